"""Dialect: how one family of recorders tells of a model call in a span."""

from collections.abc import Callable
from dataclasses import dataclass

from spangrad.adapters.reading import Reading
from spangrad.store.records import Span


@dataclass(frozen=True, slots=True)
class Names:
    """What a span names: of itself, if it is a call, and of the calls below it."""

    agent: str | None = None
    step: str | None = None
    step_index: int | None = None
    conversation: str | None = None


@dataclass(frozen=True, slots=True)
class Dialect:
    """One dialect: how its spans are known, which of them are model calls, and what those say.

    All are pure functions of one span, `with_parent` also of a reading. They never raise, whatever the span
    holds: what can't be read is a fault of the reading.
    """

    name: str
    """What reports call it: `otel_genai`."""
    wrote: Callable[[Span], bool]
    """Whether a span is told in this dialect, model call or not."""
    is_call: Callable[[Span], bool]
    """Whether a span of this dialect is a model call."""
    read: Callable[[Span], Reading]
    """Read a call span of this dialect."""
    names: Callable[[Span], Names] | None = None
    """What a span names for the calls below it; None if only the conventions' attributes do."""
    with_parent: Callable[[Reading, Span], Reading] | None = None
    """Fill in what only the span right above a call says of it."""
    trace_span_id: str | None = None
    """Id that the span has, in every trace, that names the conversation of all calls in it."""
