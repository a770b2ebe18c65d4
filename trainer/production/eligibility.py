"""Which recorded sessions an update may take, and what the others wait for: questions in SQL.

A session is a rollout of split `recorded`, and is in one state, the first that fits:

    trained     an update that consumes what it takes read a call of it, when it was part of another session
    unended     its root span has not come, its last span is neither an end that the gateway was told nor
                old enough, or calls are still unread
    failed      it ended with an error
    no_grade    no call of it is of a grade that the objective can train
    too_old     a call was sampled by a version that the update may not learn from
    unrewarded  it has no reward that counts; it may still come
    ready       an update may take it

Knows the store's tables. Does not know: learners, clocks.

Invariants:
* what an update consumed, or read a call of for what it consumed, is never ready again; reading alone, as
  stages on stored rollouts do, takes nothing away;
* what is held out is never ready for an update;
* rewards count as `credit/rewards.py` counts them.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from spangrad.adapters.grading import at_least
from spangrad.adapters.model_call import Grade, Purpose
from spangrad.credit.groups import LARGEST
from spangrad.store.base import Store
from spangrad.store.records import RECORDED_SPLIT
from spangrad.tracer import conventions

STATES: Final = ("trained", "unended", "failed", "no_grade", "too_old", "unrewarded", "ready")
PARTS: Final = 1_000_000
"""The held-out share is known to one in so many."""
HELD_OUT_MOST: Final = 512
"""Held-out sessions whose rewards are read, the newest."""

_STATES: Final = f"""
WITH own AS (
  SELECT rollout_id, attempt, status, ended_ns,
    md5_number_lower(rollout_id) % {PARTS} < $held_out AS is_held_out
  FROM rollouts WHERE split = $split AND consumed_by IS NULL
    AND rollout_id NOT IN (SELECT unnest($taken::VARCHAR[]))
), unread AS (
  SELECT s.rollout_id FROM unread_traces u JOIN spans s USING (trace_id) WHERE s.rollout_id IS NOT NULL
  UNION SELECT n.rollout_id FROM unread_traces u JOIN sessions n USING (trace_id)
), rooted AS (
  SELECT DISTINCT own.rollout_id FROM own JOIN spans s USING (rollout_id)
  WHERE own.ended_ns > $idle_ns AND coalesce(s.attempt, 0) = own.attempt
    AND (s.scope = $tracer AND s.attributes->>$role = 'rollout'
      OR s.scope = $gateway AND s.end_ns = own.ended_ns AND s.attributes->>$role = $end)
), read AS (
  SELECT DISTINCT calls.rollout_id FROM update_reads JOIN calls USING (call_id)
  JOIN updates USING (run_id, update_index)
  WHERE updates.consumes AND calls.rollout_id IN (SELECT rollout_id FROM own)
), told AS (
  SELECT c.rollout_id, count(*) FILTER (c.purpose = $acts AND c.grade <> 'unusable') AS acts,
    coalesce(bool_or(c.purpose = $acts AND c.grade IN (SELECT unnest($grades::VARCHAR[]))), false) AS is_good,
    coalesce(bool_and(c.policy_version BETWEEN $oldest AND $newest), true) AS is_fresh
  FROM calls c JOIN own USING (rollout_id) WHERE c.attempt = own.attempt GROUP BY c.rollout_id
), counting AS (
  SELECT r.rollout_id, r.call_id, r.name FROM rewards r JOIN own USING (rollout_id)
  WHERE r.author IN (SELECT unnest($authors::VARCHAR[])) AND r.name IN (SELECT unnest($names::VARCHAR[]))
    AND abs(r.value) <= $largest AND coalesce(r.attempt, own.attempt) = own.attempt
), given AS (
  SELECT g.rollout_id, count(DISTINCT g.name) FILTER (g.call_id IS NULL) AS names,
    count(DISTINCT c.call_id) FILTER (c.purpose = $acts AND c.grade <> 'unusable') AS steps
  FROM counting g LEFT JOIN calls c ON c.call_id = g.call_id AND c.rollout_id = g.rollout_id
  GROUP BY g.rollout_id
), states AS (
  SELECT rollout_id, ended_ns, is_held_out, CASE
    WHEN rollout_id IN (SELECT rollout_id FROM read) THEN 'trained'
    WHEN status NOT IN ('succeeded', 'failed') OR rollout_id IN (SELECT rollout_id FROM unread)
      OR NOT coalesce(ended_ns <= $idle_ns, false) AND rollout_id NOT IN (SELECT rollout_id FROM rooted)
      THEN 'unended'
    WHEN status = 'failed' THEN 'failed'
    WHEN NOT coalesce(is_good, false) THEN 'no_grade'
    WHEN NOT is_fresh THEN 'too_old'
    WHEN names = len($names::VARCHAR[]) OR steps >= acts THEN 'ready'
    ELSE 'unrewarded' END AS state
  FROM own LEFT JOIN told USING (rollout_id) LEFT JOIN given USING (rollout_id)
)
"""
_COUNTS: Final = f"{_STATES} SELECT state, is_held_out, count(*) AS count FROM states GROUP BY ALL"
_READY: Final = f"""{_STATES}
SELECT rollout_id FROM states WHERE NOT is_held_out
QUALIFY state = 'ready' AND NOT bool_or(state = 'unrewarded' AND ended_ns > $waits_ns)
  OVER (ORDER BY ended_ns, rollout_id ROWS UNBOUNDED PRECEDING)
ORDER BY ended_ns, rollout_id LIMIT $most
"""
_HELD_OUT: Final = f"""{_STATES}
SELECT rollout_id FROM states WHERE state = 'ready' AND is_held_out
ORDER BY ended_ns DESC, rollout_id LIMIT {HELD_OUT_MOST}
"""


@dataclass(frozen=True, slots=True)
class Rules:
    """What an update takes."""

    idle_s: float
    reward_wait_s: float
    held_out: float
    """See `ProductionConfig`."""
    min_grade: Grade
    """The worst grade of calls that the objective can train."""
    max_staleness: int
    """Updates that a call may be older than the learner."""
    authors: Sequence[str]
    """Whose rewards count."""
    names: Collection[str]
    """Names of the rewards that are summed: all of them have to be there."""


@dataclass(frozen=True, slots=True)
class Moment:
    """When it is asked."""

    policy_version: int
    """Of the learner."""
    now_ns: int
    taken: Collection[str] = ()
    """Rollouts that are spoken for."""


def states(store: Store, rules: Rules, at: Moment) -> Mapping[str, int]:
    """How many sessions are in each state, `held_out` those that no update takes, whatever their state."""
    rows = store.query(_COUNTS, _asked(rules, at))
    found = {state: 0 for state in STATES}
    found |= {row["state"]: row["count"] for row in rows if not row["is_held_out"]}
    return found | {"held_out": sum(row["count"] for row in rows if row["is_held_out"])}


def ready(store: Store, rules: Rules, at: Moment, *, most: int) -> list[str]:
    """The sessions that an update may take, `most` at most, in the order in which they ended."""
    waits_ns = at.now_ns - round(rules.reward_wait_s * 1e9)
    rows = store.query(_READY, _asked(rules, at) | {"waits_ns": waits_ns, "most": most})
    return [row["rollout_id"] for row in rows]


def held_out(store: Store, rules: Rules, at: Moment) -> list[str]:
    """Held-out sessions that an update might have taken, the newest first, `HELD_OUT_MOST` at most."""
    return [row["rollout_id"] for row in store.query(_HELD_OUT, _asked(rules, at))]


def _asked(rules: Rules, at: Moment) -> dict[str, Any]:
    return {
        "split": RECORDED_SPLIT,
        "held_out": round(rules.held_out * PARTS),
        "taken": list(at.taken),
        "idle_ns": at.now_ns - round(rules.idle_s * 1e9),
        "tracer": conventions.SCOPE_TRACER,
        "gateway": conventions.SCOPE_GATEWAY,
        "end": conventions.ROLE_END,
        "role": f'$."{conventions.SPAN_ROLE}"',
        "acts": str(Purpose.AGENT),
        "grades": [str(grade) for grade in Grade if at_least(grade, rules.min_grade)],
        "oldest": at.policy_version - rules.max_staleness,
        "newest": at.policy_version,
        "authors": [str(author) for author in rules.authors],
        "names": list(rules.names),
        "largest": LARGEST,
    }
