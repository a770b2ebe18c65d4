"""The process in which an agent runs: the agent, the tracer, and nothing else.

A rollout worker starts it, sends rollouts as JSON lines on its standard input and
reads results from its standard output. It holds the agent's key only, so what the
policy can reach can't grade itself.

    in   {"run": {"rollout_id", "attempt", "task_id", "task"}}  |  {"flush": n}
    out  {"ready": true}  |  {"done": id, "attempt", "output"}
         {"failed": id, "attempt", "error_type", "error"}  |  {"flushed": n, "ok": bool}

* Whatever the agent prints goes to standard error, never into the protocol.
* End of input ends the process after a flush; it also dies with its parent.
"""

import argparse
import asyncio
import json
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, TextIO

import spangrad
from spangrad.trainer.processes import die_with_parent
from spangrad.user_code import is_async, load_callable

FLUSH_TIMEOUT_S = 30.0


class AgentHost:
    """Runs rollouts concurrently: async agents in one event loop, sync ones in a thread each.

    How many at once is up to who asks.
    """

    def __init__(self, function: Callable[..., Any], *, replies: TextIO) -> None:
        """Prepare the loop; `serve` starts reading."""
        self._function = function
        self._replies = replies
        self._write_lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        if is_async(function):
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, daemon=True, name="rollouts").start()

    def serve(self, lines: TextIO) -> None:
        """Answer requests until the input ends."""
        self._reply({"ready": True})
        for line in lines:
            request = json.loads(line)
            if "run" in request:
                self._submit(request["run"])
            elif "flush" in request:
                self._threads_flush(request["flush"])

    def _submit(self, rollout: dict[str, Any]) -> None:
        if self._loop is not None:
            asyncio.run_coroutine_threadsafe(self._run_async(rollout), self._loop)
        else:
            threading.Thread(target=self._run_sync, args=(rollout,), daemon=True, name="rollout").start()

    def _run_sync(self, rollout: dict[str, Any]) -> None:
        try:
            with _scope(rollout):
                output = self._function(rollout["task"])
        except BaseException as error:  # a failed rollout is data, also one that called sys.exit
            self._fail(rollout, error)
        else:
            self._finish(rollout, output)

    async def _run_async(self, rollout: dict[str, Any]) -> None:
        try:
            with _scope(rollout):
                output = await self._function(rollout["task"])
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
        self._reply({"done": rollout["rollout_id"], "attempt": rollout["attempt"], "output": output})

    def _fail(self, rollout: dict[str, Any], error: BaseException) -> None:
        self._reply(
            {
                "failed": rollout["rollout_id"],
                "attempt": rollout["attempt"],
                "error_type": type(error).__name__,
                "error": str(error)[:2000].encode(errors="replace").decode(),
            }
        )

    def _reply(self, message: dict[str, Any]) -> None:
        line = json.dumps(message)
        with self._write_lock:
            self._replies.write(line + "\n")
            self._replies.flush()


def _scope(rollout: dict[str, Any]) -> Any:
    return spangrad.rollout(
        rollout_id=rollout["rollout_id"], attempt=rollout["attempt"], task_id=rollout["task_id"]
    )


def main(argv: list[str] | None = None) -> None:
    """Entry point of `python -m spangrad.trainer.rollouts.agent_host`."""
    parser = argparse.ArgumentParser(description="Run an agent for a rollout worker.")
    parser.add_argument("--function", required=True)
    parser.add_argument("--base-dir", default=".")
    parser.add_argument("--store", required=True)
    options = parser.parse_args(argv)
    die_with_parent()
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    spangrad.init(store=options.store)
    host = AgentHost(load_callable(options.function, options.base_dir), replies=replies)
    host.serve(sys.stdin)
    spangrad.shutdown()


if __name__ == "__main__":
    main()
