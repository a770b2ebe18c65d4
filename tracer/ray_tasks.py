"""Lets the current rollout follow work to Ray tasks.

Wrapped are `RemoteFunction._remote`, through which `.remote()` and `.options().remote()` go, and `ray.init`,
when (and only if) Ray is imported. A task that is started in a rollout runs a twin of the function, which
gets the rollout as a first argument; a `runtime_env` would need new workers. Knows Ray's remote functions.

Invariants:
* A worker without spangrad runs the task as ever.
* A cluster that happens to be started in a rollout is not a part of it: it serves others too.
* If Ray is not as expected, tasks run as ever and that is said once.

Actors are not followed: `rollout_headers()` and `continue_rollout()` are for them.
"""

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Generator
from types import ModuleType
from typing import Any, cast
from weakref import WeakKeyDictionary

from spangrad.tracer import carried, following
from spangrad.tracer.hooks import when_imported
from spangrad.tracer.patching import Patches
from spangrad.tracer.periodically import Periodically

logger = logging.getLogger(__name__)

_twins: "WeakKeyDictionary[Any, Any]" = WeakKeyDictionary()
_patches = Patches()
_said = Periodically()


def install() -> None:
    """Wrap Ray's functions."""
    _patches.is_on = True
    when_imported("ray.remote_function", _patch_functions)
    when_imported("ray", _patch_init)


def uninstall() -> None:
    """Put them back."""
    _patches.undo()


def _patch_functions(module: ModuleType) -> None:
    _patches.replace(module.RemoteFunction, "_remote", _remote)


def _patch_init(module: ModuleType) -> None:
    _patches.replace(module, "init", _init)


def _init(original: Callable[..., Any]) -> Callable[..., Any]:
    def init(*args: Any, **kwargs: Any) -> Any:
        with carried.set_aside():
            return original(*args, **kwargs)

    return init


def _remote(original: Callable[..., Any]) -> Callable[..., Any]:
    def _remote(self: Any, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        try:
            followed = _followed(self)
        except Exception:  # the boundary: the task must be started
            followed = None
            if _said.due():
                logger.warning("Ray tasks are recorded without their rollouts", exc_info=True)
        if followed is None:
            return original(self, args, kwargs, **options)
        twin, taken = followed
        return original(twin, (taken, *(args or ())), kwargs, **options)

    return _remote


def _followed(function: Any) -> tuple[Any, Any] | None:
    """The twin of a remote function and its first argument; None if there is nothing to follow."""
    taken = carried.capture()
    if taken is None or not inspect.isfunction(function._function) or function._decorator is not None:
        return None
    twin = _twins.get(function)
    if twin is None:
        remote = sys.modules["ray"].remote
        max_calls = function._default_options.get("max_calls")  # the only option that is no task's
        make = remote if max_calls is None else remote(max_calls=max_calls)
        twin = _twins[function] = make(_twin_of(function._function))
    return twin, following.written(taken)


def _twin_of(function: Callable[..., Any]) -> Callable[..., Any]:
    # Local functions, which Ray pickles by value: a worker without spangrad must be able to read them.
    if inspect.isgeneratorfunction(function):

        @functools.wraps(function)
        def items(_spangrad: Any, /, *args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
            try:
                from spangrad.tracer.following import within
            except ImportError:
                return (yield from function(*args, **kwargs))
            with within(_spangrad):
                return (yield from function(*args, **kwargs))

        return _with_first_argument(items, function)

    @functools.wraps(function)
    def run(_spangrad: Any, /, *args: Any, **kwargs: Any) -> Any:
        try:
            from spangrad.tracer.following import within
        except ImportError:
            return function(*args, **kwargs)
        with within(_spangrad):
            return function(*args, **kwargs)

    return _with_first_argument(run, function)


def _with_first_argument(twin: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Give `twin` the signature against which Ray checks arguments before it sends them."""
    ours = inspect.Parameter("_spangrad", inspect.Parameter.POSITIONAL_ONLY)
    theirs = inspect.signature(function).parameters.values()
    parameters = [ours, *(parameter.replace(annotation=inspect.Parameter.empty) for parameter in theirs)]
    twin.__signature__ = inspect.Signature(parameters)
    return cast(Callable[..., Any], twin)
