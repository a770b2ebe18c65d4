"""Read back what the tracer wrote into a store's spool."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from spangrad.tracer import conventions as c
from spangrad.tracer.exporter import spool_of_store
from spangrad.tracer.journal import recover
from spangrad.tracer.spool import Spool


class Recorded:
    """One span, as it came over the wire."""

    def __init__(self, span: Any, resource: dict[str, Any], scope: str) -> None:
        self.name: str = span.name
        self.trace_id: str = span.trace_id.hex()
        self.span_id: str = span.span_id.hex()
        self.parent_id: str = span.parent_span_id.hex()
        self.is_error: bool = span.status.code == 2
        self.message: str = span.status.message
        self.start_ns: int = span.start_time_unix_nano
        self.end_ns: int = span.end_time_unix_nano
        self.kind: int = span.kind
        self.attributes = _attributes(span.attributes)
        self.events = [(event.name, _attributes(event.attributes)) for event in span.events]
        self.resource = resource
        self.scope = scope

    def __getitem__(self, name: str) -> Any:
        return self.attributes[name]

    def get(self, name: str) -> Any:
        return self.attributes.get(name)

    @property
    def is_call(self) -> bool:
        return c.OPERATION_NAME in self.attributes and c.SPAN_ROLE not in self.attributes

    @property
    def is_root(self) -> bool:
        return bool(self.get(c.SPAN_ROLE) == "rollout")

    def json(self, name: str) -> Any:
        return json.loads(self.attributes[name])

    def prompt(self) -> str:
        messages = self.json(c.INPUT_MESSAGES)
        return str(next(m["parts"][0]["content"] for m in messages if m["role"] == "user"))


def spans_of_store(store: str | Path) -> list[Recorded]:
    """Drain a store's spool, as the store does."""
    spans: list[Recorded] = []
    spool = Spool(spool_of_store(store))
    recover(spool)
    spool.drain(lambda request: spans.extend(spans_of_request(request)))
    return spans


def spans_of_request(request: bytes) -> list[Recorded]:
    found: list[Recorded] = []
    for resource in ExportTraceServiceRequest.FromString(request).resource_spans:
        named = _attributes(resource.resource.attributes)
        for scope in resource.scope_spans:
            found.extend(Recorded(span, named, scope.scope.name) for span in scope.spans)
    return found


def calls(spans: Iterable[Recorded]) -> list[Recorded]:
    return sorted((span for span in spans if span.is_call), key=lambda span: span.start_ns)


def roots(spans: Iterable[Recorded]) -> list[Recorded]:
    return [span for span in spans if span.is_root]


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return None if kind is None else getattr(value, kind)
