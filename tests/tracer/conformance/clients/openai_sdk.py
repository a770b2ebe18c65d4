"""The OpenAI SDK: chat, legacy completions, Responses, embeddings; sync and async."""

import asyncio
import urllib.request
from typing import Any, Literal

import openai
from pydantic import BaseModel

from tests.tracer.conformance.case import (
    DRY,
    ONE_TOOL,
    THOUGHT,
    TWO_TOOLS,
    WET,
    Want,
    case,
    exact,
    failed,
    ids,
    partial,
    text,
)

IDS: Any = {"logprobs": True, "extra_body": {"return_token_ids": True}}
PARAMETERS: Any = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
STRICT_TOOL: Any = {**TOOL, "function": {**TOOL["function"], "strict": True}}
JSON_IDS = (141, 142, 143, 151645)
EMBEDDED = Want("unusable", (), ())


class Forecast(BaseModel):
    city: str
    days: int


def sync_client(url: str, **more: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key="k", **{"max_retries": 0, **more})


def async_client(url: str, **more: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=url, api_key="k", **{"max_retries": 0, **more})


def asks(words: str = "The weather in Oslo?", **more: Any) -> Any:
    return {"model": "policy", "messages": [{"role": "user", "content": words}], **more}


@case("openai", "create", "chat", ids(DRY))
@case("openai", "gzip reply", "chat_gzip", ids(DRY))
@case("openai", "reasoning", "thoughts", ids(THOUGHT))
@case("openai", "500", "error_500", failed("500"))
@case("openai", "400", "error_400", failed("400"))
@case("openai", "reply is not JSON", "not_json", Want("unusable", (), ()))
@case("openai", "reply cut", "half_body", Want("unusable", (), (), error="RemoteProtocolError"))
def create(url: str) -> Any:
    with sync_client(url) as client:
        return client.chat.completions.create(**asks(**IDS))


@case("openai", "create, nothing asked for", "chat_plain", text())
@case("openai", "create", "gateway_chat", exact(DRY), through_gateway=True)
def create_plain(url: str) -> Any:
    with sync_client(url) as client:
        return client.chat.completions.create(**asks())


@case("openai", "async create", "chat", ids(DRY))
async def async_create(url: str) -> Any:
    async with async_client(url) as client:
        return await client.chat.completions.create(**asks(**IDS))


@case("openai", "n=2", "chat_n2", ids(DRY, WET))
def several(url: str) -> Any:
    with sync_client(url) as client:
        return client.chat.completions.create(**asks(n=2, **IDS))


@case("openai", "stream n=2", "chat_n2_stream", ids(DRY, WET))
def several_streamed(url: str) -> Any:
    with sync_client(url) as client:
        return list(client.chat.completions.create(**asks(n=2, stream=True, **IDS)))


@case("openai", "stream", "chat_stream", ids(DRY))
@case("openai", "stream, reasoning", "thoughts_stream", ids(THOUGHT))
@case("openai", "stream cut by the server", "stream_cut", partial(101, 102, error="RemoteProtocolError"))
@case("openai", "stream without finish reason", "stream_unfinished", partial(101, 102))
@case(
    "openai",
    "stream with an error in it",
    "stream_error",
    partial(101, 102, error="InternalServerError"),
)
@case("openai", "stream with broken JSON", "stream_not_json", partial())
def stream(url: str) -> Any:
    with sync_client(url) as client:
        return list(client.chat.completions.create(**asks(stream=True, **IDS)))


@case("openai", "stream, nothing asked for", "chat_plain_stream", text())
@case("openai", "stream", "gateway_stream", exact(DRY), through_gateway=True)
def stream_plain(url: str) -> Any:
    with sync_client(url) as client:
        return list(client.chat.completions.create(**asks(stream=True)))


@case("openai", "async stream", "chat_stream", ids(DRY))
async def async_stream(url: str) -> Any:
    async with async_client(url) as client:
        chunks = await client.chat.completions.create(**asks(stream=True, **IDS))
        return [chunk async for chunk in chunks]


@case("openai", ".stream() helper", "chat_stream", ids(DRY))
def stream_helper(url: str) -> Any:
    with sync_client(url) as client, client.chat.completions.stream(**asks(**IDS)) as events:
        kinds = [event.type for event in events]
        return kinds, events.get_final_completion()


@case("openai", "async .stream() helper", "chat_stream", ids(DRY))
async def async_stream_helper(url: str) -> Any:
    async with async_client(url) as client, client.chat.completions.stream(**asks(**IDS)) as events:
        kinds = [event.type async for event in events]
        return kinds, await events.get_final_completion()


@case("openai", "parse", "structured", ids(JSON_IDS))
def parse(url: str) -> Any:
    with sync_client(url) as client:
        return client.chat.completions.parse(**asks(response_format=Forecast, **IDS))


@case("openai", "async parse", "structured", ids(JSON_IDS))
async def async_parse(url: str) -> Any:
    async with async_client(url) as client:
        return await client.chat.completions.parse(**asks(response_format=Forecast, **IDS))


@case("openai", ".stream() helper, structured", "structured_stream", ids(JSON_IDS))
def stream_structured(url: str) -> Any:
    with (
        sync_client(url) as client,
        client.chat.completions.stream(**asks(response_format=Forecast, **IDS)) as events,
    ):
        return events.get_final_completion()


@case("openai", "with_raw_response", "chat", ids(DRY))
def raw_response(url: str) -> Any:
    with sync_client(url) as client:
        raw = client.chat.completions.with_raw_response.create(**asks(**IDS))
        return raw.status_code, raw.headers["content-type"], raw.text, raw.parse()


@case("openai", "async with_raw_response", "chat", ids(DRY))
async def async_raw_response(url: str) -> Any:
    async with async_client(url) as client:
        raw = await client.chat.completions.with_raw_response.create(**asks(**IDS))
        return raw.status_code, raw.headers["content-type"], raw.text, raw.parse()


@case("openai", "with_raw_response, stream", "chat_stream", ids(DRY))
def raw_stream(url: str) -> Any:
    with sync_client(url) as client:
        raw = client.chat.completions.with_raw_response.create(**asks(stream=True, **IDS))
        return raw.status_code, list(raw.parse())


@case("openai", "with_streaming_response", "chat", ids(DRY))
def streaming_response(url: str) -> Any:
    with (
        sync_client(url) as client,
        client.chat.completions.with_streaming_response.create(**asks(**IDS)) as raw,
    ):
        return raw.status_code, raw.parse()


@case("openai", "with_streaming_response, lines", "chat_stream", ids(DRY))
def streaming_response_lines(url: str) -> Any:
    with (
        sync_client(url) as client,
        client.chat.completions.with_streaming_response.create(**asks(stream=True, **IDS)) as raw,
    ):
        return list(raw.iter_lines())


@case("openai", "async with_streaming_response", "chat", ids(DRY))
async def async_streaming_response(url: str) -> Any:
    async with (
        async_client(url) as client,
        client.chat.completions.with_streaming_response.create(**asks(**IDS)) as raw,
    ):
        return raw.status_code, await raw.parse()


@case("openai", "tools", "tools", ids(ONE_TOOL, finish="tool_calls"), ids(DRY))
def tools(url: str) -> Any:
    with sync_client(url) as client:
        first = client.chat.completions.create(**asks(tools=[TOOL], **IDS))
        return first, client.chat.completions.create(**after_tools(first.choices[0].message))


@case("openai", "async tools", "tools", ids(ONE_TOOL, finish="tool_calls"), ids(DRY))
async def async_tools(url: str) -> Any:
    async with async_client(url) as client:
        first = await client.chat.completions.create(**asks(tools=[TOOL], **IDS))
        return first, await client.chat.completions.create(**after_tools(first.choices[0].message))


@case("openai", "stream, parallel tools", "tools_stream", ids(TWO_TOOLS, finish="tool_calls"), ids(DRY))
def streamed_tools(url: str) -> Any:
    with (
        sync_client(url) as client,
        client.chat.completions.stream(**asks(tools=[STRICT_TOOL], **IDS)) as events,
    ):
        message = events.get_final_completion().choices[0].message
        return message, list(client.chat.completions.create(**after_tools(message, stream=True)))


def after_tools(message: Any, **more: Any) -> Any:
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "dry in there"} for call in message.tool_calls
    ]
    asked = asks(tools=[TOOL], **IDS, **more)
    asked["messages"] += [message.to_dict(exclude_none=False, mode="json"), *results]
    asked["messages"][1] = {key: asked["messages"][1][key] for key in ("role", "content", "tool_calls")}
    return asked


@case("openai", "retries 429, 429, 200", "retries", failed("429"), failed("429"), ids(DRY))
def retries(url: str) -> Any:
    with sync_client(url, max_retries=2) as client:
        return client.chat.completions.create(**asks(**IDS))


@case("openai", "retry 429, 200", "gateway_retry", failed("429", spans=2), exact(DRY), through_gateway=True)
def retry_plain(url: str) -> Any:
    with sync_client(url, max_retries=2) as client:
        return client.chat.completions.create(**asks())


@case("openai", "async retries 429, 429, 200", "retries", failed("429"), failed("429"), ids(DRY))
async def async_retries(url: str) -> Any:
    async with async_client(url, max_retries=2) as client:
        return await client.chat.completions.create(**asks(**IDS))


@case("openai", "time-out", "slow", failed("ReadTimeout"))
def timeout(url: str) -> Any:
    with sync_client(url, timeout=openai.Timeout(30, read=0.3)) as client:
        return client.chat.completions.create(**asks(**IDS))


@case("openai", "async cancelled", "slow", failed("CancelledError"))
async def cancelled(url: str) -> Any:
    async with async_client(url) as client:
        call = asyncio.create_task(client.chat.completions.create(**asks(**IDS)))
        while not await asyncio.to_thread(_was_heard, url):
            await asyncio.sleep(0.01)
        call.cancel()
        await call


def _was_heard(url: str) -> bool:
    with urllib.request.urlopen(f"{url}/seen") as response:
        return bool(int(response.read()))


@case("openai", "stream left by break", "stream_held", partial(101, 102))
def stream_left(url: str) -> Any:
    seen: list[Any] = []
    with sync_client(url) as client, client.chat.completions.create(**asks(stream=True, **IDS)) as chunks:
        for chunk in chunks:
            seen.append(chunk)
            if len(seen) == 3:
                break
    return seen


@case("openai", "stream left by close()", "stream_held", partial(101, 102))
def stream_closed(url: str) -> Any:
    return _left(url, "close")


@case("openai", "stream left by del", "stream_held", partial(101, 102))
def stream_dropped(url: str) -> Any:
    return _left(url, "del")


def _left(url: str, how: Literal["close", "del"]) -> list[Any]:
    with sync_client(url) as client:
        chunks: Any = client.chat.completions.create(**asks(stream=True, **IDS))
        seen = [next(chunks) for _ in range(3)]
        if how == "close":
            chunks.close()
        else:
            del chunks
        return seen


@case("openai", "async stream left by break", "stream_held", partial(101, 102))
async def async_stream_left(url: str) -> Any:
    async with async_client(url) as client:
        seen: list[Any] = []
        async with await client.chat.completions.create(**asks(stream=True, **IDS)) as chunks:
            async for chunk in chunks:
                seen.append(chunk)
                if len(seen) == 3:
                    break
        return seen


@case("openai", "async stream cancelled", "stream_held", partial(101, 102, error="CancelledError"))
async def async_stream_cancelled(url: str) -> Any:
    seen: list[Any] = []
    enough = asyncio.Event()

    async def read(client: openai.AsyncOpenAI) -> None:
        async for chunk in await client.chat.completions.create(**asks(stream=True, **IDS)):
            seen.append(chunk)
            if len(seen) == 3:
                enough.set()

    async with async_client(url) as client:
        reading = asyncio.create_task(read(client))
        await enough.wait()
        await asyncio.sleep(0)
        reading.cancel()
        results = await asyncio.gather(reading, return_exceptions=True)
    return seen, results


@case("openai", "completions", "completion", ids(DRY))
def legacy(url: str) -> Any:
    with sync_client(url) as client:
        return client.completions.create(
            model="policy", prompt="The weather:", logprobs=1, extra_body={"return_token_ids": True}
        )


@case("openai", "completions, stream", "completion_stream", ids(DRY))
def legacy_streamed(url: str) -> Any:
    with sync_client(url) as client:
        chunks = client.completions.create(
            model="policy",
            prompt="The weather:",
            logprobs=1,
            stream=True,
            extra_body={"return_token_ids": True},
        )
        return list(chunks)


@case("openai", "responses", "response", text())
def responses(url: str) -> Any:
    with sync_client(url) as client:
        return client.responses.create(model="policy", input="The weather in Oslo?", instructions="Be brief.")


@case("openai", "async responses", "response", text())
async def async_responses(url: str) -> Any:
    async with async_client(url) as client:
        return await client.responses.create(model="policy", input="The weather in Oslo?")


@case("openai", "responses, stream", "response_stream", text())
@case(
    "openai",
    "responses, stream cut",
    "response_cut",
    Want("unusable", (), ("in_progress",), is_complete=False, error="RemoteProtocolError"),
)
def responses_streamed(url: str) -> Any:
    with sync_client(url) as client:
        return list(client.responses.create(model="policy", input="The weather in Oslo?", stream=True))


@case("openai", "responses, tools", "response_tools", text())
def responses_tools(url: str) -> Any:
    with sync_client(url) as client:
        return client.responses.create(model="policy", input="The weather?", tools=[_response_tool()])


@case("openai", "responses, stream tools", "response_tools_stream", text())
async def responses_tools_streamed(url: str) -> Any:
    async with async_client(url) as client:
        events = await client.responses.create(
            model="policy", input="The weather?", tools=[_response_tool()], stream=True
        )
        return [event async for event in events]


def _response_tool() -> Any:
    return {"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": True}


@case("openai", "embeddings", "embeddings_base64", EMBEDDED)
def embeddings(url: str) -> Any:
    with sync_client(url) as client:
        return client.embeddings.create(model="embedder", input=["Oslo", "Bergen"])
