"""Commands about a run's published versions: policies, promote, rollback."""

from typing import TYPE_CHECKING, Annotated

import typer

from spangrad.commands.options import DEFAULT_STORE, JsonOption, KeyOption, StoreOption, opened, require
from spangrad.commands.output import note, print_json, print_rows

if TYPE_CHECKING:
    from spangrad.trainer.promotion.by_hand import Serving

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="Name of the training run (`run.id`).")]
ReasonOption = Annotated[str, typer.Option("--reason", help="Why; kept with the decision.")]
EngineOption = Annotated[
    str | None, typer.Option("--engine", help="Address of a vLLM server that is to serve the weights now.")
]
GatewayOption = Annotated[
    str | None, typer.Option("--gateway", help="Gateway before that engine, to be told of the version.")
]
_SQL = """
SELECT run_id AS run, policy_version AS version, parent_run, parent_version AS parent, status,
  update_index AS update, reward_mean AS reward, success, decided_by, reason, metrics, decided, published,
  path, note, model
FROM policy_lineage WHERE run_id = coalesce($run, run_id) ORDER BY published, run_id, policy_version
"""


def policies(
    store: StoreOption = DEFAULT_STORE,
    key: KeyOption = None,
    run: Annotated[str | None, typer.Option("--run", help="Only versions of this training run.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List published versions: parent, status, success on held-out tasks, who decided, when, the weights.

    A version is a candidate until it is promoted, by the run's rule
    ([promotion] in its config) or by `spangrad promote`; superseded when
    another one is promoted after it; rolled_back when it was given up. One
    version of a run is the promoted one. The parent of a run's first version
    is another run's, where it started from that, as stages of a recipe do.
    With --json: also the reason and all metrics of the last decision, why a
    run ended and the model folder that it left.
    """
    import json

    with opened(store, key) as asked:
        rows = asked.query(_SQL, {"run": run})
    if as_json:
        print_json([row | {"metrics": json.loads(row["metrics"] or "{}")} for row in rows])
        return
    if not rows:
        note(f"no published version is in {store!r}; a training run publishes one after every update")
        return
    for row in rows:
        if row["parent_run"] is not None:
            row["parent"] = f"{row['parent_run']} {row['parent']}"
    columns = ("run", "version", "parent", "status", "reward", "success", "decided_by", "published", "path")
    print_rows(columns, rows, right=("version", "parent", "reward", "success"), may_be_blocks=True)


def promote(
    run: RunArgument,
    version: Annotated[int, typer.Argument(metavar="VERSION", min=0, help="Version to promote.")],
    store: StoreOption = DEFAULT_STORE,
    key: KeyOption = None,
    reason: ReasonOption = "by hand",
    engine: EngineOption = None,
    gateway: GatewayOption = None,
) -> None:
    """Make a version the promoted one of its run, by hand: what agents get who ask for policy=promoted.

    Needs the admin's key, if the hub has keys. The weights are kept in the
    run's folder for as long as you leave them there. Engines of the gateway
    that serve this version take the calls from then on; --engine loads it
    into one. To serve older weights than an engine has, use `spangrad
    rollback`: version numbers only grow.
    """
    require("`spangrad promote`", "train")
    from spangrad.trainer.promotion import by_hand

    with opened(store, key, to_write=True, must_exist=True) as writable:
        told = by_hand.promote(writable, run, version, reason=reason, serving=_serving(engine, gateway, key))
    for line in told:
        note(line)


def rollback(
    run: RunArgument,
    to: Annotated[
        int | None,
        typer.Option(
            "--to", min=0, help="Version to go back to; else the one promoted before the present one."
        ),
    ] = None,
    store: StoreOption = DEFAULT_STORE,
    key: KeyOption = None,
    reason: ReasonOption = "by hand",
    engine: EngineOption = None,
    gateway: GatewayOption = None,
) -> None:
    """Give up a run's newer versions: the one before is the promoted one, and training goes on from it.

    Needs the admin's key, if the hub has keys. The decision is recorded; the
    run's trainer sees it after the update that it works on, or when it
    starts, loads the promoted weights and publishes them as a new version,
    whose parent is the promoted one. While nobody trains the run, --engine
    does that here and now.
    """
    require("`spangrad rollback`", "train")
    from spangrad.trainer.promotion import by_hand

    with opened(store, key, to_write=True, must_exist=True) as writable:
        told = by_hand.roll_back(writable, run, to, reason=reason, serving=_serving(engine, gateway, key))
    for line in told:
        note(line)


def _serving(engine: str | None, gateway: str | None, key: str | None) -> "Serving | None":
    from spangrad.errors import ConfigError
    from spangrad.trainer.promotion.by_hand import Serving

    if engine is None:
        if gateway is not None:
            raise ConfigError("--gateway has no effect without --engine, which it stands before")
        return None
    return Serving(engine, gateway, key)
