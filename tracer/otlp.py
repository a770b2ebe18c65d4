"""Spans as an OTLP `ExportTraceServiceRequest`, written straight in protobuf's wire form.

The SDK's encoder builds a message per value and copies every text four times; a call's span holds a whole
conversation, and its process is the agent's. Written from `opentelemetry-proto`'s trace.proto, whose field
numbers never change.

Knows OTLP and the SDK's read-only spans; it does not know what a span means. Invariants:
* Decoded, a request equals what the SDK's encoder makes of the same spans, one `ResourceSpans` for
  all of one resource.
* Whatever an attribute holds, the span comes out: a lone surrogate is escaped, an integer beyond 64 bits
  and an object of another kind become text.
"""

import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext

_DOUBLE = struct.Struct("<d").pack
_FIXED32 = struct.Struct("<I").pack
_FIXED64 = struct.Struct("<Q").pack
_HAS_IS_REMOTE = 0x100
_IS_REMOTE = 0x200
_SCALARS = frozenset({int, bool})
_SHORT = 100
"""Longest text, in characters, that is remembered."""
_SMALL = tuple(bytes([number]) for number in range(128))


class OnceEncoded(ReadableSpan):
    """A span that keeps what `encode_span` makes of it; nothing of it changes any more."""

    encoded: list[bytes] | None = None


def encode_span(span: ReadableSpan) -> list[bytes]:
    """One `Span` message, in pieces: they are joined once, in a request. Nobody changes the list."""
    if not isinstance(span, OnceEncoded):
        return _encoded(span)
    if span.encoded is None:
        span.encoded = _encoded(span)
    return span.encoded


def _encoded(span: ReadableSpan) -> list[bytes]:
    context = span.get_span_context()
    assert context is not None
    parent = span.parent
    parts = [
        b"\x0a\x10" + context.trace_id.to_bytes(16, "big"),
        b"\x12\x08" + context.span_id.to_bytes(8, "big"),
    ]
    _text(parts, b"\x1a", _trace_state(context))
    if parent is not None:
        parts.append(b"\x22\x08" + parent.span_id.to_bytes(8, "big"))
    _text(parts, b"\x2a", span.name)
    parts.append(b"\x30" + _SMALL[span.kind.value + 1])  # the SDK counts from 0, OTLP from 1
    if span.start_time:
        parts.append(b"\x39" + _FIXED64(span.start_time))
    if span.end_time:
        parts.append(b"\x41" + _FIXED64(span.end_time))
    _attributes(parts, b"\x4a", span.attributes)
    _count(parts, b"\x50", span.dropped_attributes)
    for event in span.events:
        _message(parts, b"\x5a", _event(event))
    _count(parts, b"\x60", span.dropped_events)
    for link in span.links:
        _message(parts, b"\x6a", _link(link))
    _count(parts, b"\x70", span.dropped_links)
    status: list[bytes] = []
    _text(status, b"\x12", span.status.description)
    _count(status, b"\x18", span.status.status_code.value)
    _message(parts, b"\x7a", status)
    parts.append(b"\x85\x01" + _FIXED32(_flags(parent)))
    return parts


def encode_request(spans: Sequence[tuple[ReadableSpan, list[bytes]]]) -> bytes:
    """A request of these spans, each with its `encode_span`."""
    grouped: dict[int, tuple[Resource, dict[int, tuple[InstrumentationScope | None, list[list[bytes]]]]]] = {}
    for span, encoded in spans:
        scope = span.instrumentation_scope
        _, scopes = grouped.setdefault(id(span.resource), (span.resource, {}))
        scopes.setdefault(id(scope), (scope, []))[1].append(encoded)
    request: list[bytes] = []
    for resource, scopes in grouped.values():
        described: list[bytes] = []
        _attributes(described, b"\x0a", resource.attributes)
        group: list[bytes] = []
        _message(group, b"\x0a", described)
        for scope, encoded_spans in scopes.values():
            _message(group, b"\x12", _scope_spans(scope, encoded_spans))
        _text(group, b"\x1a", resource.schema_url)
        _message(request, b"\x0a", group)
    return b"".join(request)


def _scope_spans(scope: InstrumentationScope | None, spans: Sequence[list[bytes]]) -> list[bytes]:
    described: list[bytes] = []
    if scope is not None:
        _text(described, b"\x0a", scope.name)
        _text(described, b"\x12", scope.version)
        _attributes(described, b"\x1a", scope.attributes)
    parts: list[bytes] = []
    _message(parts, b"\x0a", described)
    for span in spans:
        _message(parts, b"\x12", span)
    if scope is not None:
        _text(parts, b"\x1a", scope.schema_url)
    return parts


def _event(event: Event) -> list[bytes]:
    parts = [b"\x09" + _FIXED64(event.timestamp)]
    _text(parts, b"\x12", event.name)
    _attributes(parts, b"\x1a", event.attributes)
    _count(parts, b"\x20", event.dropped_attributes)
    return parts


def _link(link: Link) -> list[bytes]:
    parts = [
        b"\x0a\x10" + link.context.trace_id.to_bytes(16, "big"),
        b"\x12\x08" + link.context.span_id.to_bytes(8, "big"),
    ]
    _attributes(parts, b"\x22", link.attributes)
    _count(parts, b"\x28", link.dropped_attributes)
    parts.append(b"\x35" + _FIXED32(_flags(link.context)))
    return parts


def _flags(context: SpanContext | None) -> int:
    return _HAS_IS_REMOTE | (_IS_REMOTE if context is not None and context.is_remote else 0)


def _trace_state(context: SpanContext) -> str:
    state = context.trace_state
    return ",".join([f"{key}={value}" for key, value in state.items()]) if state else ""


def _attributes(parts: list[bytes], tag: bytes, attributes: Mapping[str, Any] | None) -> None:
    """Add one `KeyValue` field each. Long values are not copied before the last join."""
    for key, value in (attributes or {}).items():
        kind = type(value)
        if kind in _SCALARS or (kind is str and len(value) <= _SHORT):
            parts.append(_short_pair(tag, key, value))
            continue
        named = _key(key)
        before, content = _any_value(value)
        wrapped = b"\x12" + _varint(len(before) + len(content)) + before
        parts.append(tag + _varint(len(named) + len(wrapped) + len(content)) + named + wrapped)
        if content:
            parts.append(content)


def _any_value(value: Any) -> tuple[bytes, bytes]:
    """An `AnyValue` in two pieces: its tag with whatever is short, and its content."""
    if isinstance(value, str):
        content = _utf8(value)
        return b"\x0a" + _varint(len(content)), content
    if isinstance(value, bool):
        return b"\x10\x01" if value else b"\x10\x00", b""
    if isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            return _any_value(str(value))
        return b"\x18" + _varint(value & (2**64 - 1)), b""
    if isinstance(value, float):
        return b"\x21" + _DOUBLE(value), b""
    if isinstance(value, bytes):
        return b"\x3a" + _varint(len(value)), value
    if value is None:
        return b"", b""
    if isinstance(value, Mapping):
        pairs: list[bytes] = []
        _attributes(pairs, b"\x0a", {str(key): item for key, item in value.items()})
        content = b"".join(pairs)
        return b"\x32" + _varint(len(content)), content
    if isinstance(value, Sequence):
        items: list[bytes] = []
        for item in value:
            _message(items, b"\x0a", _any_value(item))
        content = b"".join(items)
        return b"\x2a" + _varint(len(content)), content
    return _any_value(str(value))


@lru_cache(maxsize=4096, typed=True)
def _short_pair(tag: bytes, key: str, value: Any) -> bytes:
    """A field whose value may come again: most of a span's attributes are those of the spans before it."""
    named = _key(key)
    before, content = _any_value(value)
    wrapped = b"\x12" + _varint(len(before) + len(content)) + before + content
    return tag + _varint(len(named) + len(wrapped)) + named + wrapped


@lru_cache(maxsize=1024)
def _key(key: str) -> bytes:
    encoded = _utf8(key)
    return b"\x0a" + _varint(len(encoded)) + encoded


def _message(parts: list[bytes], tag: bytes, content: Sequence[bytes]) -> None:
    parts.append(tag + _varint(sum(map(len, content))))
    parts += content


def _text(parts: list[bytes], tag: bytes, text: str | None) -> None:
    if text:
        encoded = _utf8(text)
        parts.append(tag + _varint(len(encoded)) + encoded)


def _count(parts: list[bytes], tag: bytes, number: int) -> None:
    if number:
        parts.append(tag + _varint(number))


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace")


def _varint(number: int) -> bytes:
    if number < 128:
        return _SMALL[number]
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)
