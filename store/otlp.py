"""Spans and log records <-> OTLP, both ways.

Knows the protobuf messages of `opentelemetry-proto`; how bytes become such messages is `requests/`.
Knows no tables. Invariant: `decode_request(encode_request(spans))` gives the spans back, but for
what OTLP has no field for (`rollout_id` and `attempt` of spans that inherited them).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord as LogProto
from opentelemetry.proto.logs.v1.logs_pb2 import ScopeLogs
from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans, Status
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanProto

from spangrad.errors import StoreError
from spangrad.store.faults import Faults, Outcome
from spangrad.store.records import LogRecord, RepeatedKeys, Span, SpanEvent
from spangrad.store.requests import logs_request, trace_request
from spangrad.tracer import conventions


def decode_request(request: bytes) -> tuple[list[Span], int]:
    """Spans of an `ExportTraceServiceRequest`, and how many could not be read and were left out.

    Raises StoreError if the bytes are no such message.
    """
    message, faults = trace_request(request)
    return spans_of(message), faults.count(Outcome.LEFT_OUT)


def spans_of(message: ExportTraceServiceRequest) -> list[Span]:
    """Spans of a request whose ids have been checked."""
    spans: list[Span] = []
    for resource_spans in message.resource_spans:
        of_resource = _of_resource(resource_spans)
        for scope_spans in resource_spans.scope_spans:
            common = of_resource | _of_scope(scope_spans)
            spans.extend(_from_proto(proto, common) for proto in scope_spans.spans)
    return spans


def encode_request(spans: Iterable[Span]) -> bytes:
    """OTLP protobuf of spans; neighbours with equal resource and scope share a block."""
    message = ExportTraceServiceRequest()
    last: tuple[Any, ...] | None = None
    block: ScopeSpans | None = None
    for span in spans:
        origin = _origin(span)
        if block is None or origin != last:
            last = origin
            resource_spans = message.resource_spans.add()
            block = resource_spans.scope_spans.add()
            _fill_origin(resource_spans, block, span)
        block.spans.append(_to_proto(span))
    return bytes(message.SerializeToString())


def decode_logs(request: bytes) -> list[LogRecord]:
    """Records of an `ExportLogsServiceRequest`. An id that is none counts as absent.

    Raises StoreError if the bytes are no such message.
    """
    message, _ = logs_request(request)
    return records_of(message)


def records_of(message: ExportLogsServiceRequest) -> list[LogRecord]:
    """Log records of a request whose ids have been checked."""
    records: list[LogRecord] = []
    for resource_logs in message.resource_logs:
        of_resource = _of_resource(resource_logs)
        for scope_logs in resource_logs.scope_logs:
            common = of_resource | _of_scope(scope_logs)
            records.extend(_log_from_proto(proto, common) for proto in scope_logs.log_records)
    return records


def encode_logs(records: Iterable[LogRecord]) -> bytes:
    """OTLP protobuf of log records; neighbours with equal resource and scope share a block."""
    message = ExportLogsServiceRequest()
    last: tuple[Any, ...] | None = None
    block: ScopeLogs | None = None
    for record in records:
        origin = _origin(record)
        if block is None or origin != last:
            last = origin
            resource_logs = message.resource_logs.add()
            block = resource_logs.scope_logs.add()
            _fill_origin(resource_logs, block, record)
        block.log_records.append(_log_to_proto(record))
    return bytes(message.SerializeToString())


def json_to_protobuf(request: bytes) -> bytes:
    """Protobuf bytes of a trace request in OTLP's JSON form (hex ids, enums as numbers)."""
    return bytes(trace_request(request, is_json=True)[0].SerializeToString())


def json_logs_to_protobuf(request: bytes, faults: Faults | None = None) -> bytes:
    """Protobuf bytes of a logs request in OTLP's JSON form; what was left out or mended is in `faults`."""
    message, found = logs_request(request, is_json=True)
    if faults is not None:
        faults.merge(found)
    return bytes(message.SerializeToString())


def _of_resource(block: Any) -> dict[str, Any]:
    resource = block.resource
    return {
        "resource": _from_pairs(resource.attributes),
        "resource_schema_url": block.schema_url,
        "resource_dropped_attributes": resource.dropped_attributes_count,
        "entity_refs": tuple(
            {
                "schema_url": ref.schema_url,
                "type": ref.type,
                "id_keys": list(ref.id_keys),
                "description_keys": list(ref.description_keys),
            }
            for ref in resource.entity_refs
        ),
    }


def _of_scope(block: Any) -> dict[str, Any]:
    return {
        "scope": block.scope.name,
        "scope_version": block.scope.version,
        "scope_attributes": _from_pairs(block.scope.attributes),
        "scope_dropped_attributes": block.scope.dropped_attributes_count,
        "schema_url": block.schema_url,
    }


def _origin(record: Span | LogRecord) -> tuple[Any, ...]:
    """What neighbours share to be in one block."""
    return (
        record.resource,
        record.resource_schema_url,
        record.resource_dropped_attributes,
        record.entity_refs,
        record.scope,
        record.scope_version,
        record.scope_attributes,
        record.scope_dropped_attributes,
        record.schema_url,
    )


def _fill_origin(of_resource: Any, of_scope: Any, record: Span | LogRecord) -> None:
    of_resource.schema_url = record.resource_schema_url
    resource, scope = of_resource.resource, of_scope.scope
    resource.attributes.extend(_to_pairs(record.resource))
    resource.dropped_attributes_count = record.resource_dropped_attributes
    for ref in record.entity_refs:
        resource.entity_refs.add(**ref)
    of_scope.schema_url = record.schema_url
    scope.name = record.scope
    scope.version = record.scope_version
    scope.attributes.extend(_to_pairs(record.scope_attributes))
    scope.dropped_attributes_count = record.scope_dropped_attributes


def _from_proto(proto: SpanProto, common: Mapping[str, Any]) -> Span:
    attributes = _from_pairs(proto.attributes)
    rollout_id = attributes.get(conventions.ROLLOUT_ID)
    attempt = attributes.get(conventions.ATTEMPT)
    has_rollout = isinstance(rollout_id, str) and rollout_id != ""
    return Span(
        trace_id=proto.trace_id.hex(),
        span_id=proto.span_id.hex(),
        parent_span_id=proto.parent_span_id.hex() or None,
        name=proto.name,
        kind=proto.kind,
        start_ns=proto.start_time_unix_nano,
        end_ns=proto.end_time_unix_nano,
        status_code=proto.status.code,
        status_message=proto.status.message,
        attributes=attributes,
        events=tuple(
            SpanEvent(e.name, e.time_unix_nano, _from_pairs(e.attributes), e.dropped_attributes_count)
            for e in proto.events
        ),
        links=tuple(_from_link(link) for link in proto.links),
        trace_state=proto.trace_state,
        flags=proto.flags,
        dropped_attributes=proto.dropped_attributes_count,
        dropped_events=proto.dropped_events_count,
        dropped_links=proto.dropped_links_count,
        rollout_id=str(rollout_id) if has_rollout else None,
        attempt=attempt if has_rollout and _is_attempt(attempt) else None,
        **common,
    )


def _log_from_proto(proto: LogProto, common: Mapping[str, Any]) -> LogRecord:
    return LogRecord(
        trace_id=proto.trace_id.hex() or None,
        span_id=proto.span_id.hex() or None,
        time_ns=proto.time_unix_nano,
        observed_ns=proto.observed_time_unix_nano,
        event_name=proto.event_name,
        body=_from_value(proto.body),
        attributes=_from_pairs(proto.attributes),
        severity_number=proto.severity_number,
        severity_text=proto.severity_text,
        flags=proto.flags,
        dropped_attributes=proto.dropped_attributes_count,
        **common,
    )


def _is_attempt(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= conventions.MAX_ATTEMPT


def _from_link(link: SpanProto.Link) -> dict[str, Any]:
    return {
        "trace_id": link.trace_id.hex(),
        "span_id": link.span_id.hex(),
        "trace_state": link.trace_state,
        "attributes": _from_pairs(link.attributes),
        "dropped_attributes": link.dropped_attributes_count,
        "flags": link.flags,
    }


def _from_pairs(pairs: Sequence[KeyValue]) -> dict[str, Any]:
    found = {pair.key: _from_value(pair.value) for pair in pairs}
    if len(found) == len(pairs):
        return found
    last = {pair.key: number for number, pair in enumerate(pairs)}
    hidden = [pair for number, pair in enumerate(pairs) if last[pair.key] != number]
    return RepeatedKeys(found, [(pair.key, _from_value(pair.value)) for pair in hidden])


def _from_value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind is None:
        return None
    if kind == "array_value":
        return [_from_value(item) for item in value.array_value.values]
    if kind == "kvlist_value":
        return _from_pairs(value.kvlist_value.values)
    return getattr(value, kind)


def _to_proto(span: Span) -> SpanProto:
    proto = SpanProto(
        trace_id=bytes.fromhex(span.trace_id),
        span_id=bytes.fromhex(span.span_id),
        parent_span_id=bytes.fromhex(span.parent_span_id or ""),
        trace_state=span.trace_state,
        flags=span.flags,
        name=span.name,
        start_time_unix_nano=span.start_ns,
        end_time_unix_nano=span.end_ns,
        attributes=_to_pairs(span.attributes),
        dropped_attributes_count=span.dropped_attributes,
        dropped_events_count=span.dropped_events,
        dropped_links_count=span.dropped_links,
    )
    # Numbers beyond the known enum values are legal on the wire, hence not in the constructor.
    proto.kind = span.kind  # type: ignore[assignment]
    if span.status_code or span.status_message:
        proto.status.CopyFrom(Status(message=span.status_message))
        proto.status.code = span.status_code  # type: ignore[assignment]
    for event in span.events:
        proto.events.add(
            name=event.name,
            time_unix_nano=event.time_ns,
            attributes=_to_pairs(event.attributes),
            dropped_attributes_count=event.dropped_attributes,
        )
    for link in span.links:
        proto.links.add(
            trace_id=bytes.fromhex(link["trace_id"]),
            span_id=bytes.fromhex(link["span_id"]),
            trace_state=link.get("trace_state", ""),
            attributes=_to_pairs(link.get("attributes", {})),
            dropped_attributes_count=link.get("dropped_attributes", 0),
            flags=link.get("flags", 0),
        )
    return proto


def _log_to_proto(record: LogRecord) -> LogProto:
    proto = LogProto(
        trace_id=bytes.fromhex(record.trace_id or ""),
        span_id=bytes.fromhex(record.span_id or ""),
        time_unix_nano=record.time_ns,
        observed_time_unix_nano=record.observed_ns,
        event_name=record.event_name,
        attributes=_to_pairs(record.attributes),
        severity_text=record.severity_text,
        flags=record.flags,
        dropped_attributes_count=record.dropped_attributes,
    )
    proto.severity_number = record.severity_number  # type: ignore[assignment]
    if record.body is not None:
        proto.body.CopyFrom(_to_value(record.body))
    return proto


def _to_pairs(attributes: Mapping[str, Any]) -> list[KeyValue]:
    hidden = attributes.hidden if isinstance(attributes, RepeatedKeys) else ()
    return [KeyValue(key=key, value=_to_value(value)) for key, value in (*hidden, *attributes.items())]


def _to_value(value: Any) -> AnyValue:
    if value is None:
        return AnyValue()
    if isinstance(value, str):
        return AnyValue(string_value=value)
    if isinstance(value, bool):
        return AnyValue(bool_value=value)
    if isinstance(value, int):
        return AnyValue(int_value=value)
    if isinstance(value, float):
        return AnyValue(double_value=value)
    if isinstance(value, bytes | bytearray | memoryview):
        return AnyValue(bytes_value=bytes(value))
    result = AnyValue()
    if isinstance(value, Mapping):
        result.kvlist_value.SetInParent()
        result.kvlist_value.values.extend(_to_pairs(value))
        return result
    if isinstance(value, Sequence):
        result.array_value.SetInParent()
        result.array_value.values.extend(_to_value(item) for item in value)
        return result
    raise StoreError(f"attribute value {value!r} of type {type(value).__name__} has no OTLP form")
