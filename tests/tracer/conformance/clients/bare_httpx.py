"""No SDK: httpx, sync and async."""

from typing import Any

import httpx

from tests.tracer.conformance.case import DRY, case, ids, partial

BODY: Any = {
    "model": "policy",
    "messages": [{"role": "user", "content": "The weather in Oslo?"}],
    "logprobs": True,
    "return_token_ids": True,
}


@case("httpx", "post", "chat", ids(DRY))
@case("httpx", "post, gzip reply", "chat_gzip", ids(DRY))
def post(url: str) -> Any:
    return httpx.post(f"{url}/chat/completions", json=BODY).json()


@case("httpx", "async post", "chat", ids(DRY))
async def async_post(url: str) -> Any:
    async with httpx.AsyncClient() as client:
        return (await client.post(f"{url}/chat/completions", json=BODY)).json()


@case("httpx", "stream", "chat_stream", ids(DRY))
@case("httpx", "stream cut by the server", "stream_cut", partial(101, 102, error="RemoteProtocolError"))
def stream(url: str) -> Any:
    with httpx.stream("POST", f"{url}/chat/completions", json=BODY | {"stream": True}) as response:
        return list(response.iter_lines())


@case("httpx", "async stream", "chat_stream", ids(DRY))
async def async_stream(url: str) -> Any:
    async with (
        httpx.AsyncClient() as client,
        client.stream("POST", f"{url}/chat/completions", json=BODY | {"stream": True}) as response,
    ):
        return [line async for line in response.aiter_lines()]
