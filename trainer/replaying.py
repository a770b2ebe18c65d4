"""An update again, from the store and the state before it: the same numbers, or where they differ.

Knows the records of an update, credit, a learner in this process. Needs no engine, no Ray and no agent, and
changes neither the store nor a checkpoint.

Invariants:
* what is compared was made anew: rewards and spans as the update read them, the config of then, the weights
  before it; what came to the store later changes nothing;
* what can't be made anew is said, and is never counted as equal.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from spangrad.credit.critic import Critic
from spangrad.credit.pipeline import CreditedBatch
from spangrad.credit.reads import as_read, reads_of
from spangrad.errors import StoreError
from spangrad.store.base import Store
from spangrad.store.records import Rollout, Update, UpdateSample
from spangrad.trainer.config import TrainConfig, build_run, to_dict
from spangrad.trainer.crediting import Crediting, as_trained
from spangrad.trainer.learning.checkpoint import is_complete
from spangrad.trainer.learning.learner import Learner
from spangrad.trainer.learning.learner_config import LearnerConfig
from spangrad.trainer.learning.selection import data_metrics, select_rows, trained_calls
from spangrad.trainer.promotion.weights import folder_of
from spangrad.trainer.update_metrics import Metrics, batch_metrics, checked_books, with_reasons_of_both

TOLERANCE: Final = 1e-4
"""How far two floats may be from each other, as a share of the larger one."""
_NEAR_ZERO: Final = 0.01
"""... and however small they are, by this part of the tolerance."""
_OF_THE_MACHINE: Final = ("time/",)
_OF_SAMPLES: Final = ("advantage", "loss_weight", "trained_tokens", "policy_version", "staleness")


@dataclass(frozen=True, slots=True)
class Check:
    """One number of an update: what was recorded, and what the replay got."""

    what: str
    recorded: float | None
    """None: the store has none."""
    replayed: float | None
    """None: the replay has none."""
    is_same: bool
    rollout: str | None = None
    """Where it is of one call."""
    call: str | None = None


@dataclass(frozen=True, slots=True)
class Replay:
    """What a replay found."""

    update: Update
    checks: Sequence[Check]
    notes: Sequence[str]
    """What could not be made anew, and what would help."""
    has_loss: bool
    """Whether the learner was run, too."""

    @property
    def is_same(self) -> bool:
        """Whether all that was compared is equal."""
        return all(check.is_same for check in self.checks)


def made_of(config: TrainConfig, batch: CreditedBatch, parent: Path) -> dict[str, Any]:
    """Fields of an update that a replay starts from, without `agent.env`, which may hold keys.

    Args:
        config: Of the run.
        batch: What the update learns from.
        parent: Folder with the learner's state before it.
    """
    told = to_dict(config) | {"base_dir": str(Path(config.base_dir).resolve())}
    told["agent"] = {**told["agent"], "env": {}}
    return {"config": told, "parent": str(parent), "reads": reads_of(batch.calls, batch.rewards)}


def replay(
    store: Store, update: Update, *, tolerance: float = TOLERANCE, device: str | None = None
) -> Replay:
    """Make an update again and compare.

    Args:
        store: Where it was committed.
        update: The update, with what it read.
        tolerance: Largest distance of equal floats, as a share; above 0.
        device: Where to compute; None: where the run did.

    Raises:
        StoreError: The update, or what it consumed, is not in the store as a replay needs it.
        ConfigError: The config of then is none of this spangrad, or the device does not exist.
        PolicyError: The model that the run started from can't be loaded.
    """
    config = _config(update)
    if device is not None:
        config = replace(config, learner=replace(config.learner, device=device))
    rollouts = _rollouts(store, update)
    model, version = config.start_model, update.policy_version - 1
    learner, notes = _learner(config.learner_from(model), update, _parent(store, update))
    if learner is None and config.critic is not None:
        notes.append("its advantages rest on what the critic said, which is in that checkpoint, too")
        return Replay(update, [], notes, has_loss=False)
    critic: Critic | None = None if learner is None or config.critic is None else learner.values
    batch = Crediting(config, model).rows(as_read(store, update.reads), rollouts, version, critic)
    checks = list(_of_reads(update, batch))
    metrics, rows_version = batch_metrics(batch), config.version_of_rows(version)
    if learner is not None:
        learnt = learner.update(batch.rows, policy_version=rows_version)
        samples = as_trained(batch.samples, learner.trained_calls())
    elif config.learner.correction.is_on:
        notes.append("what learner.correction left out can't be told without them")
        learnt, samples = {}, list(batch.samples)
    else:
        learnt, samples = _selected(config, batch, rows_version)
    metrics |= with_reasons_of_both(metrics, learnt)
    if learnt:
        metrics |= checked_books(metrics, where=f"update {update.update_index}, replayed")
    names = _OF_SAMPLES if learnt else ("advantage", "policy_version", "staleness")
    checks += _of_samples(update.samples, samples, names, tolerance)
    checks += _of_metrics(update.metrics, metrics, tolerance, has_books=bool(learnt))
    return Replay(update, checks, notes, has_loss=learner is not None)


def _config(update: Update) -> TrainConfig:
    where = f"update {update.update_index} of run {update.run_id!r}"
    if update.config is None or update.parent is None:
        raise StoreError(
            f"{where} was made by an older spangrad, which did not keep the config and what was read with it;"
            " updates made since can be replayed"
        )
    sections = {name: value for name, value in update.config.items() if name != "base_dir"}
    return build_run(sections, Path(str(update.config["base_dir"])), where=f"the config of {where}")


def _rollouts(store: Store, update: Update) -> list[Rollout]:
    """What it consumed, in its order."""
    found = {one.rollout_id: one for one in store.rollouts(rollout_ids=list(update.rollout_ids))}
    if missing := [name for name in update.rollout_ids if name not in found]:
        raise StoreError(
            f"{len(missing)} of the {len(update.rollout_ids)} rollouts of update {update.update_index} are no"
            f" longer in the store, {missing[0]!r} among them; without them it can't be replayed"
        )
    return [found[name] for name in update.rollout_ids]


def _parent(store: Store, update: Update) -> Path:
    """Where the state before the update is: a promoted version's is kept, and stands behind a rollback."""
    parent = Path(str(update.parent))
    if is_complete(parent):
        return parent
    version = update.policy_version - 1
    known = [one for one in store.policies(update.run_id) if one.policy_version == version]
    kept = folder_of(known[0], store.decisions(update.run_id)) if known else None
    return kept or parent


def _learner(config: LearnerConfig, update: Update, parent: Path) -> tuple[Learner | None, list[str]]:
    """The learner as it was before the update; None, and why, if its weights are gone."""
    if parent == Path(config.model_path):
        return Learner(config), []
    if not is_complete(parent):
        return None, [
            "the loss was not made again: the weights before the update are gone, checkpoint"
            f" {str(parent)!r}; a run keeps the newest run.keep_checkpoints of them, and to replay its last"
            " n updates takes n + 1"
        ]
    learner = Learner(config)
    learner.load(parent)
    return learner, []


def _selected(
    config: TrainConfig, batch: CreditedBatch, version: int | None
) -> tuple[Metrics, list[UpdateSample]]:
    """What a learner would train of the rows, without one."""
    learner = replace(config.learner, critic=config.critic)
    selection = select_rows(
        batch.rows, objective=learner.objective, needs_all_tokens=learner.needs_all_tokens
    )
    samples = as_trained(batch.samples, trained_calls(selection.rows))
    return data_metrics(selection, policy_version=version), samples


def _of_reads(update: Update, batch: CreditedBatch) -> Iterator[Check]:
    """Whether all calls and rewards that the update read are still there."""
    for what, recorded, replayed in (
        ("calls read", [read.call_id for read in update.reads], [call.call_id for call in batch.calls]),
        ("rewards read", [read.reward_id for read in update.reads], [one.reward_id for one in batch.rewards]),
    ):
        were, are = {one for one in recorded if one is not None}, set(replayed)
        yield Check(what, len(were), len(are), were == are)


def _of_samples(
    recorded: Sequence[UpdateSample],
    replayed: Sequence[UpdateSample],
    names: Sequence[str],
    tolerance: float,
) -> Iterator[Check]:
    """Each of these numbers of each call that was trained then or is now."""
    were, are = (
        {(one.rollout_id, one.attempt, one.call_id): one for one in samples}
        for samples in (recorded, replayed)
    )
    for key in were | are:
        for name in names:
            was, is_now = getattr(were.get(key), name, None), getattr(are.get(key), name, None)
            same = (key in were) == (key in are) and _is_same(was, is_now, tolerance)
            yield Check(name, was, is_now, same, rollout=key[0], call=key[2])


def _of_metrics(
    recorded: Mapping[str, float], replayed: Mapping[str, float], tolerance: float, *, has_books: bool
) -> Iterator[Check]:
    """Whatever both say; with `has_books` also what only one of them dropped."""
    for name in sorted(recorded.keys() | replayed.keys()):
        is_of_both = name in recorded and name in replayed
        if name.startswith("dropped/"):
            is_compared = has_books
        else:
            is_compared = is_of_both and not name.startswith(_OF_THE_MACHINE)
        if is_compared:
            was, is_now = recorded.get(name), replayed.get(name)
            yield Check(name, was, is_now, _is_same(was, is_now, tolerance))


def _is_same(one: float | None, other: float | None, tolerance: float) -> bool:
    if one is None or other is None:
        return one is other
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) and math.isnan(other)
    return math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance * _NEAR_ZERO)
