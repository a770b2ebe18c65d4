"""Which traces are one rollout."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spangrad.adapters.calls import calls_from_spans
from spangrad.adapters.model_call import Choice, Grade, ModelCall
from spangrad.adapters.sessions import CANDIDATES, Rule, keys_of, sessions
from tests.adapters.captured import captured

ASK = {"role": "user", "content": "plan"}
TOOL = {
    "id": "call_3f9a2b17",
    "type": "function",
    "function": {"name": "look", "arguments": '{"a": 1, "b": 2}'},
}


def call(number: int, messages: Any = (ASK,), reply: Any = "ok", **fields: Any) -> ModelCall:
    start = fields.setdefault("start_ns", 10 * number)
    message = {"role": "assistant", "content": reply} if isinstance(reply, str) else reply
    ids = {"trace_id": f"{number:032x}", "span_id": f"{number:016x}"}
    defaults: dict[str, Any] = {**ids, "end_ns": start + 5}
    return ModelCall(
        call_id=f"call{number}",
        span_ids=(),
        dialect="d",
        grade=Grade.TEXT,
        grade_reasons=(),
        messages=messages,
        choices=(Choice(message),),
        **(defaults | fields),
    )


def joined(*calls: ModelCall) -> list[tuple[list[int], dict[Rule, int]]]:
    return [
        ([int(trace_id, 16) for trace_id in session.trace_ids], dict(session.joined_by))
        for session in sessions(map(keys_of, calls))
    ]


def test_a_call_goes_on_from_the_one_whose_reply_it_repeats():
    said = {"role": "assistant", "content": "ok"}
    assert joined(call(1), call(2, (ASK, said, ASK))) == [([1, 2], {Rule.PREFIX: 1})]


def test_the_same_message_counts_however_a_client_wrote_it():
    reply = {"role": "assistant", "content": None, "tool_calls": [TOOL]}
    retold = {
        "role": "assistant",
        "name": "planner",
        "content": [],
        "tool_calls": [{**TOOL, "function": {"name": "look", "arguments": '{"b":2,"a":1}'}}],
    }
    assert joined(call(1, reply=reply), call(2, (ASK, retold, ASK))) == [([1, 2], {Rule.PREFIX: 1})]


def test_equal_questions_alone_join_nothing():
    assert joined(call(1), call(2)) == [([1], {}), ([2], {})]


def test_a_reply_that_had_not_ended_is_not_gone_on_from():
    said = {"role": "assistant", "content": "ok"}
    assert len(joined(call(1, start_ns=0), call(2, (ASK, said, ASK), start_ns=3))) == 2


def test_each_of_two_equal_beginnings_is_gone_on_from_once():
    said = {"role": "assistant", "content": "ok"}
    calls = [call(1), call(2), call(3, (ASK, said, ASK), "x"), call(4, (ASK, said, ASK), "y")]
    assert joined(*calls) == [([1, 4], {Rule.PREFIX: 1}), ([2, 3], {Rule.PREFIX: 1})]


def test_many_equal_beginnings_are_looked_through_only_so_far():
    said = {"role": "assistant", "content": "ok"}
    starts = [call(number) for number in range(1, 2 * CANDIDATES)]
    found = joined(*starts, call(1000, (ASK, said, ASK)))
    assert sum(len(traces) == 2 for traces, _ in found) == 1


def test_a_result_joins_the_call_that_made_it_when_the_history_was_cut():
    reply = {"role": "assistant", "content": None, "tool_calls": [TOOL]}
    result = {"role": "tool", "content": "1", "tool_call_id": TOOL["id"]}
    assert joined(call(1, reply=reply), call(2, (result,))) == [([1, 2], {Rule.TOOL_CALL: 1})]


@pytest.mark.parametrize("tool_call_id", ["call_0", "1", ""])
def test_a_counter_joins_nothing(tool_call_id):
    reply = {"role": "assistant", "content": None, "tool_calls": [{**TOOL, "id": tool_call_id}]}
    result = {"role": "tool", "content": "1", "tool_call_id": tool_call_id}
    assert len(joined(call(1, reply=reply), call(2, (result,)))) == 2


def test_an_id_that_two_calls_made_joins_nothing():
    reply = {"role": "assistant", "content": None, "tool_calls": [TOOL]}
    result = {"role": "tool", "content": "1", "tool_call_id": TOOL["id"]}
    assert len(joined(call(1, reply=reply), call(2, reply=reply), call(3, (result,)))) == 3


def test_conversations_and_named_responses_are_believed():
    calls = [
        call(1, conversation_id="c", response_id="r1"),
        call(2, conversation_id="c"),
        call(3, sampling={"previous_response_id": "r1"}),
    ]
    assert joined(*calls) == [([1, 2, 3], {Rule.CONVERSATION: 1, Rule.RESPONSE: 1})]


def test_a_trace_is_never_split():
    shared = "f" * 32
    calls = [call(1, trace_id=shared, conversation_id="a"), call(2, trace_id=shared, conversation_id="b")]
    assert [session.trace_ids for session in sessions(map(keys_of, calls))] == [[shared]]


@pytest.mark.parametrize("recorder", ["genai_openai", "openai_v2_latest"])
def test_a_raw_clients_one_span_traces_are_one_rollout(recorder):
    found = list(sessions(map(keys_of, calls_from_spans(captured(f"{recorder}/multi_turn")))))
    assert [(len(session.trace_ids), session.joined_by) for session in found] == [(4, {Rule.PREFIX: 3})]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 2)), max_size=12), st.randoms()
)
def test_every_trace_is_in_one_session_whatever_the_order_of_arrival(shapes, random):
    calls = []
    for number, (history, said, conversation) in enumerate(shapes, start=1):
        messages = [ASK] + [{"role": "assistant", "content": str(said)}, ASK] * history
        calls.append(
            call(number, tuple(messages), str(said), conversation_id=str(conversation) * conversation)
        )
    found = joined(*calls)
    assert sorted(trace for traces, _ in found for trace in traces) == list(range(1, len(calls) + 1))
    assert all(sum(rules.values()) == len(traces) - 1 for traces, rules in found)
    random.shuffle(calls)
    assert joined(*calls) == found
