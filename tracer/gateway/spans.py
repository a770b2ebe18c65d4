"""Start spans, end them once everything is known, hand them to the exporter, count them.

A call's span ends in a background task after the client has its reply, because the
policy version has to be asked again. `flush` waits for those tasks and then for the
exporter.

Invariants: a span is exported once or counted as dropped; what waits on disk for a hub is
not counted as exported, and is sent without a call or a flush once the hub takes it; the
exporter's queue never overflows unseen; recording never raises into a call; an ended span is in
the journal until it is exported, unless texts must not be on disk as they are (`redact`).

Knows OpenTelemetry. Knows no HTTP and no model calls.
"""

import asyncio
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode

from spangrad.errors import ConfigError
from spangrad.tracer import propagation
from spangrad.tracer.conventions import SCOPE_GATEWAY, storable
from spangrad.tracer.exporter import Exporter, OtherExporter
from spangrad.tracer.journal import Journal
from spangrad.tracer.otlp import OnceEncoded
from spangrad.tracer.propagation import SAMPLED, parse_traceparent
from spangrad.tracer.recovery import head_of, span_record
from spangrad.tracer.redaction import Rule, redacted_span, remembering
from spangrad.tracer.runtime import RandomIds

logger = logging.getLogger(__name__)

MAX_QUEUE = 16_384
"""Spans that wait for the exporter; the newest beyond that are dropped and counted."""
BATCH = 64
"""Spans of one export: encoding them holds the interpreter, and calls wait meanwhile."""
SCHEDULE_DELAY_MS = 100.0
WARN_EVERY_S = 30.0
DRAIN_EVERY_S = 1.0
"""How often spans that wait on disk are offered to the hub."""
RECOVER_EVERY = 10
"""Journals of killed processes are looked for every so many times."""
CLOSE_S = 5.0
"""After it, spans of a gateway that stops go to disk without a try to deliver them."""


@dataclass(frozen=True, slots=True)
class StartedSpan:
    """What is known of a span when its call begins."""

    name: str
    context: SpanContext
    parent: SpanContext | None
    start_ns: int
    trace_state: str | None
    """The caller's, passed on as it is."""


class SpanRecorder:
    """The gateway's own tracer: it shares nothing with a tracer that the process may have."""

    def __init__(self, exporter: SpanExporter, *, redact: Rule | None = None) -> None:
        """Send spans to `exporter`, which is shut down with the recorder, without what `redact` takes out.

        Raises ConfigError.
        """
        if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
            raise ConfigError("OTEL_SDK_DISABLED is 'true', so a gateway would record nothing; unset it")
        known = exporter if isinstance(exporter, Exporter) else OtherExporter(exporter)
        resource = Resource.create({"service.name": "spangrad-gateway"})
        self._journal: _Journal | None = None
        if known.folder is not None and redact is None:
            self._journal = _Journal(known.folder, resource)
        self._exporter = _CountingExporter(known, redact, self._journal)
        self._resource = resource
        self._scope = InstrumentationScope(SCOPE_GATEWAY)
        self._ids = RandomIds()
        self._processor = BatchSpanProcessor(
            self._exporter,
            max_queue_size=MAX_QUEUE,
            schedule_delay_millis=SCHEDULE_DELAY_MS,
            max_export_batch_size=BATCH,
        )
        self._open: set[asyncio.Future[None]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended = 0
        self._dropped = 0
        self._warned_at = float("-inf")

    def start(self, name: str, *, headers: Mapping[str, str], start_ns: int) -> StartedSpan:
        """Start a SERVER span below the caller's `traceparent`, or a root span.

        A caller's sampling decision is about its own traces: every span is recorded.
        """
        parent = parse_traceparent(headers.get("traceparent", ""))
        trace_id = self._ids.generate_trace_id() if parent is None else parent.trace_id
        span_id = self._ids.generate_span_id()
        context = SpanContext(trace_id, span_id, is_remote=False, trace_flags=SAMPLED)
        state = None if parent is None else headers.get("tracestate")
        return StartedSpan(_encodable(name), context, parent, start_ns, state)

    def hold(self) -> asyncio.Future[None]:
        """Make `flush` wait until the returned future is done: a call whose span is on its way."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._open.add(future)
        future.add_done_callback(self._open.discard)
        return future

    def end_later(self, work: Coroutine[Any, Any, None], held: asyncio.Future[None]) -> None:
        """Run `work`, which ends a span, in the background; `held` is done when it is."""

        async def run() -> None:
            try:
                await work
            except Exception:  # boundary: a call that can't be recorded is counted, nothing else fails
                self._drop("a call could not be recorded", exc_info=True)
            finally:
                if not held.done():
                    held.set_result(None)

        task = asyncio.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def end(
        self, span: StartedSpan, attributes: Mapping[str, Any], *, end_ns: int, error: tuple[str, str] | None
    ) -> bool:
        """Give a span its attributes and end it; `error` is its type and its message.

        Returns False if it is dropped.
        """
        status = Status(StatusCode.UNSET)
        if error is not None:
            status = Status(StatusCode.ERROR, _encodable(f"{error[0]}: {error[1]}"))
        # Not the SDK's own span: its limits cut attributes away, and before 1.45 it takes bytes for text.
        ended = OnceEncoded(
            name=span.name,
            context=span.context,
            parent=span.parent,
            resource=self._resource,
            attributes={key: _encodable(value) for key, value in attributes.items()},
            kind=SpanKind.SERVER,
            status=status,
            start_time=span.start_ns,
            end_time=end_ns,
            instrumentation_scope=self._scope,
        )
        if self._ended - self._exporter.taken >= MAX_QUEUE:
            self._drop("the exporter is too slow")
            return False
        self._ended += 1
        if self._journal is not None:
            self._journal.add(ended)
        self._processor.on_end(ended)
        return True

    async def caught_up(self, timeout_s: float) -> bool:
        """Wait until the spans of all calls that have ended have ended, too; False: it takes longer."""
        late = (await asyncio.wait(set(self._open), timeout=timeout_s))[1] if self._open else ()
        return not late

    async def flush(self, timeout_s: float) -> bool:
        """Wait until the spans of all calls that have ended are where the exporter brings them.

        Returns False if that takes longer than `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        if not await self.caught_up(timeout_s):
            return False
        return await asyncio.to_thread(self._flush_exporter, deadline)

    async def drain_while_waiting(self) -> None:
        """Offer the hub what waits on disk, also what a killed gateway left; ends when it is cancelled."""
        for turn in itertools.count():
            try:
                if turn % RECOVER_EVERY == 0:
                    await asyncio.to_thread(self._exporter.recover)
                await asyncio.to_thread(self._exporter.drain)
            except Exception:  # boundary: it must go on whatever happened
                logger.exception("spans that wait on disk could not be sent")
            await asyncio.sleep(DRAIN_EVERY_S)

    async def close(self) -> None:
        """Flush, then shut the exporter down."""
        self._exporter.close_soon(CLOSE_S)
        while self._tasks:
            await asyncio.wait(self._tasks)
        await asyncio.to_thread(self._processor.shutdown)
        if self._journal is not None:
            self._journal.close()

    def counts(self) -> dict[str, int]:
        """Spans that are in the store, dropped, and that are still waiting, in memory or on disk."""
        returned, lost, on_disk = self._exporter.returned, self._exporter.lost, self._exporter.on_disk
        return {
            "exported": max(0, returned - lost - on_disk),
            "dropped": self._dropped + lost,
            "waiting": self._ended - returned + on_disk,
        }

    def _flush_exporter(self, deadline: float) -> bool:
        self._processor.force_flush()  # what the hub does not take goes to disk, soon
        return self._exporter.force_flush(max(0, int(1000 * (deadline - time.monotonic()))))

    def _drop(self, reason: str, *, exc_info: bool = False) -> None:
        self._dropped += 1
        now = time.monotonic()
        if now - self._warned_at >= WARN_EVERY_S:
            self._warned_at = now
            logger.warning("%s: %d spans dropped so far", reason, self._dropped, exc_info=exc_info)


def traceparent(span: StartedSpan) -> dict[str, str]:
    """Headers that make `span` the parent of what the receiver records."""
    headers = {"traceparent": propagation.traceparent(span.context)}
    return headers if not span.trace_state else headers | {"tracestate": span.trace_state}


class _Journal:
    """A journal that one thread writes and another one, which exports in the same order, makes room in."""

    def __init__(self, folder: Path, resource: Resource) -> None:
        head = head_of(resource, "", SCOPE_GATEWAY)
        self._journal: Journal[ReadableSpan] = Journal(folder, head, span_record)
        self._halves: deque[int | None] = deque()
        self._lock = threading.Lock()

    def add(self, span: ReadableSpan) -> None:
        with self._lock:
            self._halves.append(self._journal.append(span))

    def exported(self, count: int) -> None:
        with self._lock:
            self._journal.release([self._halves.popleft() for _ in range(count)])

    def close(self) -> None:
        with self._lock:
            self._journal.close()


class _CountingExporter(SpanExporter):
    def __init__(self, exporter: Exporter, redact: Rule | None, journal: _Journal | None) -> None:
        self._exporter = exporter
        self._redact = remembering(redact)
        self._journal = journal
        self.taken = 0
        self.returned = 0
        """Spans that were delivered, kept on disk or lost."""
        self._failed = 0

    @property
    def lost(self) -> int:
        """Spans that will never be in the store, also those that the hub refused when it came back."""
        return self._failed + self._exporter.lost_spans

    @property
    def on_disk(self) -> int:
        return self._exporter.waiting

    def drain(self) -> None:
        self._exporter.drain(at_once=True)

    def recover(self) -> None:
        self._exporter.recover()

    def close_soon(self, within_s: float) -> None:
        self._exporter.close_soon(within_s)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.taken += len(spans)
        try:
            result = self._exporter.export([span for span in map(self._clean, spans) if span is not None])
        except Exception:  # boundary: the exporter's thread must live on
            logger.exception("%s failed to export %d spans", type(self._exporter).__name__, len(spans))
            self._failed += len(spans)
            result = SpanExportResult.FAILURE
        if self._journal is not None:
            self._journal.exported(len(spans))
        self.returned += len(spans)
        return result

    def _clean(self, span: ReadableSpan) -> ReadableSpan | None:
        try:
            return redacted_span(span, self._redact)
        except Exception:  # boundary: one span that can't be looked through must not cost the others
            logger.exception("a span could not be redacted; it is dropped")
            self._failed += 1
            return None

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)

    def shutdown(self) -> None:
        self._exporter.shutdown()


def _encodable(value: Any) -> Any:
    kind = type(value)
    if kind is str:
        return value if value.isascii() else storable(value)
    if kind is list or kind is tuple:
        return tuple(_encodable(item) for item in value)
    return value
