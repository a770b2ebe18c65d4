"""Leases: claimable rollouts are handed out for a while, and the while is extended.

Knows the table `rollouts` and the tasks in `tasks`. Invariants:

* one attempt of one rollout belongs to one worker at a time;
* attempts count up from 0 to `max_attempts - 1`;
* a lease costs what is open, not what is stored: behind a long stretch of ended rollouts the search
  begins at the first one that has not ended.
"""

import sys
import time
from collections.abc import Sequence
from typing import Final

import duckdb

from spangrad.store.records import Rollout
from spangrad.store.tables.queue import Floors, as_rollout, filters_of
from spangrad.store.tables.rows import marks, select_dicts

STRETCH: Final = 8_192
"""Rollouts read in vain before it is asked again where the open ones begin."""


def claim(
    con: duckdb.DuckDBPyConnection,
    *,
    worker: str,
    limit: int,
    lease_s: float,
    run_id: str | None,
    split: str | None,
    policy_version: int | None,
    floors: Floors,
) -> list[Rollout]:
    """Hand out the oldest claimable rollouts."""
    now = time.time_ns()
    filters, parameters = filters_of(run_id=run_id, split=split)
    floor = floors.get((run_id, split), 0)
    sql = "SELECT rollout_id, status = 'running' AND attempt + 1 >= max_attempts, seq FROM rollouts "
    sql += "WHERE seq >= ? AND (status = 'queued' OR (status = 'running' AND lease_until_ns < ?))"
    sql += f"{filters} ORDER BY seq LIMIT ?"
    while found := con.execute(sql, [floor, now, *parameters, max(limit, 0)]).fetchall():
        exhausted = [rollout_id for rollout_id, is_exhausted, _ in found if is_exhausted]
        if not exhausted:
            break
        con.execute(
            "UPDATE rollouts SET status = 'failed', ended_ns = ?, lease_until_ns = NULL, "
            "error_type = 'LeaseExpired', error = 'no heartbeat in time, and no attempt left' "
            "WHERE rollout_id IN (SELECT unnest(?))",
            [now, exhausted],
        )
    ids = [rollout_id for rollout_id, _, _ in found]
    if (found[0][2] if found else sys.maxsize) - floor >= STRETCH:
        floors[run_id, split] = _floor(con, floor, filters, parameters)
    if not ids:
        return []
    rows = select_dicts(
        con,
        "UPDATE rollouts SET attempt = attempt + CAST(status = 'running' AS INTEGER), status = 'running', "
        "worker = ?, lease_until_ns = ?, started_ns = ?, ended_ns = NULL, output = NULL, "
        f"policy_version = coalesce(?, policy_version) WHERE rollout_id IN ({marks(ids)}) RETURNING *",
        [worker, now + round(lease_s * 1e9), now, policy_version, *ids],
    )
    keys = list({row["task_key"] for row in rows if row["task_key"] is not None})
    tasks = dict(
        con.execute(f"SELECT task_key, task FROM tasks WHERE task_key IN ({marks(keys)})", keys).fetchall()
        if keys
        else ()
    )
    rows.sort(key=lambda row: row["seq"])
    return [as_rollout(row | {"task": tasks.get(row["task_key"])}) for row in rows]


def _floor(con: duckdb.DuckDBPyConnection, floor: int, filters: str, parameters: Sequence[str]) -> int:
    """The lowest `seq` that is open; behind the last one if none is."""
    is_open = "status IN ('queued', 'running') AND NOT is_recorded"
    sql = f"SELECT coalesce(min(seq) FILTER ({is_open}), max(seq) + 1, ?) FROM rollouts"
    sql += f" WHERE seq >= ?{filters}"
    return int(con.execute(sql, [floor, floor, *parameters]).fetchall()[0][0])


def heartbeat(
    con: duckdb.DuckDBPyConnection, rollouts: Sequence[tuple[str, int]], *, worker: str, lease_s: float
) -> list[str]:
    """Extend leases; returns the ids that are no longer this worker's."""
    kept = con.execute(
        "UPDATE rollouts SET lease_until_ns = ? WHERE worker = ? AND status = 'running' "
        "AND (rollout_id, attempt) IN (SELECT unnest(?::VARCHAR[]), unnest(?::INTEGER[])) "
        "RETURNING rollout_id, attempt",
        [
            time.time_ns() + round(lease_s * 1e9),
            worker,
            [rollout_id for rollout_id, _ in rollouts],
            [attempt for _, attempt in rollouts],
        ],
    ).fetchall()
    mine = set(kept)
    return [rollout_id for rollout_id, attempt in rollouts if (rollout_id, attempt) not in mine]
