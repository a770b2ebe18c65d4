"""`spangrad.step`, `tool`, `state` and `purpose`: say what the code is doing, by decoration.

Knows functions and the marks of `place.py`; does not know HTTP or LangChain.

Invariants:
* What is marked returns, raises and yields what it would without; nothing of ours raises or blocks.
* Marks belong to a context: tasks and copied contexts inherit them, nothing else does. They end with the
  block or function; a state that was set inside ends with the step, tool or rollout that it was set in.
* Between two items of a marked generator its marks are not its consumer's.
* Without `spangrad.init()` marks have no effect; that is said once.
* A tool that LangChain records already is one span.
"""

import contextlib
import functools
import hashlib
import inspect
import itertools
import json
import logging
from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal, TypeVar, overload

from opentelemetry.sdk.trace import Event

from spangrad.tracer import conventions as c
from spangrad.tracer.current import current_rollout, reward_attributes, rollout_attributes, started_runtime
from spangrad.tracer.current import reward as rollout_reward
from spangrad.tracer.periodically import Periodically
from spangrad.tracer.runtime import Runtime
from spangrad.tracer.steps import current_config
from spangrad.tracer.structure.place import MARKS, Marks, Scope, current_run, is_same, parent_of, run
from spangrad.tracer.structure.spans import OpenSpan, begin_span
from spangrad.tracer.wrapping import NO_RESULT, arguments_of, wrap

logger = logging.getLogger(__name__)

MAX_STATE_CHARS = 512
"""A longer state key is replaced by its hash."""

F = TypeVar("F", bound=Callable[..., Any])
Role = Literal["step", "tool"]

_said = Periodically()
_said_not_set_up = False


@overload
def step(function: F, /) -> F: ...


@overload
def step(name: str | None = None, /) -> "Mark": ...


def step(function: Any = None, /) -> Any:
    """Mark a function (as a decorator) or a block (`with`, `async with`) as a step of the rollout.

    The model calls inside get the step's name and its number in the rollout, counted from 0 as steps begin.
    Inside it `spangrad.reward` rewards the step.

    Args:
        function: Sync, async or generator function; or the name of the step. Default: the function's name.
    """
    return _mark(_StepMark, function)


@overload
def tool(function: F, /) -> F: ...


@overload
def tool(name: str | None = None, /) -> "Mark": ...


def tool(function: Any = None, /) -> Any:
    """Mark a function (as a decorator) or a block as a tool: its arguments and result are recorded.

    Args:
        function: Sync, async or generator function, of which nothing is recorded but its arguments; or the
            name of the tool. Default: the function's name. LangChain's tools are recorded anyway, and are
            returned as they are.
    """
    return _mark(_ToolMark, function)


def purpose(purpose: str, /) -> "Mark":
    """Say what the model calls inside are for: agent, title, summary, judge, embedding, other.

    Decorates functions, and works as `with` and `async with`. It outweighs what the rules of the adapters
    find; calls whose purpose isn't `agent` are not trained.
    """
    return _PurposeMark(purpose)


def state(key: object, /) -> "State":
    """Say what the agent is looking at: equal keys are the same state, whatever the messages say.

    It holds for the model calls that follow in this context, until the next `state` or until the step, tool
    or rollout ends; as `with spangrad.state(key):` until the block does.

    Args:
        key: A string, or something that JSON can express. One above 512 characters is recorded as its hash.
    """
    before = MARKS.get()
    if _runtime() is not None:
        text = _key_text(key)
        if text is not None:
            marks = before or Marks()
            MARKS.set(marks._replace(state=text, state_rollout=current_rollout()))
    return State(before)


class State(contextlib.AbstractContextManager[None], contextlib.AbstractAsyncContextManager[None]):
    """What `spangrad.state` returns; `with` ends the state with the block."""

    def __init__(self, before: Marks | None) -> None:
        """`before`: what was marked before the state was set."""
        self._before = before

    def __exit__(self, *_: object) -> None:
        """Look at what was looked at before."""
        before, marks = self._before or Marks(), MARKS.get()
        if marks is not None:
            MARKS.set(marks._replace(state=before.state, state_rollout=before.state_rollout))

    async def __aexit__(self, *_: object) -> None:
        """As `__exit__`."""
        self.__exit__()


class Mark:
    """A decorator and a context manager."""

    def __init__(self, name: str | None) -> None:
        """`name`: what is marked; by default the name of the decorated function."""
        self._name = None if name is None else str(name)
        self._entered: list[_Around] = []

    def __call__(self, function: F) -> F:
        """Decorate `function`."""
        return wrap(function, functools.partial(self._begin, function))

    def __enter__(self) -> None:
        """Mark what follows."""
        around = self._begin(None, (), {})
        around.enter()
        self._entered.append(around)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The end of it; an error is recorded and goes on."""
        around = self._innermost()
        if around is not None:
            around.leave()
            around.end(error, NO_RESULT)

    async def __aenter__(self) -> None:
        """As `__enter__`."""
        self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """As `__exit__`."""
        self.__exit__(kind, error, trace)

    def _innermost(self) -> "_Around | None":
        """The block to end: this context's last one of this mark, which other threads may use as well."""
        marks = MARKS.get()
        while marks is not None:
            if isinstance(marks.owner, _Around) and marks.owner in self._entered:
                self._entered.remove(marks.owner)
                return marks.owner
            marks = marks.outer
        return self._entered.pop() if self._entered else None

    def _begin(
        self, function: Callable[..., Any] | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> "_Around":
        try:
            runtime = _runtime()
            if runtime is not None:
                return self._around(runtime, function, args, kwargs)
        except Exception:  # the boundary: the agent must run
            _log_failure()
        return _Around()

    def _around(
        self,
        runtime: Runtime,
        function: Callable[..., Any] | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> "_Around":
        raise NotImplementedError

    def _name_of(self, function: Callable[..., Any] | None, default: str) -> str:
        return c.storable(self._name or str(getattr(function, "__name__", default)))


class _Around:
    """Around one block or run of a function; this one does nothing."""

    def enter(self) -> None:
        """Nothing is marked."""

    def leave(self) -> None:
        """Nothing was."""

    def end(self, error: BaseException | None, result: Any) -> None:
        """Nothing is recorded."""


class _Marked(_Around):
    """Marks that hold while the code runs."""

    def __init__(self, marks: Marks, span: OpenSpan | None = None, *, is_tool: bool = False) -> None:
        self._marks = marks._replace(owner=self)
        self.span = span
        self._is_tool = is_tool
        self._outer: Marks | None = None

    def enter(self) -> None:
        self._outer = MARKS.get()
        MARKS.set(self._marks)

    def leave(self) -> None:
        marks = MARKS.get()
        if marks is not None and marks.owner is self:
            self._marks = marks  # a state that was set inside, for when a generator goes on
        while marks is not None and marks.owner is not self:
            marks = marks.outer
        if marks is not None:  # else it is another context, such as one that ends an abandoned generator
            MARKS.set(self._outer)

    def end(self, error: BaseException | None, result: Any) -> None:
        span = self.span
        if span is None:
            return
        try:
            if self._is_tool and result is not NO_RESULT and span.is_open:
                span.set_json(c.TOOL_RESULT, result)
            span.end(error)
        except Exception:  # the boundary: the agent must run
            _log_failure()


class _StepMark(Mark):
    def _around(
        self,
        runtime: Runtime,
        function: Callable[..., Any] | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> _Around:
        name = self._name_of(function, "step")
        return _scope(runtime, "step", name, {})


class _ToolMark(Mark):
    def _around(
        self,
        runtime: Runtime,
        function: Callable[..., Any] | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> _Around:
        name = self._name_of(function, "tool")
        found = run(current_run(current_config()))
        if found is not None and found.span is not None and found.span.attributes.get(c.TOOL_NAME) == name:
            marks = MARKS.get()
            if marks is None or marks.scope is None or marks.scope.run_id != found.run_id:
                return _Around()  # LangChain's tool around this very function
        attributes: dict[str, Any] = {c.OPERATION_NAME: c.EXECUTE_TOOL, c.TOOL_NAME: name}
        around = _scope(runtime, "tool", name, attributes)
        if function is not None and around.span is not None:
            around.span.set_json(c.TOOL_ARGUMENTS, arguments_of(function, args, kwargs))
        return around


class _PurposeMark(Mark):
    def _around(
        self,
        runtime: Runtime,
        function: Callable[..., Any] | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> _Around:
        outer = MARKS.get()
        return _Marked((outer or Marks())._replace(purpose=c.storable(self._name or "other"), outer=outer))


def _mark(kind: type[Mark], function: Any) -> Any:
    if function is None or isinstance(function, str):
        return kind(function)
    if isinstance(function, staticmethod | classmethod):
        return type(function)(_mark(kind, function.__func__))
    if not inspect.isroutine(function):
        is_langchain = any(base.__module__.startswith("langchain_core.") for base in type(function).__mro__)
        if is_langchain or not callable(function):
            return function  # its own tracing, or nothing that can be called
    return kind(None)(function)


def reward(value: float, *, name: str = "reward", explanation: str | None = None) -> None:
    """Give a number to the current step, or to the rollout if the code is in none.

    Inside a `spangrad.step` it is for that step: it counts for the last model call in it. A rollout's own
    reward can be given anywhere with `spangrad.current_rollout().reward(...)`. It is stored as written by
    the agent; a trainer uses such rewards only if it is told to.
    """
    marks = MARKS.get()
    scope = marks.scope.within if marks is not None and marks.scope is not None else None
    if scope is None or scope.rollout is None or not is_same(scope.rollout, current_rollout()):
        rollout_reward(value, name=name, explanation=explanation)
        return
    step_name, span = scope.step.get(c.STEP_NAME), scope.span
    try:
        attributes = reward_attributes(value, name, explanation)
        if span is not None and span.is_open:
            span.events.append(Event(c.REWARD_EVENT, attributes))
        else:
            logger.warning(
                "reward %r was not recorded: step %r is over, or another process's", value, step_name
            )
    except Exception:  # the boundary: the agent must run
        logger.warning("reward %r of step %r was not recorded", value, step_name, exc_info=True)


def _scope(runtime: Runtime, role: Role, name: str, attributes: dict[str, Any]) -> "_Marked":
    """Begin a step or tool where the code is."""
    rollout, outer = current_rollout(), MARKS.get()
    run_id = current_run(current_config())
    parent, step = parent_of(rollout, run_id, outer)
    around = outer.scope if outer is not None else None
    if around is not None and not is_same(around.rollout, rollout):
        around = None
    counter = itertools.count() if around is None else around.counter
    if role == "step":
        step = {c.STEP_NAME: name, c.STEP_INDEX: next(counter if rollout is None else rollout.steps)}
        attributes = attributes | step
    attributes = attributes | {c.SPAN_ROLE: role}
    if rollout is not None:
        attributes |= rollout_attributes(rollout)
    label = f"{c.EXECUTE_TOOL} {name}" if role == "tool" else name
    span = begin_span(runtime, label, parent, attributes)
    scope = Scope(span.context, rollout, run_id, step, counter, span)
    scope.within = scope if role == "step" else around and around.within
    return _Marked((outer or Marks())._replace(scope=scope, outer=outer), span, is_tool=role == "tool")


def _key_text(key: object) -> str | None:
    try:
        text = key if isinstance(key, str) else json.dumps(key, sort_keys=True)
        text = c.storable(text)
    except Exception as error:  # the boundary: the agent must run
        if _said.due():
            logger.warning("spangrad.state: a key of type %r is no JSON (%s)", type(key).__name__, error)
        return None
    if len(text) > MAX_STATE_CHARS:
        return "blake2b:" + hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    return text


def _runtime() -> Runtime | None:
    global _said_not_set_up
    try:
        runtime = started_runtime()
    except Exception:  # the boundary: the agent must run
        _log_failure()
        runtime = None
    if runtime is None and not _said_not_set_up:
        _said_not_set_up = True
        logger.warning("spangrad's marks have no effect before spangrad.init()")
    return runtime


def _log_failure() -> None:
    if _said.due():
        logger.warning("a mark could not be recorded", exc_info=True)
