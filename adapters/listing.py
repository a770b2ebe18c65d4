"""What listings show of calls, at the cost of what they show.

Knows the tables `calls`, `rollouts` and `unread_traces`. Invariant: says what `calls_of` would say, and reads
the spans of no other rollouts and traces than those that are shown or are unread.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from spangrad.adapters.calls import calls_of
from spangrad.adapters.model_call import ModelCall
from spangrad.adapters.purpose import NO_TURN_LEFT
from spangrad.store.base import Store

_CURRENT: Final = """
FROM calls c LEFT JOIN rollouts r USING (rollout_id)
WHERE (r.attempt IS NULL OR r.attempt = c.attempt)
  AND c.trace_id NOT IN (SELECT unnest($unread::VARCHAR[]))
  AND ($rollouts::VARCHAR[] IS NULL OR c.rollout_id IN (SELECT unnest($rollouts::VARCHAR[])))
"""
"""Calls of current attempts, as far as they were read."""
_NEWEST: Final = f"""
SELECT c.call_id, c.rollout_id, c.trace_id, c.start_ns {_CURRENT}
ORDER BY c.start_ns DESC, c.call_id DESC LIMIT $limit
"""
_COUNT: Final = f"SELECT count(*) AS calls {_CURRENT}"
_COUNTS: Final = f"SELECT c.rollout_id, count(*) AS calls {_CURRENT} GROUP BY 1"
_OUT_OF_TURNS: Final = f"SELECT DISTINCT c.rollout_id {_CURRENT} AND c.purpose_reason = $reason"


def newest_calls(
    store: Store, rollout_ids: Sequence[str] | None = None, *, limit: int
) -> tuple[list[ModelCall], int]:
    """The newest calls of rollouts' current attempts, the oldest of them first, and how many there are.

    Args:
        store: Where to look.
        rollout_ids: Only calls of these rollouts.
        limit: How many calls; 0: all.
    """
    if not limit:
        calls = calls_of(store, rollout_ids)
        return calls, len(calls)
    unread, traces_unread = _unread_calls(store, rollout_ids)
    given = {"rollouts": None if rollout_ids is None else list(rollout_ids), "unread": traces_unread}
    names = ("call_id", "rollout_id", "trace_id", "start_ns")
    rows = _rows(store, _NEWEST, given | {"limit": limit})
    rows += [{name: getattr(call, name) for name in names} for call in unread]
    rows.sort(key=lambda row: (row["start_ns"], row["call_id"]))
    (read,) = _rows(store, _COUNT, given)
    shown = {row["call_id"]: row for row in rows[-limit:]}
    rollouts = {row["rollout_id"]: None for row in shown.values() if row["rollout_id"] is not None}
    traces = {row["trace_id"]: None for row in shown.values() if row["rollout_id"] is None}
    found = calls_of(store, list(rollouts), trace_ids=list(traces)) if shown else []
    calls = [call for call in found if call.call_id in shown]
    known = read["calls"] + len(unread)
    return calls, known if known > limit else len(calls)  # fewer: an unread trace tells of a known call


def calls_by_rollout(store: Store, rollout_ids: Sequence[str]) -> Counter[str]:
    """How many calls the current attempt of each of these rollouts made."""
    unread, traces_unread = _unread_calls(store, rollout_ids)
    rows = _rows(store, _COUNTS, {"rollouts": list(rollout_ids), "unread": traces_unread})
    counts = Counter({row["rollout_id"]: row["calls"] for row in rows})
    counts.update(call.rollout_id for call in unread if call.rollout_id is not None)
    return counts


def out_of_turns(store: Store, rollout_ids: Sequence[str]) -> set[str]:
    """Those of these rollouts whose turns did not suffice."""
    unread, traces_unread = _unread_calls(store, rollout_ids)
    given = {"rollouts": list(rollout_ids), "unread": traces_unread, "reason": NO_TURN_LEFT}
    found = {str(row["rollout_id"]) for row in _rows(store, _OUT_OF_TURNS, given)}
    return found | {
        call.rollout_id
        for call in unread
        if call.rollout_id is not None and call.purpose_reason == NO_TURN_LEFT
    }


def _unread_calls(store: Store, rollout_ids: Sequence[str] | None) -> tuple[list[ModelCall], list[str]]:
    """Calls of current attempts in traces that changed since their calls were written, and those traces.

    A hub may read them at any moment: what is asked next has to leave out the same ones.
    """
    unread = [row["trace_id"] for row in _rows(store, "SELECT DISTINCT trace_id FROM unread_traces", {})]
    calls = calls_of(store, (), trace_ids=unread) if unread else []
    wanted = None if rollout_ids is None else set(rollout_ids)
    return [call for call in calls if wanted is None or call.rollout_id in wanted], unread


def _rows(store: Store, sql: str, parameters: dict[str, Any]) -> list[dict[str, Any]]:
    with store.query_arrow(sql, parameters) as answer:
        rows: list[dict[str, Any]] = answer.read_all().to_pylist()
    return rows
