"""The command `spangrad`.

Knows the commands' names, their help and how they end: 0 if it worked, 1 with one line on standard error
if it did not, 2 if the command line is wrong, 3 if a monitor paused a run. Does not know what a command does.

* `spangrad --help` loads no torch, ray, vllm or duckdb.
* Every `SpangradError` is one line, `spangrad: ...`; `spangrad --debug COMMAND` shows the traceback.
"""

import os
import sys
from itertools import takewhile
from typing import Annotated, Final

import typer

from spangrad.commands import (
    crediting,
    exporting,
    keeping,
    lineage,
    listing,
    policies,
    questions,
    recording,
    scoring,
    services,
    training,
    training_rows,
)
from spangrad.errors import SpangradError

_ABOUT: Final = """Turn the spans that an agent already emits into gradients for the model behind it.

Record an agent as it is, look at what was recorded, then train the model on it."""

app = typer.Typer(
    name="spangrad",
    help=_ABOUT,
    no_args_is_help=True,
    epilog="First: spangrad run -- python my_agent.py   Then: spangrad calls",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

RECORD: Final = "Record"
LOOK: Final = "Look"
KEEP: Final = "Keep"
SERVE: Final = "Serve"
TRAIN: Final = "Train"

app.command(
    "run",
    rich_help_panel=RECORD,
    epilog="Example: spangrad run -- python my_agent.py",
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False},
)(recording.run)
app.command("ingest", rich_help_panel=RECORD, epilog="Example: spangrad ingest traces.jsonl")(
    recording.ingest
)
app.command(
    "score", rich_help_panel=RECORD, epilog="Example: spangrad score --with checks.py:is_right --workers 4"
)(scoring.score)
app.command("rollouts", rich_help_panel=LOOK, epilog="Example: spangrad rollouts --json --limit 0")(
    listing.rollouts
)
app.command("calls", rich_help_panel=LOOK, epilog="Example: spangrad calls --rollout r-17")(listing.calls)
app.command(
    "transitions", rich_help_panel=LOOK, epilog="Example: spangrad transitions --rollout r-17 --json"
)(training_rows.transitions)
app.add_typer(crediting.app, name="credit", rich_help_panel=LOOK)
app.command("report", rich_help_panel=LOOK, epilog="Example: spangrad report --store shop.duckdb")(
    questions.report
)
app.command("why", rich_help_panel=LOOK, epilog="Example: spangrad why --update 17 --rollout r-17")(
    lineage.why
)
app.command("replay", rich_help_panel=LOOK, epilog="Example: spangrad replay --update 17 --run my-agent")(
    lineage.replay
)
app.command("sql", rich_help_panel=LOOK, epilog='Example: spangrad sql "SELECT * FROM tool_errors"')(
    questions.sql
)
app.command(
    "export", rich_help_panel=LOOK, epilog="Example: spangrad export data --format trl-sft --min-reward 1"
)(exporting.export)
app.command(
    "archive", rich_help_panel=KEEP, epilog="Example: spangrad archive --before 30d --store shop.duckdb"
)(keeping.archive)
app.command("gc", rich_help_panel=KEEP, epilog="Example: spangrad gc --attribute enduser.id=42 --dry-run")(
    keeping.gc
)
app.command(
    "hub", rich_help_panel=SERVE, epilog="Example: spangrad hub --store shop.duckdb --keys keys.json"
)(services.hub)
app.command(
    "gateway", rich_help_panel=SERVE, epilog="Example: spangrad gateway --engine http://127.0.0.1:8000"
)(services.gateway)
app.command("serve", rich_help_panel=SERVE, epilog="Example: spangrad serve models/policy --port 8000")(
    services.serve
)
app.command("up", rich_help_panel=SERVE, epilog="Example: spangrad up models/policy")(services.up)
app.command("train", rich_help_panel=TRAIN, epilog="Example: spangrad train run.toml --set learner.lr=1e-5")(
    training.train
)
app.command("policies", rich_help_panel=TRAIN, epilog="Example: spangrad policies --run text-to-sql --json")(
    policies.policies
)
app.command(
    "promote",
    rich_help_panel=TRAIN,
    epilog="Example: spangrad promote text-to-sql 7 --reason 'looks good'",
)(policies.promote)
app.command("rollback", rich_help_panel=TRAIN, epilog="Example: spangrad rollback text-to-sql --to 4")(
    policies.rollback
)
app.command("demo", rich_help_panel=TRAIN, epilog="Example: spangrad demo --seed 1")(training.demo)
app.command("doctor", rich_help_panel=TRAIN, epilog="Example: spangrad doctor --json")(training.doctor)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"spangrad {version('spangrad')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line of this process and exit."""
    try:
        app(prog_name="spangrad")
    except SpangradError as error:
        # What stands before the command is ours; a `--debug` behind it may be the agent's.
        if "--debug" in takewhile(lambda argument: argument.startswith("-"), sys.argv[1:]):
            raise
        sys.stdout.flush()
        print(f"spangrad: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # The reader of our output has enough (`spangrad rollouts | head`).
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
