"""Traces that are one rollout though no span of theirs names one.

Knows the tables `sessions` and the rollouts, rewards and calls that follow from it. A rollout made here is
named by the id of its earliest trace.

Invariants:
* `spans` is not touched: what a recorder said wins over what is said here;
* a trace is in one session; what was said of it before does not count;
* rewards and call summaries move with the trace that they are of.
"""

import time
from collections.abc import Mapping, Sequence

import duckdb

from spangrad.store.records import RECORDED_SPLIT
from spangrad.store.schema import ROLLOUTS, SESSIONS
from spangrad.store.tables.evaluations import reward_by_sessions
from spangrad.store.tables.outcomes import outcome_of
from spangrad.store.tables.placing import place_again
from spangrad.store.tables.rows import insert_rows

_NEVER = 2**64


def set_sessions(con: duckdb.DuckDBPyConnection, groups: Sequence[Mapping[str, str | None]]) -> int:
    """Make each group a rollout, whatever its traces were joined to before; trace id -> why it is joined.

    A trace of theirs that no group has goes with the trace that its rollout was named by. Returns how many
    traces were given to a rollout, or moved to another one.
    """
    traces = [trace_id for group in groups for trace_id in group]
    earlier = joined(con, traces)
    started = _first_starts(con, traces)
    told: dict[str, tuple[str, str | None]] = {}
    for group in groups:
        rollout_id = min(group, key=lambda name: (started.get(name, _NEVER), name))
        told.update((trace_id, (rollout_id, reason)) for trace_id, reason in group.items())
    for trace_id, (rollout_id, reason) in earlier.items():
        if trace_id not in told and rollout_id in told:
            told[trace_id] = told[rollout_id][0], reason
    rows = [
        {"trace_id": trace_id, "rollout_id": rollout_id, "reason": reason}
        for trace_id, (rollout_id, reason) in told.items()
        if earlier.get(trace_id) != (rollout_id, reason)
    ]
    insert_rows(con, SESSIONS, rows, conflict="replace")
    changed = [t for t, (rollout_id, _) in told.items() if t not in earlier or earlier[t][0] != rollout_id]
    former = {rollout_id for rollout_id, _ in earlier.values()}
    if changed:
        _follow(con, changed, sorted(former))
    _record(con, sorted({rollout_id for rollout_id, _ in told.values()} | former))
    place_again(con, list(told), sorted(former.union(changed)))
    if changed:
        reward_by_sessions(con, changed)
    return len(changed)


def _follow(con: duckdb.DuckDBPyConnection, changed: Sequence[str], former: Sequence[str]) -> None:
    """Bring calls to what is said of the traces that changed, and forget rollouts that are none any more."""
    con.execute(
        "UPDATE calls SET rollout_id = s.rollout_id FROM sessions s WHERE calls.trace_id = s.trace_id "
        "AND calls.trace_id IN (SELECT unnest($traces::VARCHAR[])) "
        "AND (calls.rollout_id IS NULL OR calls.rollout_id IN (SELECT unnest($former::VARCHAR[])))",
        {"traces": list(changed), "former": list(former)},
    )
    con.execute(
        "DELETE FROM rollouts WHERE is_recorded AND rollout_id IN (SELECT unnest(?::VARCHAR[])) "
        "AND rollout_id NOT IN (SELECT rollout_id FROM sessions)",
        [list(former)],
    )


def joined(con: duckdb.DuckDBPyConnection, trace_ids: Sequence[str]) -> dict[str, tuple[str, str | None]]:
    """What was said before of these traces, and of all that were joined to them."""
    found = con.execute(
        "SELECT trace_id, rollout_id, reason FROM sessions WHERE rollout_id IN "
        "(SELECT rollout_id FROM sessions WHERE trace_id IN (SELECT unnest(?::VARCHAR[])))",
        [list(trace_ids)],
    ).fetchall()
    return {trace_id: (rollout_id, reason) for trace_id, rollout_id, reason in found}


def _first_starts(con: duckdb.DuckDBPyConnection, trace_ids: Sequence[str]) -> dict[str, int]:
    """When each trace began."""
    found = con.execute(
        "SELECT trace_id, min(start_ns) FROM spans WHERE trace_id IN (SELECT unnest(?::VARCHAR[])) "
        "GROUP BY trace_id",
        [list(trace_ids)],
    ).fetchall()
    return dict(found)


def _record(con: duckdb.DuckDBPyConnection, rollout_ids: Sequence[str]) -> None:
    """Make the rollouts known; the last root span says whether the agent failed."""
    told = con.execute(
        "SELECT n.rollout_id, least(min(s.start_ns), 9223372036854775807)::BIGINT, "
        "least(max(s.end_ns), 9223372036854775807)::BIGINT, "  # a clock may say anything
        "arg_max(s.status_code, (s.end_ns, s.trace_id, s.span_id)) FILTER (s.parent_span_id IS NULL), "
        "arg_max(s.status_message, (s.end_ns, s.trace_id, s.span_id)) FILTER (s.parent_span_id IS NULL) "
        "FROM spans s JOIN sessions n USING (trace_id) WHERE s.rollout_id IS NULL "
        "AND n.rollout_id IN (SELECT unnest(?)) GROUP BY n.rollout_id ORDER BY 2, 1",
        [list(rollout_ids)],
    ).fetchall()
    sql = (
        "SELECT rollout_id, started_ns, ended_ns, status, error FROM rollouts "
        "WHERE rollout_id IN (SELECT unnest(?::VARCHAR[]))"
    )
    known = {rollout_id: said for rollout_id, *said in con.execute(sql, [list(rollout_ids)]).fetchall()}
    ((first,),) = con.execute("SELECT coalesce(max(seq) + 1, 0) FROM rollouts").fetchall()
    for rollout_id, start_ns, end_ns, code, message in told:
        said = [start_ns, end_ns, *outcome_of(code, message)]
        if rollout_id in known and known[rollout_id] != said:
            con.execute(
                "UPDATE rollouts SET started_ns = ?, ended_ns = ?, status = ?, error = ? "
                "WHERE rollout_id = ? AND is_recorded",
                [*said, rollout_id],
            )
    rows = [
        {
            "seq": first + number,
            "rollout_id": rollout_id,
            "split": RECORDED_SPLIT,
            "attempt": 0,
            "max_attempts": 1,
            "status": outcome_of(code, message)[0],
            "enqueued_ns": time.time_ns(),
            "started_ns": start_ns,
            "ended_ns": end_ns,
            "error": outcome_of(code, message)[1],
            "is_recorded": True,
        }
        for number, (rollout_id, start_ns, end_ns, code, message) in enumerate(told)
        if rollout_id not in known
    ]
    insert_rows(con, ROLLOUTS, rows)
