"""The rollout queue: enqueue, claim with a lease, heartbeat, finish, requeue.

Knows the tables `rollouts` and `tasks`. Invariants:

* one attempt of one rollout belongs to one worker at a time;
* attempts count up from 0 to `max_attempts - 1`; what a worker says of an older attempt is refused;
* a rollout that is only known from spans is never handed out; its attempt is the highest that they name,
  and how it went is said by that attempt's root span (where spangrad did not record it: `outcomes.py`).
"""

import time
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import duckdb

from spangrad.errors import LeaseLostError, StoreError
from spangrad.store.encoding import decode_json, encode_json
from spangrad.store.records import RECORDED_SPLIT, Rollout, RolloutStatus, Span
from spangrad.store.schema import ROLLOUTS, TASKS
from spangrad.store.tables.lineage import Owner
from spangrad.store.tables.rows import insert_rows, looked_up, select_dicts
from spangrad.tracer import conventions

_ENDED = (RolloutStatus.SUCCEEDED, RolloutStatus.FAILED)


def enqueue(con: duckdb.DuckDBPyConnection, rollouts: Sequence[Rollout]) -> int:
    """Add rollouts; those whose id is known are left alone, unless they are known from spans only."""
    wanted: dict[str, Rollout] = {}
    for rollout in rollouts:
        wanted.setdefault(rollout.rollout_id, rollout)
    known = dict(
        con.execute(
            "SELECT rollout_id, is_recorded FROM rollouts WHERE rollout_id IN (SELECT unnest(?))",
            [list(wanted)],
        ).fetchall()
    )
    fresh = [rollout for rollout in wanted.values() if known.get(rollout.rollout_id, True)]
    for rollout in fresh:
        _check(rollout)
    recorded = [rollout_id for rollout_id, is_recorded in known.items() if is_recorded]
    if recorded:
        con.execute("DELETE FROM rollouts WHERE rollout_id IN (SELECT unnest(?))", [recorded])
    tasks = {r.rollout_id: encode_json(r.task) for r in fresh if r.task is not None}
    keys = {text: _hash(text) for text in tasks.values()}
    rows = [{"task_key": key, "task": text} for text, key in keys.items()]
    insert_rows(con, TASKS, rows, conflict="ignore")
    first, now = _next_seq(con), time.time_ns()
    insert_rows(
        con,
        ROLLOUTS,
        [
            _row(rollout, first + i, now) | {"task_key": keys.get(tasks.get(rollout.rollout_id, ""))}
            for i, rollout in enumerate(fresh)
        ],
    )
    return len(fresh)


def _check(rollout: Rollout) -> None:
    if not rollout.rollout_id:
        raise StoreError("a rollout has an empty rollout_id; give each a unique name")
    if rollout.max_attempts < 1 or not 0 <= rollout.attempt < rollout.max_attempts:
        raise StoreError(
            f"rollout {rollout.rollout_id!r} has attempt {rollout.attempt} of {rollout.max_attempts}; "
            "attempts count from 0 to max_attempts - 1"
        )
    if rollout.max_attempts > conventions.MAX_ATTEMPT:
        raise StoreError(
            f"rollout {rollout.rollout_id!r} may have {rollout.max_attempts} attempts; "
            f"{conventions.MAX_ATTEMPT} are allowed"
        )
    if rollout.status is RolloutStatus.RUNNING:
        raise StoreError(
            f"rollout {rollout.rollout_id!r} can't be enqueued as running; enqueue it, then claim it"
        )


def _row(rollout: Rollout, seq: int, now: int) -> dict[str, Any]:
    is_ended = rollout.status in _ENDED
    return {
        "seq": seq,
        "rollout_id": rollout.rollout_id,
        "task_id": rollout.task_id,
        "group_id": rollout.group_id,
        "run_id": rollout.run_id,
        "split": rollout.split,
        "attempt": rollout.attempt,
        "max_attempts": rollout.max_attempts,
        "status": str(rollout.status),
        "policy_version": rollout.policy_version,
        "worker": rollout.worker if is_ended else None,
        "enqueued_ns": now,
        "started_ns": rollout.started_ns if is_ended else None,
        "ended_ns": rollout.ended_ns if is_ended else None,
        "output": None if rollout.output is None else encode_json(rollout.output),
        "error_type": rollout.error_type,
        "error": rollout.error,
        "is_recorded": False,
    }


def claim(
    con: duckdb.DuckDBPyConnection,
    *,
    worker: str,
    limit: int,
    lease_s: float,
    run_id: str | None,
    split: str | None,
    policy_version: int | None,
) -> list[Rollout]:
    """Hand out the oldest claimable rollouts."""
    now = time.time_ns()
    filters, parameters = _filters(run_id=run_id, split=split)
    sql = "SELECT rollout_id, status = 'running' AND attempt + 1 >= max_attempts FROM rollouts "
    sql += "WHERE (status = 'queued' OR (status = 'running' AND lease_until_ns < ?))"
    sql += f"{filters} ORDER BY seq LIMIT ?"
    while found := con.execute(sql, [now, *parameters, max(limit, 0)]).fetchall():
        exhausted = [rollout_id for rollout_id, is_exhausted in found if is_exhausted]
        if not exhausted:
            break
        con.execute(
            "UPDATE rollouts SET status = 'failed', ended_ns = ?, lease_until_ns = NULL, "
            "error_type = 'LeaseExpired', error = 'no heartbeat in time, and no attempt left' "
            "WHERE rollout_id IN (SELECT unnest(?))",
            [now, exhausted],
        )
    ids = [rollout_id for rollout_id, _ in found]
    if not ids:
        return []
    rows = select_dicts(
        con,
        "UPDATE rollouts SET attempt = attempt + CAST(status = 'running' AS INTEGER), status = 'running', "
        "worker = ?, lease_until_ns = ?, started_ns = ?, ended_ns = NULL, output = NULL, "
        f"policy_version = coalesce(?, policy_version) WHERE rollout_id IN ({_marks(ids)}) RETURNING *",
        [worker, now + round(lease_s * 1e9), now, policy_version, *ids],
    )
    keys = list({row["task_key"] for row in rows if row["task_key"] is not None})
    tasks = dict(
        con.execute(f"SELECT task_key, task FROM tasks WHERE task_key IN ({_marks(keys)})", keys).fetchall()
        if keys
        else ()
    )
    rows.sort(key=lambda row: row["seq"])
    return [_rollout(row | {"task": tasks.get(row["task_key"])}) for row in rows]


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


def finish(
    con: duckdb.DuckDBPyConnection,
    rollout_id: str,
    attempt: int,
    *,
    status: RolloutStatus,
    output: Any,
    error_type: str | None,
    error: str | None,
    retry: bool,
    free: bool,
) -> None:
    """End an attempt. The same again is accepted and changes nothing."""
    if free and not retry:
        raise StoreError(f"rollout {rollout_id!r} can't finish with free and without retry; give both")
    if status not in _ENDED:
        raise StoreError(f"rollout {rollout_id!r} can't finish as {str(status)!r}; give succeeded or failed")
    found = select_dicts(
        con,
        "SELECT attempt, max_attempts, status, output, error_type, error FROM rollouts WHERE rollout_id = ?",
        [rollout_id],
    )
    if not found:
        raise StoreError(f"there is no rollout {rollout_id!r}; enqueue it first")
    row = found[0]
    is_requeued = retry and (free or attempt + 1 < row["max_attempts"])
    if is_requeued:
        target = {"status": "queued", "attempt": attempt + 1, "output": None}
    else:
        ended = RolloutStatus.FAILED if retry else status
        text = None if output is None else encode_json(output)
        target = {"status": str(ended), "attempt": attempt, "output": text}
    target |= {"error_type": error_type, "error": error}
    if all(row[name] == value for name, value in target.items()):
        return
    if row["attempt"] != attempt or row["status"] != "running":
        raise LeaseLostError(
            f"rollout {rollout_id!r}: attempt {attempt} was to be finished, but attempt {row['attempt']} is "
            f"{row['status']}; drop this result, somebody else has the rollout"
        )
    target["ended_ns"] = None if is_requeued else time.time_ns()
    target["max_attempts"] = row["max_attempts"] + int(free)
    assignments = ", ".join(f"{name} = ?" for name in target)
    con.execute(
        f"UPDATE rollouts SET lease_until_ns = NULL, {assignments} WHERE rollout_id = ?",
        [*target.values(), rollout_id],
    )


def requeue(con: duckdb.DuckDBPyConnection, rollout_ids: Sequence[str]) -> int:
    """Queue ended, unconsumed rollouts again as the next attempt, and free. Returns how many."""
    found = con.execute(
        "SELECT rollout_id FROM rollouts WHERE rollout_id IN (SELECT unnest(?::VARCHAR[])) "
        "AND status IN ('failed', 'succeeded') AND consumed_by IS NULL AND NOT is_recorded",
        [list(rollout_ids)],
    ).fetchall()
    ids = [rollout_id for (rollout_id,) in found]
    if not ids:
        return 0
    con.execute(  # a reward without an attempt would count for the next one too
        "UPDATE rewards SET attempt = r.attempt FROM rollouts r WHERE rewards.rollout_id = r.rollout_id "
        "AND rewards.attempt IS NULL AND r.rollout_id IN (SELECT unnest(?))",
        [ids],
    )
    con.execute(
        "UPDATE rollouts SET status = 'queued', attempt = attempt + 1, max_attempts = max_attempts + 1, "
        "lease_until_ns = NULL, ended_ns = NULL, output = NULL WHERE rollout_id IN (SELECT unnest(?))",
        [ids],
    )
    return len(ids)


def record_rollouts(con: duckdb.DuckDBPyConnection, spans: Sequence[tuple[Span, Owner]]) -> None:
    """Make rollouts of spans known that nobody enqueued; a root span tells how they ended."""
    by_rollout: dict[str, list[tuple[Span, Owner]]] = {}
    for span, owner in spans:
        by_rollout.setdefault(owner[0], []).append((span, owner))
    select = "SELECT rollout_id, is_recorded, attempt FROM rollouts WHERE rollout_id IN"
    found = [
        row
        for marks, some in looked_up(list(by_rollout))
        for row in con.execute(f"{select} {marks}", some).fetchall()
    ]
    known = {rollout_id: attempt for rollout_id, _, attempt in found}
    for rollout_id, is_recorded, _ in found:
        if not is_recorded:
            del by_rollout[rollout_id]  # its workers say how it goes
    first = _next_seq(con) if by_rollout.keys() - known.keys() else 0
    rows: list[dict[str, Any]] = []
    for rollout_id, owned in by_rollout.items():
        before, attempt = known.get(rollout_id), max(_attempt(owner) for _, owner in owned)
        if before is None:
            known[rollout_id] = attempt
            rows.append(
                {
                    "seq": first + len(rows),
                    "rollout_id": rollout_id,
                    "split": RECORDED_SPLIT,
                    "attempt": attempt,
                    "max_attempts": attempt + 1,
                    "status": "running",
                    "enqueued_ns": time.time_ns(),
                    "started_ns": _first_start(owned, attempt),
                    "is_recorded": True,
                }
            )
        elif attempt > before:
            known[rollout_id] = attempt
            _raise_recorded(con, rollout_id, attempt, _first_start(owned, attempt))
    insert_rows(con, ROLLOUTS, rows)
    for rollout_id, owned in by_rollout.items():
        for span, owner in owned:
            is_root = span.attributes.get(conventions.SPAN_ROLE) == "rollout"
            if is_root and _attempt(owner) == known[rollout_id]:
                _end_recorded(con, rollout_id, span)


def _attempt(owner: Owner) -> int:
    """A span that names no attempt belongs to attempt 0."""
    return min(owner[1] or 0, conventions.MAX_ATTEMPT)


def _first_start(owned: Sequence[tuple[Span, Owner]], attempt: int) -> int:
    return min(*(span.start_ns for span, owner in owned if _attempt(owner) == attempt), 2**63 - 1)


def _raise_recorded(con: duckdb.DuckDBPyConnection, rollout_id: str, attempt: int, started_ns: int) -> None:
    """A later attempt has begun: what was known of the one before no longer counts."""
    con.execute(
        "UPDATE rollouts SET attempt = ?, max_attempts = ?, status = 'running', started_ns = ?, "
        "ended_ns = NULL, error_type = NULL, error = NULL WHERE rollout_id = ?",
        [attempt, attempt + 1, started_ns, rollout_id],
    )


def _end_recorded(con: duckdb.DuckDBPyConnection, rollout_id: str, root: Span) -> None:
    task_id = root.attributes.get(conventions.TASK_ID)
    is_failed = root.status_code == 2
    error_type = root.attributes.get(conventions.ERROR_TYPE)
    con.execute(
        "UPDATE rollouts SET status = ?, started_ns = ?, ended_ns = ?, task_id = ?, "
        "error_type = ?, error = ? WHERE rollout_id = ?",
        [
            "failed" if is_failed else "succeeded",
            min(root.start_ns, 2**63 - 1),
            min(root.end_ns, 2**63 - 1),
            None if task_id is None else str(task_id),
            str(error_type) if is_failed and error_type is not None else None,
            root.status_message or None if is_failed else None,
            rollout_id,
        ],
    )


def select_rollouts(
    con: duckdb.DuckDBPyConnection,
    *,
    rollout_ids: Sequence[str] | None = None,
    run_id: str | None = None,
    group_ids: Sequence[str] | None = None,
    split: str | None = None,
    status: RolloutStatus | None = None,
    limit: int | None = None,
) -> list[Rollout]:
    """Rollouts that match every given filter, in order of enqueueing."""
    filters, parameters = _filters(run_id=run_id, split=split, status=None if status is None else str(status))
    for name, values in (("rollout_id", rollout_ids), ("group_id", group_ids)):
        if values is not None:
            filters += f" AND {name} IN (SELECT unnest(?::VARCHAR[]))"
            parameters.append(list(values))
    sql = "SELECT r.*, t.task FROM rollouts r LEFT JOIN tasks t USING (task_key) "
    sql += f"WHERE true{filters} ORDER BY seq"
    if limit is not None:
        sql += " LIMIT ?"
        parameters.append(limit)
    return [_rollout(row) for row in select_dicts(con, sql, parameters)]


def _rollout(row: dict[str, Any]) -> Rollout:
    return Rollout(
        rollout_id=row["rollout_id"],
        task_id=row["task_id"],
        group_id=row["group_id"],
        run_id=row["run_id"],
        attempt=row["attempt"],
        max_attempts=row["max_attempts"],
        status=RolloutStatus(row["status"]),
        task=None if row["task"] is None else decode_json(row["task"]),
        policy_version=row["policy_version"],
        worker=row["worker"],
        lease_until_ns=row["lease_until_ns"],
        started_ns=row["started_ns"],
        ended_ns=row["ended_ns"],
        output=None if row["output"] is None else decode_json(row["output"]),
        error_type=row["error_type"],
        error=row["error"],
        split=row["split"],
        consumed_by=row["consumed_by"],
    )


def _filters(**values: Any) -> tuple[str, list[Any]]:
    given = {name: value for name, value in values.items() if value is not None}
    return "".join(f" AND {name} = ?" for name in given), list(given.values())


def _marks(values: Sequence[Any]) -> str:
    """Placeholders for a short list; DuckDB looks those up by index."""
    return ", ".join("?" for _ in values)


def _next_seq(con: duckdb.DuckDBPyConnection) -> int:
    return int(con.execute("SELECT coalesce(max(seq) + 1, 0) FROM rollouts").fetchall()[0][0])


def _hash(text: str) -> str:
    return blake2b(text.encode(), digest_size=16).hexdigest()
