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
    from spangrad.trainer.loop import TrainReport
    from spangrad.trainer.stages.recipe import Recipe

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
    config: Annotated[Path, typer.Argument(help="Config of the run, or a recipe of several, TOML.")],
    changes: SetOption = None,
    stage: Annotated[
        str | None,
        typer.Option("--stage", help="Of a recipe: run this stage alone, and again if it has ended."),
    ] = None,
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
    on Ctrl-C or SIGTERM. With a section [stored] it learns from rollouts that
    are in the store, and needs no engine and no gateway.

    A recipe has tables [[stage]]: runs that follow one another, each from the
    weights of the one before, cloning stored rollouts first, say. A stage that
    has ended is not run again, unless --stage names it: then it starts anew
    from what the stage before has left.
    """
    require("`spangrad train`", "train")
    from spangrad.errors import ConfigError
    from spangrad.trainer.config import load_config
    from spangrad.trainer.evaluation import check_only_between
    from spangrad.trainer.stages.recipe import is_recipe, load_recipe

    if is_recipe(config):
        _train_recipe(load_recipe(config, changes or []), stage)
        return
    if stage is not None:
        raise ConfigError(f"--stage {stage!r} has no effect: {str(config)!r} has no [[stage]]; leave it out")
    settings = load_config(config, changes or [])
    check_only_between(
        settings.eval, has_promotions=bool(settings.promotion.every), updates=settings.run.updates
    )
    from spangrad.trainer.loop import train as run_training
    from spangrad.trainer.reporting.report import LiveTable

    with LiveTable() as table, _stopping(settings) as is_asked:
        report = run_training(settings, on_update=table.add, on_note=table.note, is_asked_to_stop=is_asked)
    print(_told(settings.run.id, report))


def _train_recipe(recipe: "Recipe", stage: str | None) -> None:
    from spangrad.trainer.evaluation import check_only_between
    from spangrad.trainer.reporting.report import LiveTable
    from spangrad.trainer.stages.running import train_recipe

    for one in recipe.stages:
        check_only_between(one.config.eval, has_promotions=bool(one.config.promotion.every))
    with LiveTable() as table, stop_on_sigterm():
        reports = train_recipe(recipe, only=stage, on_update=table.add, on_note=table.note)
    for done in reports:
        print(_told(done.run_id, done.report))


def _told(run_id: str, report: "TrainReport") -> str:
    ended = "" if report.ended is None else f" ({report.ended})"
    return f"run {run_id}: {report.updates} updates, policy version {report.policy_version}{ended}"


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
