"""The Anthropic and Responses routes, recorded as text with their own SDKs."""

from collections.abc import Callable

import anthropic
import httpx
import openai
import pytest

from spangrad.tracer import conventions as c
from tests.tracer.recording import Recorded, calls
from tests.tracer.stub_server import ARGUMENTS, ModelServer

Finish = Callable[[], list[Recorded]]


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
        {"type": "reasoning", "content": "Look it up."},
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


def test_other_services_with_routes_of_the_same_name_are_not_recorded(
    model: ModelServer, recorded: Finish
) -> None:
    with httpx.Client() as agent:
        agent.post(f"{model.url}/messages", json={"to": "+47", "text": "private"})
        agent.post(f"{model.url}/messages", json={"model": "car"})
    assert recorded() == []
