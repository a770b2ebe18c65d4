"""Batches on their way into a store: spans and log records, many to a commit.

Knows sizes of batches and which traces were touched; knows no files and no formats.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Final

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord

from spangrad.adapters.trace_ids import TraceIds
from spangrad.errors import RequestTooLargeError, StoreError
from spangrad.store.base import Store
from spangrad.store.faults import Faults, Outcome
from spangrad.store.otlp import encode_request
from spangrad.store.records import Span, SpanEvent
from spangrad.store.requests import BAD_IDS, BIG_NUMBERS, OTHER_TYPES, SURROGATES
from spangrad.store.requests.signals import LOGS, SPANS, Signal
from spangrad.tracer.conventions import REWARD_EVENT, REWARD_VALUE, storable

BATCH_SPANS: Final = 1000
BATCH_BYTES: Final = 4 * 2**20
TRACE_ID_DIGITS: Final = 32
SPAN_ID_DIGITS: Final = 16
_EVALUATIONS: Final = f"""
SELECT count(*) AS evaluations FROM logs WHERE contains(attributes::VARCHAR, '{REWARD_VALUE}')
  AND coalesce(nullif(event_name, ''), attributes->>'$."event.name"') = $event
  AND json_type(attributes, '$."{REWARD_VALUE}"') IN ('BIGINT', 'UBIGINT', 'DOUBLE')
"""
UNFIT: Final = (ValueError, TypeError, AttributeError, ArithmeticError, StoreError)
"""What encoding says of a span that OTLP has no form for."""


class Intake:
    """Collects requests, so that the store commits a batch and not every line."""

    def __init__(self, store: Store) -> None:
        """Nothing is stored before a batch is full, or `flush`."""
        self._store = store
        self.faults = Faults()
        """What was left out or mended on the way."""
        self._spans = ExportTraceServiceRequest()
        self._logs = ExportLogsServiceRequest()
        self._waiting_spans = self._waiting_logs = 0
        self._span_bytes = self._log_bytes = 0
        self.spans = self.new_spans = self.refused_spans = 0
        """`refused_spans`: what the store left out."""
        self.logs = self.new_logs = self.refused_logs = self.lone_logs = 0
        """`lone_logs`: records that name no trace."""
        self.by_scope: Counter[str] = Counter()
        self.traces = TraceIds()
        """Traces of which something came."""
        self.evaluations = self.unnumbered = 0
        """Log records that are evaluations; `unnumbered`: those of them without a number."""
        self._stored_evaluations: int | None = None
        """How many with a number the store had before."""

    def add_spans(self, request: ExportTraceServiceRequest) -> None:
        """Take in the spans of a request."""
        scopes = [scope for resource in request.resource_spans for scope in resource.scope_spans]
        spans = [span for scope in scopes for span in scope.spans]
        for scope in scopes:
            self.by_scope[scope.scope.name] += len(scope.spans)
        self.traces.add((span.trace_id for span in spans), has_span=True)
        self.spans += len(spans)
        self._spans.MergeFrom(request)
        self._waiting_spans += len(spans)
        self._span_bytes += request.ByteSize()
        if self._waiting_spans >= BATCH_SPANS or self._span_bytes >= BATCH_BYTES:
            self._flush_spans()

    def add_logs(self, request: ExportLogsServiceRequest) -> None:
        """Take in the log records of a request."""
        scopes = [scope for resource in request.resource_logs for scope in resource.scope_logs]
        records = [record for scope in scopes for record in scope.log_records]
        named = [record.trace_id for record in records if any(record.trace_id)]
        self.traces.add(named, has_span=False)
        judging = [record for record in records if _is_evaluation(record)]
        if judging and self._stored_evaluations is None:
            self._stored_evaluations = self._count_evaluations()
        self.evaluations += len(judging)
        self.unnumbered += sum(not _has_number(record) for record in judging)
        self.logs += len(records)
        self.lone_logs += len(records) - len(named)
        self._logs.MergeFrom(request)
        self._waiting_logs += len(records)
        self._log_bytes += request.ByteSize()
        if self._waiting_logs >= BATCH_SPANS or self._log_bytes >= BATCH_BYTES:
            self._flush_logs()

    def repeated_evaluations(self) -> int:
        """Evaluations with a number that the store had, or that came twice; once all is flushed."""
        if self._stored_evaluations is None:
            return 0
        new = self._count_evaluations() - self._stored_evaluations
        return max(self.evaluations - self.unnumbered - new, 0)

    def _count_evaluations(self) -> int:
        return int(self._store.query(_EVALUATIONS, {"event": REWARD_EVENT})[0]["evaluations"])

    def add_made(self, spans: Iterable[Span], place: str) -> str | None:
        """Take in spans that were made of a row. Returns what is wrong with them, if none can be kept."""
        made, problems = list(spans), Faults()
        fitting = [span for span in made if _has_ids(span, problems)]
        try:
            request = encode_request(fitting)
        except UNFIT:  # rare: look at every value only then
            fitting = [kept for span in fitting if (kept := _mended(span, problems)) is not None]
            request = encode_request(fitting)
        if not fitting:
            return next((f"{kind}: {one.example}" for kind, one in problems.items()), None)
        self.faults.merge(problems, f"{place}: ")
        self.add_spans(ExportTraceServiceRequest.FromString(request))
        return None

    def flush(self) -> None:
        """Put what was collected into the store."""
        self._flush_spans()
        self._flush_logs()

    def _flush_spans(self) -> None:
        if self._waiting_spans:
            before = self.faults.count(Outcome.LEFT_OUT)
            self.new_spans += self._put(self._store.put_otlp, self._spans, SPANS)
            self.refused_spans += self.faults.count(Outcome.LEFT_OUT) - before
        self._spans = ExportTraceServiceRequest()
        self._waiting_spans = self._span_bytes = 0

    def _flush_logs(self) -> None:
        if self._waiting_logs:
            before = self.faults.count(Outcome.LEFT_OUT)
            self.new_logs += self._put(self._store.put_logs, self._logs, LOGS)
            self.refused_logs += self.faults.count(Outcome.LEFT_OUT) - before
        self._logs = ExportLogsServiceRequest()
        self._waiting_logs = self._log_bytes = 0

    def _put(self, put: Callable[[bytes, Faults], int], request: Any, signal: Signal) -> int:
        """Put a request into the store, in halves where a hub takes no more. Returns how many were new."""
        body = request.SerializeToString()
        try:
            return put(body, self.faults)
        except RequestTooLargeError as error:
            count = signal.count(request)
            if count > 1:
                halves = (signal.part(request, 0, count // 2), signal.part(request, count // 2, count))
                return sum(self._put(put, half, signal) for half in halves)
            kind = f"{signal.noun}s that are too large for the hub"
            self.faults.add(kind, Outcome.LEFT_OUT, f"one of {len(body)} bytes: {error}")
            return 0


def _is_evaluation(record: LogRecord) -> bool:
    if record.event_name:
        return bool(record.event_name == REWARD_EVENT)
    return any(
        each.key == "event.name" and each.value.string_value == REWARD_EVENT for each in record.attributes
    )


def _has_number(record: LogRecord) -> bool:
    given = [each.value for each in record.attributes if each.key == REWARD_VALUE]
    kinds = [value.WhichOneof("value") for value in given]
    return kinds == ["int_value"] or (kinds == ["double_value"] and math.isfinite(given[0].double_value))


def _has_ids(span: Span, faults: Faults) -> bool:
    if len(span.trace_id) == TRACE_ID_DIGITS and len(span.span_id) == SPAN_ID_DIGITS:
        return True
    ids = f"{span.trace_id!r} and {span.span_id!r}"
    faults.add(BAD_IDS, Outcome.LEFT_OUT, f"{ids}; expected 32 and 16 hex digits")
    return False


def _mended(span: Span, faults: Faults) -> Span | None:
    """The span in a form that OTLP has; None if there is none."""
    kinds: set[str] = set()
    called = f"span {span.span_id} of trace {span.trace_id}"
    try:
        kept: Span = _kept(span, kinds)
        encode_request([kept])
    except UNFIT as error:
        faults.add("spans that OTLP has no form for", Outcome.LEFT_OUT, f"{called}: {error}")
        return None
    for kind in sorted(kinds):
        faults.add(kind, Outcome.MENDED, called)
    return kept


def _kept(value: Any, kinds: set[str]) -> Any:
    """A span, or a value of it, with what OTLP has no form for as text: lone surrogates, long ints, dates."""
    if isinstance(value, Span | SpanEvent):
        own = {field.name: _kept(getattr(value, field.name), kinds) for field in fields(value)}
        return replace(value, **own)
    if isinstance(value, str):
        if (text := storable(value)) != value:
            kinds.add(SURROGATES)
        return text
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        kinds.add(BIG_NUMBERS)
        return str(value)
    if value is None or isinstance(value, bool | int | float | bytes | bytearray):
        return value
    if isinstance(value, Mapping):
        return {_kept(str(key), kinds): _kept(each, kinds) for key, each in value.items()}
    if isinstance(value, Sequence):
        return [_kept(each, kinds) for each in value]
    kinds.add(OTHER_TYPES)
    return str(value)
