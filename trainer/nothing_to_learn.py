"""Why an update has nothing to learn from: because the run is done, or because something is missing.

Knows a credited batch, and the run's updates before it. Does not know: credit, learners, engines.
"""

import math
from collections.abc import Sequence

from spangrad.credit.pipeline import CreditedBatch
from spangrad.errors import ConvergedError, EmptyBatchError
from spangrad.store.base import Store
from spangrad.store.records import Rollout, RolloutStatus, Update
from spangrad.trainer.config import TrainConfig


def nothing_to_learn(
    store: Store,
    config: TrainConfig,
    update_index: int,
    batch: CreditedBatch,
    rollouts: Sequence[Rollout],
    *,
    why: str,
) -> EmptyBatchError:
    """The error that says so; `why` is what the settings of credit have to do with it.

    Live sessions, and stored rollouts, never say that a run is done: those that come next may be other.
    """
    if config.makes_rollouts and _has_converged(batch, rollouts, store.updates(config.run.id)):
        groups, left = batch.diagnostics["groups/all"], config.run.updates - update_index
        return ConvergedError(
            f"update {update_index}: the rollouts of each of {groups:.0f} groups got one reward,"
            f" {batch.diagnostics['reward/mean']:.3g} on average, no less than before:"
            f" nothing is left to learn, training ends {left} updates early"
        )
    trainable = sum(int(row.action_mask.sum()) for row in batch.rows)
    first = f"; first refusal: {batch.refused[0].reason}" if batch.refused else ""
    failures = [rollout.failure for rollout in rollouts if rollout.failure]
    broken = f"; first failure: {failures[0]}" if failures else ""
    if config.stored is not None:
        again = "they are passed by"
    elif config.production is not None:
        again = (
            "the rollouts stay in the store unconsumed; others are waited for, and these are looked at again"
            " after the next update"
        )
    else:
        again = (
            "the rollouts stay in the store unconsumed; the same command grades them again with a changed"
            " reward, and runs again what failed; for a changed agent choose another run.id"
        )
    return EmptyBatchError(
        f"update {update_index}: nothing to learn from {len(rollouts)} rollouts:"
        f" {trainable} trainable tokens, {int(batch.diagnostics.get('groups/informative', 0))} of"
        f" {int(batch.diagnostics.get('groups/all', 0))} groups with different rewards,"
        f" {len(batch.refused)} calls refused{first}{broken}{why}; {again}"
    )


def _has_converged(batch: CreditedBatch, rollouts: Sequence[Rollout], updates: Sequence[Update]) -> bool:
    """Whether rewards alone are why nothing is learned, and the policy is as good as while it learned."""
    said = batch.diagnostics
    earlier = [update.metrics.get("reward/mean", math.inf) for update in updates]
    if not earlier or said.get("rollouts/missing_reward") or said.get("groups/informative", 1.0):
        return False
    if any(rollout.status is not RolloutStatus.SUCCEEDED for rollout in rollouts):
        return False
    return said.get("reward/mean", -math.inf) >= sum(earlier) / len(earlier)
