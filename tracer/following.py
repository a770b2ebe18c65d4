"""Lets the current rollout follow work to other threads and processes of this program.

    Thread.start, Executor.submit, Pool.map ...            run, task
      current rollout, step, state  ----------------->  current there too

Wrapped are methods of the standard library, when (and only if) their modules are imported. Asyncio's tasks
need nothing: they copy the context. Knows threads and processes; what is carried is `carried.py`'s business,
other programs are `children.py`'s.

Invariants:
* Results, exceptions, names, classes and overridden methods of threads, pools and processes stay as they are.
* A task of a pool belongs to the rollout that submitted it, whoever's rollout made the pool or its workers.
* A thread belongs to the rollout that it was started in, until that ends.
* A process that is started (spawn, forkserver) or a task that is sent to one takes its rollout along, and
  where spans go: also if several rollouts are open, for nothing of it is in the environment.
* Without a current rollout nothing is wrapped, sent or kept.
"""

import logging
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import process as multiprocessing_process
from types import ModuleType
from typing import Any

from spangrad.tracer import carried
from spangrad.tracer.carried import Carried
from spangrad.tracer.hooks import when_imported
from spangrad.tracer.patching import Patches
from spangrad.tracer.periodically import Periodically
from spangrad.tracer.runtime import active

logger = logging.getLogger(__name__)

OWN_THREADS = "spangrad-"
"""Threads whose names begin so are ours and follow nothing."""
_SUBMITTING = ("apply_async", "map", "map_async", "starmap", "starmap_async", "imap", "imap_unordered")
_FLUSH_TIMEOUT_S = 0.5
_LOKY = ("loky.process_executor", "joblib.externals.loky.process_executor")
"""joblib's pools. Their processes are workers for all that is to come, so they belong to nobody."""
_ON_PROCESS = "_spangrad_arrival"

_patches = Patches()
_said = Periodically()
_settings: bytes | None = None


def install(settings: Mapping[str, Any]) -> None:
    """Wrap what starts threads and processes.

    Args:
        settings: Arguments of `spangrad.init` with which a process started from here begins to record. If
            they can't be pickled, such a process is not made to record.
    """
    global _settings
    try:
        _settings = pickle.dumps(dict(settings))
    except Exception as error:  # foreign objects: whatever pickling them raises
        _settings = None
        logger.warning("processes started by multiprocessing are not recorded: can't pickle %s", error)
    _patches.is_on = True
    _patches.replace(threading.Thread, "start", _thread_start)
    _patches.replace(multiprocessing_process.BaseProcess, "start", _process_start)
    when_imported("concurrent.futures.thread", _patch_threads)
    for module in ("concurrent.futures.process", *_LOKY):
        when_imported(module, _patch_processes)
    when_imported("multiprocessing.pool", _patch_pool)


def uninstall() -> None:
    """Put everything back."""
    _patches.undo()


def _patch_threads(module: ModuleType) -> None:
    _patches.replace(module.ThreadPoolExecutor, "submit", _submit)


def _patch_processes(module: ModuleType) -> None:
    _patches.replace(module.ProcessPoolExecutor, "submit", _submit)


def _patch_pool(module: ModuleType) -> None:
    _patches.replace(module.Pool, "__init__", _pool_init)
    for name in _SUBMITTING:
        _patches.replace(module.Pool, name, _submit)


def _capture() -> Carried | None:
    try:
        return carried.capture()
    except Exception:  # the boundary: the agent must run
        _log_failure()
        return None


def _log_failure() -> None:
    if _said.due():
        logger.warning("a rollout could not follow to another thread or process", exc_info=True)


def _thread_start(original: Callable[..., Any]) -> Callable[..., Any]:
    def start(self: threading.Thread) -> Any:
        taken = _capture()
        if taken is None:
            return original(self)
        put_back = _run_within(self, taken)
        try:
            return original(self)
        except BaseException:
            put_back()
            raise

    return start


def _run_within(thread: threading.Thread, taken: Carried) -> Callable[[], None]:
    """Make `thread.run` set the variables first. The wrapper is gone when the thread's own `run` begins.

    Returns what takes it away if the thread does not start.
    """
    try:
        if thread.ident is not None or thread.name.startswith(OWN_THREADS):
            return _nothing
        attributes = vars(thread)
        before = attributes.get("run")
        run_as_it_is = thread.run

        def put_back() -> None:
            if before is None:
                attributes.pop("run", None)
            else:
                attributes["run"] = before

        def run() -> None:
            put_back()
            taken.set()
            run_as_it_is()

        attributes["run"] = run
        return put_back
    except Exception:  # the boundary: a thread of any class must start, or fail as ever
        _log_failure()
        return _nothing


def _nothing() -> None:
    """Nothing was changed."""


def _submit(original: Callable[..., Any]) -> Callable[..., Any]:
    """For every method `(self, function, ...)` that hands a function to a pool."""

    def submit(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        taken = _capture()
        if taken is None or not (args or "func" in kwargs) or _interprets(self):
            return original(self, *args, **kwargs)
        if args:
            args = (Followed(args[0], taken), *args[1:])
        else:
            kwargs["func"] = Followed(kwargs["func"], taken)
        with carried.set_aside():  # the pool's workers, made now or not, serve others too
            return original(self, *args, **kwargs)

    return submit


def _interprets(pool: Any) -> bool:
    """Whether a pool's workers are interpreters (Python 3.14), into which nothing of ours is imported."""
    return any(kind.__name__ == "InterpreterPoolExecutor" for kind in type(pool).__mro__)


def _pool_init(original: Callable[..., Any]) -> Callable[..., Any]:
    def __init__(self: Any, /, *args: Any, **kwargs: Any) -> None:
        with carried.set_aside():
            original(self, *args, **kwargs)

    return __init__


def _process_start(original: Callable[..., Any]) -> Callable[..., Any]:
    def start(self: Any) -> Any:
        taken = _capture()
        if taken is None or _settings is None or "loky" in type(self).__module__:
            return original(self)
        attributes = vars(self)
        attributes[_ON_PROCESS] = _Arrival(taken)
        try:
            return original(self)
        finally:
            attributes.pop(_ON_PROCESS, None)

    return start


class Followed:
    """A function that runs as part of the rollout in which it was handed over. Can be pickled if it can."""

    __slots__ = ("_function", "_has_come", "_taken")

    def __init__(self, function: Callable[..., Any], taken: Carried, *, has_come: bool = False) -> None:
        """Wrap `function`; `has_come`: from another process, whose pool this one works for."""
        self._function = function
        self._taken = taken
        self._has_come = has_come

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        tokens = self._taken.set()
        try:
            return self._function(*args, **kwargs)
        finally:
            carried.unset(tokens)
            if self._has_come:
                _flush()

    def __repr__(self) -> str:
        """As the function's own."""
        return repr(self._function)

    def __reduce__(self) -> tuple[Any, ...]:
        """The function, and what it takes along in writing."""
        return _followed, (self._function, *written(self._taken))


@contextmanager
def within(work: tuple[Mapping[str, str], bytes | None]) -> Iterator[None]:
    """Be part of the rollout that another process has `written`."""
    tokens = received(*work).set()
    try:
        yield
    finally:
        carried.unset(tokens)
        _flush()


def _flush() -> None:
    """A pool, and Ray, may kill workers once it has their results."""
    runtime = active()
    if runtime is not None and runtime.worker.waiting:
        runtime.worker.flush(_FLUSH_TIMEOUT_S)


def written(taken: Carried) -> tuple[dict[str, str], bytes | None]:
    """What `taken` is for another process: its values, and how to record there. See `received`."""
    try:
        return taken.pack(), _settings
    except Exception:  # the boundary: the work must be sent
        _log_failure()
        return {}, None


def received(packed: Mapping[str, str], settings: bytes | None) -> Carried:
    """Undo `written`, and begin to record in this process if it does not. Does not raise."""
    try:
        if settings is not None and active() is None:
            from spangrad.tracer import setup

            setup.init(**pickle.loads(settings))
        return carried.unpack(packed)
    except Exception:  # the boundary: the work itself must be done
        logger.warning("work that came from another process is not recorded", exc_info=True)
        return Carried({})


def _followed(function: Callable[..., Any], packed: Mapping[str, str], settings: bytes | None) -> Followed:
    return Followed(function, received(packed, settings), has_come=True)


class _Arrival:
    """Rides on a process object that is pickled, and sets the variables where it is read."""

    def __init__(self, taken: Carried) -> None:
        self._taken = taken

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, written(self._taken)


def _arrive(packed: Mapping[str, str], settings: bytes | None) -> None:
    received(packed, settings).set()
