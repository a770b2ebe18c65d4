"""The Anthropic SDK: messages, streams, tools, thinking; sync and async. No token ids on this route."""

from typing import Any

import anthropic

from tests.tracer.conformance.case import Want, case, failed, text

TOOL: Any = {
    "name": "get_weather",
    "description": "Look up the weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
ENDS = text()
USES_TOOL = text("tool_calls")


def sync_client(url: str, **more: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key="k", **{"max_retries": 0, **more})


def async_client(url: str, **more: Any) -> anthropic.AsyncAnthropic:
    base_url = url.removesuffix("/v1")
    return anthropic.AsyncAnthropic(base_url=base_url, api_key="k", **{"max_retries": 0, **more})


def asks(**more: Any) -> Any:
    messages = [{"role": "user", "content": "The weather in Oslo?"}]
    return {"model": "policy", "max_tokens": 64, "messages": messages, **more}


@case("anthropic", "create", "message", ENDS)
def create(url: str) -> Any:
    with sync_client(url) as client:
        return client.messages.create(**asks(system="Be brief.", stop_sequences=["END"]))


@case("anthropic", "async create", "message", ENDS)
async def async_create(url: str) -> Any:
    async with async_client(url) as client:
        return await client.messages.create(**asks())


@case("anthropic", "with_raw_response", "message", ENDS)
def raw_response(url: str) -> Any:
    with sync_client(url) as client:
        raw = client.messages.with_raw_response.create(**asks())
        return raw.status_code, raw.text(), raw.parse()


@case("anthropic", "stream=True", "message_stream", ENDS)
@case(
    "anthropic",
    "stream with overloaded error",
    "message_overloaded",
    Want("unusable", (), (None,), is_complete=False, error="overloaded_error"),
)
def stream(url: str) -> Any:
    with sync_client(url) as client:
        return list(client.messages.create(**asks(stream=True)))


@case("anthropic", ".stream() helper", "message_stream", ENDS)
@case("anthropic", ".stream() helper, thinking", "message_thoughts_stream", ENDS)
def stream_helper(url: str) -> Any:
    with sync_client(url) as client, client.messages.stream(**asks()) as events:
        return list(events.text_stream), events.get_final_message()


@case("anthropic", "async .stream() helper", "message_stream", ENDS)
async def async_stream_helper(url: str) -> Any:
    async with async_client(url) as client, client.messages.stream(**asks()) as events:
        return [piece async for piece in events.text_stream], await events.get_final_message()


@case("anthropic", "tools", "message_tools", USES_TOOL)
def tools(url: str) -> Any:
    with sync_client(url) as client:
        return client.messages.create(**asks(tools=[TOOL]))


@case("anthropic", "stream, tools", "message_tools_stream", USES_TOOL)
def streamed_tools(url: str) -> Any:
    with sync_client(url) as client, client.messages.stream(**asks(tools=[TOOL])) as events:
        return events.get_final_message()


@case("anthropic", "async stream, tools", "message_tools_stream", USES_TOOL)
async def async_streamed_tools(url: str) -> Any:
    async with async_client(url) as client:
        return [event async for event in await client.messages.create(**asks(tools=[TOOL], stream=True))]


@case("anthropic", "thinking", "message_thoughts", ENDS)
def thinking(url: str) -> Any:
    with sync_client(url) as client:
        return client.messages.create(
            **asks(max_tokens=2048, thinking={"type": "enabled", "budget_tokens": 1024})
        )


@case("anthropic", "retry 529, 200", "message_retries", failed("529"), ENDS)
def retries(url: str) -> Any:
    with sync_client(url, max_retries=1) as client:
        return client.messages.create(**asks())


@case(
    "anthropic",
    "stream left by break",
    "message_held",
    Want("unusable", (), (None,), is_complete=False),
)
def stream_left(url: str) -> Any:
    seen: list[Any] = []
    with sync_client(url) as client, client.messages.create(**asks(stream=True)) as events:
        for event in events:
            seen.append(event)
            if event.type == "content_block_delta":
                break
    return seen
