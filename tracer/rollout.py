"""Mark a function or a block as one rollout: one run of an agent on one task.

Knows functions, generators and the runtime; it does not know HTTP.

Invariants:
* What the function returns, raises or yields passes through unchanged; also `CancelledError`, `SystemExit`
  and the like, which are recorded first.
* Between two items of a generator its rollout is not current for the consumer. It ends when the generator
  does, wherever that is: in another task or thread, or when it is collected as garbage.
* The root span is ended by the process that began it, once.
* Text that UTF-8 can't hold (lone surrogates) is recorded with backslash escapes.
* A rollout inside a rollout that names no id of its own is a part of the outer one.
"""

import logging
import os
import traceback
import uuid
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar, overload

from opentelemetry.sdk.trace import Span
from opentelemetry.trace import Status, StatusCode

from spangrad.tracer import conventions as c
from spangrad.tracer.current import (
    Rollout,
    close_rollout,
    enclosing_rollout,
    enter,
    is_entered,
    leave,
    open_rollout,
    rollout_attributes,
    started_runtime,
)
from spangrad.tracer.periodically import Periodically
from spangrad.tracer.runtime import Runtime
from spangrad.tracer.structure.spans import type_name
from spangrad.tracer.wrapping import wrap

logger = logging.getLogger(__name__)

_said = Periodically()

F = TypeVar("F", bound=Callable[..., Any])


@overload
def rollout(function: F, /) -> F: ...


@overload
def rollout(
    *,
    rollout_id: str | None = None,
    task_id: str | None = None,
    attempt: int = 0,
    name: str | None = None,
) -> "RolloutScope": ...


def rollout(
    function: F | None = None,
    /,
    *,
    rollout_id: str | None = None,
    task_id: str | None = None,
    attempt: int = 0,
    name: str | None = None,
) -> "F | RolloutScope":
    """Mark a function (as a decorator) or a block (`with`, `async with`) as one rollout.

    Args:
        function: Sync, async or generator function; each call is a rollout.
        rollout_id: Default: a new one for every call.
        task_id: What the agent was asked; rollouts of the same task are compared with each other.
        attempt: Retry number, from 0.
        name: Of the root span; default: the function's name, or `rollout`.

    Returns:
        The decorated function, or an object that decorates and that `with` gives a `Rollout`.
    """
    scope = RolloutScope(rollout_id, task_id, attempt, name)
    return scope if function is None else scope(function)


class RolloutScope:
    """A decorator and a context manager; made by `rollout(...)`."""

    def __init__(self, rollout_id: str | None, task_id: str | None, attempt: int, name: str | None) -> None:
        """See `rollout`."""
        # Whatever was given: a number or a UUID can't be a header's value.
        self._rollout_id = rollout_id if rollout_id is None else c.storable(str(rollout_id))
        self._task_id = task_id if task_id is None else c.storable(str(task_id))
        self._attempt = attempt
        self._name = name if name is None else c.storable(str(name))
        self._entered: list[_Run] = []

    def __call__(self, function: F) -> F:
        """Decorate `function`."""
        name = self._name or str(getattr(function, "__name__", "rollout"))
        return wrap(function, lambda args, kwargs: self._begin(name))

    def __enter__(self) -> Rollout:
        """Begin the rollout and make it current."""
        run = self._begin(self._name or "rollout")
        run.enter()
        self._entered.append(run)
        return run.rollout

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it; an error is recorded and goes on."""
        run = next((run for run in reversed(self._entered) if is_entered(run.rollout)), self._entered[-1])
        self._entered.remove(run)
        run.leave()
        run.end(error)

    async def __aenter__(self) -> Rollout:
        """Begin the rollout and make it current."""
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it; an error is recorded and goes on."""
        self.__exit__(kind, error, trace)

    def _begin(self, name: str) -> "_Run":
        outer = enclosing_rollout()
        if outer is not None and self._rollout_id in (None, outer.rollout_id):
            return _Run(outer, name, is_root=False)
        rollout_id = self._rollout_id or f"r-{uuid.uuid4().hex}"
        rollout = Rollout(rollout_id, self._attempt, self._task_id, None, outer=outer)
        return _Run(rollout, name, is_root=True)


class _Run:
    """The time between a rollout's begin and end, or that of a part of it: an `Around` of `wrap`."""

    def __init__(self, rollout: Rollout, name: str, *, is_root: bool) -> None:
        self.rollout = rollout
        self._is_root = is_root
        self._process_id = os.getpid()
        self._before: Rollout | None = None
        self._span: Span | None = None
        try:
            runtime = started_runtime()
            if runtime is not None:
                self._start(runtime, name)
            elif _said.due():
                logger.warning("a rollout begins before spangrad.init(): it is not recorded")
        except Exception:  # the boundary: the agent must run
            logger.warning("a rollout could not be recorded", exc_info=True)

    def enter(self) -> None:
        self._before = enter(self.rollout)

    def leave(self) -> None:
        leave(self.rollout, self._before)

    def end(self, error: BaseException | None, result: object = None) -> None:
        if self._process_id != os.getpid():  # a forked child comes back through its parent's code
            return
        if self._is_root:
            close_rollout(self.rollout)
        try:
            span = self._span
            if span is None or not span.is_recording():
                return
            try:
                if error is not None and not isinstance(error, GeneratorExit):
                    _record_error(span, error)
            finally:
                span.end()
        except Exception:  # the boundary, as above
            logger.warning("the end of a rollout could not be recorded", exc_info=True)

    def _start(self, runtime: Runtime, name: str) -> None:
        rollout = self.rollout
        attributes: dict[str, Any] = rollout_attributes(rollout)
        if self._is_root:
            attributes[c.SPAN_ROLE] = "rollout"
        self._span = runtime.start_span(name, None if self._is_root else rollout.context, attributes)
        if self._is_root:
            rollout.span, rollout.context = self._span, self._span.get_span_context()
            open_rollout(rollout)


def _record_error(span: Span, error: BaseException) -> None:
    """Record an error, first what its own `__str__` can't prevent."""
    span.set_attribute(c.ERROR_TYPE, type_name(error))
    span.set_status(Status(StatusCode.ERROR))
    span.set_status(Status(StatusCode.ERROR, c.storable(str(error))[:500]))
    span.record_exception(error, _storable_parts(error))


def _storable_parts(error: BaseException) -> dict[str, str]:
    """What OTel would record of an error as it is, where that can't be sent: see `c.storable`."""
    parts = {
        "exception.message": str(error),
        "exception.stacktrace": "".join(traceback.format_exception(error)),
    }
    return {name: c.storable(text) for name, text in parts.items() if c.storable(text) != text}
