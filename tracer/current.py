"""The rollout that the current code belongs to, and its rewards.

Knows contexts, threads and the environment; it does not know who begins a rollout (`rollout.py`) nor HTTP.

Invariants:
* The current rollout lives in a context variable of ours. Tasks and copied contexts inherit it, threads and
  processes get it from `following.py`. A thread that has it from neither (made by C code, or before the
  rollout began) belongs to the open rollout if no other has been open beside it; otherwise to none.
* A rollout that has ended is current nowhere: not in a thread, task or context that outlives it, nor where a
  generator was left in the middle of it. The one around it is, if it is open.
* A forked child neither ends nor changes a root span of its parent; its rewards are spans of their own.
* Code outside of any rollout belongs to the one that SPANGRAD_ROLLOUT names (`spangrad run`).
* A reward never raises. One that is no finite number is said in a warning and not recorded.
"""

import functools
import itertools
import logging
import math
import os
import threading
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, quote, unquote

from opentelemetry.sdk.trace import Span
from opentelemetry.trace import SpanContext, Status, StatusCode

from spangrad.tracer import children
from spangrad.tracer import conventions as c
from spangrad.tracer.carried import carry
from spangrad.tracer.periodically import Periodically
from spangrad.tracer.propagation import parse_traceparent, traceparent
from spangrad.tracer.runtime import Runtime, active

logger = logging.getLogger(__name__)

ENVIRONMENT = children.ROLLOUT
UNFINISHED = "unfinished"
"""`error.type` of a rollout that was open when its process ended."""


@dataclass(slots=True, eq=False)
class Rollout:
    """One run of an agent on one task."""

    rollout_id: str
    attempt: int
    task_id: str | None
    context: SpanContext | None
    """Of the root span; None if the tracer is not set up."""
    span: Span | None = field(repr=False, default=None)
    """The root span, if it is this process's."""
    outer: "Rollout | None" = field(repr=False, default=None)
    """The rollout in which it began."""
    is_shared: bool = field(repr=False, default=False)
    """Another rollout was open in this process at the same time."""
    is_over: bool = field(repr=False, default=False)
    """It has ended, in this process."""
    steps: "itertools.count[int]" = field(repr=False, default_factory=itertools.count)
    """Numbers the steps that `spangrad.step` marks."""

    def reward(self, value: float, *, name: str = "reward", explanation: str | None = None) -> None:
        """Give the rollout a number. Several are kept, each with its name."""
        _reward(self, value, name, explanation)

    def fail(self, reason: str) -> None:
        """Mark the rollout as failed where no exception says so."""
        if self.span is not None:
            reason = c.storable(reason)
            self.span.set_status(Status(StatusCode.ERROR, reason))
            self.span.set_attribute(c.ERROR_TYPE, reason)

    def __reduce__(self) -> tuple[Any, ...]:
        """Its names go to another process, its root span stays."""
        return _from_environment, (to_environment(self),)


_current: ContextVar[Rollout | None] = ContextVar("spangrad_rollout", default=None)
_open: list[Rollout] = []
_open_lock = threading.Lock()
_said = Periodically()


def _after_fork_in_child() -> None:
    global _open_lock
    _open_lock = threading.Lock()
    for rollout in _open:
        rollout.span = None
    _open.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


def open_rollout(rollout: Rollout) -> None:
    """Count `rollout` among those that are open in this process."""
    with _open_lock:
        _open.append(rollout)
        if len(_open) > 1:
            for other in _open:
                other.is_shared = True


def close_rollout(rollout: Rollout) -> None:
    """Undo `open_rollout`: it is over."""
    rollout.is_over = True
    with _open_lock:
        if rollout in _open:
            _open.remove(rollout)


def end_open_rollouts() -> None:
    """End the root spans of rollouts that are still open, as failed: the process is about to end."""
    for rollout in _open.copy():
        if rollout.span is not None and rollout.span.is_recording():
            rollout.fail(UNFINISHED)
            rollout.span.end()


def open_rollout_of(rollout_id: str, attempt: int) -> Rollout | None:
    """The rollout of these names, if it is open in this process."""
    return next((r for r in _open.copy() if (r.rollout_id, r.attempt) == (rollout_id, attempt)), None)


def enclosing_rollout() -> Rollout | None:
    """The rollout of this context alone."""
    rollout = _current.get()
    while rollout is not None and rollout.is_over:
        rollout = rollout.outer
    return rollout


def enter(rollout: Rollout | None) -> Rollout | None:
    """Make `rollout` that of this context. Returns the one before."""
    before = _current.get()
    _current.set(rollout)
    return before


def leave(rollout: Rollout, before: Rollout | None) -> None:
    """Undo `enter`, unless this is another context: the end of a generator may come anywhere."""
    if _current.get() is rollout:
        _current.set(before)


def is_entered(rollout: Rollout) -> bool:
    """Whether `rollout` is what this context has entered last."""
    return _current.get() is rollout


def current_rollout() -> Rollout | None:
    """The rollout that this code belongs to: its own, the process's (`spangrad run`), or none."""
    rollout = enclosing_rollout()
    if rollout is not None:
        return rollout
    # Not `current_thread`: that makes an object for a thread that Python did not start, and lists it.
    if _open and threading.get_ident() != threading.main_thread().ident:
        candidates = list(_open)
        if len(candidates) == 1 and not candidates[0].is_shared:
            return candidates[0]
    return _process_rollout()


def reward(value: float, *, name: str = "reward", explanation: str | None = None) -> None:
    """Give the current rollout a number.

    It is stored as written by the agent; a trainer uses such rewards only if it is told to.
    """
    rollout = current_rollout()
    if rollout is None:
        if _said.due():
            logger.warning("spangrad.reward(%r) outside of any rollout has no effect", value)
        return
    rollout.reward(value, name=name, explanation=explanation)


def started_runtime() -> Runtime | None:
    """The tracer of this process; under `spangrad run` it is set up when it is first needed."""
    if active() is None and ENVIRONMENT in os.environ:
        from spangrad.tracer import setup

        setup.init()
    return active()


def rollout_attributes(rollout: Rollout) -> dict[str, Any]:
    """Attributes that name the rollout, on its root and on each of its model calls."""
    attributes: dict[str, Any] = {c.ROLLOUT_ID: rollout.rollout_id, c.ATTEMPT: rollout.attempt}
    if rollout.task_id is not None:
        attributes[c.TASK_ID] = rollout.task_id
    return attributes


def to_environment(rollout: Rollout) -> str:
    """The value of SPANGRAD_ROLLOUT that makes a child process part of `rollout`."""
    fields = [quote(rollout.rollout_id, safe=""), f"attempt={rollout.attempt}"]
    if rollout.task_id is not None:
        fields.append(f"task={quote(rollout.task_id, safe='')}")
    if rollout.context is not None:
        fields.append(f"traceparent={traceparent(rollout.context)}")
    return "&".join(fields)


@functools.lru_cache(maxsize=4)
def _from_environment(value: str) -> Rollout:
    head, _, rest = value.partition("&")
    fields = dict(parse_qsl(rest))
    attempt = fields.get("attempt", "0")
    context = parse_traceparent(fields.get("traceparent", ""))
    return Rollout(unquote(head), int(attempt) if attempt.isdecimal() else 0, fields.get("task"), context)


carry("rollout", _current, pack=to_environment, unpack=_from_environment, read=enclosing_rollout)


def _process_rollout() -> Rollout | None:
    value = os.environ.get(ENVIRONMENT)
    return _from_environment(value) if value else None


def reward_attributes(value: float, name: str, explanation: str | None) -> dict[str, Any]:
    """Attributes of a reward's event. Raises ValueError or TypeError if it is no finite number."""
    number = float(value)
    if not math.isfinite(number):
        raise ValueError("a reward is a finite number; one that is missing is not given")
    attributes: dict[str, Any] = {c.REWARD_NAME: c.storable(name), c.REWARD_VALUE: number}
    if explanation is not None:
        attributes[c.REWARD_EXPLANATION] = c.storable(explanation)
    return attributes


def _reward(rollout: Rollout, value: float, name: str, explanation: str | None) -> None:
    try:
        attributes = reward_attributes(value, name, explanation)
        if rollout.span is not None and rollout.span.is_recording():
            rollout.span.add_event(c.REWARD_EVENT, attributes)
            return
        runtime = active()
        if runtime is None:
            return
        # The root span has ended, or belongs to the process that started this one.
        span = runtime.start_span("reward", rollout.context, rollout_attributes(rollout))
        span.add_event(c.REWARD_EVENT, attributes)
        span.end()
    except Exception:  # the boundary: the agent must run
        logger.warning("reward %r of rollout %r was not recorded", value, rollout.rollout_id, exc_info=True)
