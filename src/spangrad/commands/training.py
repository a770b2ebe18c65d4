"""Commands that make a policy better, and the one that says if they can run here: train, demo, doctor."""

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from spangrad.commands.options import JsonOption, asked_to_stop, require, stop_on_sigterm
from spangrad.commands.output import print_json, print_rows

if TYPE_CHECKING:
    from spangrad.trainer.config import TrainConfig
    from spangrad.trainer.doctor import Check

SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="SECTION.KEY=VALUE",
        help="Override a value of the config, `none` where it may have none; 'SECTION={}' gives a section its"
        " defaults.",
    ),
]


def train(
    config: Annotated[Path, typer.Argument(help="Config of the run, TOML.")], changes: SetOption = None
) -> None:
    """Train a policy on rollouts, detached from hub, engine and agents.

    Needs a running hub and gateway (`spangrad up`). The same command
    continues a run that was interrupted, however it was: nothing is trained
    twice or skipped. A monitor that pauses the run ends it with exit code 3
    and says how to go on. The config names a model folder (`serving.model`), the
    one that `spangrad up` serves, and an agent: a Python function, a program
    (`command`) or a server (`url`); examples/02_calculator has a config.

    With a section [production] it makes no rollouts: it learns from sessions
    of live agents that have got a reward, and ends after the update at hand
    on Ctrl-C or SIGTERM.
    """
    require("`spangrad train`", "train")
    from spangrad.trainer.config import load_config

    settings = load_config(config, changes or [])
    from spangrad.trainer.evaluation import check_only_between

    check_only_between(settings.eval, has_promotions=bool(settings.promotion.every))
    from spangrad.trainer.loop import train as run_training
    from spangrad.trainer.reporting.report import LiveTable

    with LiveTable() as table, _stopping(settings) as is_asked:
        report = run_training(settings, on_update=table.add, on_note=table.note, is_asked_to_stop=is_asked)
    print(f"run {settings.run.id}: {report.updates} updates, policy version {report.policy_version}")


@contextmanager
def _stopping(settings: "TrainConfig") -> Iterator[Callable[[], bool]]:
    """Whether to stop before the next update; unless a run ends between two, SIGTERM ends it at once."""
    if settings.production is None:
        with stop_on_sigterm():
            yield lambda: False
        return
    from spangrad.trainer.cluster import start_ray

    start_ray(settings.learner.workers, settings.cluster)  # it takes SIGTERM for itself
    with asked_to_stop() as is_asked:
        yield is_asked


def demo(
    seed: Annotated[int, typer.Option("--seed", help="Seed of tasks, sampling and weights.")] = 0,
    updates: Annotated[
        int | None, typer.Option("--updates", min=1, help="Updates; else as demo.toml says.")
    ] = None,
    example: Annotated[
        str | None,
        typer.Option(
            "--example",
            help="Folder with a demo.toml, such as examples/02_calculator; else the text-to-SQL example.",
        ),
    ] = None,
    folder: Annotated[
        str, typer.Option("--folder", help="Stores, reports and logs go here.")
    ] = ".spangrad/demo",
    cache: Annotated[str, typer.Option("--cache", help="Cloned starting policies are kept here.")] = (
        ".spangrad/policies"
    ),
    changes: SetOption = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Clone the starting policy again.")] = False,
    keep_raw: Annotated[
        bool, typer.Option("--keep-raw", help="Keep the engine's raw replies, for audits.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")] = False,
) -> None:
    """Run the whole loop: record an agent, clone an expert, train, publish, and measure before and after.

    Needs no GPU and takes minutes. Ends with success on held-out tasks
    before and after, the place of the store and of an HTML report.
    """
    require("`spangrad demo`", "train", "vllm", "agents")
    from spangrad.trainer.demo import DemoOptions, run_demo

    options = DemoOptions(
        example=example,
        folder=folder,
        cache=cache,
        seed=seed,
        updates=updates,
        changes=changes or (),
        json=as_json,
        fresh=fresh,
        keep_raw=keep_raw,
    )
    with stop_on_sigterm():
        run_demo(options)


def doctor(as_json: JsonOption = False) -> None:
    """Say what is installed, what works here, and what would make it faster.

    Exits with 1 only if something is broken that spangrad can't work
    without.
    """
    from spangrad.trainer.doctor import examine, is_broken

    checks = examine()
    rows = [{**dataclasses.asdict(check), "state": check.state.value} for check in checks]
    if as_json:
        print_json(rows)
    elif sys.stdout.isatty():
        _print_checks(checks)
    else:
        shown = [{**row, "fix": row["fix"] or None} for row in rows]
        print_rows(("area", "name", "state", "found", "fix"), shown)
    if is_broken(checks):
        raise typer.Exit(1)


_COLORS: Final = {"ok": "green", "hint": "yellow", "missing": "yellow", "broken": "red"}


def _print_checks(checks: "Sequence[Check]") -> None:
    """By area; what is installed as one paragraph, what needs doing below the line it is about."""
    console = Console(highlight=False)
    installed = [check for check in checks if check.area == "installed" and check.state == "ok"]
    versions = Text(", ".join(f"{check.name} {check.found}" for check in installed))
    console.print(Text("installed", style="bold"), Padding(versions, (0, 0, 0, 2)), sep="\n")
    others = [check for check in checks if check not in installed]
    for area in dict.fromkeys(check.area for check in others):
        table = Table.grid(padding=(0, 2, 0, 0))
        for check in others:
            if check.area == area:
                state = Text(f"  {check.state.value}", style=_COLORS[check.state.value])
                found = Text(check.found).append(f"\n-> {check.fix}" if check.fix else "", style="dim")
                table.add_row(state, Text(check.name), found)
        console.print(Text(f"\n{area}", style="bold"), table, sep="\n")
