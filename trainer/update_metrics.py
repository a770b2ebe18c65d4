"""Numbers of an update that are known beside the learner: its rollouts, its credit, its books.

Pure. README.md explains each.
"""

from collections.abc import Sequence

from spangrad.credit.books import check_books, dropped_metrics, dropped_tokens
from spangrad.credit.pipeline import CreditedBatch
from spangrad.store.records import Rollout, RolloutStatus
from spangrad.trainer.rollouts.endings import REWARD_ERROR

Metrics = dict[str, float]


def rollout_metrics(rollouts: Sequence[Rollout]) -> Metrics:
    """How the rollouts of an update went."""
    failed = [rollout for rollout in rollouts if rollout.status is not RolloutStatus.SUCCEEDED]
    unscored = [rollout for rollout in rollouts if rollout.error_type == REWARD_ERROR]
    return {
        "rollout/excluded": float(len(failed)),
        "rollout/failed_attempts": float(sum(rollout.attempt for rollout in rollouts) + len(failed)),
        "rollout/reward_errors": float(len(unscored)),
    }


def batch_metrics(batch: CreditedBatch) -> Metrics:
    """Numbers that describe what an update is about to learn from."""
    metrics = {f"credit/{name.replace('/', '_')}": float(v) for name, v in batch.diagnostics.items()}
    for name, source in (("reward/mean", "reward/mean"), ("reward/spread", "reward/std_in_groups")):
        if source in batch.diagnostics:
            metrics[name] = float(batch.diagnostics[source])
    metrics["data/refused_calls"] = float(len(batch.refused))
    metrics["data/sampled_tokens"] = float(batch.sampled_tokens)
    return metrics | dropped_metrics(dropped_tokens(batch.refused))


def with_reasons_of_both(credited: Metrics, learnt: Metrics) -> Metrics:
    """What a learner says, with what credit dropped for a reason of the same name added."""
    return {
        name: value + (credited.get(name, 0.0) if name.startswith("dropped/") else 0.0)
        for name, value in learnt.items()
    }


def checked_books(metrics: Metrics, *, where: str) -> Metrics:
    """`data/dropped_tokens` of an update: what credit refused and what the learner left out.

    Raises:
        BooksError: Sampled tokens are not those trained and those dropped.
    """
    dropped = {name: int(count) for name, count in metrics.items() if name.startswith("dropped/")}
    sampled, trained = int(metrics["data/sampled_tokens"]), int(metrics["data/trained_tokens"])
    check_books(sampled, trained, dropped, where=where)
    return {"data/dropped_tokens": float(sum(dropped.values()))}
