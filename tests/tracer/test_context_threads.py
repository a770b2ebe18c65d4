"""The rollout follows work to threads, executors and asyncio's executor."""

import _thread
import asyncio
import concurrent.futures
import contextvars
import multiprocessing.pool
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import spangrad
from spangrad.tracer.current import Rollout
from tests.tracer.recording import Recorded
from tests.waiting import wait_until

Finish = Callable[[], list[Recorded]]


def here(*_: object) -> str | None:
    rollout = spangrad.current_rollout()
    return rollout.rollout_id if rollout else None


def in_raw_thread(work: Callable[[], Any]) -> Any:
    """In a thread that `threading` did not start: C code, an old event loop, gevent's hub."""
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()
    _thread.start_new_thread(lambda: results.put(work()), ())
    return results.get(timeout=30)


def in_thread(work: Callable[[], Any]) -> Any:
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=lambda: results.put(work())).start()
    return results.get(timeout=30)


def two_open() -> tuple[Any, Any]:
    """Two rollouts that are open at once, so that nothing can be guessed."""
    return spangrad.rollout(rollout_id="first"), spangrad.rollout(rollout_id="second")


def test_a_thread_belongs_to_the_rollout_that_started_it(recorded: Finish) -> None:
    class Agent(threading.Thread):
        seen: str | None = None

        def run(self) -> None:
            self.seen = here()

    outer, inner = two_open()
    with outer:
        first = Agent()
        with inner:
            second = Agent()
            timer = threading.Timer(0, lambda: None)
            for thread in (second, timer):
                thread.start()
                thread.join()
            assert in_thread(lambda: in_thread(here)) == "second"
        first.start()
        first.join()
    assert (first.seen, second.seen) == ("first", "second")
    assert type(first) is Agent
    assert "run" not in vars(first)
    assert in_thread(here) is None


def test_a_threads_own_run_and_errors_stay_as_they_are(recorded: Finish) -> None:
    errors: queue.SimpleQueue[Any] = queue.SimpleQueue()
    hook, threading.excepthook = threading.excepthook, lambda arguments: errors.put(arguments)
    boom = ValueError("boom")

    def fails() -> None:
        raise boom

    try:
        with spangrad.rollout():
            thread = threading.Thread(name="theirs")
            thread.run = fails  # type: ignore[method-assign]
            thread.start()
            thread.join()
            with pytest.raises(RuntimeError, match="threads can only be started once"):
                thread.start()
        assert thread.run is fails
        told = errors.get(timeout=5)
        assert (told.exc_value, told.thread) == (boom, thread)
    finally:
        threading.excepthook = hook


def test_a_thread_that_can_not_start_leaves_no_trace(
    recorded: Finish, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread = threading.Thread(target=here)

    def no_more_threads(*_: object, **__: object) -> int:
        raise RuntimeError("can't start new thread")

    with spangrad.rollout(), monkeypatch.context() as patched:
        patched.setattr(threading, "_start_new_thread", no_more_threads, raising=False)
        patched.setattr(threading, "_start_joinable_thread", no_more_threads, raising=False)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            thread.start()
    assert "run" not in vars(thread)


def test_a_thread_that_can_not_start_keeps_its_own_run_and_its_error(
    recorded: Finish, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unmade(threading.Thread):
        def __init__(self) -> None:
            pass

    with spangrad.rollout():
        with pytest.raises(RuntimeError, match="not called"):
            Unmade().start()
        ran = threading.Event()
        thread: Any = threading.Thread()
        thread.run = ran.set
        with monkeypatch.context() as patch:
            for name in ("_start_new_thread", "_start_joinable_thread"):
                patch.setattr(threading, name, lambda *_, **__: 1 / 0, raising=False)
            with pytest.raises(ZeroDivisionError):
                thread.start()
        thread.start()
        thread.join()
    assert ran.is_set()


def test_to_ask_which_rollout_it_is_lists_no_thread(recorded: Finish) -> None:
    with spangrad.rollout(rollout_id="open"):
        found, is_listed = in_raw_thread(
            lambda: (here(), _thread.get_ident() in [thread.ident for thread in threading.enumerate()])
        )
    assert (found, is_listed) == ("open", False)


def test_a_pools_task_belongs_to_the_rollout_that_submitted_it(recorded: Finish) -> None:
    with ThreadPoolExecutor(1) as pool, spangrad.rollout(rollout_id="first"):
        assert pool.submit(here).result() == "first"  # makes the worker
        with spangrad.rollout(rollout_id="second"):
            assert list(pool.map(here, range(3))) == ["second"] * 3
        unbound = contextvars.Context().run(pool.submit, here)
        assert unbound.result() is None or unbound.result() == "first"  # the only open one, if any
        with spangrad.rollout(rollout_id="third"):
            assert contextvars.Context().run(pool.submit, here).result() is None
    assert pool._threads


def test_pools_of_multiprocessing_threads_follow_per_task(recorded: Finish) -> None:
    with spangrad.rollout(rollout_id="first"), multiprocessing.pool.ThreadPool(1) as pool:
        assert pool.apply(here) == "first"
        with spangrad.rollout(rollout_id="second"):
            assert pool.map(here, range(2)) == ["second"] * 2
            assert pool.apply_async(func=here).get(30) == "second"
            assert list(pool.imap(here, range(2), chunksize=2)) == ["second"] * 2
            assert list(pool.imap_unordered(func=here, iterable=range(2))) == ["second"] * 2
            assert pool.starmap(here, [(1, 2)]) == ["second"]
            assert pool.starmap_async(here, [(1, 2)]).get(30) == ["second"]
            assert pool.map_async(here, [1]).get(30) == ["second"]
        assert pool.apply(here) == "first"


def test_what_a_pool_refuses_it_still_refuses(recorded: Finish) -> None:
    pool = ThreadPoolExecutor(1)
    pool.shutdown()
    with spangrad.rollout():
        with pytest.raises(RuntimeError, match="cannot schedule new futures after shutdown"):
            pool.submit(here)
        with ThreadPoolExecutor(1) as other:
            with pytest.raises(TypeError):
                other.submit()  # type: ignore[call-arg]
            error = KeyError("theirs")

            def fails() -> None:
                raise error

            assert other.submit(fails).exception() is error


def test_run_in_executor_without_copied_context_follows(recorded: Finish) -> None:
    async def agent(name: str, barrier: asyncio.Barrier) -> list[str | None]:
        async with spangrad.rollout(rollout_id=name):
            await barrier.wait()
            loop = asyncio.get_running_loop()
            return [await loop.run_in_executor(None, here), await asyncio.to_thread(here)]

    async def both() -> tuple[list[str | None], list[str | None]]:
        barrier = asyncio.Barrier(2)
        first, second = await asyncio.gather(agent("a", barrier), agent("b", barrier))
        return first, second

    assert asyncio.run(both()) == (["a", "a"], ["b", "b"])


def test_coroutines_sent_to_a_loop_in_another_thread_follow(recorded: Finish) -> None:
    loop = asyncio.new_event_loop()

    async def ask() -> str | None:
        await asyncio.sleep(0)
        return here()

    with spangrad.rollout(rollout_id="first"):
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        with spangrad.rollout(rollout_id="second"):
            assert asyncio.run_coroutine_threadsafe(ask(), loop).result(30) == "second"
        assert asyncio.run_coroutine_threadsafe(ask(), loop).result(30) == "first"
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_a_thread_that_outlives_its_rollout_belongs_to_it_no_more(recorded: Finish) -> None:
    work: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def serve() -> None:
        while (job := work.get()) is not None:
            results.put(job())

    with spangrad.rollout(rollout_id="first"):
        worker = threading.Thread(target=serve)
        worker.start()
        work.put(here)
        assert results.get(timeout=30) == "first"
    work.put(here)
    assert results.get(timeout=30) is None

    def own() -> str | None:
        with spangrad.rollout(rollout_id="own"):
            return here()

    with spangrad.rollout(rollout_id="outer"), spangrad.rollout(rollout_id="inner"):
        work.put(own)
        assert results.get(timeout=30) == "own"
    work.put(None)
    worker.join()


def test_a_thread_of_unknown_origin_belongs_to_the_only_open_rollout(recorded: Finish) -> None:
    with spangrad.rollout(rollout_id="alone"):
        assert in_raw_thread(here) == "alone"
        with spangrad.rollout(rollout_id="other"):
            assert in_raw_thread(here) is None
        assert in_raw_thread(here) is None  # it may have begun in the other
    assert in_raw_thread(here) is None


def test_a_guess_is_not_passed_on_to_threads_that_have_rollouts_of_their_own(recorded: Finish) -> None:
    """A server's thread starts one for each request, and each request is a rollout."""

    def handle_request() -> str | None:
        with spangrad.rollout(task_id="request") as handle:
            return handle.rollout_id

    with spangrad.rollout(rollout_id="alone"):
        assert in_raw_thread(lambda: in_thread(handle_request)) != "alone"


def test_a_reward_from_a_thread_is_the_rollouts(recorded: Finish) -> None:
    with spangrad.rollout(rollout_id="r-1"), spangrad.rollout(rollout_id="r-2"):
        in_thread(lambda: spangrad.reward(0.5))
    spans = recorded()
    (rewarded,) = [span for span in spans if span.events]
    assert rewarded.get("spangrad.rollout.id") == "r-2"


def test_shutdown_puts_the_standard_library_back(recorded: Finish) -> None:
    from spangrad.tracer import children, following

    names = [
        (threading.Thread, "start"),
        (ThreadPoolExecutor, "submit"),
        (multiprocessing.pool.Pool, "map"),
        (multiprocessing.pool.Pool, "__init__"),
        (multiprocessing.Process.__base__, "start"),
    ]
    ours = [vars(owner)[name] for owner, name in names]
    assert all(hasattr(function, "__wrapped__") for function in ours)
    recorded()
    assert [vars(owner)[name] for owner, name in names] == [function.__wrapped__ for function in ours]
    assert not following._patches.is_on
    assert not children._patches.is_on


def test_who_wraps_after_us_keeps_working_and_a_second_init_does_not_wrap_twice(
    recorded: Finish, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = threading.Thread.start
    seen = []

    def theirs(self: threading.Thread) -> None:
        seen.append(self)
        ours(self)

    monkeypatch.setattr(threading.Thread, "start", theirs)
    recorded()
    with spangrad.rollout(rollout_id="unrecorded"):
        assert in_thread(here) is None
    spangrad.init()
    assert threading.Thread.start is theirs
    with spangrad.rollout(rollout_id="r-1"), spangrad.rollout(rollout_id="r-2"):
        assert in_thread(here) == "r-2"
    assert seen
    spangrad.shutdown()


def test_futures_callbacks_and_waits_are_untouched(recorded: Finish) -> None:
    with spangrad.rollout(), ThreadPoolExecutor(2) as pool:
        done: list[object] = []
        future = pool.submit(here)
        future.add_done_callback(done.append)
        assert concurrent.futures.wait([future]).done == {future}
        wait_until(lambda: done == [future])


def test_the_handle_of_a_rollout_can_be_sent_and_keeps_its_names(recorded: Finish) -> None:
    import pickle

    with spangrad.rollout(rollout_id="r & 1", task_id="t/ü", attempt=2) as handle:
        sent: Rollout = pickle.loads(pickle.dumps(handle))
    assert (sent.rollout_id, sent.task_id, sent.attempt) == ("r & 1", "t/ü", 2)
    assert sent.span is None
    assert sent.context is not None and handle.context is not None
    assert (sent.context.trace_id, sent.context.span_id, sent.context.trace_flags) == (
        handle.context.trace_id,
        handle.context.span_id,
        handle.context.trace_flags,
    )
