"""OTLP export requests out of bytes, protobuf or JSON: whatever one span is like, it costs no other.

Knows the shape of requests; knows no records and no tables. Invariants:

* a span or log record that can't be read is left out, and what is around it is read;
* what can be kept in another form is kept so: lone surrogates escaped, numbers beyond 64 bits as text;
* both are counted by kind; bytes that are no OTLP at all raise StoreError;
* a request in which all is well is parsed once, by protobuf's own parser.
"""

import json
import re
from typing import Any, Final

from google.protobuf.message import DecodeError, Message  # type: ignore[import-untyped]
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from spangrad.errors import StoreError
from spangrad.store.faults import Faults, Outcome
from spangrad.store.requests.from_json import (
    BAD_IDS,
    BIG_NUMBERS,
    OTHER_TYPES,
    SURROGATES,
    UNFIT,
    parsed,
    salvaged,
)
from spangrad.store.requests.from_wire import salvaged_wire
from spangrad.store.requests.signals import LOGS, SPANS, Signal

TRACE_ID_BYTES: Final = 16
SPAN_ID_BYTES: Final = 8
_MOST_DIGITS: Final = 400
"""Numbers with more digits are text; Python's own limit is 4300."""
_DEEPEST: Final = 300
"""Levels of JSON; protobuf reads 100 of messages, which are twice as many at most."""
_STRINGS_AND_BRACKETS: Final = re.compile(r'"[^"\\]*(?:\\.?[^"\\]*)*(?:"|\Z)|[\[\]{}]', re.DOTALL)
"""A string that nothing ends goes to the end of the text: every match takes one look."""

__all__ = [
    "BAD_IDS",
    "BIG_NUMBERS",
    "OTHER_TYPES",
    "SURROGATES",
    "is_id",
    "logs_request",
    "trace_request",
]


def trace_request(body: bytes, *, is_json: bool = False) -> tuple[ExportTraceServiceRequest, Faults]:
    """A request's spans, and what is wrong with those that were left out or mended.

    Raises StoreError if the bytes are no such request.
    """
    request, faults = _read(body, SPANS, is_json)
    for resource in request.resource_spans:
        for scope in resource.scope_spans:
            _leave_out_bad_ids(scope.spans, faults)
    return _without_shells(request, SPANS, faults), faults


def logs_request(body: bytes, *, is_json: bool = False) -> tuple[ExportLogsServiceRequest, Faults]:
    """A request's log records, and what is wrong with those that were left out or mended.

    Raises StoreError if the bytes are no such request.
    """
    request, faults = _read(body, LOGS, is_json)
    for resource in request.resource_logs:
        for scope in resource.scope_logs:
            for record in scope.log_records:
                if record.trace_id or record.span_id:
                    _clear_bad_ids(record, faults)
    return _without_shells(request, LOGS, faults), faults


def is_id(value: bytes, length: int) -> bool:
    """Whether it is an id of OTLP's: of this length, and not all zero."""
    return len(value) == length and any(value)


def _read(body: bytes, signal: Signal, is_json: bool) -> tuple[Any, Faults]:
    faults = Faults()
    try:
        if not is_json:
            return signal.request.FromString(body), faults
        return parsed(_loaded(body), signal), faults
    except DecodeError as error:
        request = salvaged_wire(body, signal, faults)
        if not faults:
            name = signal.request.DESCRIPTOR.name
            raise StoreError(f"{len(body)} bytes are no OTLP {name}: {error}") from error
        return request, faults
    except UNFIT:
        try:
            return salvaged(_loaded(body), signal, faults), faults
        except UNFIT as error:
            raise StoreError(f"{len(body)} bytes are no OTLP request in JSON: {error}") from error


def _loaded(body: bytes) -> Any:
    try:
        return json.loads(body)
    except json.JSONDecodeError:
        raise
    except (ValueError, RecursionError):  # no UTF-8, a number of thousands of digits, a thousand levels
        text = _without_depths(body.decode("utf-8", "surrogateescape"))
        return json.loads(
            text, parse_int=lambda digits: digits if len(digits) > _MOST_DIGITS else int(digits)
        )


def _without_depths(text: str) -> str:
    """JSON text with nothing in what is nested deeper than any message that is read."""
    kept: list[str] = []
    depth = begin = 0
    for found in _STRINGS_AND_BRACKETS.finditer(text):
        mark = found.group()
        if mark in ("[", "{"):
            depth += 1
            if depth == _DEEPEST + 1:
                kept += text[begin : found.start()], "[]" if mark == "[" else "{}"
                begin = len(text)
        elif mark in ("]", "}"):
            if depth == _DEEPEST + 1:
                begin = found.end()
            depth -= 1
    return "".join((*kept, text[begin:]))


def _leave_out_bad_ids(spans: Any, faults: Faults) -> None:
    bad = [
        index
        for index, span in enumerate(spans)
        if not (is_id(span.trace_id, TRACE_ID_BYTES) and is_id(span.span_id, SPAN_ID_BYTES))
    ]
    for index in bad:
        span = spans[index]
        ids = f"trace id {span.trace_id.hex()!r}, span id {span.span_id.hex()!r}"
        faults.add(BAD_IDS, Outcome.LEFT_OUT, f"span {span.name!r} has {ids}; 16 and 8 bytes were expected")
    for index in reversed(bad):
        del spans[index]


def _clear_bad_ids(record: Any, faults: Faults) -> None:
    for field, length in (("trace_id", TRACE_ID_BYTES), ("span_id", SPAN_ID_BYTES)):
        value: bytes = getattr(record, field)
        if value and not is_id(value, length):
            record.ClearField(field)
            if any(value):  # all zero is a usual way to say that there is none
                kind = "ids of log records that are none, kept without"
                faults.add(kind, Outcome.MENDED, f"{field} {value.hex()!r}")


def _without_shells(request: Message, signal: Signal, faults: Faults) -> Any:
    """The request; an empty one if all that it held was left out."""
    if faults and not signal.count(request):
        request.Clear()
    return request
