"""The process in which an agent runs, or from which it is run: agent, tracer, and nothing else.

A rollout worker starts it, says first which agent (`AgentStart`), sends rollouts as JSON lines on its
standard input and reads results from its standard output. It holds the agent's key only, so what the
policy can reach can't grade itself.

    in   {"run": {"rollout_id", "attempt", "task_id", "task"}}  |  {"flush": n}
         {"stop": id, "attempt", "why"}
    out  {"ready": true, "can_stop": bool}  |  {"done": id, "attempt", "output"}
         {"failed": id, "attempt", "error_type", "error"}  |  {"flushed": n, "ok": bool}

* Whatever the agent prints goes to standard error, never into the protocol.
* End of input ends the process after a flush; it also dies with its parent. One that runs programs sees the
  end of its input then and kills them, with what they started.
* A rollout that is stopped fails as overdue, soon; functions can't be stopped.
"""

import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol, TextIO

import spangrad
from spangrad.trainer.processes import die_with_parent
from spangrad.trainer.rollouts.agent_command import CommandAgent
from spangrad.trainer.rollouts.agent_endpoint import EndpointAgent
from spangrad.trainer.rollouts.agent_start import AgentStart
from spangrad.user_code import is_async, load_callable

FLUSH_TIMEOUT_S = 30.0


class Agent(Protocol):
    """Something that does rollouts."""

    @property
    def is_async(self) -> bool:
        """Whether `run` is a coroutine function; else it is called in a thread of its own."""
        ...

    @property
    def can_stop(self) -> bool:
        """Whether `stop`, or cancelling the coroutine, ends a rollout."""
        ...

    def run(self, rollout: dict[str, Any]) -> Any:
        """Do one rollout; returns its output or something to await. What it raises fails the rollout."""
        ...

    def stop(self, key: tuple[str, int]) -> None:
        """End one attempt that runs, by id and number."""
        ...

    def close(self) -> None:
        """End all."""
        ...


class FunctionAgent:
    """A Python function of a task."""

    can_stop = False

    def __init__(self, function: Callable[..., Any]) -> None:
        """Of somebody else's."""
        self._function = function
        self.is_async = is_async(function)

    def run(self, rollout: dict[str, Any]) -> Any:
        """Call it."""
        return self._function(rollout["task"])

    def stop(self, key: tuple[str, int]) -> None:
        """Nobody asks: see `can_stop`."""

    def close(self) -> None:
        """It ends with the process."""


class AgentHost:
    """Runs rollouts concurrently: async agents in one event loop, sync ones in a thread each.

    How many at once is up to who asks.
    """

    def __init__(self, agent: Agent, *, replies: TextIO) -> None:
        """Prepare the loop; `serve` starts reading."""
        self._agent = agent
        self._replies = replies
        self._write_lock = threading.Lock()
        self._running: dict[tuple[str, int], Future[None] | None] = {}
        """By id and attempt; None: in a thread."""
        self._stopped: dict[tuple[str, int], str] = {}
        """Why."""
        self._lock = threading.Lock()
        """Guards both."""
        self._loop: asyncio.AbstractEventLoop | None = None
        if agent.is_async:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, daemon=True, name="rollouts").start()

    def serve(self, lines: TextIO) -> None:
        """Answer requests until the input ends, then end what still runs if that is possible."""
        self._reply({"ready": True, "can_stop": self._agent.can_stop})
        try:
            for line in lines:
                request = json.loads(line)
                if "run" in request:
                    self._submit(request["run"])
                elif "stop" in request:
                    self._stop((request["stop"], request["attempt"]), request["why"])
                elif "flush" in request:
                    self._threads_flush(request["flush"])
        finally:
            self._agent.close()

    def _submit(self, rollout: dict[str, Any]) -> None:
        with self._lock:
            self._running[_key(rollout)] = (
                asyncio.run_coroutine_threadsafe(self._run_async(rollout), self._loop) if self._loop else None
            )
        if self._loop is None:
            threading.Thread(target=self._run_sync, args=(rollout,), daemon=True, name="rollout").start()

    def _stop(self, key: tuple[str, int], why: str) -> None:
        with self._lock:
            if key not in self._running:  # it has ended meanwhile
                return
            self._stopped[key] = why
            future = self._running[key]
        if future is not None:
            future.cancel()
        else:
            self._agent.stop(key)

    def _run_sync(self, rollout: dict[str, Any]) -> None:
        try:
            with _scope(rollout):
                output = self._agent.run(rollout)
        except BaseException as error:  # a failed rollout is data, also one that called sys.exit
            self._fail(rollout, error)
        else:
            self._finish(rollout, output)

    async def _run_async(self, rollout: dict[str, Any]) -> None:
        try:
            with _scope(rollout):
                output = await self._agent.run(rollout)
        except BaseException as error:  # a failed rollout is data, also one that called sys.exit
            self._fail(rollout, error)
        else:
            self._finish(rollout, output)

    def _threads_flush(self, number: int) -> None:
        def flush() -> None:
            self._reply({"flushed": number, "ok": bool(spangrad.flush(FLUSH_TIMEOUT_S))})

        threading.Thread(target=flush, daemon=True, name="flush").start()

    def _finish(self, rollout: dict[str, Any], output: Any) -> None:
        try:
            json.dumps(output, allow_nan=False, ensure_ascii=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            self._fail(rollout, TypeError(f"the agent returned {type(output).__name__}, not JSON: {error}"))
            return
        self._end(rollout, {"done": rollout["rollout_id"], "output": output})

    def _fail(self, rollout: dict[str, Any], error: BaseException) -> None:
        error_type, text = type(error).__name__, str(error)
        with self._lock:
            why = self._stopped.get(_key(rollout))
        if why is not None:
            error_type, text = TimeoutError.__name__, f"{why}: {text}" if text else why
        text = text[:2000].encode(errors="replace").decode()
        self._end(rollout, {"failed": rollout["rollout_id"], "error_type": error_type, "error": text})

    def _end(self, rollout: dict[str, Any], reply: dict[str, Any]) -> None:
        with self._lock:
            self._running.pop(_key(rollout), None)
            self._stopped.pop(_key(rollout), None)
        self._reply({**reply, "attempt": rollout["attempt"]})

    def _reply(self, message: dict[str, Any]) -> None:
        line = json.dumps(message)
        with self._write_lock:
            self._replies.write(line + "\n")
            self._replies.flush()


def _key(rollout: dict[str, Any]) -> tuple[str, int]:
    return rollout["rollout_id"], rollout["attempt"]


def _scope(rollout: dict[str, Any]) -> Any:
    return spangrad.rollout(
        rollout_id=rollout["rollout_id"], attempt=rollout["attempt"], task_id=rollout["task_id"]
    )


def agent_of(start: AgentStart) -> Agent:
    """The agent of one of the three kinds.

    Raises:
        ConfigError: There is no such function or program.
    """
    if start.command:
        return CommandAgent(start)
    if start.url:
        return EndpointAgent(start)
    return FunctionAgent(load_callable(start.function, start.base_dir))


def main() -> None:
    """Entry point of `python -m spangrad.trainer.rollouts.agent_host`."""
    start = AgentStart.from_json(sys.stdin.readline())
    if start.may_outlive_its_parent:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    else:
        die_with_parent()
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    spangrad.init(store=start.store)
    AgentHost(agent_of(start), replies=replies).serve(sys.stdin)
    spangrad.shutdown()


if __name__ == "__main__":
    main()
