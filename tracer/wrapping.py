"""Put something around every run of a function, whatever kind of function it is.

Knows sync, async and generator functions; does not know what is put around. Invariants:
* What the function returns, raises or yields passes through unchanged, `CancelledError` and the like too.
* Between two items of a generator nothing is around its consumer.
"""

import contextlib
import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any, Protocol, TypeVar, cast
from weakref import WeakKeyDictionary

F = TypeVar("F", bound=Callable[..., Any])


class Around(Protocol):
    """What is around one run. Its methods neither raise nor block."""

    def enter(self) -> None:
        """The function's code is about to run, for the first time or again."""

    def leave(self) -> None:
        """It has paused or ended."""

    def end(self, error: BaseException | None, result: Any) -> None:
        """The run is over."""


Begin = Callable[[tuple[Any, ...], dict[str, Any]], Around]
"""Makes what is around a run, of the arguments of the call. Neither raises nor blocks."""

NO_RESULT: Any = object()
"""The result of generators."""


def wrap(function: F, begin: Begin) -> F:
    """The function, with something around every run of it."""
    code = function
    if not inspect.isroutine(function) and not isinstance(function, functools.partial):
        code = getattr(type(function), "__call__", function)  # of an object that can be called  # noqa: B004
    if inspect.isasyncgenfunction(code):
        wrapper: Any = _async_generator(function, begin)
    elif inspect.isgeneratorfunction(code):
        wrapper = _generator(function, begin)
    elif inspect.iscoroutinefunction(code):
        wrapper = _coroutine(function, begin)
    else:
        wrapper = _plain(function, begin)
    return cast(F, wrapper)


def arguments_of(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Arguments by name, without the object that a method is of."""
    try:
        names = _parameters(function)
    except (TypeError, ValueError):  # a builtin without a signature: they have no names
        names = ()
    given = dict(zip(names, args, strict=False)) | kwargs
    if len(args) > len(names):
        given["*"] = args[len(names) :]
    if names and names[0] in ("self", "cls") and args:
        del given[names[0]]
    return given


_known: "WeakKeyDictionary[Any, tuple[str, ...]]" = WeakKeyDictionary()
"""Names of parameters; functions and what they hold on to live no longer because of it."""


def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    with contextlib.suppress(TypeError, KeyError):  # it can't be hashed or referred to, or is new
        return _known[function]
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    names = tuple(one.name for one in parameters if one.kind in positional)
    with contextlib.suppress(TypeError):
        _known[function] = names
    return names


def _plain(function: Callable[..., Any], begin: Begin) -> Any:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        around = begin(args, kwargs)
        around.enter()
        try:
            result = function(*args, **kwargs)
        except BaseException as error:
            around.leave()
            around.end(error, NO_RESULT)
            raise
        around.leave()
        around.end(None, result)
        return result

    return run


def _coroutine(function: Callable[..., Any], begin: Begin) -> Any:
    @functools.wraps(function)
    async def run(*args: Any, **kwargs: Any) -> Any:
        around = begin(args, kwargs)
        around.enter()
        try:
            result = await function(*args, **kwargs)
        except BaseException as error:
            around.leave()
            around.end(error, NO_RESULT)
            raise
        around.leave()
        around.end(None, result)
        return result

    return run


def _generator(function: Callable[..., Generator[Any, Any, Any]], begin: Begin) -> Any:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        inner = function(*args, **kwargs)
        around = begin(args, kwargs)
        step: Callable[..., Any] = inner.send
        argument: Any = None
        error: BaseException | None = None
        try:
            while True:
                item = _within(around, step, argument)
                try:
                    step, argument = inner.send, (yield item)
                except GeneratorExit:
                    _within(around, inner.close)
                    raise
                except BaseException as thrown:
                    step, argument = inner.throw, thrown
        except StopIteration as stop:
            return stop.value
        except BaseException as raised:
            error = raised
            raise
        finally:
            around.end(error, NO_RESULT)

    return run


def _async_generator(function: Callable[..., AsyncGenerator[Any, Any]], begin: Begin) -> Any:
    @functools.wraps(function)
    async def run(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        inner = function(*args, **kwargs)
        around = begin(args, kwargs)
        step: Callable[..., Any] = inner.asend
        argument: Any = None
        error: BaseException | None = None
        try:
            while True:
                item = await _within_async(around, step, argument)
                try:
                    step, argument = inner.asend, (yield item)
                except GeneratorExit:
                    await _within_async(around, inner.aclose)
                    raise
                except BaseException as thrown:
                    step, argument = inner.athrow, thrown
        except StopAsyncIteration:
            return
        except BaseException as raised:
            error = raised
            raise
        finally:
            around.end(error, NO_RESULT)

    return run


def _within(around: Around, step: Callable[..., Any], *arguments: Any) -> Any:
    around.enter()
    try:
        return step(*arguments)
    finally:
        around.leave()


async def _within_async(around: Around, step: Callable[..., Any], *arguments: Any) -> Any:
    around.enter()
    try:
        return await step(*arguments)
    finally:
        around.leave()
