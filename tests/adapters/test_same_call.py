"""Accounts of one call by several recorders, also in traces of their own."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spangrad.adapters.calls import calls_from_spans, calls_of
from spangrad.adapters.ingest import ingest
from spangrad.adapters.merging import cluster, merge
from spangrad.adapters.model_call import Choice
from spangrad.adapters.reading import Reading
from spangrad.adapters.same_call import CANDIDATES, group_accounts
from spangrad.adapters.sessions import Rule
from spangrad.store.file_store import FileStore
from spangrad.store.records import Span
from spangrad.tracer import conventions as c
from tests.adapters.building import span, text_attributes, token_attributes
from tests.adapters.captured import FIXTURES, captured

BOTH = "openinference_langchain_plus_openai/multi_turn"
LANGCHAIN = "openinference.instrumentation.langchain"
OPENAI = "openinference.instrumentation.openai"


def account(
    name: str,
    recorder: str,
    start: int = 0,
    end: int = 100,
    *,
    ask: str | None = "hi",
    reply: str | None = "hello",
    finish: str | None = "stop",
    trace: str | None = None,
    above: Sequence[str] = (),
    **fields: Any,
) -> Reading:
    """An account of a call; in a trace of its own unless `trace` is given."""
    ids = trace or str(crc32(f"{name} {recorder}".encode()))
    told = Choice({"role": "assistant", "content": reply}, finish)
    return Reading(
        span=span(name, trace=ids, scope=recorder, start_ns=start, end_ns=end),
        dialect="d",
        model=fields.pop("model", "m"),
        messages=[] if ask is None else [{"role": "user", "content": ask}],
        choices=[] if reply is None else [told],
        ancestor_span_ids=[each.encode().hex().rjust(16, "0") for each in above],
        **fields,
    )


def grouped(*readings: Reading) -> list[list[str]]:
    """The names in each group."""
    return sorted(
        [bytes.fromhex(r.span.span_id).lstrip(b"\0").decode() for r in g] for g in group_accounts(readings)
    )


def without_response_ids(spans: Sequence[Span], scope: str) -> list[Span]:
    def bare(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                key: bare(item) for key, item in value.items() if key != "id" or "chatcmpl" not in str(item)
            }
        return [bare(item) for item in value] if isinstance(value, list) else value

    def strip(each: Span) -> Span:
        output = each.attributes.get("output.value")
        if each.scope != scope or output is None or "chatcmpl" not in output:
            return each
        told = {"output.value": json.dumps(bare(json.loads(output)))}
        return replace(each, attributes={**each.attributes, **told})

    return [strip(each) for each in spans]


@pytest.mark.parametrize("id_free", [(), (LANGCHAIN,), (OPENAI,), (LANGCHAIN, OPENAI)])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_frameworks_and_a_clients_account_in_another_trace_are_one_call(id_free, reverse):
    spans = captured(BOTH)
    for scope in id_free:
        spans = without_response_ids(spans, scope)
    calls = calls_from_spans(reversed(spans) if reverse else spans)
    by_id = {each.span_id: each for each in spans}
    assert len(calls) == 4
    for call in calls:
        assert [by_id[span_id].scope for span_id in call.span_ids] == [LANGCHAIN, OPENAI]
        response = json.loads(by_id[call.span_ids[1]].attributes["output.value"])
        assert call.span_id == call.span_ids[0]  # the framework's names the call
        assert (call.agent_name, call.step_name, call.conversation_id) == ("picnic_agent", "model", "sess-7")
        assert call.prompt_token_ids == response["prompt_token_ids"]
        assert call.choices[0].sampled_token_ids == response["choices"][0]["token_ids"]
        assert "arguments were re-serialised" not in call.grade_reasons
    assert [call.step_index for call in calls] == [1, 3, 5, 7]


def test_one_recorder_never_tells_of_a_call_twice():
    """n agents that ask the same at once."""
    alike = [account(str(i), "openai", start=i, response_id="same") for i in range(5)]
    assert grouped(*alike) == [[str(i)] for i in range(5)]
    others = [account(f"f{i}", "framework", start=i, end=110) for i in range(5)]
    groups = grouped(*alike, *others)
    assert [len(group) for group in groups] == [2] * 5
    assert all(group[0].startswith("f") for group in groups)


def test_the_same_question_at_the_same_time_is_told_apart_by_the_replies():
    frameworks = [account(f"f{i}", "framework", start=i, end=110, reply=f"r{i}") for i in range(4)]
    clients = [account(f"c{3 - i}", "openai", start=10 + i, reply=f"r{3 - i}") for i in range(4)]
    assert grouped(*frameworks, *clients) == [[f"f{i}", f"c{i}"] for i in range(4)]


def test_the_same_question_in_several_traces_is_told_apart_by_the_trace():
    frameworks = [account(f"f{i}", "framework", start=i, end=110, trace=str(i)) for i in range(4)]
    clients = [account(f"c{3 - i}", "openai", start=10 + i, trace=str(3 - i)) for i in range(4)]
    assert grouped(*frameworks, *clients) == [[f"f{i}", f"c{i}"] for i in range(4)]


def test_a_server_that_gives_every_reply_one_id_glues_nothing_together():
    def asked(i: int) -> dict[str, Any]:
        return {"ask": f"question {i}", "reply": f"r{i}", "response_id": "chatcmpl-1"}

    frameworks = [account(f"f{i}", "framework", start=i, end=110, **asked(i)) for i in range(4)]
    clients = [account(f"c{3 - i}", "openai", start=10 + i, **asked(3 - i)) for i in range(4)]
    assert grouped(*frameworks, *clients) == [[f"f{i}", f"c{i}"] for i in range(4)]
    in_one = [replace(r, span=replace(r.span, trace_id="7" * 32)) for r in (*frameworks, *clients)]
    assert grouped(*in_one) == [[f"f{i}", f"c{i}"] for i in range(4)]


CLIENT: dict[str, Any] = {"start": 10, "end": 90, "response_id": "r"}


@pytest.mark.parametrize(
    ("framework", "client"),
    [
        ({"response_id": "r"}, CLIENT | {"start": 101, "end": 120}),  # afterwards: out of a cache
        ({"response_id": "r"}, CLIENT | {"ask": "another question"}),
        ({"response_id": "r"}, CLIENT | {"reply": "another reply"}),
        ({"response_id": "r", "rollout_id": "a"}, CLIENT | {"rollout_id": "b"}),
        ({"response_id": "r", "model": "gpt-4o"}, CLIENT | {"model": "qwen"}),
        ({"response_id": "other"}, CLIENT),
        ({"ask": None}, CLIENT),  # nothing shows it
        ({}, CLIENT | {"ask": None}),
    ],
)
def test_what_contradicts_or_shows_nothing_is_not_joined(framework, client):
    assert grouped(account("f", "framework", **framework), account("c", "openai", **client)) == [["c"], ["f"]]


@pytest.mark.parametrize(
    ("framework", "client"),
    [
        ({}, CLIENT),
        ({"response_id": "r"}, CLIENT | {"ask": None}),
        ({"ask": None, "response_id": "r"}, CLIENT),
        ({"model": "hosted_vllm/m"}, CLIENT),
        ({"model": None}, CLIENT),
        ({"reply": None}, CLIENT),
        ({"rollout_id": "a"}, CLIENT),
        ({"reply": "hel", "finish": None}, CLIENT),  # left early: how much of it is no matter
        ({"trace": "1", "ask": None}, CLIENT | {"trace": "1", "above": ["f"]}),  # below it
    ],
)
def test_what_shows_one_call_is_joined(framework, client):
    assert grouped(account("f", "framework", **framework), account("c", "openai", **client)) == [["f", "c"]]


def test_a_span_below_another_that_asked_something_else_is_a_call_of_its_own():
    judge = account("j", "openai", 10, 20, ask="judge this", trace="1", above=["f"])
    assert grouped(account("f", "framework", trace="1"), judge) == [["f"], ["j"]]


def test_in_one_trace_a_response_id_joins_what_recorders_write_down_differently():
    shortened = [{"role": "assistant", "content": "left out by one"}, {"role": "user", "content": "hi"}]
    for trace, together in (("1", True), (None, False)):
        framework = account("f", "framework", response_id="r", trace=trace)
        client = replace(account("c", "openai", **CLIENT, trace=trace), messages=shortened)
        assert (len(grouped(framework, client)) == 1) is together


def test_in_one_trace_equal_ids_and_questions_are_told_apart_by_what_went_before():
    def after(name: str, recorder: str, start: int, system: str) -> Reading:
        told = account(name, recorder, start, 110, response_id="chatcmpl-1", trace="1")
        return replace(told, messages=[{"role": "system", "content": system}, *told.messages])

    frameworks = [after(f"f{i}", "framework", i, f"agent {i}") for i in range(4)]
    clients = [after(f"c{3 - i}", "openai", 10 + i, f"agent {3 - i}") for i in range(4)]
    assert grouped(*frameworks, *clients) == [[f"f{i}", f"c{i}"] for i in range(4)]


def test_three_recorders_tell_of_one_call():
    outer = account("f", "framework", trace="1")
    middle = account("l", "litellm", 5, 95, trace="1", above=["f"], model="openai/m")
    inner = account("c", "openai", 10, 90)
    assert grouped(inner, middle, outer) == [["f", "l", "c"]]


def test_of_a_clients_retries_the_one_that_was_answered_is_the_frameworks_call():
    framework = account("f", "framework")
    failed = account("x", "openai", 5, 10, reply=None, error="429")
    answered = account("y", "openai", 20, 90)
    assert grouped(framework, failed, answered) == [["f", "y"], ["x"]]
    below = [replace(r, span=replace(r.span, trace_id="1" * 32)) for r in (framework, failed, answered)]
    above = [replace(r, ancestor_span_ids=[framework.span.span_id]) for r in below[1:]]
    assert grouped(below[0], *above) == [["f", "y"], ["x"]]


def test_what_failed_on_both_sides_is_one_failed_call():
    failed: dict[str, Any] = {"reply": None, "error": "500"}
    pair = (account("f", "framework", **failed), account("c", "openai", 10, 90, **failed))
    assert grouped(*pair) == [["f", "c"]]


def test_messages_and_replies_written_down_in_other_ways_are_the_same():
    def conversation(arguments: str, result: str, content: Any) -> list[dict[str, Any]]:
        call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
        return [
            {"role": "user", "content": content},
            {"role": "assistant", "content": None, "tool_calls": [call], "name": "agent"},
            {"role": "tool", "content": result, "tool_call_id": "1"},
        ]

    one = replace(account("f", "framework"), messages=conversation('{"a":1}', '{"x": 1}', "hi"))
    parts = [{"type": "text", "text": "hi"}]
    other = replace(account("c", "openai", 10, 90), messages=conversation('{"a": 1}', '{"x":1}', parts))
    assert grouped(one, other) == [["f", "c"]]


def test_a_call_has_the_best_of_all_accounts():
    ids: dict[str, Any] = {"sampled_token_ids": [4, 5]}
    framework = replace(
        account("f", "framework", step_name="plan", tools=[{"type": "function"}]),
        choices=[Choice({"role": "assistant", "content": "hello"}, "stop", logprobs=[-0.5, -0.25])],
    )
    client = replace(
        account("c", "openai", 10, 90, finish=None, prompt_token_ids=[1], sampling={"top_k": 5}),
        choices=[Choice({"role": "assistant", "content": "hello"}, None, **ids)],
    )
    (group,) = cluster([client, framework], {})
    merged = merge(group)
    (choice,) = merged.choices
    assert (merged.step_name, merged.prompt_token_ids, merged.sampling) == ("plan", [1], {"top_k": 5})
    assert merged.tools == framework.tools
    assert (choice.sampled_token_ids, choice.logprobs, choice.finish_reason) == (
        [4, 5],
        [-0.5, -0.25],
        "stop",
    )


def gateway(start_ns: int, trace: str = "9", **more: Any) -> Span:
    told = text_attributes(**token_attributes(), **more)
    return span("g", trace=trace, scope=c.SCOPE_GATEWAY, start_ns=start_ns, attributes=told)


def test_a_gateways_account_in_a_trace_of_its_own_is_the_clients_call():
    client = span("c", scope="framework", start_ns=0, end_ns=100, attributes=text_attributes())
    (call,) = calls_from_spans([gateway(5), client])
    assert (call.span_id, call.prompt_token_ids) == (client.span_id, [1, 2, 3])
    question = json.dumps([{"role": "user", "parts": [{"type": "text", "content": "something else"}]}])
    for other in (
        gateway(500),
        gateway(5, **{c.INPUT_MESSAGES: question}),
        gateway(5, **{c.RESPONSE_ID: "r2"}),
    ):
        assert len(calls_from_spans([other, client])) == 2


def test_a_clients_account_in_a_trace_of_its_own_is_of_the_frameworks_rollout(tmp_path):
    with FileStore(tmp_path / "store.duckdb") as store:
        report = ingest([FIXTURES / f"{BOTH}.otlp.jsonl"], store)
        assert (report.by_grade, report.joined_by) == ({"ids": 4}, {str(Rule.ONE_CALL): 4})
        assert ingest([FIXTURES / f"{BOTH}.otlp.jsonl"], store).by_grade == {"ids": 4}
        (rollout,) = store.rollouts()
        calls = calls_of(store, [rollout.rollout_id])
    assert [(call.step_name, len(call.trace_ids)) for call in calls] == [("model", 2)] * 4
    assert [str(call.grade) for call in calls] == ["ids"] * 4


accounts = st.builds(
    account,
    st.uuids().map(lambda value: value.hex[:8]),
    st.sampled_from(["framework", "litellm", "openai"]),
    st.integers(0, 30),
    st.integers(30, 60),
    ask=st.sampled_from(["hi", "ho", None]),
    reply=st.sampled_from(["a", "b", None]),
    response_id=st.sampled_from(["r1", "r2", None]),
    trace=st.sampled_from(["1", "2"]),
    error=st.sampled_from([None, None, "500"]),
)


@given(st.lists(accounts, max_size=12, unique_by=lambda r: r.span.span_id), st.randoms())
def test_every_account_is_in_one_group_that_has_a_recorder_once(readings, random):
    groups = group_accounts(readings)
    assert sorted(r.span.span_id for g in groups for r in g) == sorted(r.span.span_id for r in readings)
    assert all(len({r.span.scope for r in g}) == len(g) for g in groups)
    shuffled = random.sample(readings, len(readings))
    assert grouped(*shuffled) == grouped(*readings)


def test_work_is_near_linear_where_everybody_asks_the_same_at_once():
    def work(count: int) -> int:
        """Function calls that grouping takes."""
        readings = [
            account(f"{recorder}{i}", recorder, start=i % 7, trace=f"{i:09}")
            for i in range(count)
            for recorder in ("framework", "openai")
        ]
        calls = 0

        def counted(*_: Any) -> None:
            nonlocal calls
            calls += 1

        previous = sys.getprofile()
        sys.setprofile(counted)
        try:
            groups = group_accounts(readings)
        finally:
            sys.setprofile(previous)
        assert len(groups) == count
        return calls

    small = 4 * CANDIDATES
    assert work(2 * small) < 2.5 * work(small)
