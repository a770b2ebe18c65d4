"""What `spangrad.rollout` and `spangrad.reward` must do."""

import asyncio
import concurrent.futures
import contextvars
import multiprocessing
import random
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import spangrad
from spangrad.tracer import conventions as c
from tests.tracer.recording import Recorded, calls, roots, spans_of_store
from tests.tracer.stub_server import ModelServer

Finish = Callable[[], list[Recorded]]


def ask(model: ModelServer, prompt: str = "Hello") -> str:
    body = {"model": "policy", "messages": [{"role": "user", "content": prompt}]}
    reply = httpx.post(f"{model.url}/chat/completions", json=body)
    return str(reply.json()["choices"][0]["message"]["content"])


def test_a_decorated_function_is_one_rollout_per_call(model: ModelServer, recorded: Finish) -> None:
    @spangrad.rollout
    def bare(word: str) -> str:
        """Documented."""
        return ask(model, word)

    @spangrad.rollout(task_id="t-1", attempt=3, name="agent")
    async def with_arguments(word: str) -> str:
        await asyncio.sleep(0)
        return ask(model, word)

    assert (bare.__name__, bare.__doc__) == ("bare", "Documented.")
    assert asyncio.iscoroutinefunction(with_arguments)
    assert bare("one") == "You said one."
    assert bare("two") == "You said two."
    assert asyncio.run(with_arguments("three")) == "You said three."
    spans = recorded()
    assert [root.name for root in roots(spans)] == ["bare", "bare", "agent"]
    assert len({root[c.ROLLOUT_ID] for root in roots(spans)}) == 3
    for root, call in zip(roots(spans), calls(spans), strict=True):
        assert (call.trace_id, call.parent_id) == (root.trace_id, root.span_id)
        assert call[c.ROLLOUT_ID] == root[c.ROLLOUT_ID]
        assert not root.parent_id
    last, last_call = roots(spans)[-1], calls(spans)[-1]
    assert (last[c.TASK_ID], last[c.ATTEMPT], last_call[c.ATTEMPT]) == ("t-1", 3, 3)


def test_an_object_that_is_called_as_a_coroutine_is_a_rollout_until_that_ends(
    model: ModelServer, recorded: Finish
) -> None:
    class Agent:
        async def __call__(self) -> str:
            await asyncio.sleep(0)
            return ask(model)

    assert asyncio.run(spangrad.rollout(Agent())()) == "You said Hello."
    spans = recorded()
    (root,) = roots(spans)
    (call,) = calls(spans)
    assert call.get(c.ROLLOUT_ID) == root[c.ROLLOUT_ID]


def test_blocks_are_rollouts_and_give_their_handle(recorded: Finish) -> None:
    async def run() -> None:
        async with spangrad.rollout(rollout_id="r-2") as handle:
            assert handle.rollout_id == "r-2"
            assert spangrad.current_rollout() is handle

    with spangrad.rollout(rollout_id="r-1", task_id="t") as handle:
        assert (handle.rollout_id, handle.task_id, handle.attempt) == ("r-1", "t", 0)
        assert spangrad.current_rollout() is handle
    assert spangrad.current_rollout() is None
    asyncio.run(run())
    assert [root[c.ROLLOUT_ID] for root in roots(recorded())] == ["r-1", "r-2"]


def test_rewards_are_events_of_the_root(recorded: Finish) -> None:
    with spangrad.rollout() as handle:
        spangrad.reward(0.5, name="exact", explanation="half right")
        handle.reward(True)
        spangrad.reward("none")  # type: ignore[arg-type]
    handle.reward(2, name="late")
    spangrad.reward(1.0)
    spans = recorded()
    (root,) = roots(spans)
    assert root.events == [
        (
            c.REWARD_EVENT,
            {c.REWARD_NAME: "exact", c.REWARD_VALUE: 0.5, c.REWARD_EXPLANATION: "half right"},
        ),
        (c.REWARD_EVENT, {c.REWARD_NAME: "reward", c.REWARD_VALUE: 1.0}),
    ]
    (late,) = [span for span in spans if span is not root]
    assert (late.parent_id, late[c.ROLLOUT_ID]) == (root.span_id, root[c.ROLLOUT_ID])
    assert late.events == [(c.REWARD_EVENT, {c.REWARD_NAME: "late", c.REWARD_VALUE: 2.0})]


@pytest.mark.parametrize(
    "error", [ValueError("bad"), KeyboardInterrupt(), SystemExit(3), asyncio.CancelledError()]
)
def test_errors_are_recorded_and_pass_through_unchanged(recorded: Finish, error: BaseException) -> None:
    @spangrad.rollout
    def fails() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        fails()
    assert caught.value is error
    (root,) = roots(recorded())
    assert root.is_error
    assert root[c.ERROR_TYPE].endswith(type(error).__name__)
    assert root.events[0][0] == "exception"


def test_a_rollout_whose_error_has_no_text_ends_as_failed(recorded: Finish) -> None:
    class SilentError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    with pytest.raises(SilentError), spangrad.rollout():
        raise SilentError
    (root,) = roots(recorded())
    assert root.is_error
    assert str(root[c.ERROR_TYPE]).endswith("SilentError")


def test_ids_that_are_no_text_are_recorded_as_text(model: ModelServer, recorded: Finish) -> None:
    number: Any = 17
    with (
        spangrad.rollout(rollout_id=number, task_id=number),
        concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool,
    ):
        ask(model)
        assert pool.submit(abs, -1).result() == 1
    spans = recorded()
    (call,) = calls(spans)
    (root,) = roots(spans)
    assert [(span[c.ROLLOUT_ID], span[c.TASK_ID]) for span in (root, call)] == [("17", "17")] * 2


def test_a_cancelled_task_ends_its_rollout(recorded: Finish) -> None:
    @spangrad.rollout
    async def waits(started: asyncio.Event) -> None:
        started.set()
        await asyncio.Event().wait()

    async def run() -> None:
        started = asyncio.Event()
        task = asyncio.create_task(waits(started))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    (root,) = roots(recorded())
    assert root[c.ERROR_TYPE] == "asyncio.exceptions.CancelledError"


def test_a_generator_is_a_rollout_only_while_it_runs(model: ModelServer, recorded: Finish) -> None:
    seen: list[object] = []

    @spangrad.rollout
    def words() -> Iterator[str]:
        try:
            got = yield ask(model, "one")
            seen.append(got)
            yield ask(model, "two")
        finally:
            seen.append("closed")

    @spangrad.rollout
    async def async_words() -> AsyncIterator[str]:
        yield ask(model, "three")
        yield ask(model, "four")

    stream = words()
    assert next(stream) == "You said one."
    assert spangrad.current_rollout() is None
    ask(model, "outside")
    assert stream.send("sent") == "You said two."  # type: ignore[attr-defined]
    contextvars.Context().run(stream.close)  # type: ignore[attr-defined]

    async def run() -> list[str]:
        return [word async for word in async_words()]

    assert asyncio.run(run()) == ["You said three.", "You said four."]
    assert seen == ["sent", "closed"]
    spans = recorded()
    first, second = roots(spans)
    owner = {call.prompt(): call.get(c.ROLLOUT_ID) for call in calls(spans)}
    assert owner == {
        "one": first[c.ROLLOUT_ID],
        "outside": None,
        "two": first[c.ROLLOUT_ID],
        "three": second[c.ROLLOUT_ID],
        "four": second[c.ROLLOUT_ID],
    }
    assert not first.is_error


def test_generators_pass_on_what_is_thrown_and_returned(recorded: Finish) -> None:
    @spangrad.rollout
    def careful() -> Iterator[str]:
        try:
            yield "first"
        except ValueError as error:
            yield f"caught {error}"
        return "result"  # type: ignore[return-value]

    stream = careful()
    next(stream)
    assert stream.throw(ValueError("thrown")) == "caught thrown"  # type: ignore[attr-defined]
    with pytest.raises(StopIteration) as stop:
        next(stream)
    assert stop.value.value == "result"


def test_a_rollout_inside_a_rollout_is_a_part_of_it_unless_it_has_its_own_id(
    model: ModelServer, recorded: Finish
) -> None:
    @spangrad.rollout
    def sub_agent() -> None:
        ask(model, "sub")

    with spangrad.rollout(rollout_id="outer"):
        sub_agent()
        with spangrad.rollout(rollout_id="other"):
            ask(model, "other")
        ask(model, "outer")
    spans = recorded()
    assert {root[c.ROLLOUT_ID] for root in roots(spans)} == {"outer", "other"}
    assert {call.prompt(): call[c.ROLLOUT_ID] for call in calls(spans)} == {
        "sub": "outer",
        "other": "other",
        "outer": "outer",
    }


def test_ids_do_not_come_from_the_random_numbers_of_the_agent(recorded: Finish) -> None:
    random.seed(1)
    expected = random.random()
    for _ in range(2):
        random.seed(1)
        with spangrad.rollout():
            pass
        assert random.random() == expected
    first, second = roots(recorded())
    assert first.trace_id != second.trace_id
    assert first.span_id != second.span_id


def test_the_tracing_of_the_application_sees_nothing_of_ours(model: ModelServer, recorded: Finish) -> None:
    seen = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(seen))
    tracer = provider.get_tracer("application")
    with spangrad.rollout():
        assert not trace.get_current_span().get_span_context().is_valid
        with tracer.start_as_current_span("theirs") as theirs:
            ask(model)
            assert trace.get_current_span() is theirs
    assert [span.name for span in seen.get_finished_spans()] == ["theirs"]
    assert seen.get_finished_spans()[0].parent is None
    spans = recorded()
    assert len(spans) == 2
    assert calls(spans)[0].parent_id == roots(spans)[0].span_id


def test_a_traceparent_of_the_application_is_left_alone(model: ModelServer, recorded: Finish) -> None:
    theirs = f"00-{'a' * 32}-{'b' * 16}-01"
    with spangrad.rollout(rollout_id="r-1"):
        httpx.post(
            f"{model.url}/chat/completions",
            json={"model": "policy", "messages": []},
            headers={"traceparent": theirs},
        )
    assert model.seen[0].headers["traceparent"] == theirs
    assert model.seen[0].headers[c.HEADER_ROLLOUT] == "r-1"


def test_before_init_rollouts_run_and_are_not_recorded(tmp_path: Path) -> None:
    @spangrad.rollout
    def runs() -> int:
        spangrad.reward(1.0)
        return 7

    assert runs() == 7
    assert spangrad.flush()
    assert spans_of_store(tmp_path / ".spangrad" / "store.duckdb") == []


def test_init_twice_is_init_once(model: ModelServer, recorded: Finish, tmp_path: Path) -> None:
    spangrad.init()
    spangrad.init(store=tmp_path / "elsewhere.duckdb")
    ask(model)
    assert len(recorded()) == 1
    assert spans_of_store(tmp_path / "elsewhere.duckdb") == []


def test_it_records_again_after_shutdown(model: ModelServer, recorded: Finish, tmp_path: Path) -> None:
    ask(model)
    assert len(recorded()) == 1
    ask(model)
    spangrad.init()
    ask(model)
    assert spangrad.shutdown()
    assert len(spans_of_store(tmp_path / ".spangrad" / "store.duckdb")) == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), None])
def test_a_reward_that_is_no_finite_number_is_said_and_not_recorded(
    recorded: Finish, caplog: pytest.LogCaptureFixture, value: float
) -> None:
    with spangrad.rollout(rollout_id="r-1"):
        spangrad.reward(value)
    assert f"reward {value!r} of rollout 'r-1' was not recorded" in caplog.text
    assert roots(recorded())[0].events == []


def test_text_that_utf8_cant_hold_is_recorded_with_escapes(
    model: ModelServer, recorded: Finish, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = "\udc80\u00e9", "\\udc80\u00e9"
    with pytest.raises(ValueError), spangrad.rollout(rollout_id=bad, task_id=bad, name=bad) as handle:
        assert (handle.rollout_id, handle.task_id) == (good, good)
        with spangrad.rollout(rollout_id=bad):  # the same id: a part of it
            ask(model)
        spangrad.reward(1.0, name=bad, explanation=bad)
        raise ValueError(bad)
    with spangrad.rollout(rollout_id="r-2") as handle:
        handle.fail(bad)
    spans = recorded()
    assert caplog.records == []
    first, second = roots(spans)
    assert (first.name, first.message, first[c.ROLLOUT_ID], first[c.TASK_ID]) == (good,) * 4
    assert first.events[0][1] == {c.REWARD_NAME: good, c.REWARD_VALUE: 1.0, c.REWARD_EXPLANATION: good}
    assert first.events[1][1]["exception.message"] == good
    assert f"ValueError: {good}" in first.events[1][1]["exception.stacktrace"]
    assert (second.message, second[c.ERROR_TYPE]) == (good, good)
    assert [call[c.ROLLOUT_ID] for call in calls(spans)] == [good]


def test_shutdown_ends_a_stream_once_and_its_reader_reads_on(model: ModelServer, recorded: Finish) -> None:
    body = {"model": "policy", "stream": True, "messages": [{"role": "user", "content": "GATED one"}]}
    with httpx.stream("POST", f"{model.url}/chat/completions", json=body) as response:
        parts = response.iter_bytes()
        read = next(parts)
        while b"You" not in read:
            read += next(parts)
        (call,) = calls(recorded())
        model.gate.set()
        assert b"[DONE]" in b"".join(parts)
    assert call[c.STREAM_COMPLETE] is False
    assert recorded() == []
