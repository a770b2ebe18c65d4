"""Our encoder writes what the SDK's writes."""

from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceState
from opentelemetry.trace.propagation import set_span_in_context

from spangrad.tracer.exporter import MAX_REQUEST_BYTES, encode
from spangrad.tracer.otlp import encode_request, encode_span

VALUES: dict[str, Any] = {
    "text": "two words",
    "empty": "",
    "unicode": "Zürich 🥐",
    "long": "x" * 70_000,
    "true": True,
    "false": False,
    "zero": 0,
    "one": 1,
    "minus one": -1,
    "least": -(2**63),
    "most": 2**63 - 1,
    "float": 0.1,
    "bytes": bytes(range(256)),
    "no bytes": b"",
    "texts": ("a", "", "ü"),
    "numbers": (1, 2**40, -3),
    "nothing": (),
    "nested": {"a": [1, {"b": None}], "c": "d"},
}
RESOURCE = Resource({"service.name": "agent"}, "https://resource")
SCOPE = InstrumentationScope("scope", "1.0", "https://schema", {"kind": "scope"})
CONTEXT = SpanContext(2**100 + 7, 2**60 + 3, is_remote=False)


def span(attributes: dict[str, Any], **more: Any) -> ReadableSpan:
    given: dict[str, Any] = {"context": CONTEXT, "resource": RESOURCE, "instrumentation_scope": SCOPE}
    times = {"start_time": 2**60 + 1, "end_time": 2**60 + 2}
    return ReadableSpan("chat policy", attributes=attributes, **(given | times | more))


def ours(*spans: ReadableSpan) -> Any:
    return ExportTraceServiceRequest.FromString(encode_request([(one, encode_span(one)) for one in spans]))


@pytest.mark.parametrize("name", VALUES)
def test_a_value_is_written_as_the_sdk_writes_it(name: str) -> None:
    given = span({name: VALUES[name], "after": 1})
    assert ours(given) == encode_spans([given])


@pytest.mark.parametrize("kind", SpanKind)
@pytest.mark.parametrize("status", [Status(), Status(StatusCode.OK), Status(StatusCode.ERROR, "gone")])
def test_kind_status_parent_and_scope_are_written_as_the_sdk_writes_them(
    kind: SpanKind, status: Status
) -> None:
    state = TraceState([("vendor", "1"), ("other", "2")])
    for parent in (None, SpanContext(5, 6, is_remote=True, trace_state=state), SpanContext(5, 6, False)):
        context = SpanContext(5, 9, False, trace_state=state)
        given = span({}, kind=kind, status=status, parent=parent, context=context, instrumentation_scope=None)
        assert ours(given) == encode_spans([given])


def test_spans_of_the_sdk_with_events_and_links_are_written_as_the_sdk_writes_them() -> None:
    memory = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(memory))
    first, second = provider.get_tracer("one", "1"), provider.get_tracer("two")
    with first.start_as_current_span("root", attributes={"a": 1}) as root:
        root.add_event("event", {"score": 1.5}, timestamp=3)
        link = Link(SpanContext(3, 4, is_remote=True), {"why": "retry"})
        second.start_span("child", context=set_span_in_context(root), links=[link]).end()
    spans = memory.get_finished_spans()
    assert ours(*spans) == encode_spans(spans)
    provider.shutdown()


def test_whatever_an_attribute_holds_the_span_comes_out() -> None:
    odd: dict[str, Any] = {"surrogate": "a\ud800b", "big": 2**64, "object": SpanKind.CLIENT, "k\ud800": 1}
    (written,) = ours(span(odd)).resource_spans[0].scope_spans[0].spans
    values = {pair.key: pair.value for pair in written.attributes}
    assert values["surrogate"].string_value == "a\\ud800b"
    assert values["big"].string_value == str(2**64)
    assert values["object"].string_value == "SpanKind.CLIENT"
    assert values["k\\ud800"].int_value == 1


def test_requests_are_split_between_spans_and_none_is_lost() -> None:
    third = "x" * (MAX_REQUEST_BYTES // 3)
    spans = [span({"number": number, "text": third}) for number in range(7)]
    spans.insert(3, span({"number": 99, "text": third * 6}))
    requests = encode(spans)
    assert sum(len(request) > MAX_REQUEST_BYTES for request in requests) == 1
    found = [
        one.attributes[0].value.int_value
        for request in requests
        for one in ExportTraceServiceRequest.FromString(request).resource_spans[0].scope_spans[0].spans
    ]
    assert found == [0, 1, 2, 99, 3, 4, 5, 6]
