"""The trainer's books: updates with what they consumed, published policies, events, call summaries.

Knows the tables `updates`, `update_samples`, `update_reads`, `metrics`, `events`, `policies`, `calls` and
`unknown_calls`. Invariants:

* an update is there with all its samples, reads, metrics and consumed rollouts, or not at all;
* indexes of a run count 0, 1, 2, ... without a gap;
* a rollout is consumed by at most one update; in the place of a session that was joined to an earlier one
  since it was read, that one is;
* an update that only reads its rollouts consumes none, and may take what others have consumed;
* a monitor has at most one event of an update: the first stands.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import duckdb

from spangrad.errors import StoreError
from spangrad.store.encoding import decode_json, encode_json
from spangrad.store.records import Policy, RunEvent, Update, UpdateRead, UpdateSample
from spangrad.store.schema import (
    CALLS,
    EVENTS,
    METRICS,
    POLICIES,
    UNKNOWN_CALLS,
    UPDATE_READS,
    UPDATE_SAMPLES,
    UPDATES,
    Table,
)
from spangrad.store.tables.rows import insert_rows, select_dicts
from spangrad.store.tables.unread import changed_since


def commit_update(con: duckdb.DuckDBPyConnection, update: Update) -> bool:
    """Record an update and mark its rollouts consumed, if it consumes. False if it was committed before."""
    label = f"update {update.update_index} of run {update.run_id!r}"
    before = con.execute(
        "SELECT policy_version, rollout_ids FROM updates WHERE run_id = ? AND update_index = ?",
        [update.run_id, update.update_index],
    ).fetchall()
    if before:
        version, rollout_ids = before[0]
        if version == update.policy_version and sorted(rollout_ids) == sorted(update.rollout_ids):
            return False
        raise StoreError(
            f"{label} was committed before with other rollouts or another version; resume from it"
        )
    (last,) = con.execute(
        "SELECT max(update_index) FROM updates WHERE run_id = ?", [update.run_id]
    ).fetchall()[0]
    following = 0 if last is None else last + 1
    if update.update_index != following:
        raise StoreError(f"{label} leaves a gap: the next index is {following}")
    _consume(con, update, label)
    key = {"run_id": update.run_id, "update_index": update.update_index}
    row = {
        "policy_version": update.policy_version,
        "rollout_ids": list(update.rollout_ids),
        "checkpoint": update.checkpoint,
        "time_ns": update.time_ns or time.time_ns(),
        "config": None if update.config is None else encode_json(update.config),
        "parent": update.parent,
        "consumes": update.consumes,
    }
    insert_rows(con, UPDATES, [key | row])
    insert_rows(con, UPDATE_SAMPLES, [key | asdict(sample) for sample in update.samples])
    insert_rows(con, UPDATE_READS, [key | asdict(read) for read in update.reads])
    _insert_metrics(con, update.run_id, update.update_index, update.metrics)
    return True


def put_metrics(
    con: duckdb.DuckDBPyConnection, run_id: str, update_index: int, metrics: Mapping[str, float]
) -> None:
    """Add numbers to a committed update; a name that is there is replaced."""
    place = _known_update(con, run_id, update_index)
    con.execute(
        "DELETE FROM metrics WHERE run_id = ? AND update_index = ? AND name IN (SELECT unnest(?::VARCHAR[]))",
        [*place, list(metrics)],
    )
    _insert_metrics(con, run_id, update_index, metrics)


def put_events(con: duckdb.DuckDBPyConnection, events: Sequence[RunEvent]) -> int:
    """Record what monitors saw in committed updates. Returns how many nobody had recorded before."""
    for run_id, index in {(event.run_id, event.update_index) for event in events}:
        _known_update(con, run_id, index)
    rows = [asdict(replace(event, time_ns=event.time_ns or time.time_ns())) for event in events]
    return insert_rows(con, EVENTS, rows, conflict="ignore")


def select_events(con: duckdb.DuckDBPyConnection, run_id: str | None) -> list[RunEvent]:
    """Events by run, update and monitor."""
    where = "" if run_id is None else " WHERE run_id = $run"
    given = {} if run_id is None else {"run": run_id}
    sql = f"SELECT * FROM events{where} ORDER BY run_id, update_index, monitor"
    return [RunEvent(**row) for row in select_dicts(con, sql, given)]


def _known_update(con: duckdb.DuckDBPyConnection, run_id: str, update_index: int) -> list[Any]:
    place = [run_id, update_index]
    if not con.execute("SELECT 1 FROM updates WHERE run_id = ? AND update_index = ?", place).fetchall():
        raise StoreError(f"there is no update {update_index} of run {run_id!r}; commit it first")
    return place


def _insert_metrics(
    con: duckdb.DuckDBPyConnection, run_id: str, update_index: int, metrics: Mapping[str, float]
) -> None:
    key = {"run_id": run_id, "update_index": update_index}
    insert_rows(con, METRICS, [key | {"name": name, "value": float(v)} for name, v in metrics.items()])


def _consume(con: duckdb.DuckDBPyConnection, update: Update, label: str) -> None:
    ids = sorted(set(update.rollout_ids))
    if not ids:
        return
    found = con.execute(
        "SELECT rollout_id, consumed_run, consumed_by FROM rollouts WHERE rollout_id IN (SELECT unnest(?))",
        [ids],
    ).fetchall()
    for rollout_id, run_id, index in found:
        if index is not None and update.consumes:
            raise StoreError(
                f"{label}: rollout {rollout_id!r} was consumed by update {index} of run {run_id!r}"
            )
    missing = set(ids) - {row[0] for row in found}
    joined = _joined_since(con, missing)
    if unknown := sorted(missing - joined.keys()):
        raise StoreError(f"{label}: there is no rollout {unknown[0]!r}; enqueue it or send its spans first")
    if not update.consumes:
        return
    read = {one.rollout_id for one in update.reads if one.call_id is not None}
    con.execute(
        "UPDATE rollouts SET consumed_run = ?, consumed_by = ? WHERE consumed_by IS NULL"
        " AND rollout_id IN (SELECT unnest(?))",
        [update.run_id, update.update_index, [*ids, *(now for was, now in joined.items() if was in read)]],
    )


def _joined_since(con: duckdb.DuckDBPyConnection, rollout_ids: Collection[str]) -> dict[str, str]:
    """Of sessions that became a part of an earlier one since they were read: which one that is."""
    if not rollout_ids:
        return {}
    rows = con.execute(
        "SELECT trace_id, rollout_id FROM sessions WHERE trace_id IN (SELECT unnest(?))"
        " AND rollout_id <> trace_id",
        [sorted(rollout_ids)],
    ).fetchall()
    return dict(rows)


def select_updates(
    con: duckdb.DuckDBPyConnection,
    run_id: str | None,
    *,
    update_index: int | None = None,
    only_last: bool = False,
) -> list[Update]:
    """Updates by run and index."""
    given = {"run": run_id, "index": update_index}
    given = {name: value for name, value in given.items() if value is not None}
    conditions = [{"run": "run_id = $run", "index": "update_index = $index"}[name] for name in given]
    if only_last:
        conditions.append("update_index = (SELECT max(update_index) FROM updates WHERE run_id = $run)")
    where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    rows = select_dicts(con, f"SELECT * FROM updates{where} ORDER BY run_id, update_index", given)
    samples: dict[tuple[str, int], list[UpdateSample]] = {}
    reads: dict[tuple[str, int], list[UpdateRead]] = {}
    metrics: dict[tuple[str, int], dict[str, float]] = {}
    for row in select_dicts(con, f"SELECT * FROM update_samples{where} ORDER BY rowid", given):
        key = (row.pop("run_id"), row.pop("update_index"))
        samples.setdefault(key, []).append(UpdateSample(**row))
    for row in select_dicts(con, f"SELECT * FROM update_reads{where} ORDER BY rowid", given):
        key = (row.pop("run_id"), row.pop("update_index"))
        reads.setdefault(key, []).append(UpdateRead(**row))
    for row in select_dicts(con, f"SELECT * FROM metrics{where} ORDER BY rowid", given):
        metrics.setdefault((row["run_id"], row["update_index"]), {})[row["name"]] = row["value"]
    found = []
    for row in rows:
        key = (row["run_id"], row["update_index"])
        config = row.pop("config")
        update = Update(
            **row, samples=samples.get(key, []), metrics=metrics.get(key, {}), reads=reads.get(key, [])
        )
        found.append(replace(update, config=None if config is None else decode_json(config)))
    return found


def put_policy(con: duckdb.DuckDBPyConnection, policy: Policy) -> None:
    """Record a published version; published again, the later record stands."""
    stamped = replace(policy, time_ns=policy.time_ns or time.time_ns())
    insert_rows(con, POLICIES, [asdict(stamped)], conflict="replace")


def select_policies(con: duckdb.DuckDBPyConnection, run_id: str | None) -> list[Policy]:
    """Published versions by run and version."""
    where = "" if run_id is None else " WHERE run_id = $run"
    given = {} if run_id is None else {"run": run_id}
    rows = select_dicts(con, f"SELECT * FROM policies{where} ORDER BY run_id, policy_version", given)
    return [Policy(**row) for row in rows]


def put_calls(
    con: duckdb.DuckDBPyConnection,
    rows: Sequence[Mapping[str, Any]],
    read: Mapping[str, int | None] | None = None,
    unknown: Sequence[Mapping[str, Any]] = (),
) -> int:
    """Store call summaries by `call_id`; later ones replace earlier ones. Returns how many are others now.

    With `read` (trace id -> `changed_ns` in `unread_traces`, None if it was not there), these are all calls
    of these traces, and `unknown` those in an unknown dialect: others are removed, and traces that are not
    as they were are left as they are.
    """
    _check_columns(CALLS, rows)
    _check_columns(UNKNOWN_CALLS, unknown)
    latest = {row["call_id"]: row for row in rows}
    if read is not None:
        changed = changed_since(con, read)
        latest = {call_id: row for call_id, row in latest.items() if row["trace_id"] not in changed}
        current = [trace_id for trace_id in read if trace_id not in changed]
        con.execute("DELETE FROM unknown_calls WHERE trace_id IN (SELECT unnest(?::VARCHAR[]))", [current])
        insert_rows(con, UNKNOWN_CALLS, [row for row in unknown if row["trace_id"] not in changed])
        kept = _stored_calls(con, current)
        if gone := list(kept.keys() - latest.keys()):
            for table in ("calls", "call_keys"):
                con.execute(f"DELETE FROM {table} WHERE call_id IN (SELECT unnest(?))", [gone])
        latest = {call_id: row for call_id, row in latest.items() if kept.get(call_id) != row}
    return insert_rows(con, CALLS, list(latest.values()), conflict="replace")


def _check_columns(table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
    names = {column.name for column in table.columns}
    required = {column.name for column in table.columns if not column.nullable}
    for row in rows:
        unknown, missing = row.keys() - names, required - row.keys()
        if unknown or missing:
            what = row.get("call_id", row.get("span_id"))
            raise StoreError(
                f"call {what!r}: columns {sorted(unknown)} are unknown, {sorted(missing)} are missing; "
                f"the table `{table.name}` has {sorted(names)}"
            )


def _stored_calls(con: duckdb.DuckDBPyConnection, trace_ids: Sequence[str]) -> dict[str, dict[str, Any]]:
    sql = "SELECT * FROM calls WHERE trace_id IN (SELECT unnest(?::VARCHAR[]))"
    return {row["call_id"]: row for row in select_dicts(con, sql, [list(trace_ids)])}
