"""Which traces are one rollout."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spangrad.adapters.calls import calls_from_spans
from spangrad.adapters.model_call import Choice, Grade, ModelCall
from spangrad.adapters.sessions import CANDIDATES, GAP_NS, GUESSED, KeptApart, Rule, keys_of, sessions
from tests.adapters.captured import captured

ASK = {"role": "user", "content": "plan"}
TOLD = {"role": "user", "content": "something else"}
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
        call(1, conversation_id="conv-7f3a21", response_id="r1"),
        call(2, conversation_id="conv-7f3a21"),
        call(3, sampling={"previous_response_id": "r1"}),
    ]
    assert joined(*calls) == [([1, 2, 3], {Rule.CONVERSATION: 1, Rule.RESPONSE: 1})]


def test_the_same_id_of_two_services_is_two_conversations():
    calls = [call(i, conversation_id="7f3a21", service=s) for i, s in enumerate(["a", "b", None, "a", None])]
    assert joined(*calls) == [
        ([0, 3], {Rule.CONVERSATION: 1}),
        ([1], {}),
        ([2, 4], {Rule.CONVERSATION: 1}),  # recorders that tell no service are of one
    ]


def reasons(*calls: ModelCall) -> list[Any]:
    return [reason for session in sessions(map(keys_of, calls)) for reason in session.reasons.values()]


def test_an_id_that_anybody_has_joins_nothing_alone_and_is_counted():
    said = {"role": "assistant", "content": "ok"}
    calls = [call(1, conversation_id="thread-1"), call(2, (ASK, said, ASK), conversation_id="thread-1")]
    others = [call(3, (TOLD,), conversation_id="thread-1"), call(4, (TOLD,))]
    assert reasons(*calls, *others) == [KeptApart.UNSPECIFIC, Rule.PREFIX, KeptApart.UNSPECIFIC, None]


@pytest.mark.parametrize("later", [0, 1])
@pytest.mark.parametrize("how", ["conversation", "prefix", "response", "tool-call"])
def test_what_begins_more_than_a_day_later_is_a_rollout_of_its_own(how, later):
    said = {"role": "assistant", "content": None, "tool_calls": [TOOL]}
    result = {"role": "tool", "content": "1", "tool_call_id": TOOL["id"]}
    first = call(1, reply=said, conversation_id="7f3a21", response_id="r1")
    told: dict[str, dict[str, Any]] = {
        "conversation": {"conversation_id": "7f3a21"},
        "prefix": {"messages": (ASK, said, ASK)},
        "response": {"sampling": {"previous_response_id": "r1"}},
        "tool-call": {"messages": (result,)},
    }
    second = call(2, start_ns=first.end_ns + GAP_NS + later, **told[how])
    rule = next(rule for rule in Rule if rule.option == how)
    assert reasons(first, second) == ([None, KeptApart.GAP] if later else [None, rule])


def test_a_conversation_goes_on_as_long_as_no_pause_is_too_long():
    calls = [call(i, conversation_id="7f3a21", start_ns=i * GAP_NS) for i in range(1, 5)]
    late = call(6, conversation_id="7f3a21", start_ns=6 * GAP_NS)
    assert reasons(*calls, late) == [None, *[Rule.CONVERSATION] * 3, KeptApart.GAP]
    assert len(joined(*calls, late, call(5, conversation_id="7f3a21", start_ns=5 * GAP_NS))) == 1


@pytest.mark.parametrize("is_off", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("rule", GUESSED)
def test_a_rule_that_is_off_for_one_of_two_calls_does_not_join_them(rule, is_off):
    said = {"role": "assistant", "content": None, "tool_calls": [TOOL]}
    result = {"role": "tool", "content": "1", "tool_call_id": TOOL["id"]}
    told = {"conversation_id": "7f3a21", "sampling": {"previous_response_id": "r1"}}
    calls = [call(1, reply=said, response_id="r1", **told), call(2, (ASK, said, result), **told)]
    rest = [r for r in GUESSED if r is not rule]
    keys = [keys_of(each, rest if off else GUESSED) for each, off in zip(calls, is_off, strict=True)]
    [found] = sessions(keys)
    assert rule not in found.joined_by
    keys = [keys_of(each, () if off else [rule]) for each, off in zip(calls, is_off, strict=True)]
    assert len(sessions(keys)) == 2


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
            call(
                number, tuple(messages), str(said), conversation_id=[None, "thread-1", "7f3a21"][conversation]
            )
        )
    found = joined(*calls)
    assert sorted(trace for traces, _ in found for trace in traces) == list(range(1, len(calls) + 1))
    assert all(sum(rules.values()) == len(traces) - 1 for traces, rules in found)
    random.shuffle(calls)
    assert joined(*calls) == found


SAID = {"role": "assistant", "content": "ok"}


def test_users_who_say_the_same_keep_their_conversations_apart():
    users = [f"user-{number}" for number in range(CANDIDATES + 2)]
    greeted = [call(n, user_id=user) for n, user in enumerate(users, 1)]
    gone_on = [
        call(1000 + n, (ASK, SAID, ASK), "more", user_id=user) for n, user in enumerate(reversed(users))
    ]
    found = joined(*greeted, *gone_on)
    assert found == [([n, 1000 + len(users) - n], {Rule.PREFIX: 1}) for n in range(1, len(users) + 1)]


@pytest.mark.parametrize("name", ["user_id", "conversation_id"])
def test_another_users_or_sessions_reply_is_not_gone_on_from(name):
    alice, bob = {name: "alice-1f7c"}, {name: "bob-83d2"}
    assert reasons(call(1, **alice), call(2, (ASK, SAID, ASK), **bob)) == [None, KeptApart.OTHERS]
    shorter = (ASK, SAID, ASK, SAID, ASK)  # the longest prefix is another's
    found = joined(call(1, **alice), call(2, (ASK, SAID, ASK), **bob), call(3, shorter, **alice))
    assert [traces for traces, _ in found] == [[1, 3], [2]]


def test_who_names_nobody_joins_no_two_users():
    prompts: list[Any] = [(ASK,) + (SAID, ASK) * turns for turns in range(3)]
    named = [call(n, prompt, user_id=who) for n, (prompt, who) in enumerate(zip(prompts, "a-b", strict=True))]
    nobody = call(1, prompts[1])
    assert joined(named[0], nobody, named[2]) == [([0, 1], {Rule.PREFIX: 1}), ([2], {})]
    assert joined(call(0, prompts[0]), call(1, prompts[1], user_id="b")) == [([0, 1], {Rule.PREFIX: 1})]


def test_users_of_one_conversation_go_on_each_with_their_own():
    calls = [call(n, conversation_id="room-7f3a21", user_id="ab"[n % 2]) for n in range(4)]
    assert [traces for traces, _ in joined(*calls)] == [[0, 2], [1, 3]]
