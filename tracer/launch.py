"""`spangrad run -- CMD`: record a program without touching its code.

    launcher: root span ---- SPANGRAD_STORE, _KEY, _ROLLOUT, PYTHONPATH ----> child, grandchildren

The launcher writes the rollout's root span; the child's Python processes write the calls, under the same
trace. Knows processes and signals; it does not know what the child does. Invariants:
* The child's exit code is the result; 128 + number if a signal ended it, 127 if there is no such
  command, 126 if it can't be run.
* A store beside whose file nothing can be written is refused before the child runs.
* Nothing is said twice: the child's processes say what they lose, the launcher that a hub takes no spans.
* The child has the launcher's standard input, output and error.
* Signals sent to the launcher reach the child; the terminal's Ctrl-C reaches it once. What the launcher was
  started to ignore (`nohup`) the child ignores, too.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from types import FrameType

from spangrad.tracer import children, runtime, setup
from spangrad.tracer.current import Rollout, to_environment
from spangrad.tracer.rollout import rollout as open_scope

_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
NOT_FOUND = 127
NOT_EXECUTABLE = 126


def run_command(
    argv: Sequence[str],
    *,
    store: str | os.PathLike[str] | None = None,
    key: str | None = None,
    rollout_id: str | None = None,
    task_id: str | None = None,
) -> int:
    """Run a command as one rollout and return its exit code.

    Args:
        argv: The command and its arguments.
        store: Hub or store file; see `spangrad.init`.
        key: The hub's agent key.
        rollout_id: Default: a new one.
        task_id: What the agent is asked.

    Raises:
        ConfigError: `store` is a URL that can't be one of a hub.
        StoreError: Nothing can be written beside the store's file.
    """
    if not argv:
        return _refuse("no command given; write it after `--`", NOT_FOUND)
    program = shutil.which(argv[0])
    if program is None:
        if os.path.sep in argv[0] and os.path.exists(argv[0]):
            return _refuse(f"{argv[0]!r} can't be executed; check its permissions", NOT_EXECUTABLE)
        return _refuse(f"there is no command {argv[0]!r}; check its name and PATH", NOT_FOUND)
    setup.init(store=store, key=key)
    current = runtime.active()
    if current is not None:
        current.worker.exporter.check()
        current.worker.exporter.says_losses = False
        current.worker.close_journal()  # it would hold a span of which nothing is known before the end
    try:
        scope = open_scope(rollout_id=rollout_id, task_id=task_id, name=os.path.basename(argv[0]))
        with scope as rollout:
            code = _run_child([program, *argv[1:]], child_environment(rollout, store=store, key=key))
            if code:
                rollout.fail(f"exit code {code}")
    except OSError as error:
        return _refuse(f"{argv[0]!r} can't be executed: {error.strerror or error}", NOT_EXECUTABLE)
    finally:
        setup.flush(setup.EXIT_TIMEOUT_S)
        if current is not None and current.worker.exporter.lost_spans:
            _say(f"the end of this rollout is not recorded: {current.worker.exporter.problem}")
    return code


def child_environment(
    rollout: Rollout, *, store: str | os.PathLike[str] | None = None, key: str | None = None
) -> dict[str, str]:
    """This process's environment, so changed that Python children record themselves as part of `rollout`."""
    environment = dict(os.environ)
    variables = {
        children.STORE: setup.resolve_target(store),
        children.ROLLOUT: to_environment(rollout),
    }
    children.add_to(environment, variables if key is None else variables | {children.KEY: key})
    return environment


def _run_child(argv: Sequence[str], environment: dict[str, str]) -> int:
    forward = _Forwarder()
    with _handled_by(forward), subprocess.Popen(argv, env=environment) as child:
        forward.to(child)
        code = child.wait()
    return code if code >= 0 else 128 - code


class _Forwarder:
    """A signal handler that passes signals on to a child, also those that came before there was one."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._waiting: list[int] = []

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and _terminal_sends_to_group():
            return
        if self._child is None:
            self._waiting.append(number)
        else:
            self._child.send_signal(number)

    def to(self, child: "subprocess.Popen[bytes]") -> None:
        self._child = child
        for number in self._waiting:
            child.send_signal(number)


@contextlib.contextmanager
def _handled_by(handler: _Forwarder) -> Iterator[None]:
    previous = {}
    try:
        for number in _FORWARDED:
            if signal.getsignal(number) is signal.SIG_IGN:  # by `nohup`, or a shell's `&`: the child's, too
                continue
            with contextlib.suppress(ValueError):  # not in the main thread
                previous[number] = signal.signal(number, handler)
        yield
    finally:
        for number, earlier in previous.items():
            signal.signal(number, earlier)


def _terminal_sends_to_group() -> bool:
    """Whether Ctrl-C at the terminal reaches the child too."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


def _refuse(message: str, code: int) -> int:
    _say(message)
    return code


def _say(message: str) -> None:
    print(f"spangrad run: {message}", file=sys.stderr)
