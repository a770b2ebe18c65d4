"""Trains the stages of a recipe, each until it has gone as far as it should, and goes on where it ended.

    for each stage, in order:
        its newest run has ended       -> nothing
        its newest run has not ended   -> goes on, from the weights that it began with
        there is none                  -> begins, from what the stage before has handed over

Knows recipes, the store and `train`. Does not know: settings, credit, learners.

Invariants:
* where it is, is in the store: whoever dies anywhere goes on with the same command, and does nothing twice;
* a stage that is asked for alone is run again from what the newest run of the stage before has handed over;
  if that was cut off, the same command goes on with it.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from spangrad.errors import ConfigError, StoreError
from spangrad.store import open_store
from spangrad.store.base import Store
from spangrad.store.records import Policy
from spangrad.trainer.cluster import stop_ray
from spangrad.trainer.config import TrainConfig
from spangrad.trainer.loop import TrainReport, train
from spangrad.trainer.resuming import load_keys
from spangrad.trainer.rollouts.scheduling import RunKeys
from spangrad.trainer.stages.handing_over import Trained, hand_over, handed_over, runs_named
from spangrad.trainer.stages.recipe import Recipe, Stage
from spangrad.trainer.update_metrics import Metrics

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StageReport:
    """What a call did of a stage."""

    run_id: str
    report: TrainReport


def train_recipe(
    recipe: Recipe,
    *,
    only: str | None = None,
    keys: RunKeys | None = None,
    on_update: Callable[[int, Metrics], None] | None = None,
    on_note: Callable[[str], None] | None = None,
) -> list[StageReport]:
    """Train what is left of a recipe.

    Args:
        recipe: See `recipe.py`.
        only: Name of a stage to run alone, also if it has ended.
        keys: Bearer keys; None: read from `hub.keys`.
        on_update: Called with (update index, metrics) after every update.
        on_note: Called with a line for the person who started it.

    Returns:
        A report for each stage that was trained.

    Raises:
        ConfigError: There is no such stage, or the one before it has not ended.
        PausedError: A monitor paused a stage; all that was trained is kept.
    """
    tell = on_note or logger.info
    reports: list[StageReport] = []
    for stage in recipe.stages if only is None else [recipe.stage(only)]:
        begun = _begun(recipe, stage, keys, tell, again=only is not None)
        if begun is None:
            continue
        config, parent = begun
        report = train(
            config, keys=keys, on_update=on_update, on_note=on_note, parent=parent, on_end=hand_over
        )
        tell(f"stage {stage.name!r} (run {config.run.id!r}) has ended: {report.ended}")
        reports.append(StageReport(config.run.id, report))
        stop_ray()  # the next stage has a learner of its own, and maybe more workers
    return reports


def _begun(
    recipe: Recipe, stage: Stage, keys: RunKeys | None, tell: Callable[[str], None], *, again: bool
) -> tuple[TrainConfig, Policy | None] | None:
    """The config of the run that the stage goes on with, and what it starts from; None: it has ended."""
    config = stage.config
    store = open_store(config.hub.url, (keys or load_keys(config)).trainer)
    try:
        runs = runs_named(store, config.run.id)
        newest = runs[-1] if runs else None
        before = recipe.before(stage)
        if newest is not None and newest.handed_over is None:
            parent = _parent_of(store, newest)
            return _starting(config, newest.run_id, parent), parent
        parent = None if before is None else _newest_of(store, before, stage)
        if newest is not None and not again:
            tell(_told(stage, newest, parent))
            return None
        number = "" if newest is None else f"-{newest.number + 1}"
        return _starting(config, f"{config.run.id}{number}", parent), parent
    finally:
        store.close()


def _parent_of(store: Store, run: Trained) -> Policy | None:
    """What a run that was begun started from."""
    if run.parent_run is None:
        return None
    found = handed_over(store, run.parent_run)
    if found is None:
        raise StoreError(
            f"run {run.run_id!r} started from run {run.parent_run!r}, whose handed-over weights the store no"
            " longer names"
        )
    return found


def _newest_of(store: Store, before: Stage, stage: Stage) -> Policy:
    """What the newest run of a stage that has ended has handed over."""
    ended = [
        run.handed_over for run in runs_named(store, before.config.run.id) if run.handed_over is not None
    ]
    if not ended:
        raise ConfigError(
            f"stage {stage.name!r} starts from the weights of stage {before.name!r}, which has not ended (run"
            f" {before.config.run.id!r}); leave out --stage, or name {before.name!r} first"
        )
    return ended[-1]


def _starting(config: TrainConfig, run_id: str, parent: Policy | None) -> TrainConfig:
    """The stage's config under the name of its run, from its parent's weights."""
    model = config.serving.model if parent is None else str(parent.model)
    return replace(
        config,
        run=replace(config.run, id=run_id),
        serving=replace(config.serving, model=model),
    )


def _told(stage: Stage, newest: Trained, parent: Policy | None) -> str:
    assert newest.handed_over is not None
    line = f"stage {stage.name!r} (run {newest.run_id!r}) has ended: {newest.handed_over.note}"
    if parent is not None and parent.run_id != newest.parent_run:
        line += (
            f"; it started from run {newest.parent_run!r}, and {parent.run_id!r} is newer: --stage"
            f" {stage.name} runs it again from there"
        )
    return line
