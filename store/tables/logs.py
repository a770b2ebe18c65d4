"""Log records in and out of the file.

Knows the table `logs`. Invariants: a record is stored once by its content; an evaluation also by its
author, so that what an agent sent first does not stand in for what an evaluator says; reading gives back
what came.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final

import duckdb

from spangrad.store.archive.partitions import Partitions
from spangrad.store.encoding import decode_json, encode_json
from spangrad.store.records import LogRecord, RewardAuthor, event_name
from spangrad.store.schema import LOGS, SPANS
from spangrad.store.tables.database import Database
from spangrad.store.tables.other import other_of, with_other
from spangrad.store.tables.rows import insert_rows, traces_of_sessions
from spangrad.tracer.conventions import REWARD_EVENT

READ_ROWS: Final = 1000
_ATTRIBUTES: Final = ("attributes", "scope_attributes", "resource")
_JSON: Final = ("body", *_ATTRIBUTES)
_OF_ROLLOUTS: Final = (
    "(trace_id, span_id) IN (SELECT trace_id, span_id FROM spans WHERE "
    "rollout_id IN (SELECT unnest(?::VARCHAR[])) OR (rollout_id IS NULL AND trace_id IN "
    "(SELECT trace_id FROM sessions WHERE rollout_id IN (SELECT unnest(?::VARCHAR[])))))"
)
_PLAIN: Final = (
    *("trace_id", "span_id", "time_ns", "observed_ns", "event_name", "severity_number", "severity_text"),
    *("scope", "scope_version", "schema_url", "resource_schema_url", "flags", "dropped_attributes"),
)


def insert_logs(
    con: duckdb.DuckDBPyConnection,
    records: Sequence[LogRecord],
    author: RewardAuthor,
    partitions: Partitions,
) -> dict[str, LogRecord]:
    """Store records that came with this author's key. Returns those that were new, by `log_id`."""
    rows = [_row(record, author) for record in records]
    by_id = {row["log_id"]: (row, record) for row, record in zip(rows, records, strict=True)}
    if not by_id:
        return {}
    sql = "SELECT log_id FROM logs WHERE log_id IN (SELECT unnest(?::VARCHAR[]))"
    known = con.execute(sql, [list(by_id)]).fetchall()
    traces = {record.trace_id for record in records if record.trace_id}
    known += partitions.rows(con, LOGS, "log_id", sorted(traces))
    for (log_id,) in known:
        by_id.pop(log_id, None)
    insert_rows(con, LOGS, [row for row, _ in by_id.values()])
    return {log_id: record for log_id, (_, record) in by_id.items()}


def read_logs(
    database: Database, rollout_ids: Sequence[str] | None, trace_ids: Sequence[str] | None
) -> Iterator[LogRecord]:
    """Records of the spans of these rollouts, or of these traces (all without), by (trace, time)."""
    conditions: list[str] = []
    parameters: list[list[str]] = []
    if rollout_ids is not None:
        conditions.append(_OF_ROLLOUTS)
        parameters += [list(rollout_ids), list(rollout_ids)]
    if trace_ids is not None:
        conditions.append("trace_id IN (SELECT unnest(?::VARCHAR[]))")
        parameters.append(list(trace_ids))
    if conditions and not any(parameters):
        return
    where = f"WHERE {' OR '.join(conditions)}" if conditions else ""
    columns = (*_PLAIN, *_JSON, "other")
    order = "trace_id NULLS LAST, if(time_ns = 0, observed_ns, time_ns), place, position"
    with database.snapshot() as con:
        parts = None
        if conditions:
            sessions = traces_of_sessions(con, rollout_ids or ())
            traces = [*(trace_ids or ()), *sessions]
            parts = database.partitions.holding(con, rollout_ids=rollout_ids or (), trace_ids=traces)
        database.partitions.unite(con, parts, tables=(SPANS,))
        source = database.partitions.in_order(con, LOGS, parts)
        result = con.execute(
            f"SELECT {', '.join(columns)} FROM {source} {where} ORDER BY {order}", parameters
        )
        while chunk := result.fetchmany(READ_ROWS):
            for values in chunk:
                yield _record(dict(zip(columns, values, strict=True)))


def _row(record: LogRecord, author: RewardAuthor) -> dict[str, Any]:
    row = {name: getattr(record, name) for name in _PLAIN}
    row["body"] = encode_json(record.body)
    row |= {name: encode_json(dict(getattr(record, name))) for name in _ATTRIBUTES}
    other = other_of(record)
    who = [str(author)] if event_name(record) == REWARD_EVENT else []
    told = [*row.values(), *([] if other is None else [other]), *who]
    content = json.dumps(told, ensure_ascii=False).encode("utf-8", "surrogatepass")
    log_id = blake2b(content, digest_size=16).hexdigest()
    return row | {"log_id": log_id, "author": str(author), "other": other}


def _record(row: Mapping[str, Any]) -> LogRecord:
    plain = {name: row[name] for name in _PLAIN}
    record = LogRecord(**plain, **{name: decode_json(row[name]) for name in _JSON})
    return record if row["other"] is None else with_other(record, row["other"])
