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
import json
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from uuid import UUID

from opentelemetry.trace import SpanContext

from spangrad.tracer import conventions as c
from spangrad.tracer.carried import carry
from spangrad.tracer.current import Rollout, current_rollout
from spangrad.tracer.propagation import parse_traceparent, traceparent
from spangrad.tracer.steps import current_config, run_of, step_of
from spangrad.tracer.structure.spans import OpenSpan

MAX_RUNS = 16_384
"""LangChain runs that are remembered at once."""


@dataclass(slots=True, eq=False)
class Scope:
    """A step or tool in progress."""

    context: SpanContext
    rollout: Rollout | None
    run_id: UUID | None
    """The LangChain run whose code it is in."""
    step: dict[str, Any]
    """Attributes that name the step."""
    counter: "itertools.count[int]" = field(default_factory=itertools.count)
    """Numbers the steps below it, where there is no rollout to do so."""
    span: OpenSpan | None = None
    """None in a process that has got the scope from another one."""
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
    retrievals: dict[UUID, None] = field(default_factory=dict)
    """Retrievals in progress below it; LangChain does not end those that are cancelled."""


MARKS: ContextVar[Marks | None] = ContextVar("spangrad_marks", default=None)
RETRIEVAL: ContextVar[UUID | None] = ContextVar("spangrad_retrieval", default=None)
"""The retrieval that was begun last in this context: LangChain's config does not tell. It counts only while
it is in progress, and for code of the run that began it."""

_runs: dict[UUID, Run] = {}


def is_same(one: Rollout | None, other: Rollout | None) -> bool:
    """Whether both are the same attempt of a rollout, or none."""
    if one is other:
        return True
    if one is None or other is None:
        return False
    return (one.rollout_id, one.attempt) == (other.rollout_id, other.attempt)


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
    if scope is not None and not is_same(scope.rollout, rollout):
        scope = None
    if scope is not None and scope.run_id == run_id:
        return scope.context, scope.step
    found = run(run_id)
    if found is not None and is_same(found.rollout, rollout):
        return found.anchor, found.step
    if scope is not None:
        return scope.context, scope.step
    return (rollout.context if rollout is not None else None), {}


def place_of_call(rollout: Rollout | None) -> tuple[SpanContext | None, dict[str, Any]]:
    """Parent of a model call that begins here, and what is known of its place."""
    config = current_config()
    marks = MARKS.get()
    if config is None and marks is None and RETRIEVAL.get() is None:  # as below, in a third of the time
        return (rollout.context if rollout is not None else None), {}
    attributes = step_of(config)
    parent, step = parent_of(rollout, current_run(config), marks)
    attributes.update(step)
    if marks is not None:
        if marks.state is not None and is_same(marks.state_rollout, rollout):
            attributes[c.STATE_KEY] = marks.state
        if marks.purpose is not None:
            attributes[c.PURPOSE] = marks.purpose
    return parent, attributes


def marks_here() -> Marks | None:
    """The marks for a thread or process that begins here and does not get LangChain's config.

    What it does is below the node or tool that begins it, though no mark of ours says so.
    """
    marks, run_id = MARKS.get(), current_run(current_config())
    scope = marks.scope if marks is not None else None
    found = run(run_id)
    if found is None or found.anchor is None or (scope is not None and scope.run_id == run_id):
        return marks
    rollout = current_rollout()
    if not is_same(found.rollout, rollout):
        return marks
    within = scope.within if scope is not None and is_same(scope.rollout, rollout) else None
    return (marks or Marks())._replace(scope=Scope(found.anchor, rollout, None, found.step, within=within))


def pack_marks(marks: Marks) -> str | None:
    """The marks for another process, whose calls are below the same step or tool."""
    scope, rollout = marks.scope, marks.state_rollout
    packed: dict[str, Any] = {"purpose": marks.purpose, "state": marks.state}
    if rollout is not None:
        packed["state_rollout"] = [rollout.rollout_id, rollout.attempt]
    if scope is not None:
        packed["parent"] = traceparent(scope.context)
        packed["step"] = scope.step
        if scope.rollout is not None:
            packed["rollout"] = [scope.rollout.rollout_id, scope.rollout.attempt]
    return json.dumps(packed)


def unpack_marks(text: str) -> Marks | None:
    """Undo `pack_marks`; None if `text` is not of its making."""
    try:
        packed = json.loads(text)
        context = parse_traceparent(packed.get("parent", ""))
        scope = None
        if context is not None:
            scope = Scope(context, _named_rollout(packed.get("rollout")), None, dict(packed["step"]))
            scope.within = scope
        state_rollout = _named_rollout(packed.get("state_rollout"))
        return Marks(scope, packed["state"], state_rollout, packed["purpose"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _named_rollout(named: Any) -> Rollout | None:
    return None if named is None else Rollout(str(named[0]), int(named[1]), None, None)


carry("marks", MARKS, pack=pack_marks, unpack=unpack_marks)
