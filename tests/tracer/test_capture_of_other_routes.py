"""The Anthropic and Responses routes, recorded as text with their own SDKs, and structured output."""

from collections.abc import Callable
from typing import Any

import anthropic
import httpx
import openai
import pydantic
import pytest

from spangrad.tracer import conventions as c
from tests.tracer.recording import Recorded, calls
from tests.tracer.scripted_server import Answer as Scripted
from tests.tracer.scripted_server import scripted_server
from tests.tracer.stub_server import ARGUMENTS, MESSAGE_EVENTS, RESPONSE, ModelServer
from tests.tracer.wire.exchange import choice, completion, sse

Finish = Callable[[], list[Recorded]]
TEXT_OF_ANSWER = {"type": "output_text", "text": '{"text": "Oslo"}', "annotations": []}


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic_messages_are_recorded_as_text(model: ModelServer, recorded: Finish, stream: bool) -> None:
    url = model.url.removesuffix("/v1")
    with anthropic.Anthropic(base_url=url, api_key="k", max_retries=0) as agent:
        if stream:
            with agent.messages.stream(
                model="policy", max_tokens=9, system="Be brief.", messages=[{"role": "user", "content": "Hi"}]
            ) as events:
                assert events.get_final_message().stop_reason == "tool_use"
        else:
            agent.messages.create(
                model="policy", max_tokens=9, system="Be brief.", messages=[{"role": "user", "content": "Hi"}]
            )
    (call,) = calls(recorded())
    arguments = '{"city":  "Oslo"}' if stream else {"city": "Oslo"}
    assert call[c.PROVIDER_NAME] == "anthropic"
    assert call[c.REQUEST_MAX_TOKENS] == 9
    assert [turn["role"] for turn in call.json(c.INPUT_MESSAGES)] == ["system", "user"]
    assert call.json(c.OUTPUT_MESSAGES)[0]["parts"] == [
        {"type": "reasoning", "content": "Look it up.", "signature": "s"},
        {"type": "text", "content": "One moment."},
        {"type": "tool_call", "id": "toolu_1", "name": "get_weather", "arguments": arguments},
    ]
    assert (call[c.RESPONSE_ID], call[c.RESPONSE_FINISH_REASONS]) == ("msg_1", ["tool_use"])
    assert (call[c.INPUT_TOKENS], call[c.OUTPUT_TOKENS]) == (4, 5)
    assert call.get(c.STREAM_COMPLETE) is (True if stream else None)


@pytest.mark.parametrize("stream", [False, True])
def test_responses_are_recorded_as_text(model: ModelServer, recorded: Finish, stream: bool) -> None:
    with openai.OpenAI(base_url=model.url, api_key="k", max_retries=0) as agent:
        if stream:
            list(agent.responses.create(model="policy", input="Hi", instructions="Be brief.", stream=True))
        else:
            agent.responses.create(model="policy", input="Hi", instructions="Be brief.")
    (call,) = calls(recorded())
    assert call.json(c.INPUT_MESSAGES) == [
        {"role": "system", "parts": [{"type": "text", "content": "Be brief."}]},
        {"role": "user", "parts": [{"type": "text", "content": "Hi"}]},
    ]
    assert call.json(c.OUTPUT_MESSAGES)[0]["parts"] == [
        {"type": "text", "content": "One moment."},
        {"type": "tool_call", "id": "call_1", "name": "f", "arguments": ARGUMENTS},
    ]
    assert call.get(c.STREAM_COMPLETE) is (True if stream else None)


def test_a_raw_event_stream_of_anthropic_is_recorded(model: ModelServer, recorded: Finish) -> None:
    with anthropic.Anthropic(base_url=model.url.removesuffix("/v1"), api_key="k", max_retries=0) as agent:
        events = agent.messages.create(
            model="policy", max_tokens=9, messages=[{"role": "user", "content": "Hi"}], stream=True
        )
        assert [event.type for event in events][-1] == "message_stop"
    (call,) = calls(recorded())
    assert call[c.STREAM_COMPLETE] is True
    assert call.json(c.OUTPUT_MESSAGES)[0]["parts"][0]["signature"] == "s"


@pytest.mark.parametrize("leave", ["with", "close", "cut"])
def test_an_anthropic_stream_left_early_or_cut_is_incomplete(recorded: Finish, leave: str) -> None:
    asked: Any = {"model": "policy", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
    with scripted_server() as server, anthropic.Anthropic(base_url=server.url, api_key="k") as agent:
        server.answer("/v1/messages", Scripted(sse(*MESSAGE_EVENTS[:6])))
        if leave == "with":
            with agent.messages.stream(**asked) as helper:
                next(iter(helper))
        else:
            events: Any = agent.messages.create(**asked, stream=True)
            if leave == "cut":
                list(events)
            else:
                next(iter(events))
                events.close()
    (call,) = calls(recorded())
    assert call[c.STREAM_COMPLETE] is False
    assert call.json(c.INPUT_MESSAGES)[0]["parts"] == [{"type": "text", "content": "Hi"}]


def test_counting_tokens_and_batches_are_no_calls(model: ModelServer, recorded: Finish) -> None:
    body = {"model": "policy", "messages": [{"role": "user", "content": "Hi"}]}
    with httpx.Client() as agent:
        for path in ("messages/count_tokens", "messages/batches", "responses/input_tokens", "batches"):
            agent.post(f"{model.url}/{path}", json=body | {"input": "Hi"})
    assert recorded() == []


class Answer(pydantic.BaseModel):
    text: str


def test_structured_output_is_a_call_under_constraint(recorded: Finish) -> None:
    with scripted_server() as server:
        whole = completion(choice('{"text": "Oslo"}'), object="chat.completion", created=1)
        server.answer("/v1/chat/completions", Scripted(whole))
        parsed = RESPONSE | {"output": [RESPONSE["output"][0] | {"content": [TEXT_OF_ANSWER]}]}
        server.answer("/v1/responses", Scripted(parsed))
        with openai.OpenAI(base_url=server.url + "/v1", api_key="k", max_retries=0) as agent:
            first = agent.chat.completions.parse(
                model="policy", messages=[{"role": "user", "content": "Where?"}], response_format=Answer
            )
            second = agent.responses.parse(model="policy", input="Where?", text_format=Answer)
    assert first.choices[0].message.parsed == second.output_parsed == Answer(text="Oslo")
    chat, responses = calls(recorded())
    for call in (chat, responses):
        assert call[c.CONSTRAINED] is True
        assert call.json(c.OUTPUT_MESSAGES)[0]["parts"] == [{"type": "text", "content": '{"text": "Oslo"}'}]
        assert "schema" in call[c.REQUEST_EXTRA]


def test_sentinels_of_the_sdks_are_in_no_attribute(model: ModelServer, recorded: Finish) -> None:
    with openai.OpenAI(base_url=model.url, api_key="k", max_retries=0) as agent:
        agent.chat.completions.create(
            model="policy",
            messages=[{"role": "user", "content": "Hello"}],
            tools=openai.omit,
            temperature=openai.omit,
            timeout=openai.not_given,
        )
        agent.responses.create(model="policy", input="Hi", instructions=openai.omit)
    url = model.url.removesuffix("/v1")
    with anthropic.Anthropic(base_url=url, api_key="k", max_retries=0) as other:
        other.messages.create(
            model="policy",
            max_tokens=9,
            system=anthropic.omit,
            messages=[{"role": "user", "content": "Hi"}],
        )
    found = calls(recorded())
    assert len(found) == 3
    for call in found:
        assert "Omit" not in str(call.attributes)
        assert "NotGiven" not in str(call.attributes)
        assert c.TOOL_DEFINITIONS not in call.attributes


def test_other_services_with_routes_of_the_same_name_are_not_recorded(
    model: ModelServer, recorded: Finish
) -> None:
    with httpx.Client() as agent:
        agent.post(f"{model.url}/messages", json={"to": "+47", "text": "private"})
        agent.post(f"{model.url}/messages", json={"model": "car"})
    assert recorded() == []
