"""`cases/capture.md`, Missing calls: no way to ask a model goes past what records calls."""

import asyncio
from collections.abc import Callable
from typing import Any

import litellm
import openai
import pytest
from litellm.llms.custom_httpx.async_client_cleanup import close_litellm_async_clients
from pydantic import BaseModel

from spangrad.tracer import conventions as c
from tests.tracer.canned import completion, serving, whole
from tests.tracer.recording import Recorded, calls
from tests.tracer.stub_server import ARGUMENTS, ModelServer

Finish = Callable[[], list[Recorded]]
ASK: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "TOOL"}]}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
]


class Weather(BaseModel):
    city: str


@pytest.mark.parametrize("is_async", [False, True])
def test_every_helper_for_structured_output_is_recorded(recorded: Finish, is_async: bool) -> None:
    async def ask(url: str) -> None:
        async with openai.AsyncOpenAI(base_url=url, api_key="k") as sdk:
            await sdk.chat.completions.parse(**ASK, response_format=Weather)
            await sdk.chat.completions.with_raw_response.parse(**ASK, response_format=Weather)

    with serving(whole(completion('{"city": "Oslo"}'))) as server:
        if is_async:
            asyncio.run(ask(f"{server.url}/v1"))
        else:
            with openai.OpenAI(base_url=f"{server.url}/v1", api_key="k") as sdk:
                reply = sdk.chat.completions.parse(**ASK, response_format=Weather)
                assert reply.choices[0].message.parsed == Weather(city="Oslo")
                found = sdk.chat.completions.with_raw_response.parse(**ASK, response_format=Weather)
                assert found.parse().choices[0].message.parsed == Weather(city="Oslo")
    recorded_calls = calls(recorded())
    assert len(recorded_calls) == 2
    for call in recorded_calls:
        assert call.json(c.OUTPUT_MESSAGES)[0]["parts"][0]["content"] == '{"city": "Oslo"}'
        assert call[c.CONSTRAINED] is True


@pytest.mark.filterwarnings(
    "ignore:.*:UserWarning:pydantic.*",
    "ignore:.*:DeprecationWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",  # sockets and loops that LangChain and LiteLLM leave
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_litellms_tool_calls_are_recorded_as_the_model_wrote_them(
    model: ModelServer, recorded: Finish, is_stream: bool
) -> None:
    settings: dict[str, Any] = {**ASK, "model": "openai/policy", "api_base": model.url, "api_key": "k"}
    settings |= {"tools": TOOLS, "stream": is_stream}

    async def ask() -> None:
        found: Any = await litellm.acompletion(**settings)
        if is_stream:
            async for _ in found:
                pass
        await close_litellm_async_clients()

    found: Any = litellm.completion(**settings)
    if is_stream:
        list(found)
    asyncio.run(ask())
    part = {"type": "tool_call", "id": "call_1", "name": "get_weather", "arguments": ARGUMENTS}
    recorded_calls = calls(recorded())
    assert len(recorded_calls) == 2
    for call in recorded_calls:
        assert call.json(c.OUTPUT_MESSAGES)[0]["parts"] == [part]
        assert call.json(c.TOOL_DEFINITIONS) == TOOLS
        assert call[c.RESPONSE_FINISH_REASONS] == ["tool_calls"]
