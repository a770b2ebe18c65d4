"""Where in the agent the calling code is: in which step, tool or graph node, looking at which state.

Two things tell: the marks that `spangrad.step` and its like leave in one context variable of ours
(`MARKS`), and the LangChain run that the runnable config names. Knows how they nest; does not know HTTP.

Invariants:
* Of a mark and a run, the inner one counts: a mark knows the run that it was made in, and a run the mark.
* What belongs to another rollout than the current one does not count.
* Runs are found by their ids alone, never by what happens to be current, so one handler serves any number
  of runs at once. A run that never ends is forgotten when there are too many.
"""

import itertools
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from uuid import UUID

from opentelemetry.trace import SpanContext

from spangrad.tracer import conventions as c
from spangrad.tracer.current import Rollout
from spangrad.tracer.steps import current_config, run_of, step_of
from spangrad.tracer.structure.spans import OpenSpan

MAX_RUNS = 16_384
"""LangChain runs that are remembered at once."""


@dataclass(slots=True, eq=False)
class Scope:
    """A step or tool in progress."""

    span: OpenSpan
    rollout: Rollout | None
    run_id: UUID | None
    """The LangChain run whose code it is in."""
    step: dict[str, Any]
    """Attributes that name the step."""
    counter: "itertools.count[int]" = field(default_factory=itertools.count)
    """Numbers the steps below it, where there is no rollout to do so."""
    within: "Scope | None" = None
    """The innermost step: itself, or the one around a tool."""


class Marks(NamedTuple):
    """What was marked around the calling code."""

    scope: Scope | None = None
    state: str | None = None
    state_rollout: Rollout | None = None
    """The rollout in which the state was set; it ends with it."""
    purpose: str | None = None
    owner: object | None = None
    """Who made these marks, and undoes them."""
    outer: "Marks | None" = None
    """What is there again afterwards."""


@dataclass(slots=True, eq=False)
class Run:
    """A LangChain run in progress."""

    run_id: UUID
    parent_id: UUID | None
    name: str
    start_ns: int
    rollout: Rollout | None
    anchor: SpanContext | None
    """Parent of the spans below it: its own span, or the nearest one above."""
    step: dict[str, Any]
    """Attributes that name the step that it is in."""
    metadata: Any = None
    span: OpenSpan | None = None
    retrievals: list[UUID] | None = None
    """Retrievals below it; LangChain does not end those that are cancelled."""


MARKS: ContextVar[Marks | None] = ContextVar("spangrad_marks", default=None)
RETRIEVAL: ContextVar[UUID | None] = ContextVar("spangrad_retrieval", default=None)
"""The retrieval that was begun last in this context: LangChain's config does not tell. It counts only while
it is in progress, and for code of the run that began it."""

_runs: dict[UUID, Run] = {}


def run(run_id: UUID | None) -> Run | None:
    """A run in progress that was seen to begin."""
    return None if run_id is None else _runs.get(run_id)


def remember(new: Run) -> None:
    """A run has begun."""
    _runs[new.run_id] = new
    if len(_runs) > MAX_RUNS:
        try:
            oldest = next(iter(_runs))
        except (StopIteration, RuntimeError):  # another thread is at it
            return
        forget(oldest)


def forget(run_id: UUID) -> Run | None:
    """A run has ended."""
    return _runs.pop(run_id, None)


def current_run(config: Any) -> UUID | None:
    """The LangChain run whose code is running."""
    run_id = run_of(config)
    hint = RETRIEVAL.get()
    if hint is not None:
        retrieval = _runs.get(hint)
        if retrieval is not None and retrieval.parent_id == run_id:
            return hint
    return run_id


def parent_of(
    rollout: Rollout | None, run_id: UUID | None, marks: Marks | None
) -> tuple[SpanContext | None, dict[str, Any]]:
    """The innermost span around code of this run under these marks, and the attributes of its step."""
    scope = marks.scope if marks is not None else None
    if scope is not None and scope.rollout is not rollout:
        scope = None
    if scope is not None and scope.run_id == run_id:
        return scope.span.context, scope.step
    found = run(run_id)
    if found is not None and found.rollout is rollout:
        return found.anchor, found.step
    if scope is not None:
        return scope.span.context, scope.step
    return (rollout.context if rollout is not None else None), {}


def place_of_call(rollout: Rollout | None) -> tuple[SpanContext | None, dict[str, Any]]:
    """Parent of a model call that begins here, and what is known of its place."""
    config = current_config()
    marks = MARKS.get()
    attributes = step_of(config)
    parent, step = parent_of(rollout, current_run(config), marks)
    attributes.update(step)
    if marks is not None:
        if marks.state is not None and marks.state_rollout is rollout:
            attributes[c.STATE_KEY] = marks.state
        if marks.purpose is not None:
            attributes[c.PURPOSE] = marks.purpose
    return parent, attributes
