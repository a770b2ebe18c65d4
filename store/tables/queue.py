"""The rollout queue: enqueue, finish, give up, requeue; what is known from spans. Leases are in `claims.py`.

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

from spangrad.errors import StoreError
from spangrad.store.encoding import decode_json, encode_json
from spangrad.store.records import RECORDED_SPLIT, Ending, Rollout, RolloutStatus, Span
from spangrad.store.schema import ROLLOUTS, TASKS
from spangrad.store.tables.lineage import Owner
from spangrad.store.tables.rows import insert_rows, looked_up, select_dicts, update_rows
from spangrad.tracer import conventions

_ENDED = (RolloutStatus.SUCCEEDED, RolloutStatus.FAILED)

Floors = dict[tuple[str | None, str | None], int]
"""For (run, split): no lower `seq` is queued or running. Whoever queues ended rollouts clears it."""


def enqueue(con: duckdb.DuckDBPyConnection, rollouts: Sequence[Rollout], floors: Floors) -> int:
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
    first, now = max([_next_seq(con), *floors.values()]), time.time_ns()
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
    if rollout.turn_budget is not None and not 0 <= rollout.turn_budget < 2**31:
        raise StoreError(
            f"rollout {rollout.rollout_id!r} has a turn budget of {rollout.turn_budget}; expected 0 or more"
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
        "turn_budget": rollout.turn_budget,
    }


def finish(con: duckdb.DuckDBPyConnection, endings: Sequence[Ending]) -> list[str]:
    """End attempts. Returns the ids that are no longer the worker's; the same again changes nothing."""
    for ending in endings:
        _check_ending(ending)
    select = "SELECT rollout_id, attempt, max_attempts, status, output, error_type, error FROM rollouts"
    rows = {
        row["rollout_id"]: row
        for marks, some in looked_up(list({ending.rollout_id for ending in endings}))
        for row in select_dicts(con, f"{select} WHERE rollout_id IN {marks}", some)
    }
    now, changed, lost = time.time_ns(), dict[str, dict[str, Any]](), list[str]()
    for ending in endings:
        row = rows.get(ending.rollout_id)
        if row is None:
            raise StoreError(f"there is no rollout {ending.rollout_id!r}; enqueue it first")
        target = _ended(ending, row["max_attempts"])
        if all(row[name] == value for name, value in target.items()):
            continue
        if row["attempt"] != ending.attempt or row["status"] != "running":
            lost.append(ending.rollout_id)
            continue
        row |= target
        changed[ending.rollout_id] = row | {
            "max_attempts": row["max_attempts"] + int(ending.free),
            "ended_ns": None if target["status"] == "queued" else now,
        }
    update_rows(con, ROLLOUTS, [row | {"lease_until_ns": None} for row in changed.values()])
    return lost


def _check_ending(ending: Ending) -> None:
    if ending.free and not ending.retry:
        raise StoreError(f"rollout {ending.rollout_id!r} can't finish with free and without retry; give both")
    if ending.status not in _ENDED:
        raise StoreError(
            f"rollout {ending.rollout_id!r} can't finish as {str(ending.status)!r}; give succeeded or failed"
        )


def _ended(ending: Ending, max_attempts: int) -> dict[str, Any]:
    """What the row says once this attempt has ended."""
    if ending.retry and (ending.free or ending.attempt + 1 < max_attempts):
        target: dict[str, Any] = {"status": "queued", "attempt": ending.attempt + 1, "output": None}
    else:
        status = RolloutStatus.FAILED if ending.retry else ending.status
        text = None if ending.output is None else encode_json(ending.output)
        target = {"status": str(status), "attempt": ending.attempt, "output": text}
    return target | {"error_type": ending.error_type, "error": ending.error}


def give_up(
    con: duckdb.DuckDBPyConnection, rollout_ids: Sequence[str], *, error_type: str, error: str
) -> int:
    """End queued and running rollouts as failed, whoever has them. Returns how many."""
    return len(
        con.execute(
            "UPDATE rollouts SET status = 'failed', ended_ns = ?, lease_until_ns = NULL, error_type = ?, "
            "error = ? WHERE rollout_id IN (SELECT unnest(?::VARCHAR[])) "
            "AND status IN ('queued', 'running') AND NOT is_recorded RETURNING rollout_id",
            [time.time_ns(), error_type, error, list(rollout_ids)],
        ).fetchall()
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
    named = None if status is None else str(status)
    filters, parameters = filters_of(run_id=run_id, split=split, status=named)
    for name, values in (("rollout_id", rollout_ids), ("group_id", group_ids)):
        if values is not None:
            filters += f" AND {name} IN (SELECT unnest(?::VARCHAR[]))"
            parameters.append(list(values))
    sql = "SELECT r.*, t.task FROM rollouts r LEFT JOIN tasks t USING (task_key) "
    sql += f"WHERE true{filters} ORDER BY seq"
    if limit is not None:
        sql += " LIMIT ?"
        parameters.append(limit)
    return [as_rollout(row) for row in select_dicts(con, sql, parameters)]


def as_rollout(row: dict[str, Any]) -> Rollout:
    """A row of `rollouts` with its task."""
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
        turn_budget=row["turn_budget"],
    )


def filters_of(**values: Any) -> tuple[str, list[Any]]:
    """Conditions for the columns that are given a value, and the values."""
    given = {name: value for name, value in values.items() if value is not None}
    return "".join(f" AND {name} = ?" for name in given), list(given.values())


def _next_seq(con: duckdb.DuckDBPyConnection) -> int:
    return int(con.execute("SELECT coalesce(max(seq) + 1, 0) FROM rollouts").fetchall()[0][0])


def _hash(text: str) -> str:
    return blake2b(text.encode(), digest_size=16).hexdigest()
