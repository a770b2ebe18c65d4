"""Commands that get spans into a store: run, ingest."""

import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from spangrad.commands.options import DEFAULT_STORE, JsonOption, KeyOption, StoreOption, is_hub, opened
from spangrad.commands.output import cell, note, print_json, print_rows
from spangrad.errors import ConfigError, DialectError, StoreError, StoreLockedError
from spangrad.store.names import nearest

if TYPE_CHECKING:
    from spangrad.adapters.ingest import IngestReport
    from spangrad.adapters.sessions import Rule

_SCOPES_SHOWN: Final = 8


def run(
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND...", help="The agent's own command line.")
    ],
    store: StoreOption = DEFAULT_STORE,
    key: KeyOption = None,
    rollout: Annotated[
        str | None, typer.Option("--rollout", help="Id for this rollout; made up if not given.")
    ] = None,
    task: Annotated[
        str | None, typer.Option("--task", help="Id of the task that the agent works on.")
    ] = None,
) -> None:
    """Run an agent as it is and record its model calls.

    The agent runs in a child process with the tracer loaded into it; its
    code does not change. Exits with the agent's exit code.
    """
    from spangrad.tracer.launch import run_command

    if not is_hub(store):
        from spangrad.store.file_store import check_file

        with suppress(StoreLockedError):  # whoever holds it has a schema that fits
            check_file(store)
    if rollout is not None:
        _tell_known(rollout, store, key)
    code = run_command(command, store=store, key=key, rollout_id=rollout, task_id=task)
    if sys.stderr.isatty():
        from spangrad.trainer.processes import own_command

        listing = f"{own_command()} rollouts --store {shlex.quote(store)}"
        note(f"spangrad: recorded into {store}; list it with: {listing}")
    raise typer.Exit(code)


def _tell_known(rollout: str, store: str, key: str | None) -> None:
    """Warn where another run has recorded itself as this rollout: nothing tells their spans apart."""
    from spangrad.store.client import HubClient
    from spangrad.store.reading import open_to_read

    with suppress(StoreError):  # not there yet, locked, or not ours to read
        with HubClient(store, key, 2.0, retry_s=0.0) if is_hub(store) else open_to_read(store) as known:
            is_known = bool(known.rollouts(rollout_ids=[rollout]))
        if is_known:
            note(
                f"spangrad: rollout {rollout!r} is in {store} already, and this run is recorded into the same"
                " attempt of it; without --rollout it gets an id of its own"
            )


def ingest(
    paths: Annotated[
        list[Path],
        typer.Argument(help="Files or folders: OTLP (JSON, JSON lines, protobuf), exports (JSON, Parquet)."),
    ],
    store: StoreOption = DEFAULT_STORE,
    key: KeyOption = None,
    join: Annotated[
        str | None,
        typer.Option(
            "--join",
            metavar="RULES",
            help="What may join traces: conversation,prefix,response,tool-call; by default all of these.",
        ),
    ] = None,
    no_join: Annotated[
        bool, typer.Option("--no-join", help="Join no traces: each is a rollout of its own.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Read traces that another tool exported, and say what each call is good for.

    Spans: OpenTelemetry GenAI of every year, spangrad's own, OpenInference,
    OpenLLMetry, Langfuse, LangSmith, MLflow, LiteLLM, Logfire, pydantic-ai,
    and log records that hold their messages. Exports, known by their rows:
    Langfuse, LangSmith, MLflow, Phoenix, Agent Lightning, OpenAI chat and
    request logs. Their scores become rewards, by the author of your key.

    All spans are stored as they are; a call in no known dialect is counted.
    Calls whose recorder names no rollout get one: their trace, joined with
    the traces that go on from it within a day, by these rules: both name the
    same conversation of one service or project (conversation); the later
    repeats messages and reply of the earlier (prefix), names its response
    (response), or has the result of a tool call of its reply (tool-call).
    Each joining is counted. --join names the rules to go by, --no-join none;
    traces keep to the rules that they were ingested with. To join them by
    other rules, ingest them again: they are joined, or parted, anew.

    Every model call gets a grade (exact, ids, text, unusable) and the
    reasons why it is not better. Reading a file twice stores it once. Exit
    code 1: nothing was usable, no call, log record or score of a trace,
    call or session that the store has.
    """
    from spangrad.adapters.exports.rewards import SAME_SCORE
    from spangrad.adapters.ingest import ingest as ingest_files

    rules = _rules(join, no_join)
    with opened(store, key, to_write=True) as target, _progress() as progress:
        found = ingest_files(paths, target, progress=progress, join=rules)
    if as_json:
        print_json([found.to_json()])
    if found.files and found.broken_files == found.files:
        from spangrad.adapters.file_kinds import READ

        broken = [f"{each.path}:{each.line}: {each.reason}" for each in found.broken]
        broken += [f"{kind}: {fault.example}" for kind, fault in found.faults.items()]
        first = next(iter(broken), f"no known format: {found.unknown_row}")
        raise DialectError(f"nothing could be read from {', '.join(map(str, paths))}: {first}; {READ}")
    if not as_json:
        _print_report(found)
    has_rewards = bool(found.new_rewards or SAME_SCORE in found.scores_left_out)
    if not found.scores or found.spans or found.logs:
        if not found.calls:
            _tell_no_calls(found)
    elif not has_rewards:
        _tell_no_rewards(found)
    if not (found.calls or found.embeddings or found.logs or has_rewards):
        raise typer.Exit(1)  # nothing was usable


def _rules(join: str | None, no_join: bool) -> "tuple[Rule, ...]":
    """The rules that --join and --no-join name."""
    from spangrad.adapters.sessions import GUESSED

    if no_join and join is not None:
        raise ConfigError(f"--no-join contradicts --join {join!r}; give one of them")
    if no_join:
        return ()
    by_name = {rule.option: rule for rule in GUESSED}
    names = list(by_name) if join is None else [name.strip() for name in join.split(",")]
    for name in names:
        if name not in by_name:
            hint = nearest(name, list(by_name))
            raise ConfigError(
                f"--join {join!r}: {name!r} is no rule{hint}; the rules are {', '.join(by_name)}"
            )
    return tuple(by_name[name] for name in names)


def _print_report(found: "IngestReport") -> None:
    rows: list[dict[str, Any]] = []
    for name, value in found.to_json().items():
        name = name.removeprefix("by_")
        if value is None or isinstance(value, str):
            continue
        if isinstance(value, Mapping):
            counts = {which: one["count"] if isinstance(one, dict) else one for which, one in value.items()}
            rows += [{"what": name, "which": which, "count": count} for which, count in counts.items()]
        else:
            rows.append({"what": name, "count": len(value) if isinstance(value, list | tuple) else value})
    print_rows(("what", "which", "count"), rows, right=("count",))
    if found.scores_of_parts:
        note(
            f"scores: {found.scores_of_parts} of traces inside longer rollouts were kept at the trace's last"
            " call; what a whole rollout is worth says a score of its session, or `spangrad score`"
        )
    if found.unknown_row is not None:
        note(
            f"unknown: {found.unknown_rows} rows in a format that is not read, kept out; {found.unknown_row}"
        )
    for kind, fault in found.faults.items():
        note(f"{kind}: {fault.count} {fault.outcome}{f'; {fault.example}' if fault.example else ''}")


def _tell_no_calls(found: "IngestReport") -> None:
    from spangrad.adapters.dialects import DIALECTS

    scopes = sorted(found.by_scope.items(), key=lambda scope: -scope[1])
    shown = ", ".join(f"{cell(name) or 'no name'} ({count})" for name, count in scopes[:_SCOPES_SHOWN])
    others = len(scopes) - _SCOPES_SHOWN
    seen = f" of these scopes: {shown}{f' and {others} more' if others > 0 else ''}" if scopes else ""
    seen += f", and from {found.rows} rows, of which {found.unknown_rows} are in no known format" * bool(
        found.rows
    )
    unread = sum(found.by_dialect.values())
    calls = f"; {unread} of them are model calls in a dialect that is not read" if unread else ""
    note(
        f"no model call could be read from {found.spans} spans{seen}{calls}."
        f" Read are {', '.join(sorted(DIALECTS))}" + "; the rest is stored" * bool(found.spans or found.logs)
    )


def _tell_no_rewards(found: "IngestReport") -> None:
    reasons = ", ".join(f"{reason} ({count})" for reason, count in found.scores_left_out.items())
    note(
        f"none of {found.scores} scores is stored: {reasons}; ingest the traces that they are of, and then"
        " these scores again"
    )


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None] | None]:
    """A bar on standard error; nothing where that is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
