"""Dialect OTel GenAI up to 1.36, an event for every message."""

import json
from dataclasses import replace
from typing import Any

import pytest

from spangrad.adapters.calls import calls_from_spans
from spangrad.adapters.dialects.genai_legacy import NO_RECORDS, NOT_CAPTURED, TEXT_BESIDE_CALLS
from spangrad.adapters.model_call import Grade
from spangrad.store.records import SpanEvent
from tests.adapters import picnic
from tests.adapters.building import span
from tests.adapters.captured import captured

OLD = {
    "gen_ai.operation.name": "chat",
    "gen_ai.system": "openai",
    "gen_ai.response.finish_reasons": ["stop"],
}
SCOPE = "opentelemetry.instrumentation.openai_v2"


def calls(name):
    return calls_from_spans(captured(name))


def told(*events: tuple[str, Any], key: str = "body", scope: str = SCOPE):
    """The one call with these events, each (name, body)."""
    listed = tuple(SpanEvent(name, at, {key: body}) for at, (name, body) in enumerate(events))
    (call,) = calls_from_spans([replace(span(scope=scope, attributes=OLD), events=listed)])
    return call


def without_text_beside_calls(message):
    return {**message, "content": None} if message.get("tool_calls") else message


def test_a_whole_conversation_reads_as_far_as_the_recorder_keeps_it():
    found = calls("openai_v2_legacy/multi_turn")
    # The recorder leaves text beside tool calls out of earlier turns; in the reply it is there.
    expected = [([*map(without_text_beside_calls, asked)], reply) for asked, reply in picnic.expected()]
    assert picnic.told(found) == expected
    assert [call.choices[0].finish_reason for call in found] == picnic.FINISH_REASONS
    assert [call.grade_reasons for call in found] == [
        ("no token ids", picnic.TOOLS_NOT_TOLD),
        *[("no token ids", picnic.TOOLS_NOT_TOLD, TEXT_BESIDE_CALLS)] * 3,
    ]
    assert {(call.dialect, call.grade, call.model) for call in found} == {
        ("otel_genai_legacy", Grade.TEXT, "stub-7b")
    }
    assert [call.tools for call in found] == [()] * 4  # nor does it keep tools


def test_arguments_are_the_models_bytes():
    second = calls("openai_v2_legacy/multi_turn")[1]
    shown, made = second.messages[2], second.choices[0].message
    assert [m["tool_calls"][0]["function"]["arguments"] for m in (shown, made)] == picnic.ARGUMENTS


@pytest.mark.parametrize("case", ["n2", "retry", "stream", "stream_no_usage", "stream_tool"])
def test_what_was_recorded_whole_is_text(case):
    (call,) = calls(f"openai_v2_legacy/{case}")
    untold = (picnic.TOOLS_NOT_TOLD,) if case == "stream_tool" else ()
    assert (call.grade, call.grade_reasons) == (Grade.TEXT, ("no token ids", *untold))


@pytest.mark.parametrize("case", ["parallel_async", "parallel_threads"])
def test_parallel_calls_keep_their_own_records(case):
    found = calls(f"openai_v2_legacy/{case}")
    assert [call.grade for call in found] == [Grade.TEXT] * 4
    on_spans = calls(f"genai_openai/{case}")
    assert sorted(str(reply) for _, reply in picnic.told(found)) == sorted(
        str(reply) for _, reply in picnic.told(on_spans)
    )


def test_two_choices_are_one_call():
    (call,) = calls("openai_v2_legacy/n2")
    assert [choice.message["content"] for choice in call.choices] == [
        "You said: two versions please",
        "You said: two versions please (v1)",
    ]


def test_a_failed_call_keeps_its_error_as_the_only_reason():
    found = calls("openai_v2_legacy/fail")
    assert [len(call.grade_reasons) for call in found] == [1, 1, 1]
    assert all(call.grade_reasons[0].startswith("error: ") for call in found)


@pytest.mark.parametrize("case", ["stream_abandoned", "cancelled_stream"])
def test_records_of_a_span_that_was_never_exported_are_no_call(case):
    assert calls(f"openai_v2_legacy/{case}") == []


def test_a_call_without_its_log_records_says_so_and_what_to_do():
    bare = [replace(each, events=()) for each in captured("openai_v2_legacy/multi_turn")]
    found = calls_from_spans(bare)
    assert [(call.grade, call.grade_reasons) for call in found] == [(Grade.UNUSABLE, (NO_RECORDS,))] * 4
    assert "ingest them together with its spans" in NO_RECORDS


def test_a_call_some_of_whose_records_are_missing_is_unusable():
    no_choice = told(("gen_ai.user.message", {"content": "hi"}))
    no_message = told(
        ("gen_ai.choice", {"index": 0, "finish_reason": "stop", "message": {"content": "hello"}})
    )
    second_only = {"index": 1, "finish_reason": "stop", "message": {"content": "hello"}}
    one_of_two = told(("gen_ai.user.message", {"content": "hi"}), ("gen_ai.choice", second_only))
    for call in (no_choice, no_message, one_of_two):
        assert call.grade is Grade.UNUSABLE
        assert call.grade_reasons[0].startswith(NO_RECORDS)


def test_records_without_text_were_not_captured():
    call = told(
        ("gen_ai.user.message", {}),
        ("gen_ai.choice", {"index": 0, "finish_reason": "stop", "message": {"role": "assistant"}}),
    )
    assert (call.grade, call.grade_reasons) == (Grade.UNUSABLE, (NOT_CAPTURED,))


def test_a_result_that_is_empty_is_no_lost_text():
    call = told(
        ("gen_ai.user.message", {"content": "hi"}),
        ("gen_ai.tool.message", {"id": "call_1"}),
        ("gen_ai.choice", {"index": 0, "finish_reason": "stop", "message": {"content": "hello"}}),
    )
    assert call.grade is Grade.TEXT
    assert call.messages[1] == {"role": "tool", "content": "", "tool_call_id": "call_1"}


def test_events_of_the_span_itself_hold_the_body_as_json():
    user = json.dumps({"role": "user", "content": "hi"})
    choice = json.dumps({"index": 0, "finish_reason": "stop", "message": {"content": "hello"}})
    events = (("gen_ai.user.message", user), ("gen_ai.choice", choice))
    call = told(*events, key="gen_ai.event.content", scope="azure.ai.inference")
    assert call.grade is Grade.TEXT
    assert picnic.told([call]) == [
        ([{"role": "user", "content": "hi"}], {"role": "assistant", "content": "hello"})
    ]


def test_a_body_that_is_broken_spoils_its_call_and_says_which():
    call = told(("gen_ai.user.message", "{"), ("gen_ai.choice", {"index": 0, "message": {"content": "x"}}))
    assert call.grade is Grade.UNUSABLE
    assert call.grade_reasons[0].startswith("unreadable: gen_ai.user.message: the body is str")


def test_messages_and_tool_calls_that_are_json_text_are_read():
    calls = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}]
    events: list[tuple[str, dict[str, Any]]] = [
        ("gen_ai.user.message", {"content": "hi"}),
        ("gen_ai.assistant.message", {"content": "", "tool_calls": json.dumps(calls)}),
        ("gen_ai.tool.message", {"content": "3", "id": "c1"}),
        (
            "gen_ai.choice",
            {
                "index": 0,
                "finish_reason": "stop",
                "message": json.dumps({"role": "assistant", "content": "three"}),
            },
        ),
    ]
    listed = tuple(SpanEvent(name, at, attributes) for at, (name, attributes) in enumerate(events))
    (call,) = calls_from_spans([replace(span(scope=SCOPE, attributes=OLD), events=listed)])
    assert call.grade is Grade.TEXT
    assert call.messages[1]["tool_calls"] == calls  # arguments byte for byte
    assert call.choices[0].message == {"role": "assistant", "content": "three"}
    broken = SpanEvent("gen_ai.choice", 9, {"index": 0, "message": "three"})
    (call,) = calls_from_spans([replace(span(scope=SCOPE, attributes=OLD), events=(listed[0], broken))])
    assert call.grade_reasons[0] == "unreadable: gen_ai.choice: a message is str; expected an object"
