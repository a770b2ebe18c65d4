"""Generators that are abandoned half way, closed elsewhere or collected leave no rollout behind."""

import asyncio
import contextvars
import gc
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

import spangrad
from spangrad.tracer import conventions as c
from tests.tracer.recording import Recorded, roots

Finish = Callable[[], list[Recorded]]


def here() -> str | None:
    rollout = spangrad.current_rollout()
    return rollout.rollout_id if rollout else None


@spangrad.rollout(rollout_id="decorated")
def decorated() -> Iterator[str | None]:
    yield here()
    yield here()


def block() -> Iterator[str | None]:
    with spangrad.rollout(rollout_id="block"):
        yield here()
        yield here()


@spangrad.rollout(rollout_id="decorated")
async def async_decorated() -> AsyncIterator[str | None]:
    yield here()
    await asyncio.sleep(0)
    yield here()


async def async_block() -> AsyncIterator[str | None]:
    async with spangrad.rollout(rollout_id="block"):
        yield here()
        await asyncio.sleep(0)
        yield here()


@pytest.fixture(autouse=True)
def nothing_is_said(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Such as "token was created in a different Context", or an error of the event loop."""
    yield
    assert caplog.records == []


@pytest.mark.parametrize("make", [decorated, block])
@pytest.mark.parametrize("end", ["garbage", "close", "elsewhere", "other thread", "throw"])
def test_a_generator_that_is_left_ends_its_rollout_and_is_not_current(
    recorded: Finish, make: Callable[[], Any], end: str
) -> None:
    stream = make()
    name = next(stream)
    if end == "garbage":
        del stream
        gc.collect()
    elif end == "close":
        stream.close()
    elif end == "elsewhere":
        contextvars.Context().run(stream.close)
    elif end == "throw":
        with pytest.raises(KeyError):
            stream.throw(KeyError("theirs"))
    else:
        thread = threading.Thread(target=stream.close)
        thread.start()
        thread.join()
    assert here() is None
    with spangrad.rollout(rollout_id="next"):
        assert here() == "next"
    assert here() is None
    spans = roots(recorded())
    assert [root[c.ROLLOUT_ID] for root in spans] == [name, "next"]
    assert spans[0].is_error is (end == "throw")


@pytest.mark.parametrize("make", [decorated, block])
def test_a_generator_that_ends_in_another_rollout_leaves_that_one_current(
    recorded: Finish, make: Callable[[], Any]
) -> None:
    stream = make()
    contextvars.copy_context().run(next, stream)
    with spangrad.rollout(rollout_id="other"):
        stream.close()
        assert here() == "other"
    assert here() is None


@pytest.mark.parametrize("make", [async_decorated, async_block])
@pytest.mark.parametrize("end", ["garbage", "aclose", "other task", "never"])
def test_an_async_generator_that_is_left_ends_its_rollout_and_is_not_current(
    recorded: Finish, make: Callable[[], Any], end: str
) -> None:
    async def close(stream: Any) -> str | None:
        with spangrad.rollout(rollout_id="other"):
            await stream.aclose()
            return here()

    async def run() -> None:
        stream = make()
        await anext(stream)
        if end == "garbage":
            del stream
            gc.collect()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        elif end == "aclose":
            await stream.aclose()
        elif end == "other task":
            assert await asyncio.create_task(close(stream)) == "other"
        if end == "never":
            held.append(stream)  # the loop closes it at the end
        else:
            assert here() is None

    held: list[Any] = []
    asyncio.run(run())
    assert here() is None
    ended = {root[c.ROLLOUT_ID]: root.is_error for root in roots(recorded())}
    assert ended.pop("decorated" if make is async_decorated else "block") is False
    assert set(ended) <= {"other"}


def test_a_stream_cancelled_in_the_middle_of_a_step_restores_the_context(recorded: Finish) -> None:
    async def run() -> None:
        @spangrad.rollout(rollout_id="stuck")
        async def stuck() -> AsyncIterator[None]:
            await asyncio.Event().wait()
            yield

        async def consume() -> None:
            with spangrad.rollout(rollout_id="consumer"):
                try:
                    async for _ in stuck():
                        pass
                finally:
                    assert here() == "consumer"

        task = asyncio.create_task(consume())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert {root[c.ROLLOUT_ID]: root[c.ERROR_TYPE] for root in roots(recorded())} == {
        "stuck": "asyncio.exceptions.CancelledError",
        "consumer": "asyncio.exceptions.CancelledError",
    }


def test_one_scope_used_by_several_tasks_at_once_gives_each_its_own_rollout(recorded: Finish) -> None:
    scope = spangrad.rollout(task_id="t")

    async def agent(wait: int) -> bool:
        async with scope as handle:
            for _ in range(wait):
                await asyncio.sleep(0)
                if spangrad.current_rollout() is not handle:
                    return False
        return spangrad.current_rollout() is None

    async def both() -> list[bool]:
        return list(await asyncio.gather(agent(1), agent(5), agent(3)))

    assert asyncio.run(both()) == [True] * 3
    assert len({root[c.ROLLOUT_ID] for root in roots(recorded())}) == 3


def test_a_task_that_outlives_its_rollout_belongs_to_the_one_around_it(recorded: Finish) -> None:
    async def run() -> tuple[str | None, str | None]:
        ended = asyncio.Event()

        async def late() -> str | None:
            await ended.wait()
            return here()

        with spangrad.rollout(rollout_id="outer"):
            with spangrad.rollout(rollout_id="inner"):
                task = asyncio.create_task(late())
            ended.set()
            in_outer = await task
            ended.clear()
            task = asyncio.create_task(late())
        ended.set()
        return in_outer, await task

    assert asyncio.run(run()) == ("outer", None)
