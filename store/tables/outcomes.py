"""How rollouts ended that no tracer of spangrad recorded: their spans name them, and nothing else is known.

Knows the tables `spans` and `rollouts`. Invariants:
* a rollout that spangrad's tracer records runs until its own root span has come (`queue.py`);
* of another recorder, whose spans come when they have ended, the last root span says how it went; without
  one, that it went well;
* what is said follows from the spans of the current attempt, not from their order.
"""

from collections.abc import Iterable
from typing import Any, Final

import duckdb

from spangrad.store.tables.rows import looked_up
from spangrad.tracer import conventions

_NAMED: Final = "SELECT DISTINCT rollout_id FROM spans WHERE rollout_id IS NOT NULL AND trace_id IN"
_OF_ATTEMPT: Final = "r.rollout_id = s.rollout_id AND r.attempt = least(coalesce(s.attempt, 0), $most)"
_DUE: Final = f"""
SELECT r.rollout_id FROM spans s JOIN rollouts r ON {_OF_ATTEMPT}
WHERE r.is_recorded AND s.rollout_id IN (SELECT unnest($rollouts::VARCHAR[]))
GROUP BY r.rollout_id, r.status
HAVING if(r.status = 'running', NOT bool_or(s.scope = $tracer),
  coalesce(bool_or(s.end_ns = r.ended_ns AND s.scope <> $tracer), false))
"""
"""Found without a look at attributes. One that somebody else has ended did not end with any of its spans."""
_TOLD: Final = f"""
WITH own AS (
  SELECT s.*, s.attributes->>$role = 'rollout' AS is_own_root,
    s.parent_span_id IS NULL OR EXISTS (
      SELECT 1 FROM spans p WHERE p.trace_id = s.trace_id AND p.span_id = s.parent_span_id
      AND p.rollout_id IS DISTINCT FROM s.rollout_id) AS is_root
  FROM spans s JOIN rollouts r ON {_OF_ATTEMPT}
  WHERE s.rollout_id IN (SELECT unnest($rollouts::VARCHAR[])))
SELECT r.rollout_id, r.status, r.started_ns, r.ended_ns, r.error, bool_or(s.scope = $tracer) AS is_traced,
  least(min(s.start_ns), 9223372036854775807)::BIGINT, least(max(s.end_ns), 9223372036854775807)::BIGINT,
  arg_max(s.status_code, (s.end_ns, s.trace_id, s.span_id)) FILTER (s.is_root),
  arg_max(s.status_message, (s.end_ns, s.trace_id, s.span_id)) FILTER (s.is_root)
FROM own s JOIN rollouts r USING (rollout_id)
GROUP BY r.rollout_id, r.status, r.started_ns, r.ended_ns, r.error
HAVING NOT coalesce(bool_or(s.is_own_root), false)
"""


def outcome_of(code: int | None, message: str | None) -> tuple[str, str | None]:
    """Status and error of a rollout, as its last root span's status says."""
    return ("failed", message or "the last root span says ERROR") if code == 2 else ("succeeded", None)


def settle_outcomes(con: duckdb.DuckDBPyConnection, trace_ids: Iterable[str]) -> None:
    """Say how the rollouts ended that spans of these traces name, where nothing but their spans is known."""
    named = {
        rollout_id
        for marks, some in looked_up(list(trace_ids))
        for (rollout_id,) in con.execute(f"{_NAMED} {marks}", some).fetchall()
    }
    given: dict[str, Any] = {"tracer": conventions.SCOPE_TRACER, "most": conventions.MAX_ATTEMPT}
    due = con.execute(_DUE, {**given, "rollouts": list(named)}).fetchall() if named else []
    if not due:
        return
    given |= {"rollouts": [rollout_id for (rollout_id,) in due], "role": f'$."{conventions.SPAN_ROLE}"'}
    for rollout_id, *known, is_traced, start_ns, end_ns, code, message in con.execute(
        _TOLD, given
    ).fetchall():
        status, error = ("running", None) if is_traced else outcome_of(code, message)
        said = [status, start_ns, None if is_traced else end_ns, error]
        if said != known:
            con.execute(
                "UPDATE rollouts SET status = ?, started_ns = ?, ended_ns = ?, error = ? "
                "WHERE rollout_id = ?",
                [*said, rollout_id],
            )
