"""What the store says of the rollouts of an update: which they are, what they wrote, what they were given."""

from collections.abc import Sequence
from typing import Final

from spangrad.adapters.calls import calls_of
from spangrad.store.base import Store
from spangrad.store.records import Rollout, RolloutStatus
from spangrad.trainer.evaluation import values_of
from spangrad.trainer.monitoring.behavior import acting_by_rollout, text_of
from spangrad.trainer.monitoring.flattery import Output, words_of

MOST_OUTPUTS: Final = 256
"""Outputs of an update that are read for phrases, spread over its rollouts."""
_CONSUMED: Final = "SELECT rollout_id FROM rollouts WHERE consumed_run = ? AND consumed_by = ? ORDER BY seq"
_VERIFIED: Final = """
SELECT update_index, avg(value) AS mean FROM (
  SELECT r.consumed_by AS update_index,
    arg_max(w.value, (w.author = 'operator', w.time_ns, w.rowid)) AS value
  FROM rollouts r JOIN rewards w ON w.rollout_id = r.rollout_id AND coalesce(w.attempt, r.attempt) = r.attempt
  WHERE r.consumed_run = $run AND r.consumed_by BETWEEN $first AND $last AND r.status = 'succeeded'
    AND w.name = $name AND w.call_id IS NULL AND w.author <> 'agent' GROUP BY r.rollout_id, r.consumed_by)
GROUP BY update_index
"""


def rollouts_of(store: Store, run_id: str, update: int) -> list[Rollout]:
    """What an update consumed that succeeded, in order of enqueueing."""
    with store.query_arrow(_CONSUMED, [run_id, update]) as answer:  # `query` has a limit of rows
        ids = answer.read_all()["rollout_id"].to_pylist()
    return store.rollouts(rollout_ids=ids, status=RolloutStatus.SUCCEEDED) if ids else []


def verified(store: Store, run_id: str, name: str, first: int, last: int) -> dict[int, float]:
    """Mean of a held-out reward over the rollouts of each update that have it; none that an agent gave."""
    given = {"run": run_id, "name": name, "first": first, "last": last}
    with store.query_arrow(_VERIFIED, given) as answer:
        return {row["update_index"]: row["mean"] for row in answer.read_all().to_pylist()}


def outputs_of(store: Store, run_id: str, update: int, judge: str, authors: Sequence[str]) -> list[Output]:
    """What the rollouts of an update wrote, and what the judge gave them."""
    rollouts = rollouts_of(store, run_id, update)
    some = rollouts[:: -(-len(rollouts) // MOST_OUTPUTS) or 1]
    rewards = values_of(store, some, authors, {judge: 1.0})
    calls = calls_of(store, [rollout.rollout_id for rollout in some]) if some else ()
    acting = acting_by_rollout(calls, some)
    found = []
    for rollout in some:
        calls_made = acting.get(rollout.rollout_id, ())
        replies = [text_of(choice.message) for call in calls_made for choice in call.choices]
        if replies:
            task = rollout.group_id or rollout.task_id or ""
            words, reward = words_of(" ".join(replies)), rewards.get(rollout.rollout_id)
            found.append(Output(rollout.rollout_id, task, words, reward))
    return found
