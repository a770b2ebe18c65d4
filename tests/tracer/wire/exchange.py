"""One HTTP exchange, made up, and the span and the call that become of it."""

import json
from collections.abc import Callable
from typing import Any

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from spangrad.adapters.calls import calls_from_spans
from spangrad.adapters.model_call import ModelCall
from spangrad.store.otlp import decode_request
from spangrad.tracer import conventions as c
from spangrad.tracer.calls import RawCall, span_of
from spangrad.tracer.redaction import Rule, redacted_span
from spangrad.tracer.wire.repeated import Reader

HI: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "Hi"}]}


def sse(*events: Any) -> bytes:
    """A stream of events; those that have a type are named after it."""
    lines = []
    for event in events:
        name = f"event: {event['type']}\n" if isinstance(event, dict) and "type" in event else ""
        lines.append(f"{name}data: {json.dumps(event)}\n\n")
    return "".join(lines).encode()


def choice(content: str | None = "Hello.", *, finish: str | None = "stop", **more: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": content} | more.pop("message", {})
    return {"index": 0, "message": message, "finish_reason": finish} | more


def completion(*choices: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"id": "r-1", "model": "policy", "choices": list(choices) or [choice()]} | more


def exchange(
    request: Any,
    response: Any,
    *,
    route: str = "chat/completions",
    status: int = 200,
    headers: dict[str, str] | None = None,
    number: int = 1,
    is_exhausted: bool = True,
    encode: tuple[str, Callable[[bytes], bytes]] | None = None,
    attributes: dict[str, Any] | None = None,
) -> ReadableSpan:
    """The span of a request; a `response` of bytes is a stream. `encode`: its content encoding, and how."""
    is_stream = isinstance(response, bytes)
    raw = response if isinstance(response, bytes) else json.dumps(response).encode()
    raw = raw if encode is None else encode[1](raw)
    body = json.dumps(request).encode()
    call = RawCall(1, number, None, 100 * number, route, "h", None, body, dict(attributes or {}))
    call.end_ns = call.start_ns + 50
    call.status_code = status
    call.content_type = "text/event-stream" if is_stream else "application/json"
    call.content_encoding = "" if encode is None else encode[0]
    call.response_headers = headers
    call.response, call.response_bytes, call.is_exhausted = [raw], len(raw), is_exhausted
    span = span_of(call, Resource.get_empty(), InstrumentationScope(c.SCOPE_TRACER), Reader())
    assert span is not None
    return span


def written(span: ReadableSpan) -> dict[str, Any]:
    """The attributes, those that are JSON decoded."""
    return {
        name: json.loads(value) if isinstance(value, str) and value[:1] in "[{" else value
        for name, value in (span.attributes or {}).items()
    }


def recorded(request: Any, response: Any, **more: Any) -> dict[str, Any]:
    return written(exchange(request, response, **more))


def model_calls(*spans: ReadableSpan, rule: Rule | None = None) -> list[ModelCall]:
    """What a trainer would see of these spans."""
    ready = [redacted_span(span, rule) for span in spans]
    stored, rejected = decode_request(encode_spans(ready).SerializeToString())
    assert not rejected
    return calls_from_spans(stored)


def model_call(request: Any, response: Any, *, rule: Rule | None = None, **more: Any) -> ModelCall:
    (call,) = model_calls(exchange(request, response, **more), rule=rule)
    return call
