"""Requests in OTLP's forms, well and spoiled, for tests of what a bad span costs."""

from collections.abc import Callable
from typing import Any

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

TRACE = "0af7651916cd43dd8448eb211c80319c"


def json_span(number: int, **more: Any) -> dict[str, Any]:
    """A span in JSON."""
    return {
        "traceId": TRACE,
        "spanId": f"{number:016x}",
        "name": f"span {number}",
        "kind": 3,
        "startTimeUnixNano": "1544712660000000000",
        "endTimeUnixNano": "1544712661000000000",
        "attributes": [{"key": "n", "value": {"intValue": str(number)}}],
        **more,
    }


def attribute(value: Any) -> dict[str, Any]:
    """What `json_span` takes to have one attribute `x`."""
    return {"attributes": [{"key": "x", "value": value}]}


def json_request(*spans: Any) -> dict[str, Any]:
    """A request of these spans, each in a scope of its own beside the others."""
    resource = {"attributes": [{"key": "service.name", "value": {"stringValue": "shop"}}]}
    scopes = [{"scope": {"name": "recorder"}, "spans": [span]} for span in spans]
    return {"resourceSpans": [{"resource": resource, "scopeSpans": scopes}]}


def json_logs(*records: Any) -> dict[str, Any]:
    """A request of these log records."""
    return {"resourceLogs": [{"scopeLogs": [{"scope": {"name": "recorder"}, "logRecords": list(records)}]}]}


def wire_request(*names: bytes) -> bytes:
    """A protobuf request of spans with these names, whatever bytes they are made of."""
    request = ExportTraceServiceRequest()
    scope = request.resource_spans.add().scope_spans.add()
    for number, name in enumerate(names, start=1):
        scope.spans.add(
            trace_id=bytes.fromhex(TRACE),
            span_id=number.to_bytes(8, "big"),
            name=_stand_in(number, name),
            start_time_unix_nano=1544712660000000000,
        )
    return _with_texts(request.SerializeToString(), names)


def wire_logs(*texts: bytes) -> bytes:
    """A protobuf request of log records with these texts, whatever bytes they are made of."""
    request = ExportLogsServiceRequest()
    scope = request.resource_logs.add().scope_logs.add()
    for number, text in enumerate(texts, start=1):
        scope.log_records.add(time_unix_nano=number, severity_text=_stand_in(number, text))
    return _with_texts(request.SerializeToString(), texts)


def _stand_in(number: int, text: bytes) -> str:
    return chr(ord("A") + number) * len(text)


def _with_texts(body: bytes, texts: tuple[bytes, ...]) -> bytes:
    for number, text in enumerate(texts, start=1):
        stand_in = _stand_in(number, text).encode()
        assert body.count(stand_in) == 1
        body = body.replace(stand_in, text)
    return body


Spoil = Callable[[dict[str, Any]], Any]

LEFT_OUT: dict[str, tuple[dict[str, Any], str]] = {
    "a trace id of zeros": ({"traceId": "0" * 32}, "bad ids"),
    "a short trace id": ({"traceId": "0af7"}, "bad ids"),
    "a trace id that is no hex": ({"traceId": "zz" * 16}, "bad ids"),
    "a number as id": ({"spanId": 17}, "bad ids"),
    "no span id": ({"spanId": ""}, "bad ids"),
    "a parent that is no hex": ({"parentSpanId": "root"}, "bad ids"),
    "a time before 1970": ({"startTimeUnixNano": "-1"}, "bad times"),
    "a time beyond 64 bits": ({"endTimeUnixNano": "1e30"}, "bad times"),
    "a date": ({"startTimeUnixNano": "2026-11-30T10:00:00Z"}, "bad times"),
    "no such kind": ({"kind": "SPAN_KIND_CUSTOMER"}, "unknown enum values"),
    "no such status": ({"status": {"code": "STATUS_CODE_MAYBE"}}, "unknown enum values"),
    "a number as name": ({"name": 5}, "wrong types"),
    "attributes as an object": ({"attributes": {"a": "b"}}, "wrong types"),
    "an attribute that is no object": ({"attributes": ["a"]}, "wrong types"),
    "an attribute without a typed value": ({"attributes": [{"key": "a", "value": "b"}]}, "wrong types"),
    "events as text": ({"events": "none"}, "wrong types"),
    "links of numbers": ({"links": [1]}, "wrong types"),
    "flags beyond 32 bits": ({"flags": 2**40}, "wrong types"),
}
"""What a span can have that nothing honest can be stored for, and the kind of the fault."""

MENDED: dict[str, tuple[dict[str, Any], str, Any]] = {
    "a lone surrogate": (attribute({"stringValue": "a\ud83d"}), "lone surrogates", "a\\ud83d"),
    "an integer beyond 64 bits": (
        attribute({"intValue": str(10**30)}),
        "integers beyond 64 bits",
        str(10**30),
    ),
    "a bare integer beyond 64 bits": (
        attribute({"intValue": -(2**70)}),
        "integers beyond 64 bits",
        str(-(2**70)),
    ),
    "a fraction as integer": (
        attribute({"intValue": 1.5}),
        "values of another type than they say",
        "1.5",
    ),
    "a word as truth": (attribute({"boolValue": "maybe"}), "values of another type than they say", "maybe"),
    "a number as text": (attribute({"stringValue": 5}), "values of another type than they say", "5"),
    "a word as number": (attribute({"doubleValue": "fast"}), "values of another type than they say", "fast"),
    "infinity": (attribute({"doubleValue": float("inf")}), "NaN or Infinity without quotes", float("inf")),
    "a field that OTLP does not have": (
        {**attribute({"stringValue": "a"}), "color": {"red": 1}},
        "fields that OTLP does not have, left off",
        "a",
    ),
    "a surrogate deep inside": (
        attribute(
            {
                "arrayValue": {
                    "values": [{"kvlistValue": {"values": [{"key": "\udc00", "value": {"intValue": "1"}}]}}]
                }
            }
        ),
        "lone surrogates",
        [{"\\udc00": 1}],
    ),
}
"""What a span can have that is kept in another form: the span, the kind, the attribute as it is stored."""
