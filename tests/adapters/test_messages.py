"""OTel message parts -> OpenAI chat messages, and what is said about losses."""

from typing import Any

import pytest

from spangrad.adapters.messages import (
    ARGUMENTS_RESERIALISED,
    NO_CHAT_FORM,
    RESULTS_RESERIALISED,
    chat_messages,
    chat_tools,
    system_messages,
)
from spangrad.errors import DialectError
from spangrad.tracer.wire.messages import input_message

CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Use the tools."},
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    {
        "role": "assistant",
        "content": None,
        "reasoning": "hm",
        "tool_calls": [
            {
                "id": "c1",
                "type": "function",
                "function": {"name": "query", "arguments": '{"sql":  "select 1"}'},
            },
            {"id": "c2", "type": "function", "function": {"name": "query", "arguments": "not json"}},
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "1"},
    {"role": "tool", "tool_call_id": "c2", "content": "error"},
    {"role": "assistant", "content": ""},
    {"role": "user", "content": "thanks", "name": "ann"},
]


def test_what_the_tracer_wrote_comes_back_as_it_was_sent():
    notes: list[str] = []
    assert chat_messages([input_message(message) for message in CONVERSATION], notes) == CONVERSATION
    assert notes == []


def parts(*items: Any, role: str = "assistant") -> list[dict[str, Any]]:
    return [{"role": role, "parts": list(items)}]


def test_an_argument_string_is_kept_byte_for_byte():
    notes: list[str] = []
    recorded = parts({"type": "tool_call", "id": "x", "name": "f", "arguments": '{ "a":1}'})
    found = chat_messages(recorded, notes)
    assert found[0]["tool_calls"][0]["function"]["arguments"] == '{ "a":1}'
    assert notes == []


def test_parsed_arguments_are_serialised_and_that_is_said_once():
    notes: list[str] = []
    recorded = parts(*[{"type": "tool_call", "id": "x", "name": "f", "arguments": {"città": 1}}] * 2)
    found = chat_messages(recorded, notes)
    assert found[0]["tool_calls"][0]["function"]["arguments"] == '{"città": 1}'
    assert notes == [ARGUMENTS_RESERIALISED]


@pytest.mark.parametrize("key", ["response", "result"])
def test_a_tool_result_is_read_under_both_of_its_names(key):
    found = chat_messages(parts({"type": "tool_call_response", "id": "x", key: "7"}, role="tool"), [])
    assert found == [{"role": "tool", "content": "7", "tool_call_id": "x"}]


def test_each_tool_result_of_a_message_becomes_a_message():
    responses = [{"type": "tool_call_response", "id": name, "response": name} for name in "ab"]
    assert [m["tool_call_id"] for m in chat_messages(parts(*responses, role="tool"), [])] == ["a", "b"]


def test_a_structured_tool_result_is_serialised_and_that_is_said():
    notes: list[str] = []
    found = chat_messages(
        parts({"type": "tool_call_response", "id": "x", "response": {"a": 1}}, role="tool"), notes
    )
    assert found[0]["content"] == '{"a": 1}'
    assert notes == [RESULTS_RESERIALISED]


def test_text_before_or_after_a_tool_call_is_the_same_message():
    text = {"type": "text", "content": "so"}
    tool_call = {"type": "tool_call", "id": "x", "name": "f", "arguments": "{}"}
    assert chat_messages(parts(text, tool_call), []) == chat_messages(parts(tool_call, text), [])


def test_a_part_without_a_chat_form_is_kept_and_named():
    notes: list[str] = []
    found = chat_messages(parts({"type": "input_audio", "data": "x"}, role="user"), notes)
    assert found[0]["content"] == [{"type": "input_audio", "data": "x"}]
    assert notes == [f"{NO_CHAT_FORM}: 'input_audio'"]


@pytest.mark.parametrize(
    "recorded", ["text", {"role": "user"}, [7], [{"role": "user"}], [{"parts": []}], parts(3)]
)
def test_another_shape_is_an_error_that_says_what_was_expected(recorded):
    with pytest.raises(DialectError, match="expected"):
        chat_messages(recorded, [])


def test_system_instructions_are_a_system_message_as_string_and_as_parts():
    expected = [{"role": "system", "content": "be brief"}]
    assert system_messages("be brief", []) == expected
    assert system_messages([{"type": "text", "content": "be brief"}], []) == expected


def test_flat_and_wrapped_tools_become_the_same():
    wrapped = {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert (
        chat_tools([{"type": "function", "name": "f", "parameters": {}}])
        == chat_tools([wrapped])
        == [wrapped]
    )


@pytest.mark.parametrize("kind", [None, 3, [], {}])
def test_a_part_whose_type_is_no_text_has_no_chat_form(kind):
    notes: list[str] = []
    chat_messages([{"role": "user", "parts": [{"type": kind, "content": "hi"}]}], notes)
    assert notes == [f"{NO_CHAT_FORM}: {kind!r}"]
