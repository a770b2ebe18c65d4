"""Processes that run a verifier, and what came of every rollout.

Knows processes and their answers. Knows no store.

Invariants:
* a process has one rollout at a time, so that it is known which one ended it or kept it too long;
* a verifier that raises, hangs or ends its process costs its own rollout; a new process goes on;
* no process is left behind: they end with the generator, and with this process however it ends.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Generator, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from multiprocessing.connection import Pipe, wait
from typing import Any, Final

from spangrad.adapters.scoring.stored_rollout import StoredRollout
from spangrad.errors import ConfigError

LOADING_S: Final = 120.0
"""How long a process may take to import the verifier."""
END_S: Final = 2.0
"""How long one may take to end when nothing is left to do."""
ANSWER_BYTES: Final = 2**20
_HOST: Final = "spangrad.adapters.scoring.verifier_host"


class Outcome(StrEnum):
    """What came of one rollout."""

    SCORED = "scored"
    NO_OPINION = "no opinion"
    """The verifier returned None."""
    RAISED = "raised"
    """It raised, or returned something that is no reward."""
    TIMED_OUT = "timed out"
    DIED = "died"
    """It ended its process."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a verifier said of one rollout."""

    rollout_id: str
    attempt: int
    outcome: Outcome
    values: Mapping[str, float] | None = None
    """Rewards by name, if it was scored."""
    error: str | None = None


def verdicts(
    rollouts: Iterable[StoredRollout],
    spec: str,
    *,
    base_dir: str = ".",
    name: str = "reward",
    workers: int = 1,
    timeout_s: float = 60.0,
    pause_s: float = 1.0,
) -> Generator[Verdict | None, None, None]:
    """Run a verifier over rollouts, in the order in which it is done with them.

    None in between: nothing came for `pause_s`, and the caller has time for something else.

    Args:
        rollouts: Taken one by one, as processes have time for them.
        spec: `path/to/file.py:name` or `package.module:name`.
        base_dir: What a path is relative to.
        name: Of a reward that comes without one.
        workers: How many processes.
        timeout_s: For one rollout.
        pause_s: How long to wait for a verdict at most.

    Raises:
        ConfigError: The verifier can't be loaded.
    """
    command = [sys.executable, "-m", _HOST, spec, base_dir, name]
    waiting = iter(rollouts)
    following = next(waiting, None)
    pool: list[_Process] = []
    idle: deque[_Process] = deque()
    try:
        while following is not None or any(process.rollout for process in pool):
            while following is not None and idle:
                process = idle.popleft()
                if process.give(following, timeout_s):
                    following = next(waiting, None)
                else:
                    pool.remove(process)
            while following is not None and len(pool) < workers:
                pool.append(_Process(command))
            answered = _answered(pool, pause_s)
            if not answered:
                yield None
            for process in answered:
                verdict = process.take(spec, timeout_s)
                if process.is_over:
                    pool.remove(process)
                else:
                    idle.append(process)
                if verdict is not None:
                    yield verdict
    finally:
        for process in pool:
            process.close()
        until = time.monotonic() + END_S
        for process in pool:
            process.stop(max(0.0, until - time.monotonic()) if process in idle else 0.0)


def check(spec: str, *, base_dir: str = ".", name: str = "reward") -> None:
    """Load a verifier in a process of its own, where there is nothing to judge.

    Raises:
        ConfigError: It can't be loaded.
    """
    process = _Process([sys.executable, "-m", _HOST, spec, base_dir, name])
    try:
        while not process.is_idle:
            for one in _answered([process], LOADING_S):
                one.take(spec, LOADING_S)
    finally:
        process.stop(END_S)


def _answered(pool: "list[_Process]", pause_s: float) -> "list[_Process]":
    """Processes that have answered or ended, or whose time is over; waits for one, but not for long."""
    busy = {process.connection: process for process in pool if not process.is_idle}
    rest_s = min(process.until for process in busy.values()) - time.monotonic()
    answered = {busy[ready] for ready in wait(list(busy), max(0.0, min(rest_s, pause_s)))}  # type: ignore[index]
    now = time.monotonic()
    return [process for process in busy.values() if process in answered or process.until <= now]


class _Process:
    """One process: loading the verifier, idle, or busy with a rollout."""

    def __init__(self, command: list[str]) -> None:
        self.connection, theirs = Pipe()
        environment = {key: value for key, value in os.environ.items() if key != "SPANGRAD_KEY"}
        self._process = subprocess.Popen(
            [*command, str(theirs.fileno())],
            stdin=subprocess.PIPE,
            stdout=2,  # what a verifier prints is not our listing
            pass_fds=(theirs.fileno(),),
            env=environment,
            start_new_session=True,
        )
        theirs.close()
        self.rollout: StoredRollout | None = None
        self.is_idle = False
        self.is_over = False
        self.until = time.monotonic() + LOADING_S

    def give(self, rollout: StoredRollout, timeout_s: float) -> bool:
        """Hand over a rollout; False: it has ended since its last one, and this one is not to blame."""
        try:
            self.connection.send(rollout)
        except OSError:
            self.stop(0.0)
            return False
        self.rollout, self.is_idle = rollout, False
        self.until = time.monotonic() + timeout_s
        return True

    def take(self, spec: str, timeout_s: float) -> Verdict | None:
        """The verdict on its rollout; None: it has loaded the verifier."""
        rollout, self.rollout = self.rollout, None
        try:
            answer = self._answer()
            ended = ""
        except (EOFError, OSError, ValueError):
            answer = None
            ended = f"its process ended with {self.stop(END_S)}"
        if rollout is None:
            if answer is None or "ready" not in answer:
                why = ended or f"it took longer than {LOADING_S:g} s"
                raise ConfigError(answer["broken"] if answer else f"{spec!r} can't be loaded: {why}")
            self.is_idle = True
            return None
        if answer is None:
            self.is_over = True
            self.stop(0.0)
            outcome = Outcome.DIED if ended else Outcome.TIMED_OUT
            return _verdict(rollout, outcome, error=ended or f"it took longer than {timeout_s:g} s")
        self.is_idle = True
        if "raised" in answer:
            return _verdict(rollout, Outcome.RAISED, error=str(answer["raised"]))
        values = answer.get("values")
        return _verdict(rollout, Outcome.SCORED if values else Outcome.NO_OPINION, values=values)

    def close(self) -> None:
        """Tell an idle process that nothing is left to do."""
        self.connection.close()

    def stop(self, within_s: float) -> int:
        """End the process, with whatever it started; its exit code."""
        self.connection.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(within_s)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        return code

    def _answer(self) -> dict[str, Any] | None:
        """What it said; None: nothing yet. Raises if it has ended, or says what no host of ours would."""
        if not self.connection.poll():
            return None
        found: dict[str, Any] = json.loads(self.connection.recv_bytes(ANSWER_BYTES))
        return found


def _verdict(
    rollout: StoredRollout,
    outcome: Outcome,
    *,
    values: Mapping[str, float] | None = None,
    error: str | None = None,
) -> Verdict:
    return Verdict(rollout.rollout_id, rollout.attempt, outcome, values, error)
