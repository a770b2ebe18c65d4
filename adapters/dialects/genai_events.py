"""Dialect: OTel GenAI spans whose content is in an event (conventions 1.37 and later).

One event `gen_ai.client.inference.operation.details` a call, of the span or a log
record that names it, has the JSON attributes that the span lacks. A span that has no
content and no such event is read here, too: its reading says what is missing.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from spangrad.adapters.dialects.dialect import Dialect
from spangrad.adapters.dialects.otel_genai import EMBEDDINGS, SYSTEM_INSTRUCTIONS, is_call, read_as
from spangrad.adapters.log_events import BODY
from spangrad.adapters.reading import Reading
from spangrad.store.records import Span
from spangrad.tracer import conventions as c

NAME: Final = "otel_genai_events"
DETAILS: Final = "gen_ai.client.inference.operation.details"
CONTENT: Final = (c.INPUT_MESSAGES, c.OUTPUT_MESSAGES, SYSTEM_INSTRUCTIONS)
_CAPTURE: Final = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
NO_RECORD: Final = (
    "content is not on the span, nor in a log record: ingest the recorder's log records together with its "
    f"spans; if there are none, record with {_CAPTURE}=SPAN_ONLY"
)
NOT_CAPTURED: Final = f"content was not captured: record with {_CAPTURE}=SPAN_AND_EVENT"


def wrote(span: Span) -> bool:
    """Whether content of a call is in its event, or nowhere."""
    if not is_call(span) or span.attributes.get(c.OPERATION_NAME) == EMBEDDINGS:
        return False
    if any(name in details and name not in span.attributes for details in _details(span) for name in CONTENT):
        return True
    return c.PROVIDER_NAME in span.attributes and not any(name in span.attributes for name in CONTENT)


def read(span: Span) -> Reading:
    """Read a call span of this dialect together with its event."""
    found = _details(span)
    told: dict[str, Any] = {}
    for details in found:
        told |= details
    told |= span.attributes
    lost = sum(event.dropped_attributes for event in span.events if event.name == DETAILS)
    whole = replace(span, attributes=told, dropped_attributes=span.dropped_attributes + lost)
    reading = replace(read_as(NAME, whole), span=span)
    if reading.error is not None or any(name in told for name in CONTENT):
        return reading
    return replace(reading, faults=(*reading.faults, NOT_CAPTURED if found else NO_RECORD))


def _details(span: Span) -> list[Mapping[str, Any]]:
    """What the events say; earlier editions had it in the body of the record."""
    return [
        {**(body if isinstance(body := event.attributes.get(BODY), Mapping) else {}), **event.attributes}
        for event in span.events
        if event.name == DETAILS
    ]


GENAI_EVENTS: Final = Dialect(NAME, wrote, is_call, read)
