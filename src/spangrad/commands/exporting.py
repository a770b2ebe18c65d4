"""The command `spangrad export`: a store's rollouts as a dataset that a trainer reads.

Knows options and what is told at the end; formats, filters and the card are `adapters.datasets`, and
`transition_files.py` for the one that needs credit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from spangrad.commands.options import (
    DEFAULT_STORE,
    JsonOption,
    KeyOption,
    RolloutsOption,
    RunOption,
    StoreOption,
    opened,
    require,
    stop_on_sigterm,
)
from spangrad.commands.output import note, print_json, print_rows, progress_bar
from spangrad.errors import ConfigError, EmptyBatchError, StoreError

if TYPE_CHECKING:
    from spangrad.adapters.datasets.card import Card, Side
    from spangrad.adapters.datasets.scanning import Scanner
    from spangrad.commands.transition_files import Credit
    from spangrad.store.base import Store
    from spangrad.store.records import Rollout

ROWS_OF_SQL: Final = 10_000
_STRAYS_SQL: Final = """
SELECT count(*) AS traces FROM (SELECT trace_id FROM spans GROUP BY trace_id HAVING count(rollout_id) = 0)
WHERE trace_id NOT IN (SELECT trace_id FROM sessions)
"""


class ExportFormat(StrEnum):
    """What can be written."""

    TRANSITIONS = "transitions"
    MESSAGES = "messages"
    SHAREGPT = "sharegpt"
    TRL_SFT = "trl-sft"
    TRL_DPO = "trl-dpo"
    TRL_GRPO = "trl-grpo"
    VERL = "verl"
    OTLP = "otlp"
    OTLP_PROTO = "otlp-proto"


class MinGrade(StrEnum):
    """Worst grade that goes out."""

    EXACT = "exact"
    IDS = "ids"
    TEXT = "text"


def export(
    out: Annotated[Path, typer.Argument(help="Folder to write: data files, card.md and card.json.")],
    form: Annotated[ExportFormat, typer.Option("--format", "-f", help="What to write.")],
    store: StoreOption = DEFAULT_STORE,
    key: KeyOption = None,
    rollout: RolloutsOption = None,
    run: RunOption = None,
    sql: Annotated[
        str | None, typer.Option("--sql", help="Only rollouts in the column rollout_id of this SELECT.")
    ] = None,
    min_reward: Annotated[
        float | None, typer.Option("--min-reward", help="Only rollouts with at least this reward.")
    ] = None,
    min_grade: Annotated[
        MinGrade | None,
        typer.Option("--min-grade", help="Worst grade of a call; text, for transitions ids, if not given."),
    ] = None,
    policy: Annotated[str | None, typer.Option("--policy", help="Only calls of this model.")] = None,
    per_task: Annotated[
        int | None, typer.Option("--per-task", min=1, help="Only so many rollouts of a task, the best.")
    ] = None,
    keep_repeats: Annotated[
        bool, typer.Option("--keep-repeats", help="Keep rollouts of a task that say the same.")
    ] = False,
    heldout: Annotated[
        float, typer.Option("--heldout", min=0.0, help="Share of the tasks to keep apart, by their hash.")
    ] = 0.0,
    config: Annotated[
        Path | None,
        typer.Option("--config", help="Config of a run, TOML: its estimators and reward authors."),
    ] = None,
    author: Annotated[
        list[str] | None,
        typer.Option("--author", help="Whose rewards count: evaluator, operator, agent; several times."),
    ] = None,
    clone: Annotated[
        bool, typer.Option("--clone", help="Transitions without rewards: advantage 1 everywhere.")
    ] = False,
    tokenizer: Annotated[
        Path | None,
        typer.Option("--tokenizer", help="With --clone: model folder that gives calls of text their ids."),
    ] = None,
    licence: Annotated[
        str | None, typer.Option("--licence", help="Licence of the data, for the card.")
    ] = None,
    keep_secrets: Annotated[
        bool, typer.Option("--keep-secrets", help="Keep rows in which a key or a token was found.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if an export wrote it.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write rollouts as a dataset: for TRL, verl, OpenAI fine-tuning, LLaMA-Factory, or as OTLP.

    OUT gets train.jsonl (or .parquet), with --heldout also heldout.jsonl, and
    a card that says what is in it and what was left out, with reasons. It is
    written whole or not at all; the same command gives the same bytes.

    transitions is Parquet: token ids, masks, behaviour logprobs, advantages.
    otlp (JSON lines) and otlp-proto give back the spans and log records as
    they came; only --sql, --rollout and --run choose among them.
    """
    from importlib.metadata import version

    from spangrad.adapters.datasets.card import Card
    from spangrad.adapters.datasets.export import write_sides
    from spangrad.adapters.datasets.formats import FORMATS
    from spangrad.adapters.datasets.scanning import Scanner
    from spangrad.adapters.datasets.selecting import Filters, Refused, select
    from spangrad.adapters.datasets.tables import columns
    from spangrad.adapters.datasets.writing import check_target, whole_folder
    from spangrad.adapters.model_call import Grade
    from spangrad.commands.transition_files import TransitionWriter, outcomes_by

    check_target(out, force=force)
    is_copy = form in (ExportFormat.OTLP, ExportFormat.OTLP_PROTO)
    is_rows = form is ExportFormat.TRANSITIONS
    if clone and not is_rows:
        raise ConfigError(f"--clone is for transitions only, not for {form.value}")
    credit = _credit(config, author, tokenizer, clone=clone)
    grade = min_grade or _default_grade(config, credit, is_rows=is_rows)
    filters = Filters(
        min_grade=Grade(grade.value),
        min_reward=min_reward,
        policy=policy,
        per_task=per_task,
        drop_repeats=not (keep_repeats or is_copy or is_rows) and FORMATS[form.value].drops_repeats,
        heldout=heldout,
    )
    if is_copy and (min_reward is not None or min_grade or policy or per_task or heldout):
        raise ConfigError(
            f"{form.value} copies what came in; only --sql, --rollout and --run choose among it"
        )
    asked = {"sql": sql, "rollout": list(rollout) if rollout else None, "run": run}
    scanner = Scanner()
    with stop_on_sigterm(), opened(store, key) as source, whole_folder(out, force=force) as folder:
        wanted = _wanted(source, rollout, run, sql)
        if is_copy:
            ids = [one.rollout_id for one in wanted] if any(asked.values()) else None
            sides = {"all": _copy(folder, source, ids, scanner, form)}
            refused, seen = Refused(), len(wanted)
        else:
            with progress_bar("choosing") as progress:
                selection = select(source, wanted, filters, outcomes_by(source, credit.authors), progress)
            with progress_bar("writing") as progress:
                if is_rows:
                    writer = TransitionWriter(
                        source, selection, filters, credit, scanner, keep_secrets=keep_secrets
                    )
                    sides = writer.write(folder, wanted, progress)
                else:
                    sides = write_sides(
                        folder,
                        source,
                        selection,
                        FORMATS[form.value],
                        filters,
                        scanner,
                        keep_secrets=keep_secrets,
                        progress=progress,
                    )
            refused, seen = selection.refused, selection.seen
        card = Card(
            format=form.value,
            reader=_READERS.get(form) or FORMATS[form.value].reader,
            version=version("spangrad"),
            licence=licence,
            filters={
                **asked,
                **{name: value for name, value in asdict(filters).items() if not is_copy},
                "authors": list(credit.authors),
                "clone": clone,
                "keep_secrets": keep_secrets or is_copy,
            },
            sides=sides,
            refused=refused,
            secrets=scanner.found,
            seen=seen,
            notes=(*_notes(form, sides), *_strays(source, any(asked.values()) or is_copy)),
            columns=tuple(columns()) if is_rows else (),
        )
        if not any(side.rows for side in sides.values()):
            raise EmptyBatchError(_nothing(store, card))
        card.write(folder)
    _tell(out, card, as_json=as_json)


_READERS: Final = {
    ExportFormat.TRANSITIONS: "pyarrow, Hugging Face `datasets`",
    ExportFormat.OTLP: "any OpenTelemetry backend: OTLP, JSON lines",
    ExportFormat.OTLP_PROTO: "any OpenTelemetry backend: OTLP, protobuf with lengths",
}


def _wanted(
    store: "Store", rollout: Sequence[str] | None, run: str | None, sql: str | None
) -> "list[Rollout]":
    ids = None if rollout is None else list(rollout)
    if sql is not None:
        named = _ids_by_sql(store, sql)
        ids = named if ids is None else [one for one in named if one in set(ids)]
    found = store.rollouts(rollout_ids=ids, run_id=run)
    return sorted(found, key=lambda one: one.rollout_id)


def _ids_by_sql(store: "Store", sql: str) -> list[str]:
    """Rollout ids of a SELECT, some thousand at a time: a query returns no more."""
    inner = sql.strip().rstrip(";")
    page = (
        f"SELECT DISTINCT rollout_id::VARCHAR AS rollout_id FROM (\n{inner}\n)"
        f" WHERE rollout_id > $last ORDER BY 1 LIMIT {ROWS_OF_SQL}"
    )
    ids: list[str] = []
    while True:
        try:
            rows = store.query(page, {"last": ids[-1] if ids else ""})
        except StoreError as error:
            raise StoreError(f"--sql needs a SELECT with a column rollout_id: {error}") from error
        ids += [str(row["rollout_id"]) for row in rows]
        if len(rows) < ROWS_OF_SQL:
            return ids


def _credit(
    config: Path | None, author: list[str] | None, tokenizer: Path | None, *, clone: bool
) -> "Credit":
    from spangrad.commands.transition_files import Credit
    from spangrad.credit.assign import CreditConfig
    from spangrad.credit.rewards import DEFAULT_AUTHORS

    authors: Sequence[str] = DEFAULT_AUTHORS
    credit = CreditConfig()
    if config is not None:
        from spangrad.trainer.config import load_config

        settings = load_config(config)
        credit, authors = settings.credit, settings.rollout.reward_authors
    render = None
    if tokenizer is not None:
        if not clone:
            raise ConfigError("--tokenizer is for --clone only: calls without the engine's ids get no credit")
        require("`spangrad export --tokenizer`", "train")
        from spangrad.commands.traces import renderer

        render = renderer(tokenizer)
    return Credit(None if clone else credit, author or authors, render)


def _default_grade(config: Path | None, credit: "Credit", *, is_rows: bool) -> MinGrade:
    if not is_rows or credit.render is not None:
        return MinGrade.TEXT
    return MinGrade.IDS if config is None else MinGrade.EXACT


def _copy(
    folder: Path,
    store: "Store",
    ids: Sequence[str] | None,
    scanner: "Scanner",
    form: ExportFormat,
) -> "Side":
    """Spans and log records as OTLP, of these rollouts or of the whole store."""
    from spangrad.adapters.datasets.otlp import write_copy

    with progress_bar("copying") as progress:
        return write_copy(folder, store, ids, scanner, as_json=form is ExportFormat.OTLP, progress=progress)


def _notes(form: ExportFormat, sides: "Mapping[str, Side]") -> tuple[str, ...]:
    from spangrad.adapters.datasets.formats import FORMATS

    if form in (ExportFormat.OTLP, ExportFormat.OTLP_PROTO):
        return ("a copy of what was recorded: nothing is left out, secrets included",)
    notes = []
    thought = sum(side.with_reasoning for side in sides.values())
    if thought and form.value in FORMATS and FORMATS[form.value].drops_reasoning:
        notes.append(f"reasoning of {thought} calls is left out: the format has no place for it")
    if "heldout" in sides:
        notes.append("tasks are held out by the hash of their key; a task never changes its side")
    return tuple(notes)


def _strays(store: "Store", is_known: bool) -> list[str]:
    """What a dataset of rollouts can't have: traces that are of none."""
    if is_known:
        return []
    (row,) = store.query(_STRAYS_SQL)
    count = row["traces"]
    return [f"{count} traces belong to no rollout; only otlp has them"] if count else []


def _nothing(store: str, card: "Card") -> str:
    counts = card.to_json()["refused"]
    reasons = [f"{reason} ({count})" for kind in counts.values() for reason, count in kind.items()]
    why = f"left out: {'; '.join(reasons[:4])}" if reasons else "`spangrad rollouts` lists what is there"
    return f"nothing in {store!r} can be exported as {card.format} ({card.seen} rollouts looked at); {why}"


def _tell(out: Path, card: "Card", *, as_json: bool) -> None:
    told = card.to_json()
    if as_json:
        print_json([told])
        return
    shown = ("split", "file", "rows", "rollouts", "tasks", "calls")
    rows = [{"split": name, **side} for name, side in told["splits"].items()]
    print_rows(shown, [{name: row.get(name) for name in shown} for row in rows], right=shown[2:])
    for kind, counts in told["refused"].items():
        for reason, count in counts.items():
            note(f"left out, {count} {kind}: {reason}")
    for kind, count in told["secrets_found"].items():
        note(f"secrets: {kind} in {count} rows")
    for text in card.notes:
        note(text)
    note(f"{out}/card.md says what is in it")
