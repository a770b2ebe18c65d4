"""Merging of spans into calls, and the calls of a store."""

import dataclasses
import json
from typing import Any

import pytest

from spangrad.adapters.calls import call_to_json, calls_from_spans, calls_of
from spangrad.adapters.dialects import NO_DIALECT, recognise
from spangrad.adapters.dialects.otel_genai import DIALECT_OTEL
from spangrad.adapters.merging import NEVER_READ
from spangrad.adapters.model_call import Grade, Purpose
from spangrad.store.file_store import FileStore
from spangrad.store.otlp import encode_request
from spangrad.store.records import Rollout, RolloutStatus, Span, SpanEvent
from spangrad.tracer import conventions as c
from spangrad.tracer.gateway.record import reply_attributes, request_attributes
from spangrad.tracer.gateway.reply import Reply
from spangrad.tracer.gateway.rewrite import Route
from spangrad.tracer.gateway.versions import SampledBy
from tests.adapters.building import span, text_attributes, token_attributes
from tests.adapters.captured import captured


def client(**fields: Any) -> Span:
    names = {c.STEP_NAME: "plan", c.AGENT_NAME: "sql", c.ROLLOUT_ID: "roll"}
    return span("c", attributes=text_attributes(**names), end_ns=100, **fields)


def gateway(name: str = "g", parent: str | None = "c", **more: Any) -> Span:
    attributes = text_attributes(**token_attributes(), **more)
    return span(name, parent=parent, scope=c.SCOPE_GATEWAY, kind=2, start_ns=1, attributes=attributes)


def test_a_client_span_and_its_gateway_span_are_one_call():
    (call,) = calls_from_spans([gateway(), client()])
    assert call.grade is Grade.EXACT
    assert (call.step_name, call.agent_name, call.rollout_id) == ("plan", "sql", "roll")
    assert call.span_id == client().span_id
    assert set(call.span_ids) == {client().span_id, gateway().span_id}
    assert call.prompt_token_ids == [1, 2, 3]


def test_the_exact_request_comes_from_the_gateway():
    asked = json.dumps([{"role": "user", "parts": [{"type": "text", "content": "exactly this"}]}])
    (call,) = calls_from_spans([client(), gateway(**{c.INPUT_MESSAGES: asked})])
    assert call.messages == [{"role": "user", "content": "exactly this"}]


def test_spans_in_other_traces_of_the_rollout_are_joined_by_response_id():
    apart = dataclasses.replace(gateway(parent=None), trace_id="f" * 32, rollout_id="roll")
    (call,) = calls_from_spans([apart, client()])
    assert call.grade is Grade.EXACT


def test_equal_response_ids_in_different_rollouts_are_different_calls():
    apart = dataclasses.replace(gateway(parent=None), trace_id="f" * 32, rollout_id="other")
    assert len(calls_from_spans([apart, client()])) == 2


def test_a_server_that_reuses_response_ids_does_not_glue_calls_together():
    first, second = (span(n, attributes=text_attributes(), start_ns=s) for n, s in (("a", 0), ("b", 50)))
    assert len(calls_from_spans([first, second])) == 2


def test_a_framework_span_and_an_sdk_span_of_one_call_are_one_call():
    outer = span("o", attributes=text_attributes(**{c.STEP_NAME: "plan"}), scope="framework", end_ns=100)
    inner = span("i", parent="o", attributes=text_attributes(**token_attributes()), start_ns=5)
    (call,) = calls_from_spans([inner, outer])
    assert (call.step_name, call.grade, call.span_id) == ("plan", Grade.EXACT, outer.span_id)


def test_retries_below_the_sdk_are_one_call():
    failed = [
        dataclasses.replace(
            gateway(name),
            attributes={c.OPERATION_NAME: "chat", c.PROVIDER_NAME: "vllm", c.ERROR_TYPE: "429"},
            status_code=2,
        )
        for name in ("x", "y")
    ]
    (call,) = calls_from_spans([client(), *failed, gateway()])
    assert (call.grade, call.error) == (Grade.EXACT, None)
    assert len(call.span_ids) == 4


def test_a_reply_that_the_client_never_read_is_a_call_of_its_own_and_unusable():
    lost = gateway("x", **{c.RESPONSE_ID: "r0"})
    calls = calls_from_spans([client(), lost, gateway()])
    assert sorted(call.grade for call in calls) == [Grade.EXACT, Grade.UNUSABLE]
    (unread,) = (call for call in calls if call.grade is Grade.UNUSABLE)
    assert NEVER_READ in unread.grade_reasons


def test_an_error_of_the_client_spoils_the_call():
    (call,) = calls_from_spans([client(status_code=2, status_message="timeout"), gateway()])
    assert call.grade is Grade.UNUSABLE


def test_faults_of_the_client_span_do_not_matter_where_the_gateway_has_the_content():
    (call,) = calls_from_spans([client(dropped_attributes=3), gateway()])
    assert call.grade is Grade.EXACT


def test_what_only_ancestors_say_is_found_on_them():
    root = span("r", attributes={c.ROLLOUT_ID: "roll", c.ATTEMPT: 2})
    agent = span("w", parent="r", attributes={c.AGENT_NAME: "writer"})
    (call,) = calls_from_spans([root, agent, span("a", parent="w", attributes=text_attributes())])
    assert (call.rollout_id, call.attempt, call.agent_name) == ("roll", 2, "writer")


def test_spans_that_are_each_others_parents_end():
    one = span("a", parent="b", attributes=text_attributes())
    two = span("b", parent="a", scope=c.SCOPE_GATEWAY, attributes=text_attributes(**token_attributes()))
    assert len(calls_from_spans([one, two])) == 1


def test_what_the_gateway_answered_itself_is_nobodys_action_whatever_the_client_says():
    own = text_attributes(**{c.SYNTHETIC: c.NO_TURN_LEFT, c.PURPOSE: "other", c.POLICY: "frozen"})
    said = span("g", parent="c", scope=c.SCOPE_GATEWAY, kind=2, start_ns=1, attributes=own)
    asked = dataclasses.replace(client(), attributes={**client().attributes, c.PURPOSE: "agent"})
    (call,) = calls_from_spans([said, asked])
    assert (call.purpose, call.purpose_reason) == (Purpose.OTHER, "synthetic: turn budget")
    assert call.grade is Grade.UNUSABLE
    assert call.grade_reasons[0] == "the gateway answered, no model did: turn budget"


def test_purpose_and_policy_are_read():
    (call,) = calls_from_spans([span(attributes=text_attributes(**{c.PURPOSE: "judge", c.POLICY: "frozen"}))])
    assert (call.purpose, call.is_trained_policy) == (Purpose.JUDGE, False)
    (call,) = calls_from_spans([span(attributes=text_attributes(**{c.PURPOSE: "something new"}))])
    assert call.purpose is Purpose.OTHER


def test_the_gateways_own_record_is_read_back():
    body = {
        "model": "policy",
        "messages": [
            {"role": "user", "content": "2+2?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": "c1",
                        "type": "function",
                        "function": {"name": "add", "arguments": '{"a":2, "b":2}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "4"},
        ],
        "tools": [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}],
        "temperature": 0.8,
        "n": 2,
        "tool_choice": "auto",
    }
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": str(index)},
            "finish_reason": "stop",
            "token_ids": [10 + index, 11, 2],
            "logprobs": {"content": [{"logprob": -0.25 * k} for k in range(3)]},
        }
        for index in range(2)
    ]
    reply = Reply()
    reply.add({"id": "x", "model": "policy", "choices": choices, "prompt_token_ids": [5, 6, 7]})
    recorded = request_attributes(body, Route("chat")) | reply_attributes(
        reply, body, versions=SampledBy(3, 3), logprobs_mode="processed"
    )
    (call,) = calls_from_spans([span(scope=c.SCOPE_GATEWAY, attributes=recorded)])
    assert (call.grade, call.grade_reasons) == (Grade.EXACT, ())
    assert call.messages == body["messages"]
    assert call.tools == body["tools"]
    assert call.sampling == {"temperature": 0.8, "n": 2, "tool_choice": "auto"}
    assert [choice.sampled_token_ids for choice in call.choices] == [[10, 11, 2], [11, 11, 2]]
    assert call.choices[1].logprobs == [0.0, -0.25, -0.5]
    assert call.choices[1].policy_versions == [3, 3, 3]
    assert call.choices[1].message == {"role": "assistant", "content": "1"}


@pytest.mark.parametrize(
    ("name", "grades"),
    [
        ("genai_openai/multi_turn", ["text"] * 4),
        ("genai_openai/n2", ["text"]),
        ("genai_openai/stream_abandoned", ["unusable"]),
        ("genai_openai/fail", ["unusable"] * 3),
        ("genai_openai/retry", ["text"]),
        ("genai_openai/stream_tool", ["text"]),
        ("genai_openai/responses", ["text"]),
        ("genai_langchain/multi_turn", ["text"] * 4),
        ("openai_v2_latest/stream", ["text"]),
    ],
)
def test_captured_traces_give_their_calls(name, grades):
    assert [str(call.grade) for call in calls_from_spans(captured(name))] == grades


def test_a_captured_conversation_reads_as_chat():
    calls = calls_from_spans(captured("genai_openai/multi_turn"))
    assert "arguments were re-serialised" in calls[0].grade_reasons
    last = calls[-1]
    roles = [message["role"] for message in last.messages]
    assert roles[:4] == ["system", "user", "assistant", "tool"]
    assert last.messages[2]["tool_calls"][0]["function"]["name"] == "get_weather"
    assert last.messages[3]["tool_call_id"] == last.messages[2]["tool_calls"][0]["id"]
    assert last.tools[0]["function"]["name"] == "get_weather"
    assert calls[0].choices[0].finish_reason == "tool_calls"


def test_captured_choices_are_all_kept():
    (call,) = calls_from_spans(captured("genai_openai/n2"))
    assert [choice.message["content"] for choice in call.choices] == [
        "You said: two versions please",
        "You said: two versions please (v1)",
    ]


def test_captured_system_instructions_come_first():
    (call,) = calls_from_spans(captured("genai_openai/responses"))
    assert call.messages[0] == {"role": "system", "content": "be brief"}


def test_the_agents_name_is_found_in_a_captured_langgraph_trace():
    calls = calls_from_spans(captured("genai_langchain/multi_turn"))
    assert {call.agent_name for call in calls} == {"picnic_agent"}


def test_a_foreign_call_is_recognised_as_one_that_nobody_reads():
    assert recognise(span(scope="somebody", attributes={c.OPERATION_NAME: "chat"})) == NO_DIALECT


def test_tool_spans_are_no_calls():
    tool = span(scope="x", attributes={c.OPERATION_NAME: "execute_tool", c.PROVIDER_NAME: "openai"})
    assert recognise(tool) is None


def test_a_call_as_json_has_what_a_script_needs():
    (call,) = calls_from_spans([client(), gateway()])
    found = json.loads(json.dumps(call_to_json(call)))
    assert found["output"] == {"role": "assistant", "content": "hello"}
    assert found["sampled_token_ids"] == [4, 5]
    assert found["policy_version"] == 7
    assert found["grade"] == "exact"
    assert found["rollout_id"] == "roll"
    assert found["finish_reason"] == "stop"


def test_only_calls_of_the_current_attempt_come_out_of_a_store(tmp_path):
    def attempt(number: int, trace: str) -> list[Span]:
        names = {c.ROLLOUT_ID: "roll", c.ATTEMPT: number}
        root = span("r", trace=trace, attributes={**names, c.SPAN_ROLE: "rollout"})
        return [root, span("a", trace=trace, parent="r", attributes=text_attributes(**names))]

    with FileStore(tmp_path / "s.duckdb") as store:
        store.enqueue([Rollout("roll", max_attempts=3)])
        store.claim(worker="w", limit=1)
        store.finish("roll", 0, error="engine died", retry=True)
        store.claim(worker="w", limit=1)
        store.put_otlp(encode_request([*attempt(0, "1"), *attempt(1, "2")]))
        (call,) = calls_of(store, ["roll"])
        assert call.attempt == 1
        assert [found.call_id for found in calls_of(store)] == [call.call_id]


def test_where_nobody_enqueued_a_rollout_its_highest_attempt_counts(tmp_path):
    with FileStore(tmp_path / "s.duckdb") as store:
        for number, trace in ((0, "1"), (1, "2")):
            names = {c.ROLLOUT_ID: "roll", c.ATTEMPT: number}
            store.put_otlp(encode_request([span("a", trace=trace, attributes=text_attributes(**names))]))
        assert [call.attempt for call in calls_of(store)] == [1]


def test_calls_rollout_and_rewards_are_of_the_same_attempt_of_a_recorded_rollout(tmp_path):
    with FileStore(tmp_path / "s.duckdb") as store:
        for number, trace, reward in ((1, "2", 0.0), (0, "1", 1.0)):  # the first attempt's arrive last
            names = {c.ROLLOUT_ID: "roll", c.ATTEMPT: number}
            event = SpanEvent(c.REWARD_EVENT, 5, {c.REWARD_VALUE: reward})
            root = span(
                "r", trace=trace, attributes={**names, c.SPAN_ROLE: "rollout"}, status_code=2 - 2 * number
            )
            call = span("a", trace=trace, parent="r", attributes=text_attributes(**names))
            store.put_otlp(encode_request([call, dataclasses.replace(root, events=[event])]))
        (rollout,) = store.rollouts()
        assert (rollout.attempt, rollout.status) == (1, RolloutStatus.SUCCEEDED)
        assert [call.attempt for call in calls_of(store)] == [rollout.attempt]
        assert [r.value for r in store.rewards() if r.attempt == rollout.attempt] == [0.0]


def test_an_attempt_that_is_not_believed_hides_no_call(tmp_path):
    names = {c.ROLLOUT_ID: "roll", c.ATTEMPT: c.MAX_ATTEMPT + 1}
    with FileStore(tmp_path / "s.duckdb") as store:
        store.put_otlp(encode_request([span("a", attributes=text_attributes(**names))]))
        assert [call.attempt for call in calls_of(store)] == [0]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, DIALECT_OTEL),
        ({c.INPUT_MESSAGES: None}, DIALECT_OTEL),
        ({c.INPUT_MESSAGES: "[", c.OUTPUT_MESSAGES: "[]"}, NO_DIALECT),
        ({c.INPUT_MESSAGES: '[{"role": "user", "content": "hi"}]', c.OUTPUT_MESSAGES: None}, "genai_generic"),
        ({"acme.prompt": "hi", c.INPUT_MESSAGES: None, c.OUTPUT_MESSAGES: None}, NO_DIALECT),
    ],
)
def test_without_a_provider_messages_in_the_form_of_the_conventions_tell_the_dialect(changes, expected):
    told = text_attributes(**changes)
    del told[c.PROVIDER_NAME]
    there = {name: value for name, value in told.items() if value is not None}
    assert recognise(span(scope="somebody", attributes=there)) == expected


def test_what_the_client_redacted_is_not_trained_though_the_gateway_has_it_in_clear():
    named = {c.REDACTED: json.dumps([c.INPUT_MESSAGES])}
    hidden = dataclasses.replace(client(), attributes={**client().attributes, **named})
    (call,) = calls_from_spans([hidden, gateway()])
    assert call.grade is Grade.UNUSABLE
    assert f"text was redacted: {c.INPUT_MESSAGES}" in call.grade_reasons


def test_a_reply_that_either_side_knows_to_be_cached_is_not_trained():
    cached: dict[str, Any] = {c.CACHED: True}
    (call,) = calls_from_spans([client(), gateway(**cached)])
    assert call.grade is Grade.UNUSABLE


def test_redacted_places_outside_of_request_and_reply_do_no_harm():
    (call,) = calls_from_spans([span(attributes=text_attributes(**{c.REDACTED: '["status"]'}))])
    assert call.grade is Grade.TEXT
