"""One HTTP exchange with a model, and the span that it becomes.

`RawCall` holds references to bytes and is filled on the agent's thread. `span_of` decodes and names
them, on the worker's thread. Knows OTLP attributes and content encodings; it does not know httpx.

Invariants:
* An exchange on `/chat/completions` always becomes a span. What can't be read is named, with the reason, in
  `spangrad.dropped`. The other routes have names that others use too: there only a JSON request that
  names a model and has content counts.
* A failed attempt (status 4xx or 5xx, or no response) is a span of its own with status ERROR and
  `error.type`; a later attempt of the same request says in `spangrad.http.retries` how many came before.
* `spangrad.stream.complete` is False for a stream that was left early, cut or cancelled.
* A reply that a cache says to have served is marked: nothing was sampled.
* Of what a server or a gateway puts into headers nothing is recorded; keys that it repeats in an error are
  blanked.
* A span is at most `span_size.MAX_SPAN_BYTES` long: what makes it longer is left out and named.
"""

import importlib
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode

from spangrad.tracer import conventions as c
from spangrad.tracer.propagation import SAMPLED
from spangrad.tracer.redaction import secrets
from spangrad.tracer.span_size import cut, shorten
from spangrad.tracer.wire import chat
from spangrad.tracer.wire.anthropic import assemble_messages, messages_request, messages_response
from spangrad.tracer.wire.caching import is_served_by_cache
from spangrad.tracer.wire.embeddings import embeddings_request, embeddings_response
from spangrad.tracer.wire.fast_json import loads
from spangrad.tracer.wire.repeated import Reader
from spangrad.tracer.wire.responses import assemble_responses, responses_request, responses_response
from spangrad.tracer.wire.streams import Assembled, assemble_chat

MAX_RESPONSE_BYTES = 64 * 2**20
"""A longer response, compressed or not, is passed on as ever, but not kept."""
_PIECE_BYTES = 16 * 2**10
"""Compressed bytes that are decoded at once: they may stand for a thousand times as many."""
_MESSAGE_CHARS = 500


@dataclass(slots=True)
class RawCall:
    """One HTTP attempt. Times are nanoseconds since the epoch."""

    trace_id: int
    span_id: int
    parent: SpanContext | None
    start_ns: int
    route: str
    """Last part of the path, one of `ROUTES`."""
    host: str
    port: int | None
    request_body: bytes | None
    """None if the client streams its request."""
    attributes: dict[str, Any]
    """What only the calling thread knew: rollout, step, retries."""
    end_ns: int = 0
    status_code: int | None = None
    content_type: str = ""
    content_encoding: str = ""
    response_headers: Mapping[str, str] | None = None
    """Those that tell of caches; looked at, never recorded."""
    response: list[bytes] = field(default_factory=list)
    response_bytes: int = 0
    is_exhausted: bool = False
    """The client read the whole body."""
    error_type: str | None = None
    """Class of the exception that ended the exchange."""

    @property
    def context(self) -> SpanContext:
        """Ids of the span. Making one takes the time of a system call, so the calling thread does not."""
        return SpanContext(self.trace_id, self.span_id, is_remote=False, trace_flags=SAMPLED)

    @property
    def size_bytes(self) -> int:
        """Memory that the call holds on to."""
        return len(self.request_body or b"") + self.response_bytes + 1000


Request = Callable[[dict[str, Any], dict[str, str]], chat.Attributes]
Response = Callable[[dict[str, Any], dict[str, str], dict[str, Any]], chat.Attributes]
Assemble = Callable[[bytes, int], Assembled]


@dataclass(frozen=True, slots=True)
class _Route:
    operation: str
    provider: str
    request: Request
    response: Response
    assemble: Assemble
    content: frozenset[str] = frozenset()
    """A JSON request with `model` and one of these fields is a model call; empty: anything is."""


_ROUTES = {
    "chat/completions": _Route(
        "chat", "openai", chat.request_attributes, chat.response_attributes, assemble_chat
    ),
    "completions": _Route(
        "text_completion",
        "openai",
        chat.request_attributes,
        chat.response_attributes,
        assemble_chat,
        frozenset({"prompt", "messages"}),
    ),
    "responses": _Route(
        "chat",
        "openai",
        responses_request,
        responses_response,
        assemble_responses,
        frozenset({"input", "prompt", "previous_response_id", "conversation"}),
    ),
    "messages": _Route(
        "chat",
        "anthropic",
        messages_request,
        messages_response,
        assemble_messages,
        frozenset({"messages"}),
    ),
    "embeddings": _Route(
        "embeddings",
        "openai",
        embeddings_request,
        embeddings_response,
        assemble_chat,
        frozenset({"input"}),
    ),
}
ROUTES = tuple(_ROUTES)


def span_of(
    call: RawCall, resource: Resource, scope: InstrumentationScope, requests: Reader
) -> ReadableSpan | None:
    """Build the span of a finished exchange; None if it turns out to be no model call.

    `requests` has read the calls before.
    """
    route = _ROUTES[call.route]
    dropped: dict[str, str] = {}
    attributes: dict[str, Any] = {
        c.OPERATION_NAME: route.operation,
        c.PROVIDER_NAME: route.provider,
        "server.address": call.host,
        **call.attributes,
    }
    if call.port is not None:
        attributes["server.port"] = call.port
    request = _request(call, route, requests, attributes, dropped)
    if route.content and not ("model" in request and route.content & request.keys()):
        return None
    status = _response(call, route, request, attributes, dropped)
    if call.response_headers is not None and is_served_by_cache(list(call.response_headers.items())):
        attributes[c.CACHED] = True
    shorten(attributes, dropped)
    if dropped:
        attributes[c.DROPPED] = chat.dumps(dropped)
    return ReadableSpan(
        name=f"{route.operation} {attributes.get(c.REQUEST_MODEL, '')}".strip(),
        context=call.context,
        parent=call.parent,
        resource=resource,
        attributes=attributes,
        kind=SpanKind.CLIENT,
        status=status,
        start_time=call.start_ns,
        end_time=call.end_ns,
        instrumentation_scope=scope,
    )


def _request(
    call: RawCall,
    route: _Route,
    requests: Reader,
    attributes: dict[str, Any],
    dropped: dict[str, str],
) -> dict[str, Any]:
    if call.request_body is None:
        dropped["request"] = "the client streamed its body"
        return {}
    try:
        request = requests.read(call.request_body)
        attributes.update(route.request(request, dropped))
    except Exception as error:  # foreign data: whatever it is, the span must come out
        dropped["request"] = f"can't be read: {type(error).__name__}: {error}"[:_MESSAGE_CHARS]
        return {}
    return request


def _response(
    call: RawCall,
    route: _Route,
    request: dict[str, Any],
    attributes: dict[str, Any],
    dropped: dict[str, str],
) -> Status:
    """Add what was answered; returns the span's status."""
    if call.status_code is None:
        return _failure(attributes, call.error_type or "no response", "")
    body = _body(call, dropped)
    if call.status_code >= 400:
        message = body[: 4 * _MESSAGE_CHARS].decode("utf-8", "replace")
        return _failure(attributes, str(call.status_code), message)
    streamed = call.content_type.startswith("text/event-stream")
    if not streamed and not call.is_exhausted:
        dropped["response"] = "the client did not read it"
    elif body:
        try:
            if streamed:
                error = _streamed(route, body, request, attributes, dropped)
            else:
                decoded = loads(body)
                error = decoded.get("error") if isinstance(decoded.get("error"), dict) else None
                attributes.update(route.response(decoded, dropped, request))
        except Exception as problem:  # foreign data: whatever it is, the span must come out
            dropped["response"] = f"can't be read: {type(problem).__name__}: {problem}"[:_MESSAGE_CHARS]
        else:
            if error is not None:
                kind = str(error.get("type") or error.get("code") or "error")
                return _failure(attributes, chat.clean(kind), chat.clean(str(error.get("message", ""))))
    if streamed:
        attributes.setdefault(c.STREAM_COMPLETE, False)
    if call.error_type and not attributes.get(c.STREAM_COMPLETE):
        return _failure(attributes, call.error_type, "")
    return Status(StatusCode.UNSET)


def _streamed(
    route: _Route,
    body: bytes,
    request: dict[str, Any],
    attributes: dict[str, Any],
    dropped: dict[str, str],
) -> dict[str, Any] | None:
    count = request.get("n")
    count = count if isinstance(count, int) and count > 0 else 1
    assembled = route.assemble(body, count * chat.prompt_count(request))
    attributes[c.STREAM_COMPLETE] = assembled.is_complete
    if assembled.unreadable:
        dropped["response"] = f"events that can't be read: {assembled.unreadable} of them"
    attributes.update(route.response(assembled.body, dropped, request))
    return assembled.error


def _failure(attributes: dict[str, Any], error_type: str, message: str) -> Status:
    attributes[c.ERROR_TYPE] = error_type
    return Status(StatusCode.ERROR, cut(secrets(message), _MESSAGE_CHARS) or None)


def _body(call: RawCall, dropped: dict[str, str]) -> bytes:
    if call.response_bytes > MAX_RESPONSE_BYTES:
        dropped["response"] = f"longer than {MAX_RESPONSE_BYTES} bytes"
        return b""
    body = b"".join(call.response)
    for encoding in reversed([part.strip() for part in call.content_encoding.lower().split(",")]):
        if encoding in ("", "identity"):
            continue
        try:
            body = _decompress(encoding, body)
        except Exception as error:  # a codec that is not installed, or a transport that has decoded already
            if body.lstrip()[:1] == b"{" or body.startswith((b"data:", b"event:")):
                break
            dropped["response"] = f"content-encoding {encoding!r}: {type(error).__name__}: {error}"
            return b""
    return body


def _decompress(encoding: str, body: bytes) -> bytes:
    """As much of `body` as is there: an abandoned stream ends in the middle."""
    decoded = _decoder(encoding, body)
    parts: list[bytes] = []
    size = 0
    for start in range(0, len(body), _PIECE_BYTES):
        parts.append(decoded(body[start : start + _PIECE_BYTES]))
        size += len(parts[-1])
        if size > MAX_RESPONSE_BYTES:
            raise ValueError(f"longer than {MAX_RESPONSE_BYTES} bytes")
    return b"".join(parts)


def _decoder(encoding: str, body: bytes) -> Callable[[bytes], bytes]:
    """What decodes one piece after the other."""
    if encoding in ("gzip", "x-gzip"):
        return zlib.decompressobj(16 + zlib.MAX_WBITS).decompress
    if encoding == "deflate":
        try:
            zlib.decompressobj().decompress(body[:_PIECE_BYTES])
        except zlib.error:
            return zlib.decompressobj(-zlib.MAX_WBITS).decompress
        return zlib.decompressobj().decompress
    decode: Callable[[bytes], bytes]
    if encoding == "zstd":
        # Only there if the client could ask for it, as below.
        decode = importlib.import_module("zstandard").ZstdDecompressor().decompressobj().decompress
        return decode
    if encoding == "br":
        decode = importlib.import_module("brotli").Decompressor().process
        return decode
    raise ValueError("unknown")
