"""Captured items as records of a journal, and what a killed process left there as requests to a hub.

Knows `RawCall`, spans and OTLP; it does not know files. Invariants:
* A recovered call becomes the span that its own process would have made of it: by the same code, with the
  resource of that process.
* A record that no span can be made of costs only itself, and is said.
"""

import json
import logging
import marshal
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext

from spangrad.tracer import conventions as c
from spangrad.tracer.calls import RawCall, span_of
from spangrad.tracer.journal import Record
from spangrad.tracer.otlp import encode_request, encode_span
from spangrad.tracer.wire.repeated import Reader

logger = logging.getLogger(__name__)

_REQUEST_BYTES = 2**20
_MARSHAL = 2
"""Version that every Python 3 reads. A quarter of the time that JSON takes, on the agent's thread."""
_SPAN = marshal.dumps(None, _MARSHAL)
"""Meta of a record that is a span already."""


def head_of(resource: Resource, version: str, scope: str = c.SCOPE_TRACER) -> dict[str, Any]:
    """What the records of one process share."""
    attributes = dict(resource.attributes)
    return {"resource": attributes, "schema_url": resource.schema_url, "scope": scope, "version": version}


def call_record(call: RawCall) -> Record:
    """A call, with its bodies as they are."""
    parent, request, response = call.parent, call.request_body, call.response
    fields: Any = (
        None if request is None else len(request),
        call.trace_id,
        call.span_id,
        None if parent is None else parent[:3],
        call.start_ns,
        call.route,
        call.host,
        call.port,
        call.attributes,
        call.end_ns,
        call.status_code,
        call.content_type,
        call.content_encoding,
        call.response_headers,
        call.response_bytes,
        call.is_exhausted,
        call.error_type,
    )
    try:
        meta = marshal.dumps(fields, _MARSHAL)
    except ValueError:  # something is a subclass of str
        meta = marshal.dumps(json.loads(json.dumps(fields)), _MARSHAL)
    return meta, request or b"", response[0] if len(response) == 1 else b"".join(response)


def span_record(span: ReadableSpan) -> Record:
    """A span, as OTLP."""
    return _SPAN, b"".join(encode_span(span)), b""


def requests_of(head: Mapping[str, Any], records: Iterable[tuple[bytes, bytes]]) -> Iterator[bytes]:
    """OTLP requests of what `head_of`, `call_record` and `span_record` made; content in one piece."""
    resource = Resource(head["resource"], head["schema_url"])
    scope = InstrumentationScope(head.get("scope", c.SCOPE_TRACER), head["version"])
    described = ReadableSpan("", resource=resource, instrumentation_scope=scope)
    requests = Reader()
    together: list[tuple[ReadableSpan, list[bytes]]] = []
    size = 0
    for meta, content in records:
        try:
            encoded = [content]
            if meta != _SPAN:
                span = span_of(_call(meta, content), resource, scope, requests)
                if span is None:
                    continue
                encoded = encode_span(span)
        except Exception:  # the boundary: one bad record must not cost the others
            logger.warning("no span could be made of a call of a killed process", exc_info=True)
            continue
        together.append((described, encoded))
        size += sum(map(len, encoded))
        if size > _REQUEST_BYTES:
            yield encode_request(together)
            together, size = [], 0
    if together:
        yield encode_request(together)


def _call(meta: bytes, content: bytes) -> RawCall:
    length, trace_id, span_id, parent, start_ns, route, host, port, attributes, *rest = marshal.loads(meta)
    end_ns, status_code, content_type, encoding, headers, response_bytes, is_exhausted, error_type = rest
    return RawCall(
        trace_id=trace_id,
        span_id=span_id,
        parent=None if parent is None else SpanContext(*parent),
        start_ns=start_ns,
        route=route,
        host=host,
        port=port,
        request_body=None if length is None else content[:length],
        attributes=attributes,
        end_ns=end_ns,
        status_code=status_code,
        content_type=content_type,
        content_encoding=encoding,
        response_headers=headers,
        response=[content[length or 0 :]],
        response_bytes=response_bytes,
        is_exhausted=is_exhausted,
        error_type=error_type,
    )
