"""Log records that belong to spans -> events of those spans, for the readers of dialects.

Some recorders put messages into the logs signal, joined to the call by trace and span
id. A dialect reads one span; so its records are handed to it as events, in the order
of their times. Only readers see such spans: the store keeps spans and records apart.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from spangrad.store.records import LogRecord, Span, SpanEvent, event_name

BODY: Final = "body"
"""Attribute of such an event that holds the record's body."""


def with_logs(spans: Iterable[Span], records: Iterable[LogRecord]) -> list[Span]:
    """The spans, each with the records that name it as further events, in order of time."""
    by_span: dict[tuple[str, str], list[LogRecord]] = {}
    for record in records:
        if record.trace_id is not None and record.span_id is not None:
            by_span.setdefault((record.trace_id, record.span_id), []).append(record)
    if not by_span:
        return list(spans)
    return [_with(span, by_span.get((span.trace_id, span.span_id))) for span in spans]


def _with(span: Span, records: list[LogRecord] | None) -> Span:
    if not records:
        return span
    in_order = sorted(records, key=lambda record: record.time_ns or record.observed_ns)
    return replace(span, events=(*span.events, *map(_event, in_order)))


def _event(record: LogRecord) -> SpanEvent:
    return SpanEvent(
        name=event_name(record),
        time_ns=record.time_ns or record.observed_ns,
        attributes={**record.attributes, BODY: record.body},
        dropped_attributes=record.dropped_attributes,
    )
