"""Spans in and out of the file.

Knows the tables `spans` and `messages`, and what arriving spans tell of rollouts and
rewards. Invariants: a batch is stored whole or not at all; a span that is known is
ignored; reading gives back what came, plus the derived `rollout_id` and `attempt`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import duckdb

from spangrad.store.encoding import encode_json
from spangrad.store.otlp import encode_request
from spangrad.store.records import Span
from spangrad.store.schema import MESSAGES, SPANS
from spangrad.store.tables.compact import Compactor
from spangrad.store.tables.database import Database
from spangrad.store.tables.evaluations import has_evaluations, reward_by_spans
from spangrad.store.tables.expand import BASE_COLUMNS, Expander, Row, row_key, span_from_row
from spangrad.store.tables.lineage import STORED_COLUMNS, Admission, Lineage, Owner, Stored
from spangrad.store.tables.other import other_of
from spangrad.store.tables.queue import record_rollouts
from spangrad.store.tables.rewards import insert_rewards
from spangrad.store.tables.rows import insert_rows, looked_up, select_dicts, traces_of_sessions
from spangrad.store.tables.span_rewards import event_rewards
from spangrad.store.tables.unread import touch

READ_ROWS = 1000


class SpanWriter:
    """Stores batches of spans, with what it remembers from the ones before."""

    def __init__(self, database: Database) -> None:
        """Write to this file."""
        self._database = database
        self._compactor = Compactor()
        self._lineage = Lineage(self._archived)
        self._are_judged: bool | None = None
        """Whether log records in the file may judge spans that come; None: not looked up yet."""

    def await_judged(self) -> None:
        """From now on, look for records that judge the spans that come."""
        self._are_judged = True

    def are_judged(self, con: duckdb.DuckDBPyConnection) -> bool:
        """Whether log records in the file may judge spans."""
        if self._are_judged is None:
            self._are_judged = has_evaluations(con)
        return self._are_judged

    def _archived(self, con: duckdb.DuckDBPyConnection, trace_ids: Sequence[str]) -> list[Stored]:
        return self._database.partitions.rows(con, SPANS, STORED_COLUMNS, trace_ids)

    def put(self, batches: Sequence[Sequence[Span]]) -> list[int]:
        """Store batches in one transaction. Returns how many spans of each were new."""
        spans = [span for batch in batches for span in batch]
        if not spans:
            return [0] * len(batches)
        try:
            with self._database.transaction() as con:
                is_new = self._insert(con, spans)
        except BaseException:
            self._compactor.forget()
            self._lineage.forget()
            raise
        flags = iter(is_new)
        return [sum(next(flags) for _ in batch) for batch in batches]

    def _insert(self, con: duckdb.DuckDBPyConnection, spans: Sequence[Span]) -> Sequence[bool]:
        admission = self._lineage.admit(con, spans)
        fresh = [span for span, is_new in zip(spans, admission.is_new, strict=True) if is_new]
        rows: list[dict[str, Any]] = []
        contents: dict[str, str] = {}
        texts: dict[int, str] = {}
        for span in fresh:
            owner = admission.owners.get((span.trace_id, span.span_id))
            columns, new = self._compactor.pack(span, owner[0] if owner else span.trace_id)
            contents |= new
            rows.append(_row(span, owner, texts) | columns)
        insert_rows(con, SPANS, rows)
        messages = [{"message_id": key, "content": content} for key, content in contents.items()]
        insert_rows(con, MESSAGES, messages, conflict="ignore")
        self._settle(con, admission)
        touch(con, (span.trace_id for span in spans), self._database.stamp())
        owned = [(span, admission.owners.get((span.trace_id, span.span_id))) for span in fresh]
        record_rollouts(con, [(span, owner) for span, owner in owned if owner])
        insert_rewards(con, event_rewards(con, fresh, admission))
        if (fresh or admission.settled_earlier) and self.are_judged(con):
            reward_by_spans(con, fresh, [trace_id for trace_id, _ in admission.settled_earlier])
        return admission.is_new

    def _settle(self, con: duckdb.DuckDBPyConnection, admission: Admission) -> None:
        """Write the owners that earlier spans have got by now."""
        by_owner: dict[tuple[Owner, str], list[str]] = {}
        for (trace_id, span_id), owner in admission.settled_earlier.items():
            by_owner.setdefault((owner, trace_id), []).append(span_id)
        for ((rollout_id, attempt), trace_id), span_ids in by_owner.items():
            given = {"rollout": rollout_id, "attempt": attempt, "trace": trace_id, "spans": span_ids}
            con.execute(_OWN, given)
            if self._database.partitions.holding(con, trace_ids=[trace_id]):
                con.execute(_OWN_ARCHIVED, given)
                con.execute(_NAME_OWNER, {"rollout": rollout_id, "trace": trace_id})


_OWN: Final = """
UPDATE spans SET rollout_id = $rollout, attempt = $attempt
WHERE trace_id = $trace AND span_id IN (SELECT unnest($spans))
"""
_OWN_ARCHIVED: Final = """
INSERT INTO archived_owners SELECT $trace, span_id, $rollout, $attempt FROM (SELECT unnest($spans) AS span_id)
WHERE span_id NOT IN (SELECT span_id FROM spans WHERE trace_id = $trace)
"""
_NAME_OWNER: Final = """
UPDATE archived_traces SET rollout_ids = list_distinct(list_append(rollout_ids, $rollout))
WHERE trace_id = $trace
"""


def _row(span: Span, owner: Owner | None, texts: dict[int, str]) -> dict[str, Any]:
    """A row but for what the compactor makes. Spans of a batch share resource and scope: `texts` has them."""

    def shared(value: Mapping[str, Any]) -> str:
        if id(value) not in texts:
            texts[id(value)] = encode_json(dict(value))
        return texts[id(value)]

    events = [
        {"name": e.name, "time_ns": e.time_ns, "attributes": e.attributes, "dropped": e.dropped_attributes}
        for e in span.events
    ]
    return {
        "trace_id": span.trace_id,
        "span_id": span.span_id,
        "parent_span_id": span.parent_span_id,
        "rollout_id": owner[0] if owner else None,
        "attempt": owner[1] if owner else None,
        "name": span.name,
        "kind": span.kind,
        "start_ns": span.start_ns,
        "end_ns": span.end_ns,
        "status_code": span.status_code,
        "status_message": span.status_message,
        "scope": span.scope,
        "scope_version": span.scope_version,
        "scope_attributes": shared(span.scope_attributes),
        "schema_url": span.schema_url,
        "resource": shared(span.resource),
        "resource_schema_url": span.resource_schema_url,
        "events": encode_json(events) if events else "[]",
        "links": encode_json(list(span.links)) if span.links else "[]",
        "trace_state": span.trace_state,
        "flags": span.flags,
        "dropped_attributes": span.dropped_attributes,
        "dropped_events": span.dropped_events,
        "dropped_links": span.dropped_links,
        "other": other_of(span),
    }


_SPANS = """
SELECT s.* REPLACE (coalesce(s.rollout_id, n.rollout_id) AS rollout_id)
FROM spans s LEFT JOIN sessions n ON n.trace_id = s.trace_id
"""
"""A rollout that a span names, or was found above it, wins over the session that its trace is in."""
_OF_ROLLOUTS = "s.rollout_id IN (SELECT unnest($rollouts))"
_OF_TRACES = "s.trace_id IN (SELECT unnest($traces))"
_OF_SESSIONS = "(s.rollout_id IS NULL AND s.trace_id IN (SELECT unnest($sessions)))"


def read_spans(
    database: Database, rollout_ids: Sequence[str] | None, trace_ids: Sequence[str] | None
) -> Iterator[Span]:
    """Spans of these rollouts or traces (all without), ordered by (trace, start time)."""
    with database.snapshot() as con, database.snapshot() as look_up:
        where, parameters, parts = "", {}, None
        if rollout_ids is not None or trace_ids is not None:
            parameters = {"rollouts": list(rollout_ids or ()), "traces": list(trace_ids or ())}
            parameters["sessions"] = traces_of_sessions(con, parameters["rollouts"])
            parameters = {name: values for name, values in parameters.items() if values}
            if not parameters:
                return
            parts = database.partitions.holding(
                con,
                rollout_ids=parameters.get("rollouts", ()),
                trace_ids=[*parameters.get("traces", ()), *parameters.get("sessions", ())],
            )
            conditions = {"rollouts": _OF_ROLLOUTS, "traces": _OF_TRACES, "sessions": _OF_SESSIONS}
            where = "WHERE " + " OR ".join(conditions[name] for name in parameters)  # each is a scan
        for each in (con, look_up):
            database.partitions.unite(each, parts, tables=(SPANS,))
        result = con.execute(f"{_SPANS} {where} ORDER BY s.trace_id, s.start_ns, s.span_id", parameters)
        names = [column[0] for column in result.description or ()]
        while chunk := result.fetchmany(READ_ROWS):
            rows: list[Row] = [dict(zip(names, values, strict=True)) for values in chunk]
            expander = Expander(rows, _fetch_bases(look_up), _fetch_messages(database, look_up, parts))
            for row in rows:
                yield span_from_row(row, expander.attributes(row))


def differing(database: Database, spans: Sequence[Span]) -> Iterator[tuple[Span, Span]]:
    """Those of these spans whose ids a stored span has that says something else, each with that one."""
    with database.snapshot() as con:
        ids = [
            list(values) for values in zip(*{(span.trace_id, span.span_id) for span in spans}, strict=True)
        ]
        parts = database.partitions.holding(con, trace_ids=[span.trace_id for span in spans])
        database.partitions.unite(con, parts, tables=(SPANS,))
        sql = f"{_SPANS} WHERE s.trace_id IN (SELECT unnest(?)) AND s.span_id IN (SELECT unnest(?))"
        rows: Sequence[Row] = select_dicts(con, sql, ids) if ids else ()
        expander = Expander(rows, _fetch_bases(con), _fetch_messages(database, con, parts))
        stored = {row_key(row): span_from_row(row, expander.attributes(row)) for row in rows}
        for span in spans:
            known = stored.get(f"{span.trace_id}-{span.span_id}")
            if known is not None and not _say_the_same(known, span):
                yield span, known


def _say_the_same(one: Span, other: Span) -> bool:
    """Whether OTLP would tell both alike: rollout and attempt are derived, and NaN is unequal to itself."""
    bare = [replace(span, rollout_id=None, attempt=None) for span in (one, other)]
    return bare[0] == bare[1] or encode_request(bare[:1]) == encode_request(bare[1:])


def _fetch_bases(con: duckdb.DuckDBPyConnection) -> Callable[[Sequence[str]], list[Row]]:
    def fetch(keys: Sequence[str]) -> list[Row]:
        wanted = set(keys)
        select = (
            f"SELECT {', '.join(BASE_COLUMNS)} FROM spans WHERE span_id IN (SELECT unnest(?)) AND trace_id IN"
        )
        span_ids = [key.split("-")[1] for key in keys]
        found: list[Row] = []
        for marks, trace_ids in looked_up(sorted({key.split("-")[0] for key in keys})):
            rows = select_dicts(con, f"{select} {marks}", [span_ids, *trace_ids])
            found += [row for row in rows if row_key(row) in wanted]
        return found

    return fetch


def _fetch_messages(
    database: Database, con: duckdb.DuckDBPyConnection, parts: Sequence[int] | None
) -> Callable[[Sequence[str]], Mapping[str, str]]:
    def fetch(ids: Sequence[str]) -> Mapping[str, str]:
        live, found = database.partitions.live(MESSAGES), dict[str, str]()
        for marks, some in looked_up(ids):
            sql = f"SELECT message_id, content FROM {live} WHERE message_id IN {marks}"
            found.update(con.execute(sql, some).fetchall())
        missing = [key for key in ids if key not in found]
        return found | database.partitions.messages(con, missing, parts) if missing else found

    return fetch
