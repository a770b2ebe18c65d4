"""The command `spangrad score`: rewards for rollouts that are stored.

Knows options and what is told at the end; what a file of rewards says and how a verifier is run is
`adapters.scoring`.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from spangrad.commands.filters import rollouts_named_by, rollouts_that_fit
from spangrad.commands.options import (
    DEFAULT_STORE,
    JsonOption,
    KeyOption,
    RolloutsOption,
    RunOption,
    SqlOption,
    StoreOption,
    asked_to_stop,
    opened,
)
from spangrad.commands.output import note, print_json, print_rows, progress_bar
from spangrad.errors import ConfigError, DialectError

if TYPE_CHECKING:
    from spangrad.adapters.scoring.reward_files import RewardFilesReport
    from spangrad.adapters.scoring.verify import Verification, VerificationReport

_LEFT_OUT_SHOWN: Final = 10
_INTERRUPTED: Final = 130


def score(
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="REWARDS", help="Files of rewards: JSON lines, a JSON array, Parquet."),
    ] = None,
    verifier: Annotated[
        str | None,
        typer.Option(
            "--with",
            metavar="FUNCTION",
            help="Instead of files: a function that judges, my_module:fn or path/to/file.py:fn.",
        ),
    ] = None,
    store: StoreOption = DEFAULT_STORE,
    key: KeyOption = None,
    rollout: RolloutsOption = None,
    run: RunOption = None,
    split: Annotated[
        str | None, typer.Option("--split", help="Only this split: train, expert, recorded, ...")
    ] = None,
    sql: SqlOption = None,
    name: Annotated[str, typer.Option("--name", help="Name of rewards that come without one.")] = "reward",
    workers: Annotated[
        int | None,
        typer.Option("--workers", min=1, help="Processes that judge; as many as CPUs, if not given."),
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", min=0.001, help="Seconds that the function has for one rollout.")
    ] = 60.0,
    again: Annotated[bool, typer.Option("--again", help="Judge also what has this reward already.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Reward rollouts that are stored: from files, or by running a function over them.

    A row of a file has value, what it is about (rollout_id, trace_id or call_id;
    a call of it by span_id or response_id) and, if need be, name and
    explanation. The same file twice stores once.

    The function gets a rollout: rollout_id, task, output, calls, messages,
    final_text. It returns a number, a dict name -> number, or None for no
    opinion, and may be async; a function of (task, output), as a trainer's
    config names it, will do. Rollouts that it raises or hangs on get no
    reward and are counted. Stopped, the same command goes on where it was.

    The author of a reward is who your key says; with a store's file, the operator.
    """
    filters = {"--rollout": rollout, "--run": run, "--split": split, "--sql": sql}
    if bool(files) == (verifier is not None):
        raise ConfigError(
            "`spangrad score` takes either files of rewards or a function: `spangrad score rewards.jsonl`,"
            " `spangrad score --with my_module:fn`"
        )
    if not name:
        raise ConfigError("--name is empty, expected the name of a reward")
    if files:
        for option, value in {**filters, "--workers": workers, "--again": again}.items():
            if value:
                raise ConfigError(f"{option} is for --with only: a file says itself what it is about")
        _score_files(files, store, key, name, as_json=as_json)
        return
    from spangrad.adapters.scoring.verify import Verification

    asked = Verification(
        spec=str(verifier), name=name, again=again, workers=workers or os.cpu_count() or 1, timeout_s=timeout
    )
    _score_with(asked, store, key, filters, as_json=as_json)


def _score_files(files: list[Path], store: str, key: str | None, name: str, *, as_json: bool) -> None:
    from spangrad.adapters.scoring.reward_files import put_reward_files

    with opened(store, key, to_write=True, must_exist=True) as target:
        found = put_reward_files(files, target, name=name)
    if as_json:
        print_json([found.to_json()])
    else:
        _tell_files(found)
    if found.rows and not found.rewards:
        raise DialectError(
            f"no row of {', '.join(map(str, files))} gave a reward: {_shown(found, 0)};"
            " expected rollout_id or trace_id, and value"
        )


def _tell_files(found: "RewardFilesReport") -> None:
    rows: list[dict[str, Any]] = [
        {"what": "rows", "count": found.rows},
        *({"what": "rewards", "which": name, "count": count} for name, count in found.by_name.items()),
        {"what": "new_rewards", "count": found.new_rewards},
        *(
            [{"what": "corrected", "which": "by a later row", "count": found.corrected}]
            * bool(found.corrected)
        ),
        *(
            {"what": "left_out", "which": reason, "count": count}
            for reason, count in found.left_out_by_reason.items()
        ),
    ]
    print_rows(("what", "which", "count"), rows, right=("count",))
    for number in range(min(len(found.left_out), _LEFT_OUT_SHOWN)):
        note(f"left out: {_shown(found, number)}")
    if len(found.left_out) > _LEFT_OUT_SHOWN:
        note(f"left out: {len(found.left_out) - _LEFT_OUT_SHOWN} more; --json lists all")
    if found.unread_columns:
        named = ", ".join(f"{column} ({count})" for column, count in found.unread_columns.items())
        note(f"columns that are not read: {named}")


def _shown(found: "RewardFilesReport", number: int) -> str:
    row = found.left_out[number]
    return f"{row.path}:{row.line}: {row.reason}{f': {row.detail}' if row.detail else ''}"


def _score_with(
    asked: "Verification", store: str, key: str | None, filters: dict[str, Any], *, as_json: bool
) -> None:
    from spangrad.adapters.scoring.verify import VerificationReport, verify

    report = VerificationReport()
    with (
        asked_to_stop() as is_stopped,
        opened(store, key, to_write=True, must_exist=True) as target,
        progress_bar("judging") as progress,
    ):
        wanted = rollouts_that_fit(
            target, store, rollouts=filters["--rollout"], run=filters["--run"], split=filters["--split"]
        )
        if filters["--sql"] is not None:
            named = rollouts_named_by(target, filters["--sql"])
            wanted = [rollout for rollout in wanted if rollout.rollout_id in named]
        verify(target, wanted, asked, report, progress=progress, is_stopped=is_stopped)
    if as_json:
        print_json([report.to_json()])
    else:
        _tell_verification(report, asked)
    if is_stopped():
        note("stopped; what was judged is stored, and the same command goes on from there")
        raise typer.Exit(_INTERRUPTED)
    if report.failures and report.failures == sum(report.by_outcome.values()):
        first = next(iter(report.first_errors.values()))
        raise ConfigError(f"{asked.spec!r} failed on all {report.failures} rollouts, first on {first}")


def _tell_verification(report: "VerificationReport", asked: "Verification") -> None:
    left = {"not_succeeded": report.not_succeeded, "already_scored": report.already_scored}
    rows: list[dict[str, Any]] = [
        {"what": "rollouts", "count": report.rollouts},
        *({"what": what, "which": "left out", "count": count} for what, count in left.items() if count),
        *({"what": "judged", "which": one, "count": count} for one, count in report.by_outcome.items()),
        *(
            {"what": "rewards", "which": name, "count": count, "mean": report.sums[name] / count}
            for name, count in report.rewards.items()
        ),
        {"what": "new_rewards", "count": report.new_rewards},
    ]
    print_rows(("what", "which", "count", "mean"), rows, right=("count", "mean"))
    for outcome, error in report.first_errors.items():
        note(f"no reward, {outcome} ({report.by_outcome[outcome]}), first: {error}")
    if report.already_scored:
        note(
            f"{report.already_scored} rollouts have a reward {asked.name!r} of this author already, or such"
            " as this function named itself; --again judges them anew, --name gives another name"
        )
