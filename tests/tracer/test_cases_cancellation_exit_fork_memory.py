"""`cases/capture.md`, Cancellation, exit, fork, memory."""

import asyncio
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

import spangrad
from spangrad.tracer import capture
from spangrad.tracer import conventions as c
from spangrad.tracer.current import ENVIRONMENT
from tests.tracer.canned import Answer, serving
from tests.tracer.recording import Recorded, calls, roots, spans_of_store
from tests.tracer.stub_server import ModelServer, model_server

Finish = Callable[[], list[Recorded]]


def body(prompt: str, **more: Any) -> dict[str, Any]:
    return {"model": "policy", "messages": [{"role": "user", "content": prompt}]} | more


# Cancellation


async def cancel(task: "asyncio.Task[Any]", how: str) -> None:
    if how == "cancel":
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    elif how == "wait_for":
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(task, 0.01)
    else:

        async def fail() -> None:
            raise KeyError("a neighbour")

        with pytest.raises(ExceptionGroup):
            async with asyncio.TaskGroup() as group:
                group.create_task(as_child(task))
                group.create_task(fail())


async def as_child(task: "asyncio.Task[Any]") -> None:
    try:
        await task
    except asyncio.CancelledError:
        task.cancel()
        raise


@pytest.mark.parametrize("how", ["cancel", "wait_for", "task group"])
@pytest.mark.parametrize("when", ["before the headers", "in the stream"])
def test_a_cancelled_call_ends_as_an_error_whenever_and_however_it_is_cancelled(
    recorded: Finish, how: str, when: str
) -> None:
    answer = Answer(waits=True) if when == "before the headers" else None

    async def run(url: str, asked: Callable[[], bool]) -> None:
        started = asyncio.Event()

        async def ask() -> None:
            async with openai.AsyncOpenAI(base_url=url, api_key="k", max_retries=0) as client:
                stream: Any = await client.chat.completions.create(**body("GATED", stream=True))
                async for _ in stream:
                    started.set()

        task = asyncio.create_task(ask())
        while not (started.is_set() or (answer and asked())):
            await asyncio.sleep(0.01)
        await cancel(task, how)

    if answer is not None:
        with serving(answer) as server:
            asyncio.run(run(f"{server.url}/v1", lambda: bool(server.asked)))
    else:
        with model_server() as model:
            asyncio.run(run(model.url, lambda: False))
    (call,) = calls(recorded())
    assert (call.is_error, call[c.ERROR_TYPE]) == (True, "asyncio.exceptions.CancelledError")
    assert call.get(c.STREAM_COMPLETE) is (None if answer else False)
    assert capture._open_calls == set()


def test_an_interrupt_from_the_keyboard_in_a_call_is_an_error_and_passes(recorded: Finish) -> None:
    class Interrupting(httpx.SyncByteStream):
        def __iter__(self) -> Any:
            raise KeyboardInterrupt

    original: Any = httpx.HTTPTransport.handle_request
    inner = original.__wrapped__
    with serving(Answer(b"{}")) as server, httpx.Client() as client:
        capture.uninstall()

        def interrupted(self: Any, request: Any) -> Any:
            response = inner(self, request)
            response.stream.close()
            response.stream = Interrupting()
            return response

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(httpx.HTTPTransport, "handle_request", interrupted)
            capture.install()
            with pytest.raises(KeyboardInterrupt):
                client.post(f"{server.url}/v1/chat/completions", json=body("x"))
            spans = recorded()
    (call,) = calls(spans)
    assert (call.is_error, call[c.ERROR_TYPE]) == (True, "builtins.KeyboardInterrupt")


# Exit

PRELUDE = """
import asyncio, atexit, concurrent.futures, faulthandler, os, sys, threading, time, httpx, spangrad
spangrad.init(store=sys.argv[1])
def ask(prompt):
    body = {"model": "policy", "messages": [{"role": "user", "content": prompt}]}
    httpx.post(sys.argv[2] + "/chat/completions", json=body)
"""
ENDS = {
    "pool that is still at work": """
pool = concurrent.futures.ThreadPoolExecutor(2)
pool.submit(ask, "one")
pool.submit(ask, "two")
""",
    "exit handler": """
atexit.register(ask, "one")
ask("two")
""",
    "asyncio.run": """
async def main():
    await asyncio.gather(asyncio.to_thread(ask, "one"), asyncio.to_thread(ask, "two"))
asyncio.run(main())
""",
    "sys.exit beside a thread": """
threading.Thread(target=ask, args=("one",)).start()
ask("two")
sys.exit(0)
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
def test_nothing_that_finished_is_lost_at_the_interpreters_end(
    model: ModelServer, tmp_path: Path, end: str
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != ENVIRONMENT}
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + ENDS[end], str(tmp_path / "s"), model.url],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    prompts = sorted(call.prompt() for call in calls(spans_of_store(tmp_path / "s")))
    assert prompts == ["one", "two"]


# Fork

FORKS = """
busy = threading.Event()
clients = [httpx.Client() for _ in range(5)]  # made here: an import lock that a fork inherits is not ours
def ask(prompt, client):
    body = {"model": "policy", "messages": [{"role": "user", "content": prompt}]}
    client.post(sys.argv[2] + "/chat/completions", json=body)
for client in clients[1:]:
    ask("parent", client)
spangrad.flush()
def hammer(client):
    while not busy.is_set():
        ask("parent", client)
threads = [threading.Thread(target=hammer, args=(client,)) for client in clients[1:]]
for thread in threads: thread.start()
for number in range(8):
    child = os.fork()
    if child == 0:
        faulthandler.dump_traceback_later(40, exit=True)
        ask(f"child {number}", clients[0])
        os._exit(0 if spangrad.flush(30) else 1)
    assert os.waitpid(child, 0)[1] == 0
busy.set()
for thread in threads: thread.join()
"""


@pytest.mark.slow
def test_children_forked_while_our_locks_may_be_held_record_their_calls(
    model: ModelServer, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PRELUDE + FORKS, str(tmp_path / "s"), model.url],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    found = calls(spans_of_store(tmp_path / "s"))
    prompts = [call.prompt() for call in found]
    assert sorted(set(prompts) - {"parent"}) == [f"child {number}" for number in range(8)]
    assert len(prompts) - prompts.count("parent") == 8
    assert len({call.span_id for call in found}) == len(found)
    assert prompts.count("parent") == model.prompts().count("parent")


# Memory


def test_streams_and_rollouts_that_nobody_ends_hold_nothing_and_need_no_threads(
    model: ModelServer, recorded: Finish
) -> None:
    def left_alone(number: int) -> None:
        response = client.send(
            client.build_request("POST", f"{model.url}/chat/completions", json=body("CUT it", stream=True)),
            stream=True,
        )
        cycle: list[Any] = [response]
        cycle.append(cycle)

    @spangrad.rollout
    def steps() -> Any:
        yield 1
        yield 2

    with httpx.Client(limits=httpx.Limits(max_connections=None)) as client:
        left_alone(0)
        before = threading.active_count() - sum("Thread-" in t.name for t in threading.enumerate())
        for number in range(50):
            left_alone(number)
            next(steps())
        gc.collect()
        assert capture._open_calls == set()
        ours = threading.active_count() - sum("Thread-" in t.name for t in threading.enumerate())
        assert ours == before
    spans = recorded()
    assert len(calls(spans)) == 51
    assert all(call[c.STREAM_COMPLETE] is False for call in calls(spans))
    assert len(roots(spans)) == 50


def test_a_stream_without_an_end_is_bounded(recorded: Finish, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "MAX_RESPONSE_BYTES", 100_000)
    monkeypatch.setattr("spangrad.tracer.calls.MAX_RESPONSE_BYTES", 100_000)
    endless = Answer(b"data: {}\n\n" * 50_000, content_type="text/event-stream")
    with (
        serving(endless) as server,
        httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body("x", stream=True)) as response,
    ):
        size = 0
        for part in response.iter_raw():
            size += len(part)
            (open_call,) = capture._open_calls
            assert sum(map(len, open_call.raw.response)) <= 100_000
    assert size == 500_000
    (call,) = calls(recorded())
    assert "longer than 100000 bytes" in call.json(c.DROPPED)["response"]
