"""Cancellation, exit, fork and memory, where they touch rollouts."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import spangrad
from spangrad.tracer import conventions as c
from spangrad.tracer import current
from spangrad.tracer.current import ENVIRONMENT
from tests.tracer.recording import Recorded, calls, roots, spans_of_store
from tests.tracer.stub_server import ModelServer
from tests.waiting import wait_until

Finish = Callable[[], list[Recorded]]

PRELUDE = """
import atexit, multiprocessing, os, signal, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
import httpx, spangrad
def ask(prompt):
    body = {"model": "policy", "messages": [{"role": "user", "content": prompt}]}
    httpx.post(sys.argv[1] + "/chat/completions", json=body)
"""
BEGIN = 'spangrad.init(store="s")\n'


def run(
    code: str, model: ModelServer, where: Path, returncode: int = 0, *, begin: str = BEGIN
) -> list[Recorded]:
    environment = {name: value for name, value in os.environ.items() if name != ENVIRONMENT}
    ended = subprocess.run(
        [sys.executable, "-c", PRELUDE + begin + code, model.url],
        capture_output=True,
        text=True,
        env=environment,
        cwd=where,
        timeout=60,
    )
    assert (ended.returncode, ended.stdout + ended.stderr) == (returncode, "")
    return spans_of_store(where / "s")


def test_a_cancelled_stream_is_an_error_and_ends(model: ModelServer, recorded: Finish) -> None:
    """`CancelledError` is a BaseException: neither may the span stay open nor look like a success."""

    async def agent(reading: asyncio.Event) -> None:
        body = {"model": "policy", "stream": True, "messages": [{"role": "user", "content": "GATED one"}]}
        async with (
            spangrad.rollout(rollout_id="r"),
            httpx.AsyncClient() as client,
            client.stream("POST", f"{model.url}/chat/completions", json=body) as response,
        ):
            async for _ in response.aiter_bytes():
                reading.set()

    async def cancel() -> None:
        reading = asyncio.Event()
        task = asyncio.create_task(agent(reading))
        await reading.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    spans = recorded()
    (call,), (root,) = calls(spans), roots(spans)
    for span in (call, root):
        assert span.is_error
        assert span[c.ERROR_TYPE] == "asyncio.exceptions.CancelledError"
    assert call[c.STREAM_COMPLETE] is False
    assert call.end_ns >= call.start_ns


def test_a_call_cancelled_before_its_response_is_an_error_and_ends(recorded: Finish) -> None:
    async def cancel() -> None:
        connected = asyncio.Event()

        async def never_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connected.set()
            await reader.read()
            writer.close()
            await writer.wait_closed()
            hung_up.set()

        hung_up = asyncio.Event()
        server = await asyncio.start_server(never_answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]

        async def agent() -> None:
            async with httpx.AsyncClient() as client:
                await client.post(f"http://127.0.0.1:{port}/v1/chat/completions", json={"messages": []})

        task = asyncio.create_task(agent())
        await connected.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await hung_up.wait()
        server.close()

    asyncio.run(cancel())
    (call,) = calls(recorded())
    assert (call.is_error, call[c.ERROR_TYPE]) == (True, "asyncio.exceptions.CancelledError")


@pytest.mark.slow
def test_a_fork_while_every_lock_is_held_does_not_stop_the_child(model: ModelServer, tmp_path: Path) -> None:
    """As by a preloading server: a thread of the parent holds the queue's, the span's and our own locks."""
    spans = run(
        """
from spangrad.tracer import current, runtime, setup
worker = runtime.active().worker
with spangrad.rollout(rollout_id="r") as handle:
    ask("before")
    held, done = threading.Event(), threading.Event()
    def hold():
        with worker._lock, setup._lock, current._open_lock, handle.span._lock:
            held.set()
            done.wait(60)
    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        spangrad.reward(1.0)
        with spangrad.rollout(rollout_id="own"):
            ask("child")
        spangrad.init()
        os._exit(0 if spangrad.shutdown() else 1)
    status = os.waitpid(child, 0)[1]
    done.set()
    thread.join()
assert status == 0, status
""",
        model,
        tmp_path,
    )
    assert {call.prompt(): call[c.ROLLOUT_ID] for call in calls(spans)} == {"before": "r", "child": "own"}
    (rewarded,) = [span for span in spans if span.events]
    assert rewarded[c.ROLLOUT_ID] == "r"
    assert sorted(root[c.ROLLOUT_ID] for root in roots(spans)) == ["own", "r"]


@pytest.mark.slow
def test_work_begun_before_the_fork_is_recorded_once_and_the_childs_too(
    model: ModelServer, tmp_path: Path
) -> None:
    """A preloading server: the parent has recorded, children serve and fork again."""
    spans = run(
        """
ask("preload")
children = []
for number in range(3):
    child = os.fork()
    if child == 0:
        with spangrad.rollout(rollout_id=f"r{number}"), ThreadPoolExecutor(1) as pool:
            pool.submit(ask, f"child {number}").result()
        spangrad.flush()
        os._exit(0)
    children.append(child)
assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
ask("parent")
""",
        model,
        tmp_path,
    )
    owner = {call.prompt(): call.get(c.ROLLOUT_ID) for call in calls(spans)}
    assert owner == {"preload": None, "parent": None} | {f"child {n}": f"r{n}" for n in range(3)}
    assert len(spans) == 5 + 3


@pytest.mark.slow
def test_a_thread_pool_closed_before_atexit_loses_nothing(model: ModelServer, tmp_path: Path) -> None:
    spans = run(
        """
pool = ThreadPoolExecutor(2)
scope = spangrad.rollout(rollout_id="r")
scope.__enter__()
@atexit.register
def late():
    try:
        pool.submit(ask, "refused")
    except RuntimeError:
        ask("at exit")
    scope.__exit__(None, None, None)
for number in range(4):
    pool.submit(ask, f"pool {number}")
""",
        model,
        tmp_path,
    )
    prompts = sorted(call.prompt() for call in calls(spans))
    assert prompts == ["at exit", *(f"pool {number}" for number in range(4))]
    assert {call[c.ROLLOUT_ID] for call in calls(spans)} == {"r"}
    assert [root.is_error for root in roots(spans)] == [False]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ending", "returncode"),
    [("", 0), ("os.kill(os.getpid(), signal.SIGTERM); signal.pause()", -signal.SIGTERM)],
    ids=["return", "SIGTERM"],
)
def test_a_rollout_that_is_not_over_at_the_end_is_recorded_as_unfinished(
    model: ModelServer, tmp_path: Path, ending: str, returncode: int
) -> None:
    spans = run(
        f"""
@spangrad.rollout(rollout_id="generator")
def words():
    ask("one")
    yield
    yield
held = words()
next(held)
def hang():
    with spangrad.rollout(rollout_id="thread"):
        ask("two")
        begun.set()
        threading.Event().wait()
begun = threading.Event()
threading.Thread(target=hang, daemon=True).start()
begun.wait(60)
{ending}
""",
        model,
        tmp_path,
        returncode,
    )
    ended = {root[c.ROLLOUT_ID]: (root.is_error, root[c.ERROR_TYPE]) for root in roots(spans)}
    assert ended == {"generator": (True, "unfinished"), "thread": (True, "unfinished")}
    assert {call.prompt(): call[c.ROLLOUT_ID] for call in calls(spans)} == {
        "one": "generator",
        "two": "thread",
    }


@pytest.mark.slow
def test_a_child_of_multiprocessing_that_begins_to_record_by_itself_flushes(
    model: ModelServer, tmp_path: Path
) -> None:
    spans = run(
        """
def child():
    spangrad.init(store="s")
    ask("child")
process = multiprocessing.get_context("fork").Process(target=child)
process.start()
process.join()
assert process.exitcode == 0
""",
        model,
        tmp_path,
        begin="",
    )
    assert [call.prompt() for call in calls(spans)] == ["child"]


@pytest.mark.slow
def test_pools_that_are_terminated_at_once_end(model: ModelServer, tmp_path: Path) -> None:
    """A SIGTERM that comes just before a worker waits for its semaphore must kill it all the same."""
    spans = run(
        """
for _ in range(15):
    with multiprocessing.get_context("fork").Pool(2) as pool:
        pool.map(str, range(3))
""",
        model,
        tmp_path,
    )
    assert spans == []


@pytest.mark.slow
def test_a_pool_that_is_terminated_keeps_what_its_workers_recorded(
    model: ModelServer, tmp_path: Path
) -> None:
    spans = run(
        """
with spangrad.rollout(rollout_id="r"), multiprocessing.get_context("fork").Pool(2) as pool:
    pool.map(ask, ["one", "two", "three"])
""",
        model,
        tmp_path,
    )
    assert {call.prompt(): call[c.ROLLOUT_ID] for call in calls(spans)} == dict.fromkeys(
        ["one", "two", "three"], "r"
    )


def test_rollouts_that_are_left_in_the_middle_do_not_stay_in_memory(recorded: Finish) -> None:
    kept: list[weakref.ref[Any]] = []

    class Heavy:
        pass

    @spangrad.rollout
    def words(heavy: Heavy) -> Iterator[int]:
        yield 1
        yield 2

    @spangrad.rollout
    async def async_words(heavy: Heavy) -> AsyncIterator[int]:
        yield 1
        yield 2

    def leave() -> None:
        heavy = Heavy()
        kept.append(weakref.ref(heavy))
        next(words(heavy))

    async def leave_async() -> None:
        heavy = Heavy()
        kept.append(weakref.ref(heavy))
        await anext(async_words(heavy))

    async def leave_all() -> None:
        for _ in range(50):
            await leave_async()
            leave()
            await asyncio.sleep(0)  # the loop closes what was left
        await asyncio.sleep(0)

    asyncio.run(leave_all())
    gc.collect()
    assert [reference for reference in kept if reference() is not None] == []
    assert current._open == []
    spans = roots(recorded())
    assert (len(spans), sum(root.is_error for root in spans)) == (100, 0)


def test_threads_do_not_keep_their_rollout_in_memory(recorded: Finish) -> None:
    threads = []
    with spangrad.rollout():
        taken = weakref.ref(spangrad.current_rollout().span)  # type: ignore[union-attr]
        threads.append(threading.Thread(target=lambda: None))
        threads[0].start()
        threads[0].join()
    recorded()
    wait_until(lambda: gc.collect() >= 0 and taken() is None)
    assert threads
