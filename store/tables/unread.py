"""Traces whose calls were not read since they got spans or log records.

Knows the table `unread_traces`: a row for every change, as an upsert costs four times as much. Invariants:
* what puts spans or records of a trace into the file puts the trace here, in the same transaction;
* a trace leaves only as it was when it was read: one that has changed meanwhile stays.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import duckdb

from spangrad.store.records import UnreadTrace

_CHANGED = "SELECT trace_id, max(changed_ns) AS changed_ns FROM unread_traces"
_FOUND = """
SELECT u.trace_id, u.changed_ns, list_sort(list_distinct(list(s.rollout_id))) AS rollout_ids
FROM unread u LEFT JOIN spans s ON s.trace_id = u.trace_id
LEFT JOIN rollouts r ON r.rollout_id = s.rollout_id
"""
_IS_TO_COME = "NOT r.is_recorded AND r.status IN ('queued', 'running')"
_IS_QUIET = "max(changed_ns) NOT BETWEEN $now - $quiet AND $now"
"""A time to come is one of a clock that was put back: nobody waits for it."""


def touch(con: duckdb.DuckDBPyConnection, trace_ids: Iterable[str], stamp_ns: int) -> None:
    """Note that these traces changed at a time that is later than any before."""
    if ids := sorted(set(trace_ids)):
        con.execute("INSERT INTO unread_traces SELECT unnest(?::VARCHAR[]), ?", [ids, stamp_ns])


def select_unread(
    con: duckdb.DuckDBPyConnection,
    *,
    trace_ids: Sequence[str] | None = None,
    rollout_ids: Sequence[str] | None = None,
    quiet_s: float | None = None,
    limit: int | None = None,
) -> list[UnreadTrace]:
    """Unread traces that match every given filter, the longest unchanged first."""
    where, having, given = ["true"], ["true"], dict[str, Any]()
    if trace_ids is not None:
        where.append("trace_id IN (SELECT unnest($traces::VARCHAR[]))")
        given["traces"] = list(trace_ids)
    if rollout_ids is not None:
        named = "SELECT trace_id FROM spans WHERE rollout_id IN (SELECT unnest($rollouts::VARCHAR[]))"
        where.append(f"trace_id IN ({named})")
        given["rollouts"] = list(rollout_ids)
    if quiet_s is not None:
        having.append(_IS_QUIET)
        given |= {"now": time.time_ns(), "quiet": round(quiet_s * 1e9)}
    unread = f"{_CHANGED} WHERE {' AND '.join(where)} GROUP BY trace_id HAVING {' AND '.join(having)}"
    if not con.execute(f"{unread} LIMIT 1", given).fetchall():
        return []  # without a look at all spans
    is_awaited = "false" if quiet_s is None else f"coalesce(bool_or({_IS_TO_COME}), false)"
    found = con.execute(
        f"WITH unread AS ({unread}) {_FOUND} GROUP BY u.trace_id, u.changed_ns HAVING NOT {is_awaited} "
        f"ORDER BY u.changed_ns, u.trace_id{'' if limit is None else f' LIMIT {int(limit)}'}",
        given,
    ).fetchall()
    return [UnreadTrace(trace_id, changed_ns, rollout_ids) for trace_id, changed_ns, rollout_ids in found]


def changed_since(con: duckdb.DuckDBPyConnection, read: Mapping[str, int | None]) -> set[str]:
    """Those that are not as they were: changed, or read by somebody else; None: it was not unread."""
    now = _changes(con, read)
    return {trace_id for trace_id, changed_ns in read.items() if now.get(trace_id) != changed_ns}


def mark_read(con: duckdb.DuckDBPyConnection, traces: Mapping[str, int]) -> list[str]:
    """Take out the traces that did not change since. Returns them."""
    now = _changes(con, traces)
    done = [trace_id for trace_id, changed_ns in traces.items() if now.get(trace_id) == changed_ns]
    if done:
        con.execute("DELETE FROM unread_traces WHERE trace_id IN (SELECT unnest(?::VARCHAR[]))", [done])
    return done


def _changes(con: duckdb.DuckDBPyConnection, trace_ids: Iterable[str]) -> dict[str, int]:
    sql = f"{_CHANGED} WHERE trace_id IN (SELECT unnest(?::VARCHAR[])) GROUP BY trace_id"
    return dict(con.execute(sql, [list(trace_ids)]).fetchall())
