"""Dialect OpenLLMetry up to 0.4x: spans built from the table of its attributes, for none were captured."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from spangrad.adapters.calls import calls_from_spans
from spangrad.adapters.dialects import recognise
from spangrad.adapters.model_call import Grade, Purpose
from spangrad.store.records import Span
from tests.adapters import picnic
from tests.adapters.building import span

SCOPE = "opentelemetry.instrumentation.openai.v1"
EMPTY: Mapping[str, Any] = {}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


def flat_message(name: str, message: dict[str, Any]) -> dict[str, Any]:
    """One message, an attribute for every field."""
    told = {f"{name}.role": message["role"]}
    if message.get("content") is not None:
        told[f"{name}.content"] = message["content"]
    if "tool_call_id" in message:
        told[f"{name}.tool_call_id"] = message["tool_call_id"]
    for index, (call_id, function, arguments) in enumerate(message.get("tool_calls", ())):
        below = f"{name}.tool_calls.{index}"
        told |= {f"{below}.id": call_id, f"{below}.name": function}
        told[f"{below}.arguments"] = json.dumps(arguments, ensure_ascii=False)
    return told


def flat_attributes(turn: int = 1) -> dict[str, Any]:
    """The attributes of one of the picnic agent's calls, in the order in which they are set."""
    told: dict[str, Any] = {
        "llm.request.type": "chat",
        "gen_ai.system": "OpenAI",
        "gen_ai.request.model": "stub-7b",
        "gen_ai.request.max_tokens": 256,
        "gen_ai.request.temperature": 0.7,
        "llm.is_streaming": False,
        "llm.headers": "None",
    }
    for index, message in enumerate(picnic.requests()[turn]):
        told |= flat_message(f"gen_ai.prompt.{index}", message)
    for index, name in enumerate(picnic.TOOLS):
        below = f"llm.request.functions.{index}"
        told |= {
            f"{below}.name": name,
            f"{below}.description": "…",
            f"{below}.parameters": json.dumps(SCHEMA),
        }
    told |= {
        "gen_ai.response.model": "stub-7b",
        "gen_ai.response.id": f"chatcmpl-{turn}",
        "llm.usage.total_tokens": 510,
        "gen_ai.usage.completion_tokens": 87,
        "gen_ai.usage.prompt_tokens": 423,
        "gen_ai.completion.0.finish_reason": picnic.FINISH_REASONS[turn],
    }
    return told | flat_message("gen_ai.completion.0", picnic.replies()[turn])


def flat(turn: int = 1, more: Mapping[str, Any] = EMPTY, *, dropped: int = 0, without: int = 0) -> Span:
    """The span of a call, without its oldest attributes."""
    attributes = dict(list(flat_attributes(turn).items())[without:]) | dict(more)
    name = "abcd"[turn]
    return span(
        name, trace=name, scope=SCOPE, start_ns=turn, attributes=attributes, dropped_attributes=dropped
    )


def the_call(told: Span):
    (call,) = calls_from_spans([told])
    return call


def test_a_whole_conversation_reads_as_it_was():
    found = calls_from_spans([flat(turn) for turn in range(4)])
    assert picnic.told(found) == picnic.expected()
    assert [call.choices[0].finish_reason for call in found] == picnic.FINISH_REASONS
    assert {call.dialect for call in found} == {"openllmetry_legacy"}
    assert {(call.grade, tuple(call.grade_reasons)) for call in found} == {(Grade.TEXT, ("no token ids",))}
    assert found[1].usage == {"input_tokens": 423, "output_tokens": 87}
    assert found[1].sampling == {"temperature": 0.7, "max_tokens": 256}


def test_arguments_are_the_models_bytes():
    messages, reply = the_call(flat(1)).messages, the_call(flat(1)).choices[0].message
    assert [m["tool_calls"][0]["function"]["arguments"] for m in (messages[2], reply)] == picnic.ARGUMENTS


def test_tools_are_read_with_their_parameters():
    tools = the_call(flat()).tools
    assert [tool["function"]["name"] for tool in tools] == list(picnic.TOOLS)
    assert tools[0]["function"]["parameters"] == SCHEMA


def test_a_span_that_lost_its_oldest_attributes_is_unusable():
    call = the_call(
        flat(3, dropped=10, without=10)
    )  # 7 of the request, both of message 0, the role of message 1
    assert call.grade is Grade.UNUSABLE
    assert [reason.split(":")[0] for reason in call.grade_reasons] == [
        "attributes were dropped",
        "messages are missing",
        "messages are missing",
    ]
    assert "gen_ai.prompt.0 is not on the span" in call.grade_reasons[1]


def test_a_lost_beginning_is_seen_though_nobody_counted_what_was_dropped():
    call = the_call(flat(3, without=9))
    assert call.grade is Grade.UNUSABLE
    assert call.grade_reasons[0].startswith("messages are missing: gen_ai.prompt.0 is not on the span")


def test_a_lost_tool_call_is_seen():
    told = flat_attributes(2)
    del told["gen_ai.prompt.4.tool_calls.0.id"], told["gen_ai.prompt.4.tool_calls.0.name"]
    del told["gen_ai.prompt.4.tool_calls.0.arguments"]
    call = the_call(span(scope=SCOPE, attributes=told))
    assert call.grade_reasons == ("messages are missing: gen_ai.prompt.4 has lost its tool call 0",)


def test_two_choices_are_one_call():
    second = {"gen_ai.completion.1.finish_reason": "length", "gen_ai.completion.1.role": "assistant"}
    call = the_call(flat(3, second | {"gen_ai.completion.1.content": "Lyon"}))
    assert [choice.finish_reason for choice in call.choices] == ["stop", "length"]
    assert [choice.message["content"] for choice in call.choices] == [picnic.ANSWER, "Lyon"]


def test_a_stream_without_a_finish_reason_was_left_early():
    told = flat_attributes(3) | {"llm.is_streaming": True}
    del told["gen_ai.completion.0.finish_reason"]
    call = the_call(span(scope=SCOPE, attributes=told))
    assert call.grade_reasons == ("stream was left early: choice 0",)


def test_a_list_of_parts_is_a_list_again_and_a_tools_result_stays_its_text():
    parts = [{"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {"url": "http://x"}}]
    call = the_call(flat(1, {"gen_ai.prompt.1.content": json.dumps(parts)}))
    assert call.messages[1]["content"] == parts
    call = the_call(flat(1, {"gen_ai.prompt.3.content": json.dumps(parts)}))
    assert call.messages[3]["content"] == json.dumps(parts)


@pytest.mark.parametrize(("role", "expected"), [("human", "user"), ("ai", "assistant"), ("system", "system")])
def test_langchains_roles_have_the_names_of_chat(role, expected):
    assert the_call(flat(0, {"gen_ai.prompt.1.role": role})).messages[1]["role"] == expected


def test_an_embedding_has_nothing_to_train():
    told = {"llm.request.type": "embedding", "gen_ai.request.model": "e", "gen_ai.prompt.0.content": "hi"}
    call = the_call(span(scope=SCOPE, attributes=told))
    assert (call.purpose, call.grade_reasons) == (Purpose.EMBEDDING, ("an embedding: nothing was sampled",))


def test_the_prompt_of_a_text_completion_is_no_chat():
    told = {
        "llm.request.type": "completion",
        "gen_ai.prompt.0.user": "Once",
        "gen_ai.completion.0.content": "upon",
    }
    call = the_call(span(scope=SCOPE, attributes=told | {"gen_ai.completion.0.finish_reason": "stop"}))
    assert call.grade is Grade.UNUSABLE
    assert any(reason.startswith("a part has no chat form") for reason in call.grade_reasons)


def test_a_rerank_is_no_call():
    assert recognise(span(scope=SCOPE, attributes={"llm.request.type": "rerank"})) is None
