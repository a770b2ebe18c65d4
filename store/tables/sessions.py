"""Traces that are one rollout though no span of theirs names one.

Knows the tables `sessions` and `call_keys`, and the rollouts, rewards and calls that
follow from them. A rollout made here is named by the id of its earliest trace.

Invariants:
* `spans` is not touched: what a recorder said wins over what is said here;
* a trace is in one session; groups that share a trace become one;
* rewards and call summaries move with the rollout that they were given to.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import duckdb

from spangrad.errors import StoreError
from spangrad.store.records import RECORDED_SPLIT
from spangrad.store.schema import CALL_KEYS, ROLLOUTS, SESSIONS
from spangrad.store.tables.evaluations import reward_by_sessions
from spangrad.store.tables.rows import insert_rows, select_dicts

_RELATED = """
SELECT k.* FROM call_keys k WHERE k.call_id NOT IN (SELECT unnest($call_ids)) AND (
  k.conversation_id IN (SELECT unnest($conversations)) OR k.response_id IN (SELECT unnest($previous))
  OR k.previous_response_id IN (SELECT unnest($responses)) OR list_has_any(k.reply_keys, $prefixes)
  OR list_has_any(k.prefix_keys, $replies) OR list_has_any(k.tool_calls_made, $answered)
  OR list_has_any(k.tool_calls_answered, $made))
"""
"""Calls that may go on from the given ones, or that those may go on from."""


def join_traces(con: duckdb.DuckDBPyConnection, groups: Sequence[Sequence[str]]) -> int:
    """Make the traces of each group one rollout, with all that they were joined to before.

    Returns how many traces were given to a rollout, or moved to another one.
    """
    earlier = joined(con, [trace_id for group in groups for trace_id in group])
    sessions: dict[str, str] = {}
    renamed: dict[str, str] = {}

    def current(rollout_id: str) -> str:
        while rollout_id in renamed:
            rollout_id = renamed[rollout_id]
        return rollout_id

    started = _first_starts(con, groups, earlier)
    for group in groups:
        known = {current(sessions.get(t) or earlier.get(t) or t) for t in group}
        rollout_id = min(known, key=lambda name: (started.get(name, 0), name))
        renamed.update((other, rollout_id) for other in known if other != rollout_id)
        sessions.update((trace_id, rollout_id) for trace_id in group)
    sessions = {trace_id: current(rollout_id) for trace_id, rollout_id in sessions.items()}
    moved = {old: current(old) for old in renamed if old in earlier.values()}
    changed = {t: r for t, r in sessions.items() if earlier.get(t) != r}
    rows = [{"trace_id": trace_id, "rollout_id": rollout_id} for trace_id, rollout_id in changed.items()]
    insert_rows(con, SESSIONS, rows, conflict="replace")
    for old, new in moved.items():
        for table in ("sessions", "rewards", "calls"):
            con.execute(f"UPDATE {table} SET rollout_id = ? WHERE rollout_id = ?", [new, old])
        con.execute("DELETE FROM rollouts WHERE is_recorded AND rollout_id = ?", [old])
    _record(con, sorted(set(sessions.values()) | set(moved.values())))
    if changed:
        con.execute(
            "UPDATE calls SET rollout_id = s.rollout_id FROM sessions s "
            "WHERE calls.trace_id = s.trace_id AND calls.rollout_id IS NULL "
            "AND calls.trace_id IN (SELECT unnest(?))",
            [list(changed)],
        )
        reward_by_sessions(con, list(changed))
    return len(changed)


def put_call_keys(con: duckdb.DuckDBPyConnection, rows: Sequence[Mapping[str, Any]]) -> int:
    """Store keys of calls by `call_id`; later ones replace earlier ones."""
    names = {column.name for column in CALL_KEYS.columns}
    for row in rows:
        if unknown := row.keys() - names:
            raise StoreError(f"call {row.get('call_id')!r}: {sorted(unknown)} are no columns of `call_keys`")
    return insert_rows(
        con, CALL_KEYS, list({row["call_id"]: row for row in rows}.values()), conflict="replace"
    )


def related_call_keys(
    con: duckdb.DuckDBPyConnection, rows: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Keys of stored calls that may go on from the given ones, or the given from them."""
    given = {
        "call_ids": [row["call_id"] for row in rows],
        "conversations": _values(rows, "conversation_id"),
        "previous": _values(rows, "previous_response_id"),
        "responses": _values(rows, "response_id"),
        "prefixes": _lists(rows, "prefix_keys"),
        "replies": _lists(rows, "reply_keys"),
        "answered": _lists(rows, "tool_calls_answered"),
        "made": _lists(rows, "tool_calls_made"),
    }
    return select_dicts(con, _RELATED, given)


def _values(rows: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    return list({row[name] for row in rows if row.get(name) is not None})


def _lists(rows: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    return list({value for row in rows for value in row.get(name) or ()})


def joined(con: duckdb.DuckDBPyConnection, trace_ids: Sequence[str]) -> dict[str, str]:
    """The rollouts of these traces, and of all that were joined to them before."""
    found = con.execute(
        "SELECT trace_id, rollout_id FROM sessions WHERE rollout_id IN "
        "(SELECT rollout_id FROM sessions WHERE trace_id IN (SELECT unnest(?)))",
        [list(trace_ids)],
    ).fetchall()
    return dict(found)


def _first_starts(
    con: duckdb.DuckDBPyConnection, groups: Sequence[Sequence[str]], earlier: Mapping[str, str]
) -> dict[str, int]:
    """When each trace that may name a rollout began."""
    names = {trace_id for group in groups for trace_id in group} | set(earlier.values())
    found = con.execute(
        "SELECT trace_id, min(start_ns) FROM spans WHERE trace_id IN (SELECT unnest(?)) GROUP BY trace_id",
        [sorted(names)],
    ).fetchall()
    return dict(found)


def _record(con: duckdb.DuckDBPyConnection, rollout_ids: Sequence[str]) -> None:
    """Make the rollouts known; the last root span says whether the agent failed."""
    told = con.execute(
        "SELECT n.rollout_id, least(min(s.start_ns), 9223372036854775807)::BIGINT, "
        "least(max(s.end_ns), 9223372036854775807)::BIGINT, "  # a clock may say anything
        "arg_max(s.status_code, s.end_ns) FILTER (s.parent_span_id IS NULL), "
        "arg_max(s.status_message, s.end_ns) FILTER (s.parent_span_id IS NULL) "
        "FROM spans s JOIN sessions n USING (trace_id) WHERE s.rollout_id IS NULL "
        "AND n.rollout_id IN (SELECT unnest(?)) GROUP BY n.rollout_id ORDER BY 2, 1",
        [list(rollout_ids)],
    ).fetchall()
    known = dict(
        con.execute(
            "SELECT rollout_id, seq FROM rollouts WHERE rollout_id IN (SELECT unnest(?))", [list(rollout_ids)]
        ).fetchall()
    )
    ((first,),) = con.execute("SELECT coalesce(max(seq) + 1, 0) FROM rollouts").fetchall()
    for rollout_id, start_ns, end_ns, code, message in told:
        if rollout_id in known:
            con.execute(
                "UPDATE rollouts SET started_ns = ?, ended_ns = ?, status = ?, error = ? "
                "WHERE rollout_id = ? AND is_recorded "
                "AND (started_ns, ended_ns, status, error) IS DISTINCT FROM (?, ?, ?, ?)",
                [*(said := (start_ns, end_ns, *_outcome(code, message))), rollout_id, *said],
            )
    rows = [
        {
            "seq": first + number,
            "rollout_id": rollout_id,
            "split": RECORDED_SPLIT,
            "attempt": 0,
            "max_attempts": 1,
            "status": _outcome(code, message)[0],
            "enqueued_ns": time.time_ns(),
            "started_ns": start_ns,
            "ended_ns": end_ns,
            "error": _outcome(code, message)[1],
            "is_recorded": True,
        }
        for number, (rollout_id, start_ns, end_ns, code, message) in enumerate(told)
        if rollout_id not in known
    ]
    insert_rows(con, ROLLOUTS, rows)


def _outcome(code: int | None, message: str | None) -> tuple[str, str | None]:
    return ("failed", message or "the last root span says ERROR") if code == 2 else ("succeeded", None)
