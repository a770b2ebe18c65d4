"""What `spangrad.init()` sets up: a private tracer provider, the worker, and who may be told of rollouts.

There is at most one active runtime in a process; `active()` returns it. It knows the OTel SDK; it does not
know HTTP clients. Invariants:
* The global tracer provider and the ambient OTel context are left alone: the application's own tracing
  sees nothing of ours.
* Ids are numbers of our own: an agent that seeds `random` neither repeats our ids nor gets other numbers
  because of us, and a child made by fork has others than its parent.
* Sampling and attribute limits of the environment do not apply: a training sample is whole or absent.
"""

import random
from dataclasses import dataclass
from typing import Any, Protocol

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import NonRecordingSpan, SpanContext, set_span_in_context

from spangrad.tracer import conventions as c
from spangrad.tracer.calls import RawCall, span_of
from spangrad.tracer.exporter import Exporter
from spangrad.tracer.journal import Journal, Record
from spangrad.tracer.propagation import SAMPLED, Destinations
from spangrad.tracer.recovery import call_record, head_of, span_record
from spangrad.tracer.redaction import Rule, redacted_span, remembering
from spangrad.tracer.wire.repeated import Reader
from spangrad.tracer.worker import Worker

_MANY = 2**20


class RandomIds(IdGenerator):
    """Ids from numbers of our own, which begin with the operating system's randomness in every process."""

    def __init__(self) -> None:
        """Draw from the operating system once: it takes longer than all else that an id needs."""
        self.begin_anew()

    def begin_anew(self) -> None:
        """Have other numbers than the process that this one was forked from."""
        self._random = random.Random()

    def generate_span_id(self) -> int:
        """64 random bits, not all zero."""
        return self._random.getrandbits(64) or 1

    def generate_trace_id(self) -> int:
        """128 random bits, not all zero."""
        return self._random.getrandbits(128) or 1


@dataclass(frozen=True, slots=True)
class EndedSpan:
    """A span that the SDK has ended."""

    span: ReadableSpan
    size_bytes: int = 4096


class _ToWorker(SpanProcessor):
    def __init__(self, worker: "Worker[Captured]") -> None:
        self._worker = worker

    def on_end(self, span: ReadableSpan) -> None:
        self._worker.put(EndedSpan(span))


class Readable(Protocol):
    """A span of ours that has ended: see `structure/spans.py`."""

    @property
    def size_bytes(self) -> int:
        """Memory that it holds on to."""
        ...

    def readable(self, resource: Resource, scope: InstrumentationScope) -> ReadableSpan:
        """Make the span, on the worker's thread."""
        ...


Captured = RawCall | EndedSpan | Readable


class Runtime:
    """The tracer of this process."""

    def __init__(
        self, target: str, exporter: Exporter, resource: Resource, destinations: Destinations, version: str
    ) -> None:
        """Make the provider and the worker; `worker.start()` and `activate` set it going."""
        self.target = target
        self.destinations = destinations
        self.redact: Rule | None = None
        """What every text goes through before it leaves the process: see `redact_with`."""
        journal = None
        if exporter.folder is not None:
            journal = Journal(exporter.folder, head_of(resource, version), self._record)
        self.worker: Worker[Captured] = Worker(exporter, self._finish, journal=journal)
        self._requests = Reader()
        self._ids = RandomIds()
        self._scope = InstrumentationScope(c.SCOPE_TRACER, version)
        self._provider = TracerProvider(
            sampler=ALWAYS_ON,
            resource=resource,
            shutdown_on_exit=False,
            id_generator=self._ids,
            span_limits=SpanLimits(
                max_attributes=_MANY,
                max_span_attributes=_MANY,
                max_event_attributes=_MANY,
                max_events=_MANY,
                max_attribute_length=_MANY * 64,
                max_span_attribute_length=_MANY * 64,
            ),
        )
        self._provider.add_span_processor(_ToWorker(self.worker))
        self._tracer = self._provider.get_tracer(c.SCOPE_TRACER, version)

    def start_span(self, name: str, parent: SpanContext | None, attributes: dict[str, Any]) -> Span:
        """Start an internal span; its context is not made current."""
        context = Context()
        if parent is not None:
            context = set_span_in_context(NonRecordingSpan(parent), context)
        span = self._tracer.start_span(name, context=context, attributes=attributes)
        assert isinstance(span, Span)  # ALWAYS_ON
        return span

    def new_context(self, parent: SpanContext | None) -> SpanContext:
        """Ids for a span that is built later."""
        return SpanContext(*self.new_ids(parent), is_remote=False, trace_flags=SAMPLED)

    def new_ids(self, parent: SpanContext | None) -> tuple[int, int]:
        """The same as numbers: trace and span."""
        trace_id = parent.trace_id if parent is not None else self._ids.generate_trace_id()
        return trace_id, self._ids.generate_span_id()

    def redact_with(self, rule: Rule | None) -> None:
        """Set the rule. With one there is no journal: the text would be in it as it is."""
        self.redact = remembering(rule)
        if rule is not None:
            self.worker.close_journal()

    def after_fork_in_child(self) -> None:
        """Start anew in a child process."""
        self._requests = Reader()  # the parent's thread may have been in the middle of it
        self._ids.begin_anew()
        self.worker.after_fork_in_child()

    def _record(self, item: Captured) -> Record:
        if isinstance(item, RawCall):
            return call_record(item)
        span = self._finish(item)
        assert span is not None  # only calls may turn out to be nothing
        return span_record(span)

    def _finish(self, item: Captured) -> ReadableSpan | None:
        if isinstance(item, EndedSpan):
            return redacted_span(item.span, self.redact)
        if isinstance(item, RawCall):
            span = span_of(item, self._provider.resource, self._scope, self._requests)
            return span if span is None or self.redact is None else redacted_span(span, self.redact)
        return redacted_span(item.readable(self._provider.resource, self._scope), self.redact)


_active: Runtime | None = None


def active() -> Runtime | None:
    """The runtime of this process, if `spangrad.init()` was called."""
    return _active


def activate(runtime: Runtime | None) -> None:
    """Make `runtime` the one of this process."""
    global _active
    _active = runtime
