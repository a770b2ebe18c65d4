"""An agent that is a program: `agent.command`, started once for every rollout.

    in    the task as JSON: standard input, and SPANGRAD_TASK if it is no longer than the system allows
          OPENAI_BASE_URL, OPENAI_API_KEY, OPENAI_MODEL, and ANTHROPIC_... alike: calls that are made with
          them belong to the rollout, whatever language makes them
    out   the JSON object in the last line of standard output, or else all of it as text

Knows processes. Knows no protocol, queue or rewards.

* An exit code other than 0 fails the rollout, and so does more output than `MAX_OUTPUT_BYTES`, unless it ends
  with the JSON; the failure has the end of what the program wrote to standard error.
* When the program has ended, all of its process group is killed. Nothing waits for what keeps its pipes open.
* A program dies with this process, however that ends.
"""

import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, ClassVar, Final

from spangrad.errors import AgentFailedError, ConfigError
from spangrad.trainer.processes import die_with_parent
from spangrad.trainer.rollouts.agent_start import MAX_OUTPUT_BYTES, AgentStart

TAIL_BYTES: Final = 1500
"""Of standard error in a failure."""
MAX_VARIABLE_BYTES: Final = 128_000
"""Linux takes no longer string in an environment (131,072 with its name)."""
LOOK_S: Final = 0.1
"""How often it is looked whether a program that still has its pipes has ended."""


class CommandAgent:
    """Runs a program for every rollout, in the thread that asks."""

    is_async: ClassVar = False
    can_stop: ClassVar = True

    def __init__(self, start: AgentStart) -> None:
        """Nothing is started yet.

        Raises:
            ConfigError: There is no such program.
        """
        self._start = start
        program, *arguments = start.command
        is_path = os.sep in program
        found = shutil.which(os.path.join(start.base_dir, program) if is_path else program)
        if found is None:
            where = f"in {start.base_dir!r}" if is_path else "on the PATH"
            raise ConfigError(f"agent.command: there is no program {program!r} {where} that can be executed")
        self._argv = [os.path.abspath(found) if is_path else program, *arguments]
        self._lock = threading.Lock()
        self._running: dict[tuple[str, int], subprocess.Popen[bytes]] = {}
        self._stopped = set[tuple[str, int]]()

    def run(self, rollout: Mapping[str, Any]) -> Any:
        """Start the program for this rollout, wait for it, and read its output.

        Raises:
            AgentFailedError: It failed, was stopped, or printed too much.
        """
        key = rollout["rollout_id"], rollout["attempt"]
        task = json.dumps(rollout["task"], ensure_ascii=False).encode(errors="replace")
        with tempfile.TemporaryFile() as given:
            given.write(task)
            given.seek(0)
            process = subprocess.Popen(
                self._argv,
                cwd=self._start.base_dir,
                env=self._environment(rollout, task),
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        with process:
            with self._lock:
                self._running[key] = process
                if key in self._stopped:
                    _kill_group(process)
            try:
                return _Reading(process).result()
            finally:
                with self._lock:
                    self._stopped.discard(key)
                    del self._running[key]

    def stop(self, key: tuple[str, int]) -> None:
        """End the program of one attempt that `run` was asked for, with all its processes."""
        with self._lock:
            self._stopped.add(key)
            if key in self._running:
                _kill_group(self._running[key])

    def close(self) -> None:
        """End all programs."""
        with self._lock:
            for process in self._running.values():
                _kill_group(process)

    def _environment(self, rollout: Mapping[str, Any], task: bytes) -> dict[str, str]:
        start, url = self._start, self._start.policy_url(rollout)
        key = start.key or "none"
        given = {
            **{"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": key, "OPENAI_MODEL": start.model},
            **{"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": key, "ANTHROPIC_MODEL": start.model},
        }
        if len(task) <= MAX_VARIABLE_BYTES:
            given["SPANGRAD_TASK"] = task.decode()
        return {**os.environ, **given, **start.env}


class _Reading:
    """Takes what a program writes, until it has ended."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        self._output = bytearray()
        """Its end, if it is too long."""
        self._printed = 0
        self._tail = bytearray()

    def result(self) -> Any:
        """The output."""
        process = self._process
        assert process.stdout is not None and process.stderr is not None
        with selectors.DefaultSelector() as selector:
            for pipe, take in ((process.stdout, self._take_output), (process.stderr, self._take_errors)):
                os.set_blocking(pipe.fileno(), False)
                selector.register(pipe, selectors.EVENT_READ, take)
            while process.poll() is None:
                if selector.get_map():
                    self._read(selector, LOOK_S)
                else:
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(LOOK_S)
            _kill_group(process)
            while self._read(selector, 0.0):  # what was written before it ended is in the pipes
                pass
        if process.returncode < 0:
            self._fail(f"it was ended by {_signal_name(-process.returncode)}")
        if process.returncode:
            self._fail(f"exit code {process.returncode}")
        output = output_of(self._output.decode(errors="replace"))
        if self._printed > MAX_OUTPUT_BYTES and isinstance(output, str):
            self._fail(f"it printed {self._printed} bytes, {MAX_OUTPUT_BYTES} at most can be its output")
        return output

    def _read(self, selector: selectors.BaseSelector, timeout_s: float) -> bool:
        """Take what is there. Returns whether anything was."""
        is_any = False
        for ready, _ in selector.select(timeout_s):
            with suppress(BlockingIOError):
                if chunk := os.read(ready.fd, 2**16):
                    is_any = True
                    ready.data(chunk)
                else:
                    selector.unregister(ready.fileobj)
        return is_any

    def _take_output(self, chunk: bytes) -> None:
        self._printed += len(chunk)
        self._output += chunk
        del self._output[:-MAX_OUTPUT_BYTES]

    def _take_errors(self, chunk: bytes) -> None:
        os.write(sys.stderr.fileno(), chunk)
        self._tail += chunk
        del self._tail[:-TAIL_BYTES]

    def _fail(self, what: str) -> None:
        tail = self._tail.decode(errors="replace").strip()
        raise AgentFailedError(f"{what}; its standard error ends: {tail}" if tail else what)


def output_of(text: str) -> Any:
    """What a program printed: the JSON object in its last line, or all of it as text.

    A number or a quoted text in the last line is no JSON of the agent's for sure: it may be the policy's
    words, and then the kind of the output would depend on what the policy says.
    """
    text = text.strip()
    last = text[text.rfind("\n") + 1 :]
    if last.startswith("{"):
        with suppress(ValueError, RecursionError):
            return json.loads(last)
    return text


def _kill_group(process: "subprocess.Popen[bytes]") -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _signal_name(number: int) -> str:
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"
