"""How often a run's rollouts succeeded on each task, asked of the store.

Only rollouts that an update of the run has consumed count: their rewards are in, and a restart finds the
same. What counts as a reward is what `credit.rewards.rewards_of` counts (a test holds the two together).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from spangrad.credit.rewards import PRECEDENCE
from spangrad.store.base import Store

HALF_LIVES: Final = 10
"""Rollouts that count less than a thousandth are not looked at."""
_SQL: Final = """
WITH newest AS (
  SELECT max(update_index) AS at FROM updates WHERE run_id = $run
), consumed AS (
  SELECT rollout_id, attempt, task_id, newest.at - consumed_by AS age FROM rollouts, newest
  WHERE run_id = $run AND consumed_run = $run AND consumed_by > newest.at - $updates
    AND split = 'train' AND status = 'succeeded' AND task_id IS NOT NULL
), counted AS (
  SELECT rollout_id, w.name,
    arg_max(w.value, (list_position($precedence::VARCHAR[], w.author), w.time_ns, w.rowid)) AS value
  FROM consumed c JOIN rewards w USING (rollout_id)
  WHERE w.call_id IS NULL AND coalesce(w.attempt, c.attempt) = c.attempt
    AND w.author IN (SELECT unnest($authors::VARCHAR[]))
  GROUP BY ALL
), outcomes AS (
  SELECT rollout_id, sum(value * weight) AS value
  FROM counted
  JOIN (SELECT unnest($names::VARCHAR[]) AS name, unnest($weights::DOUBLE[]) AS weight) USING (name)
  GROUP BY rollout_id HAVING count(*) = len($names::VARCHAR[])
)
SELECT task_id, age, count(*) FILTER (value >= $success_at) AS successes, count(*) AS rollouts
FROM consumed JOIN outcomes USING (rollout_id) GROUP BY ALL ORDER BY ALL
"""


def successes_by_task(
    store: Store,
    run_id: str,
    *,
    half_life: float,
    success_at: float,
    authors: Sequence[str],
    weights: Mapping[str, float],
) -> dict[str, tuple[float, float]]:
    """Successes and failures of each task that has any; one counts half after `half_life` updates.

        s_i = sum over its rollouts of 2^(-age / half_life) [R >= success_at],   age in updates

    Args:
        store: Where rollouts, rewards and updates are.
        run_id: The run; others have other policies.
        half_life: In updates, above 0.
        success_at: Least reward of a success.
        authors: Whose rewards count.
        weights: Name -> weight of the rewards that are summed; a rollout that lacks one does not count.
    """
    parameters: dict[str, Any] = {
        "run": run_id,
        "updates": math.ceil(HALF_LIVES * half_life),
        "precedence": [str(author) for author in PRECEDENCE],
        "authors": list(authors),
        "names": list(weights),
        "weights": list(weights.values()),
        "success_at": success_at,
    }
    with store.query_arrow(_SQL, parameters) as answer:
        rows: list[dict[str, Any]] = answer.read_all().to_pylist()
    found: dict[str, tuple[float, float]] = {}
    for row in rows:
        weight = 0.5 ** (row["age"] / half_life)
        successes, failures = found.get(row["task_id"], (0.0, 0.0))
        successes += weight * row["successes"]
        failures += weight * (row["rollouts"] - row["successes"])
        found[row["task_id"]] = (successes, failures)
    return found
