"""Dialect `gen_ai.*` of unknown recorders: OpenAI's chat form, wherever the conventions once had content."""

import json
from dataclasses import replace

import pytest

from spangrad.adapters.calls import calls_from_spans
from spangrad.adapters.dialects import NO_DIALECT, recognise
from spangrad.adapters.model_call import Grade
from spangrad.store.records import SpanEvent
from tests.adapters.building import span, text_attributes
from tests.adapters.picnic import TOOLS_NOT_TOLD

CALL = ("call_1", '{"b":1,  "a":2}')
ASKED = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hi"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": CALL[0], "type": "function", "function": {"name": "f", "arguments": CALL[1]}}],
    },
    {"role": "tool", "content": "3", "tool_call_id": CALL[0]},
]
ANSWER = {"role": "assistant", "content": "three"}
PLAIN = {
    "gen_ai.operation.name": "chat",
    "gen_ai.request.model": "policy",
    "gen_ai.response.finish_reasons": ["stop"],
}


def the_call(attributes, *events):
    told = replace(span(scope="acme.tracing", attributes={**PLAIN, **attributes}), events=events)
    (call,) = calls_from_spans([told])
    return call


@pytest.mark.parametrize("kind", ["messages", "prompt", "prompt of kwargs", "events"])
def test_chat_messages_read_wherever_they_are(kind):
    asked, given = json.dumps(ASKED), json.dumps([ANSWER])
    if kind == "messages":
        call = the_call({"gen_ai.input.messages": asked, "gen_ai.output.messages": given})
    elif kind == "prompt":
        call = the_call({"gen_ai.prompt": asked, "gen_ai.completion": json.dumps(ANSWER)})
    elif kind == "prompt of kwargs":
        choices = {"choices": [{"finish_reason": "stop", "message": ANSWER}]}
        request = {"gen_ai.prompt": json.dumps({"messages": ASKED}), "gen_ai.completion": json.dumps(choices)}
        call = the_call(request)
    else:
        events = [("gen_ai.content.prompt", "gen_ai.prompt", asked)]
        events.append(("gen_ai.content.completion", "gen_ai.completion", given))
        call = the_call({}, *(SpanEvent(name, 1, {key: value}) for name, key, value in events))
    assert (call.dialect, call.grade) == ("genai_generic", Grade.TEXT)
    assert call.grade_reasons == ("no token ids", TOOLS_NOT_TOLD)
    assert list(call.messages) == ASKED  # arguments byte for byte
    assert [(dict(choice.message), choice.finish_reason) for choice in call.choices] == [(ANSWER, "stop")]


def test_a_request_in_a_form_that_is_not_known_is_a_fault_and_no_guess():
    call = the_call({"gen_ai.prompt": "User: hi", "gen_ai.completion": json.dumps(ANSWER)})
    assert call.grade is Grade.UNUSABLE
    assert call.grade_reasons[0].startswith("invalid JSON: gen_ai.prompt")
    call = the_call({"gen_ai.prompt": '{"text": "hi"}', "gen_ai.completion": json.dumps(ANSWER)})
    assert call.grade_reasons[0].startswith("unreadable: gen_ai.prompt")


@pytest.mark.parametrize("who", [{}, {"gen_ai.system": "openai"}, {"gen_ai.provider.name": "openai"}])
def test_messages_with_parts_are_the_conventions_whatever_the_provider_is_called(who):
    asked = [{"role": "user", "parts": [{"type": "text", "content": "hi"}]}]
    given = [{"role": "assistant", "parts": [{"type": "text", "content": "three"}], "finish_reason": "stop"}]
    messages = {"gen_ai.input.messages": json.dumps(asked), "gen_ai.output.messages": json.dumps(given)}
    call = the_call({**messages, **who})
    assert (call.dialect, call.grade, call.grade_reasons) == ("otel_genai", Grade.TEXT, ("no token ids",))
    assert list(call.messages) == [{"role": "user", "content": "hi"}]
    assert call.choices[0].message["content"] == "three"


def test_a_call_that_has_no_content_at_all_says_so():
    call = the_call({"gen_ai.system": "openai"})
    assert call.grade is Grade.UNUSABLE
    assert call.grade_reasons[0].startswith("content was not recorded")


def test_a_call_that_nothing_here_reads_is_counted_as_one():
    assert recognise(span(scope="acme", attributes={**PLAIN, "acme.prompt": "hi"})) == NO_DIALECT


def test_messages_in_the_form_of_the_conventions_stay_theirs():
    assert recognise(span(scope="acme", attributes=text_attributes())) == "otel_genai"
