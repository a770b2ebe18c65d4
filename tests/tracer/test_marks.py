"""What `spangrad.step`, `tool`, `state`, `purpose` and `reward` must do."""

import asyncio
import contextvars
import gc
import logging
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

import spangrad
from spangrad.tracer import conventions as c
from spangrad.tracer.structure import marks, place
from tests.tracer.recording import Recorded, calls, roots, spans_of_store
from tests.tracer.span_tree import named, tree
from tests.tracer.stub_server import ModelServer

Finish = Callable[[], list[Recorded]]


def ask(model: ModelServer, prompt: str = "Hello", **headers: str) -> str:
    body = {"model": "policy", "messages": [{"role": "user", "content": prompt}]}
    reply = httpx.post(f"{model.url}/chat/completions", json=body, headers=headers)
    return str(reply.json()["choices"][0]["message"]["content"])


def by_prompt(spans: list[Recorded], name: str) -> dict[str, Any]:
    return {call.prompt(): call.get(name) for call in calls(spans)}


def test_steps_name_and_number_the_calls_inside_and_nest(model: ModelServer, recorded: Finish) -> None:
    @spangrad.step
    def plan() -> str:
        return ask(model, "plan")

    @spangrad.step("look")
    async def search() -> str:
        async with spangrad.step("deeper"):
            ask(model, "deeper")
        return ask(model, "look")

    with spangrad.rollout():
        assert plan() == "You said plan."
        assert asyncio.run(search()) == "You said look."
        ask(model, "outside")
    found = recorded()
    look = ("look", ["chat", ("deeper", ["chat"])])
    assert tree(found) == [("rollout", ["chat", look, ("plan", ["chat"])])]
    assert by_prompt(found, c.STEP_NAME) == {
        "plan": "plan",
        "look": "look",
        "deeper": "deeper",
        "outside": None,
    }
    assert by_prompt(found, c.STEP_INDEX) == {"plan": 0, "look": 1, "deeper": 2, "outside": None}
    step = named(found, "deeper")
    assert (step[c.SPAN_ROLE], step[c.STEP_NAME], step[c.STEP_INDEX]) == ("step", "deeper", 2)
    assert step[c.ROLLOUT_ID] == roots(found)[0][c.ROLLOUT_ID]
    assert [seen.headers.get(c.HEADER_STEP) for seen in model.seen] == ["plan", "deeper", "look", None]


def test_steps_outside_of_a_rollout_are_a_trace(model: ModelServer, recorded: Finish) -> None:
    with spangrad.step("outer"), spangrad.step("inner"):
        ask(model)
    found = recorded()
    assert tree(found) == [("outer", [("inner", ["chat"])])]
    assert (calls(found)[0][c.STEP_INDEX], calls(found)[0].get(c.ROLLOUT_ID)) == (1, None)


def test_a_generator_is_a_step_only_while_it_runs(model: ModelServer, recorded: Finish) -> None:
    @spangrad.step
    def words() -> Iterator[str]:
        spangrad.state("kept")
        got: Any = yield ask(model, "one")
        yield ask(model, got)

    @spangrad.step
    async def async_words() -> AsyncIterator[str]:
        yield ask(model, "three")
        yield ask(model, "four")

    stream = words()
    assert next(stream) == "You said one."
    ask(model, "between")
    assert stream.send("two") == "You said two."  # type: ignore[attr-defined]
    contextvars.Context().run(stream.close)  # type: ignore[attr-defined]

    async def run() -> list[str]:
        return [word async for word in async_words()]

    assert asyncio.run(run()) == ["You said three.", "You said four."]
    found = recorded()
    assert tree(found) == [("async_words", ["chat", "chat"]), "chat", ("words", ["chat", "chat"])]
    states = {"one": "kept", "two": "kept", "between": None, "three": None, "four": None}
    assert by_prompt(found, c.STATE_KEY) == states
    assert not any(span.is_error for span in found)


@pytest.mark.parametrize("error", [ValueError("bad"), SystemExit(3), asyncio.CancelledError()])
@pytest.mark.parametrize("mark", [spangrad.step, spangrad.tool, spangrad.purpose("judge")])
def test_errors_pass_through_unchanged(recorded: Finish, error: BaseException, mark: Any) -> None:
    def fails() -> None:
        raise error

    async def fails_later() -> None:
        raise error

    for run in (mark(fails), lambda: asyncio.run(mark(fails_later)())):
        with pytest.raises(type(error)) as caught:
            run()
        if not isinstance(error, asyncio.CancelledError):  # asyncio makes its own
            assert caught.value is error
    for span in recorded():
        assert span.is_error
        assert span[c.ERROR_TYPE].endswith(type(error).__name__)


def test_a_tool_records_its_arguments_and_its_result(model: ModelServer, recorded: Finish) -> None:
    class Desk:
        @spangrad.tool
        def look(self, place: str, *more: int, days: int = 1, **others: Any) -> dict[str, Any]:
            """Documented."""
            ask(model, "inner")
            return {"place": place, "by": self.look.__doc__}

    @spangrad.tool("fetch")
    async def get(url: str) -> bytes:
        return url.encode()

    with spangrad.rollout(), spangrad.step("act"):
        assert Desk().look("Oslo", 1, 2, days=3, exact=True)["by"] == "Documented."
        assert asyncio.run(get("x")) == b"x"
    found = recorded()
    tools = ["execute_tool fetch", ("execute_tool look", ["chat"])]
    assert tree(found) == [("rollout", [("act", tools)])]
    look = named(found, "execute_tool look")
    assert (look[c.OPERATION_NAME], look[c.SPAN_ROLE], look[c.TOOL_NAME]) == ("execute_tool", "tool", "look")
    assert look.json(c.TOOL_ARGUMENTS) == {"place": "Oslo", "days": 3, "exact": True, "*": [1, 2]}
    assert look.json(c.TOOL_RESULT) == {"place": "Oslo", "by": "Documented."}
    assert named(found, "execute_tool fetch").json(c.TOOL_RESULT) == "<1 bytes>"
    assert calls(found)[0][c.STEP_NAME] == "act"


def test_what_a_tool_gets_and_gives_is_cut_and_never_touched(recorded: Finish) -> None:
    class Hostile:
        def __repr__(self) -> str:
            raise RuntimeError("looked at")

        __str__ = __iter__ = __len__ = __bool__ = __repr__

    @spangrad.tool
    def odd(first: Any, second: str) -> Any:
        return first

    hostile = Hostile()
    assert odd(hostile, "x" * 200_000) is hostile
    endless: list[Any] = [1]
    endless.append(endless)
    assert odd(endless, "\udc80") is endless
    assert len(odd("y" * 70_000, "z" * 70_000)) == 70_000
    first, second, third = recorded()
    assert len(first[c.TOOL_ARGUMENTS]) < 70_000
    assert first.json(c.TOOL_RESULT).endswith("Hostile>")
    assert first.json(c.DROPPED) == {c.TOOL_ARGUMENTS: "cut: it is too long"}
    assert set(third.json(c.DROPPED)) == {c.TOOL_ARGUMENTS, c.TOOL_RESULT}
    assert second.json(c.TOOL_ARGUMENTS)["second"] == "\udc80"


def test_lazy_arguments_of_a_tool_stay_lazy(recorded: Finish) -> None:
    made: list[str] = []

    class Lazy:
        @property  # type: ignore[misc]
        def __class__(self) -> Any:
            made.append("object")
            return str

    class Rows(list[int]):
        def __iter__(self) -> Iterator[int]:
            made.append("rows")
            return super().__iter__()

    spangrad.tool(lambda user, rows: None)(Lazy(), Rows([1, 2]))
    (span,) = recorded()
    arguments = span.json(c.TOOL_ARGUMENTS)
    assert (arguments["user"].endswith("Lazy>"), arguments["rows"]) == (True, [1, 2])
    assert made == []


def test_a_state_holds_until_the_next_one_or_the_end_of_its_step(
    model: ModelServer, recorded: Finish
) -> None:
    with spangrad.rollout():
        ask(model, "none")
        spangrad.state("room")
        ask(model, "room")
        with spangrad.step("walk"):
            ask(model, "still room")
            spangrad.state(["hall", 2])
            ask(model, "hall")
        ask(model, "room again")
        with spangrad.state("desk"):
            ask(model, "desk")
            spangrad.state("drawer")
            ask(model, "drawer")
        ask(model, "back in room")
        spangrad.state(object())
        ask(model, "no key, no change")
    ask(model, "over")
    found = by_prompt(recorded(), c.STATE_KEY)
    assert found == {
        "none": None,
        "room": "room",
        "still room": "room",
        "hall": '["hall", 2]',
        "room again": "room",
        "desk": "desk",
        "drawer": "drawer",
        "back in room": "room",
        "no key, no change": "room",
        "over": None,
    }
    assert model.seen[1].headers[c.HEADER_STATE] == "room"


def test_a_long_state_is_its_hash(model: ModelServer, recorded: Finish) -> None:
    for key in ("x" * 1000, "y" * 1000, "x" * 1000):
        spangrad.state(key)
        ask(model)
    spangrad.state("short")
    first, second, third = (call[c.STATE_KEY] for call in calls(recorded()))
    assert first == third != second
    assert first.startswith("blake2b:")
    assert len(first) < 50


def test_a_state_of_one_rollout_or_task_is_not_anothers(model: ModelServer, recorded: Finish) -> None:
    async def look(key: str) -> None:
        spangrad.state(key)
        await asyncio.sleep(0)
        ask(model, key)

    async def run() -> None:
        spangrad.state("all")
        await asyncio.gather(look("left"), look("right"))
        ask(model, "after")
        with spangrad.rollout():
            ask(model, "in a rollout")

    asyncio.run(run())
    assert by_prompt(recorded(), c.STATE_KEY) == {
        "left": "left",
        "right": "right",
        "after": "all",
        "in a rollout": None,
    }


def test_a_purpose_is_a_hint_of_the_block_and_a_header_of_the_call_beats_it(
    model: ModelServer, recorded: Finish
) -> None:
    @spangrad.purpose("summary")
    def shorten() -> str:
        return ask(model, "summary")

    with spangrad.purpose("judge"):
        ask(model, "judge")
        shorten()
        ask(model, "title", **{c.HEADER_PURPOSE: "title"})
    ask(model, "agent")
    found = by_prompt(recorded(), c.PURPOSE)
    assert found == {"judge": "judge", "summary": "summary", "title": "title", "agent": None}
    assert [seen.headers.get(c.HEADER_PURPOSE) for seen in model.seen] == [
        "judge",
        "summary",
        "title",
        None,
    ]


def test_a_reward_in_a_step_is_on_the_step_and_any_other_on_the_rollout(recorded: Finish) -> None:
    with spangrad.rollout() as handle:
        with spangrad.step("try"), spangrad.tool("inner"):
            spangrad.reward(0.25, explanation="close")
            handle.reward(0.75)
        spangrad.reward(1)
        with spangrad.step("bad"):
            spangrad.reward("none")  # type: ignore[arg-type]
    spans = recorded()
    given = [(event[c.REWARD_VALUE], event.get(c.REWARD_EXPLANATION)) for _, event in roots(spans)[0].events]
    assert given == [(0.75, None), (1.0, None)]
    (name, event), *others = named(spans, "try").events
    assert (name, event[c.REWARD_VALUE], event[c.REWARD_EXPLANATION]) == (c.REWARD_EVENT, 0.25, "close")
    assert not others
    assert not named(spans, "bad").events


def test_one_mark_serves_threads_and_tasks_at_once(model: ModelServer, recorded: Finish) -> None:
    shared = spangrad.step("shared")
    together = threading.Barrier(3)

    def work(number: int) -> None:
        with spangrad.rollout(rollout_id=f"r-{number}"), shared:
            together.wait(30)
            ask(model, f"{number}")
            together.wait(30)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))
    found = recorded()
    assert tree(found) == [("rollout", [("shared", ["chat"])])] * 3
    for root in roots(found):
        assert {s[c.ROLLOUT_ID] for s in found if s.trace_id == root.trace_id} == {root[c.ROLLOUT_ID]}


def test_static_and_class_methods_stay_what_they_are(recorded: Finish) -> None:
    class Desk:
        @spangrad.tool
        @staticmethod
        def twice(number: int) -> int:
            return 2 * number

        @classmethod
        @spangrad.tool
        def named(cls, number: int) -> str:
            return f"{cls.__name__}{number}"

        @spangrad.tool
        @classmethod
        def again(cls) -> str:
            return cls.__name__

    assert (Desk().twice(2), Desk.named(3), Desk().again()) == (4, "Desk3", "Desk")
    found = recorded()
    assert [span.json(c.TOOL_ARGUMENTS) for span in found] == [{"number": 2}, {"number": 3}, {}]


def test_marks_written_down_hold_in_another_process(model: ModelServer, recorded: Finish) -> None:
    with spangrad.rollout(), spangrad.step("there"), spangrad.purpose("judge"):
        spangrad.state("desk")
        current = place.MARKS.get()
        assert current is not None
        text = place.pack_marks(current)
        assert text is not None
        arrived = place.unpack_marks(text)
        place.MARKS.set(arrived)
        ask(model)
        place.MARKS.set(current)
    (call,) = calls(found := recorded())
    assert call.parent_id == named(found, "there").span_id
    there = [call[name] for name in (c.STEP_NAME, c.STEP_INDEX, c.STATE_KEY, c.PURPOSE)]
    assert there == ["there", 0, "desk", "judge"]
    assert [place.unpack_marks(text) for text in ("", "{}", "[1]", "null")] == [None] * 4


def test_before_init_marks_do_nothing_and_say_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(marks, "_said_not_set_up", False)

    @spangrad.tool
    @spangrad.step
    @spangrad.purpose("judge")
    def runs(value: int) -> int:
        with spangrad.state("s"), spangrad.step("t"):
            spangrad.state("u")
            return value + 1

    with caplog.at_level(logging.WARNING):
        assert [runs(1), runs(2)] == [2, 3]
    assert [record.message for record in caplog.records] == [
        "spangrad's marks have no effect before spangrad.init()"
    ]
    assert spans_of_store(tmp_path / ".spangrad" / "store.duckdb") == []


def test_a_step_that_is_open_when_recording_ends_is_recorded(recorded: Finish) -> None:
    with spangrad.rollout(), spangrad.step("open"):
        (span,) = recorded()
    assert span.name == "open"
    assert span.json(c.DROPPED) == {"end": "it was still open"}


def test_what_can_not_be_marked_is_returned_as_it_is(recorded: Finish) -> None:
    given = {"a": 1}
    assert spangrad.tool(given) is given  # type: ignore[call-overload]
    assert recorded() == []


def test_tools_of_every_kind_of_callable_end_and_live_no_longer_than_without_us(recorded: Finish) -> None:
    class Unhashable:
        def __call__(self, word: str) -> str:
            return word

        __hash__ = None  # type: ignore[assignment]

    def local(word: str) -> str:
        return word

    assert spangrad.tool(Unhashable())("a") == "a"
    assert spangrad.tool(min)(3, 2) == 2
    assert spangrad.tool(local)("b") == "b"
    gone = weakref.ref(local)
    del local
    gc.collect()
    assert gone() is None
    spans = [span for span in recorded() if span.get(c.SPAN_ROLE) == "tool"]
    assert [span.json(c.TOOL_ARGUMENTS) for span in spans] == [{"word": "a"}, {"*": [3, 2]}, {"word": "b"}]
    assert all(c.DROPPED not in span.attributes for span in spans)  # none was "still open"
