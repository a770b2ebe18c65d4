"""`spangrad.init()`, `flush()` and `shutdown()`: start and end recording in this process.

Invariants:
* `init` twice is `init` once, but for `redact`, which counts from then on.
* What was captured reaches the hub or the disk when the interpreter exits (return, `sys.exit`, uncaught
  exception), on SIGTERM (unless the application handles it itself), and in children of `multiprocessing`
  that return. SIGTERM kills these children at once, as ever; tasks of pools are written before they return.
  A call that is not over by then is recorded with what has come of its response; `flush` ends no call.
  `os._exit` and SIGKILL lose the calls that are not over: the others are in the journal, unless there is a
  `redact` rule, and are sent by the next process or taken in with the store's file. A rollout that is not
  over by then is recorded as failed, with `error.type` "unfinished".
* No application handler is replaced.
"""

import atexit
import contextlib
import logging
import multiprocessing
import multiprocessing.util as multiprocessing_util
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from opentelemetry.sdk.resources import SERVICE_NAME, Resource

from spangrad.errors import CaptureError
from spangrad.tracer import blind_spots, capture, children, following, hops, ray_tasks, runtime
from spangrad.tracer.current import end_open_rollouts
from spangrad.tracer.exporter import Exporter, SpoolExporter
from spangrad.tracer.hub_exporter import HubExporter
from spangrad.tracer.propagation import Destinations
from spangrad.tracer.redaction import Rule, rule_of
from spangrad.tracer.structure import graphs
from spangrad.tracer.structure.spans import end_open_spans

logger = logging.getLogger(__name__)

DEFAULT_STORE = ".spangrad/store.duckdb"
EXIT_TIMEOUT_S = 5.0
_END_TIMEOUT_S = 1.0

_lock = threading.RLock()
_settings: dict[str, Any] = {}
_hooked = False
_closer: int | None = None
"""The thread that is in `shutdown`."""
_closed = threading.Event()
_is_sigterm_waiting = False
_forking = threading.local()


def init(
    *,
    store: str | os.PathLike[str] | None = None,
    key: str | None = None,
    service_name: str | None = None,
    propagate_to: Sequence[str] = (),
    spool_dir: str | os.PathLike[str] | None = None,
    redact: bool | str | Rule | None = None,
    record_children: bool = True,
) -> None:
    """Start to record this process's model calls.

    Args:
        store: URL of a hub, or path of a store's file. Default: SPANGRAD_STORE, or `.spangrad/store.duckdb`
            in the working directory.
        key: The hub's agent key. Default: SPANGRAD_KEY.
        service_name: `service.name` of the spans. Default: OTEL_SERVICE_NAME.
        propagate_to: Hosts beyond loopback and private addresses that are told of traces and rollouts in
            request headers: a gateway's. `*.domain` names a domain and everything below.
        spool_dir: Where spans wait while a hub is down. Default: in `.spangrad/spool`.
        redact: What every text goes through before it leaves the process: a function from text to text, the
            name of a built-in rule (`secrets`, `emails`, `default`: both), or True for `default`. A call that
            it changes trains nothing. Default: SPANGRAD_REDACT, else nothing.
            With a function only `multiprocessing` children that can be given it are recorded.
        record_children: Also record Python programs that are started with `subprocess` from within a rollout,
            as a part of it, by variables in their environment.

    Raises:
        ConfigError: `store` is a URL that can't be one of a hub, or `redact` is no rule.
        CaptureError: The tracer could not be set up.
    """
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        logger.info("OTEL_SDK_DISABLED is set: nothing is recorded")
        return
    given = redact is not None
    rule = rule_of(redact if given else os.environ.get("SPANGRAD_REDACT"))
    with _lock:
        target = resolve_target(store)
        current = runtime.active()
        if current is not None:
            if given:  # `spangrad run` set the tracer up before the program could say this
                current.redact_with(rule)
                _follow(_settings | {"redact": redact})
            if store is not None and target != current.target:
                logger.warning(
                    "spangrad.init(store=%r) ignored: spans already go to %r; call spangrad.shutdown() first",
                    target,
                    current.target,
                )
            return
        exporter = make_exporter(target, key, spool_dir)
        exporter.says_outages = not _is_launched_for(target)
        try:
            _start(target, exporter, service_name, propagate_to, rule)
            _follow(
                {
                    "store": target,
                    "key": key,
                    "service_name": service_name,
                    "propagate_to": tuple(propagate_to),
                    "spool_dir": None if spool_dir is None else str(Path(spool_dir).absolute()),
                    "redact": redact,
                    "record_children": record_children,
                }
            )
        except Exception as error:
            raise CaptureError(f"the tracer could not be set up: {error}") from error


def flush(timeout_s: float = 10.0) -> bool:
    """Wait until what was recorded is where it belongs: at the hub, or in the spool of the store's file.

    While a hub does not take spans it is tried again until time runs out. Returns False if something is
    not there by then: it waits on disk, to be sent later.
    """
    current = runtime.active()
    if current is None:
        return True
    deadline = time.monotonic() + timeout_s
    if not current.worker.flush(timeout_s):
        return False
    return current.worker.exporter.force_flush(max(0, int(1000 * (deadline - time.monotonic()))))


def shutdown(timeout_s: float = 10.0) -> bool:
    """Bring what was recorded to the hub or to disk, and stop recording. Returns False if time ran out."""
    with _lock:
        current = runtime.active()
        if current is None:
            return True
        with _closing():
            runtime.activate(None)
            capture.uninstall()
            for module in (following, ray_tasks, hops, children):
                module.uninstall()
            capture.end_open_calls()
            end_open_spans()
            flushed = current.worker.close(timeout_s)
            blind_spots.tell_again()
            current.worker.exporter.shutdown()
        return flushed


def resolve_target(store: str | os.PathLike[str] | None) -> str:
    """The hub's URL, or the absolute path of the store's file."""
    given = os.fspath(store if store is not None else os.environ.get("SPANGRAD_STORE") or DEFAULT_STORE)
    return given if is_hub(given) else str(Path(given).absolute())


def is_hub(target: str) -> bool:
    """Whether a target is a hub's URL."""
    return target.startswith(("http://", "https://"))


def make_exporter(
    target: str, key: str | None = None, spool_dir: str | os.PathLike[str] | None = None
) -> Exporter:
    """The exporter for a target of `resolve_target`."""
    if is_hub(target):
        return HubExporter(target, key or os.environ.get("SPANGRAD_KEY"), spool_dir)
    return SpoolExporter(target)


def _is_launched_for(target: str) -> bool:
    """Whether `spangrad run` has started this process: it says for all of them if the hub takes nothing."""
    rollout, store = os.environ.get(children.ROLLOUT), os.environ.get(children.STORE)
    return bool(rollout and not children.is_quiet(rollout) and store and resolve_target(store) == target)


def _start(
    target: str, exporter: Exporter, service_name: str | None, hosts: Sequence[str], rule: Rule | None
) -> None:
    from spangrad import __version__

    resource = Resource.create({SERVICE_NAME: service_name} if service_name else None)
    started = runtime.Runtime(target, exporter, resource, Destinations(hosts), __version__)
    started.redact_with(rule)
    started.worker.start()
    runtime.activate(started)
    capture.install()
    graphs.install()
    _hook_process()


def _follow(settings: dict[str, Any]) -> None:
    """Let rollouts go where work goes; processes that begin to record there do so with `settings`."""
    global _settings
    _settings = settings
    key, redact = settings["key"], settings["redact"]
    following.install(settings | {"key": key or os.environ.get("SPANGRAD_KEY")})
    ray_tasks.install()
    hops.install()
    children.uninstall()
    if not settings["record_children"] or callable(redact):  # a program can't be given the function
        return
    variables = {children.STORE: settings["store"]}
    if key is not None:
        variables[children.KEY] = key
    if redact is not None:
        variables[children.REDACT] = redact if isinstance(redact, str) else str(int(redact))
    children.install(variables)


def _hook_process() -> None:
    global _hooked
    if not _hooked:
        _hooked = True
        atexit.register(_at_exit)
        os.register_at_fork(after_in_child=_after_fork_in_child)
        os.register_at_fork(before=_hold_sigterm, after_in_parent=_let_go, after_in_child=_let_go)
        multiprocessing_util.register_after_fork(_AT_FORK, lambda _: _before_child_exits())
        if multiprocessing.parent_process() is not None:  # a child that began to record only now
            _before_child_exits()
    is_main = threading.current_thread() is threading.main_thread()
    if (
        multiprocessing.parent_process() is None
        and is_main
        and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    ):
        signal.signal(signal.SIGTERM, _on_sigterm)


def _hold_sigterm() -> None:
    """Python forgets signals with a handler that come while it forks: the kernel keeps them until it has."""
    _forking.masks = None
    if signal.getsignal(signal.SIGTERM) is _on_sigterm:
        _forking.masks = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _let_go() -> None:
    before = getattr(_forking, "masks", None)
    if before is not None:
        _forking.masks = None
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _AtFork:
    """Something for `multiprocessing` to hold a weak reference to."""


_AT_FORK = _AtFork()


def _before_child_exits() -> None:
    """A child of `multiprocessing` may skip atexit, but runs its own finalizers.

    `Process.terminate` and pools end it by SIGTERM while it waits for a semaphore. A handler written in
    Python is not called if that comes a moment before the wait: the child, and who joins it, would hang.
    """
    if signal.getsignal(signal.SIGTERM) is _on_sigterm:
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
    multiprocessing_util.Finalize(None, _at_exit, exitpriority=0)


def _after_fork_in_child() -> None:
    global _lock, _closer, _closed
    _lock = threading.RLock()
    _closer, _closed = None, threading.Event()
    capture.after_fork_in_child()
    current = runtime.active()
    if current is not None:
        current.after_fork_in_child()


def _at_exit() -> None:
    end_open_rollouts()
    shutdown(EXIT_TIMEOUT_S)


@contextlib.contextmanager
def _closing() -> Iterator[None]:
    """While the tracer closes, a SIGTERM waits until that is done: see `_on_sigterm`."""
    global _closer
    _closed.clear()
    _closer = threading.get_ident()
    try:
        yield
    finally:
        _closer = None
        _closed.set()
        if _is_sigterm_waiting:
            _end_by_sigterm()


def _on_sigterm(number: int, frame: FrameType | None) -> Any:
    global _is_sigterm_waiting
    current = runtime.active()
    if _closer == threading.get_ident():
        _is_sigterm_waiting = True
        return
    if _closer is not None:
        _closed.wait(EXIT_TIMEOUT_S)
    elif current is not None:
        capture.end_open_calls()
        end_open_spans()
        # On a thread of its own: this one may hold the lock of a span.
        ending = threading.Thread(target=end_open_rollouts, name="spangrad-end", daemon=True)
        ending.start()
        ending.join(_END_TIMEOUT_S)
        if current.worker.flush(EXIT_TIMEOUT_S):  # to the hub or to disk: no need to wait for the hub
            current.worker.close_journal()
    _end_by_sigterm()


def _end_by_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)
