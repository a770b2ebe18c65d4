"""Child processes that die with their parent: hub, gateway, agent hosts.

Knows how to start, wait for, and end a process. Knows nothing of what it serves.

* A child is killed by the kernel when its parent dies, however it dies (Linux).
* A port is checked before a child is started, so that "taken" is one clear line.
* `stop` sends SIGTERM, waits, then SIGKILL; it only touches the child's own group.
* A command that is told to a person (`own_command`) works when it is pasted.
"""

import contextlib
import ctypes
import os
import random
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import httpx

from spangrad.errors import EngineError, PortInUseError

QUIET_ENV = {
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "TOKENIZERS_PARALLELISM": "false",
    # A waiting OpenMP thread that spins takes a core from the engine on small machines.
    "OMP_WAIT_POLICY": "PASSIVE",
}
"""Environment of every child: nothing may wait for a network that may not be there."""

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends. Call it in the child; Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def require_free_port(host: str, port: int, *, what: str) -> None:
    """Raise PortInUseError if nothing can listen at that address."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise PortInUseError(
                f"{what}: {host}:{port} is taken ({error.strerror});"
                " stop what listens there or choose another port"
            ) from error


def own_command(*, from_anywhere: bool = False) -> str:
    """How `spangrad` is called in this folder: its name, or its path if that finds none or another.

    With `from_anywhere`, a path that holds in other folders too.
    """
    program = Path(sys.argv[0])
    if program.name == "__main__.py" and program.parent.name == "spangrad":
        return f"{_shown(Path(sys.executable), from_anywhere)} -m spangrad"
    found = shutil.which("spangrad")
    if program.name != "spangrad" or (found is not None and Path(found).resolve() == program.resolve()):
        return "spangrad"
    return _shown(program, from_anywhere)


def _shown(program: Path, from_anywhere: bool) -> str:
    path = program.absolute()
    if path.is_relative_to(Path.cwd()) and not from_anywhere:
        path = path.relative_to(Path.cwd())
    return shlex.quote(str(path) if os.sep in str(path) else f".{os.sep}{path}")


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on right now.

    Below the range that the system hands out by itself: what other processes open
    in the meantime (Ray opens many) can't take it.
    """
    for _ in range(1000):
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise PortInUseError(f"{host} has no free port between 20000 and 32000")


def end_group(process: "subprocess.Popen[bytes]", timeout_s: float) -> None:
    """End a child that leads its own group: SIGTERM, wait, then SIGKILL for all of the group."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout_s)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def answers_in_time(url: str, *, is_alive: Callable[[], bool], timeout_s: float) -> bool:
    """Wait until `url` answers 200. False: the process behind it has ended, or `timeout_s` is over."""
    deadline = time.monotonic() + timeout_s
    while is_alive() and time.monotonic() < deadline:
        try:
            if httpx.get(url, timeout=2.0).status_code == httpx.codes.OK:
                return True
        except httpx.HTTPError:
            pass
        time.sleep(0.05)
    return False


class Service:
    """One child process with a log file and a URL that answers when it is ready."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        *,
        log: Path,
        ready_url: str,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Describe the child; `start` starts it."""
        self.name = name
        self.argv = list(argv)
        self.log = log
        self.ready_url = ready_url
        self.env = {**os.environ, **QUIET_ENV, **(env or {})}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Process id while started."""
        return None if self._process is None else self._process.pid

    def start(self) -> "Service":
        """Start the child; its output goes to the end of the log file."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self.env,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        return self

    def is_alive(self) -> bool:
        """True while the child runs."""
        return self._process is not None and self._process.poll() is None

    def wait_ready(self, timeout_s: float = 30.0) -> "Service":
        """Wait until `ready_url` answers 200; EngineError with the log's last line if it does not."""
        if answers_in_time(self.ready_url, is_alive=self.is_alive, timeout_s=timeout_s):
            return self
        if not self.is_alive():
            raise EngineError(f"{self.name} ended at once: {last_line(self.log)} (log: {self.log})")
        raise EngineError(
            f"{self.name} did not answer at {self.ready_url} in {timeout_s:.0f} s (log: {self.log})"
        )

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the child: SIGTERM, then SIGKILL for its whole group."""
        process, self._process = self._process, None
        if process is not None:
            end_group(process, timeout_s)

    def __enter__(self) -> "Service":
        """Start and wait until ready."""
        self.start()
        try:
            return self.wait_ready()
        except BaseException:
            self.stop()
            raise

    def __exit__(self, *_: object) -> None:
        """Stop."""
        self.stop()


def last_line(log: Path, *, bytes_back: int = 4096) -> str:
    """Last line of a log that says something; '' if there is none."""
    try:
        with log.open("rb") as lines:
            lines.seek(max(0, log.stat().st_size - bytes_back))
            said = [
                line.strip() for line in lines.read().decode(errors="replace").splitlines() if line.strip()
            ]
    except OSError:
        return ""
    return said[-1] if said else ""
