"""Spans of what is no model call: agents, steps, tools, retrievals.

Lighter than the SDK's: the agent's thread fills in a record, the worker makes the span. Knows the runtime;
does not know who decides what is a step. Invariants:
* A span ends once: by its owner, when too many are open (the oldest), or when recording stops; then as it is.
* What was forked belongs to the parent process: a child ends none of its spans.
* Nothing here raises.
"""

import os
import time
from dataclasses import dataclass, field, replace
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode

from spangrad.tracer import conventions as c
from spangrad.tracer.runtime import Runtime
from spangrad.tracer.span_size import cut
from spangrad.tracer.structure.json_text import json_text

MAX_OPEN = 16_384
"""Spans that may be open at once in a process."""
_MESSAGE_CHARS = 500

_open: dict["OpenSpan", None] = {}
"""Spans in progress, oldest first. Each is in here until it ends: whoever takes it out ends it."""


@dataclass(slots=True, eq=False)
class OpenSpan:
    """A span that is being filled in."""

    name: str
    context: SpanContext
    parent: SpanContext | None
    attributes: dict[str, Any]
    start_ns: int
    runtime: Runtime
    process: int
    end_ns: int = 0
    status: Status | None = None
    events: list[Event] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)
    """What is not as it was, and why."""

    @property
    def size_bytes(self) -> int:
        """Memory that the span holds on to."""
        return 1000 + sum(len(value) for value in self.attributes.values() if isinstance(value, str))

    @property
    def is_open(self) -> bool:
        """Whether something can still be added, here."""
        return self in _open and self.process == os.getpid()

    def set_json(self, name: str, value: Any) -> None:
        """Set an attribute to the JSON of `value`; what was cut is named in `spangrad.dropped`."""
        self.attributes[name], is_cut = json_text(value)
        if is_cut:
            self.dropped[name] = "cut: it is too long"

    def end(self, error: BaseException | None = None) -> None:
        """End it, for the first time only; an error gives it the status ERROR."""
        if _take(self):
            self.finish(error)

    def finish(self, error: BaseException | None) -> None:
        """Hand it to the worker. For whoever has taken it out of the open ones."""
        if self.process != os.getpid():
            return
        self.end_ns = time.time_ns()
        if error is not None and not isinstance(error, GeneratorExit):
            if _is_graph_signal(error):
                self.attributes[c.INTERRUPTED] = type(error).__name__.endswith("Interrupt")
            else:
                self.attributes[c.ERROR_TYPE] = type_name(error)
                self.status = Status(StatusCode.ERROR, _message(error))
        if self.dropped:
            self.attributes[c.DROPPED] = json_text(self.dropped)[0]
        self.runtime.worker.put(self)

    def readable(self, resource: Resource, scope: InstrumentationScope) -> ReadableSpan:
        """The span, on the worker's thread."""
        return ReadableSpan(
            name=c.storable(self.name),
            context=self.context,
            parent=self.parent,
            resource=resource,
            attributes={
                name: c.storable(value) if isinstance(value, str) else value
                for name, value in self.attributes.items()
            },
            events=self.events,
            kind=SpanKind.INTERNAL,
            status=self.status or Status(StatusCode.UNSET),
            start_time=self.start_ns,
            end_time=self.end_ns,
            instrumentation_scope=scope,
        )


def begin_span(
    runtime: Runtime,
    name: str,
    parent: SpanContext | None,
    attributes: dict[str, Any],
    start_ns: int | None = None,
) -> OpenSpan:
    """Begin a span below `parent`; without one it begins a trace."""
    context = runtime.new_context(parent)
    span = OpenSpan(name, context, parent, attributes, start_ns or time.time_ns(), runtime, os.getpid())
    _open[span] = None
    if len(_open) > MAX_OPEN:
        _end_oldest()
    return span


def end_open_spans() -> None:
    """End what is open, as it is: recording is about to end. Neither blocks nor raises."""
    for span in list(_open):
        _end_as_it_is(span)


def type_name(error: BaseException) -> str:
    """The class of an error, with its module unless it is built in."""
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _take(span: OpenSpan) -> bool:
    try:
        del _open[span]
    except KeyError:
        return False
    return True


def _end_oldest() -> None:
    try:
        oldest = next(iter(_open))
    except (StopIteration, RuntimeError):  # another thread is at it
        return
    _end_as_it_is(oldest)


def _end_as_it_is(span: OpenSpan) -> None:
    if _take(span):  # a copy, to which its owner adds nothing any more
        dropped = span.dropped | {"end": "it was still open"}
        copy = replace(span, attributes=dict(span.attributes), events=list(span.events), dropped=dropped)
        copy.finish(None)


def _message(error: BaseException) -> str | None:
    try:
        return cut(c.storable(str(error)), _MESSAGE_CHARS) or None
    except Exception:  # the application's __str__
        return None


def _is_graph_signal(error: BaseException) -> bool:
    """Whether LangGraph raised it to stop a node: an interrupt, or a command to the graph above."""
    return any(kind.__name__ == "GraphBubbleUp" for kind in type(error).__mro__)
