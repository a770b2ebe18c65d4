"""`cases/capture.md`, Breaking the client: types, headers, helpers and errors are the ones without us."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import litellm
import openai
import pytest
from langchain_openai import ChatOpenAI
from litellm.llms.custom_httpx.async_client_cleanup import close_litellm_async_clients
from pydantic import BaseModel, SecretStr

import spangrad
from spangrad.tracer import conventions as c
from tests.tracer.canned import serving, whole
from tests.tracer.recording import Recorded, calls
from tests.tracer.stub_server import ModelServer

Finish = Callable[[], list[Recorded]]
ASK: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "Hello"}]}
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*:UserWarning:pydantic.*",
    "ignore:.*:DeprecationWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",  # sockets that LangChain and LiteLLM leave
)


def typed(value: Any) -> Any:
    """A value with the class of everything in it."""
    if isinstance(value, BaseModel):
        return type(value), {name: typed(getattr(value, name)) for name in type(value).model_fields}
    if isinstance(value, dict):
        return type(value), {name: typed(part) for name, part in value.items() if not name.endswith("date")}
    if isinstance(value, list | tuple):
        return type(value), [typed(part) for part in value]
    return type(value), value


def headers(found: Any) -> dict[str, str]:
    return {name: value for name, value in found.items() if not name.endswith("date")}


opened_clients: list[openai.OpenAI] = []


@pytest.fixture(autouse=True)
def clients_are_closed() -> Iterator[None]:
    yield
    while opened_clients:
        opened_clients.pop().close()


def sdk(url: str) -> openai.OpenAI:
    opened_clients.append(openai.OpenAI(base_url=url, api_key="k", max_retries=0))
    return opened_clients[-1]


def plain(url: str) -> Any:
    return typed(sdk(url).chat.completions.create(**ASK))


def streamed(url: str) -> Any:
    opened = sdk(url).chat.completions.create(**ASK, stream=True)
    return type(opened), headers(opened.response.headers), [typed(chunk) for chunk in opened]


def raw(url: str) -> Any:
    found = sdk(url).chat.completions.with_raw_response.create(**ASK)
    request = found.http_request
    assert request.headers["content-type"] == "application/json"
    return (
        type(found),
        type(found.http_response),
        (found.status_code, found.method, found.is_closed, found.retries_taken, found.request_id),
        headers(found.headers),
        typed(found.parse()),
        found.text,
        found.content,
    )


def raw_stream(url: str) -> Any:
    found = sdk(url).chat.completions.with_raw_response.create(**ASK, stream=True)
    opened: Any = found.parse()
    return type(found), type(opened), headers(found.headers), [typed(chunk) for chunk in opened]


def streaming_response(url: str) -> Any:
    with sdk(url).chat.completions.with_streaming_response.create(**ASK) as found:
        kind, told = type(found), headers(found.headers)
        return kind, told, b"".join(found.iter_bytes())


def streaming_response_lines(url: str) -> Any:
    with sdk(url).chat.completions.with_streaming_response.create(**ASK, stream=True) as found:
        return type(found), list(found.iter_lines())


def stream_helper(url: str) -> Any:
    with sdk(url).chat.completions.stream(**ASK) as events:
        return [event.type for event in events], typed(events.get_final_completion())


def iterated_in_steps(url: str) -> Any:
    opened = sdk(url).chat.completions.create(**ASK, stream=True)
    first = next(opened)
    rest = list(opened)
    return typed(first), len(rest), opened.response.is_closed, list(opened)


def asynchronous(url: str) -> Any:
    async def run() -> Any:
        async with openai.AsyncOpenAI(base_url=url, api_key="k", max_retries=0) as client:
            one = await client.chat.completions.create(**ASK)
            found = await client.chat.completions.with_raw_response.create(**ASK)
            opened = await client.chat.completions.create(**ASK, stream=True)
            chunks = [typed(chunk) async for chunk in opened]
            async with client.chat.completions.with_streaming_response.create(**ASK) as response:
                text = await response.text()
            return typed(one), type(found), typed(found.parse()), headers(found.headers), chunks, text

    return asyncio.run(run())


def langchain(url: str) -> Any:
    chat = ChatOpenAI(base_url=url, api_key=SecretStr("k"), model="policy", max_retries=0)
    with_headers = ChatOpenAI(
        base_url=url, api_key=SecretStr("k"), model="policy", max_retries=0, include_response_headers=True
    )
    told = with_headers.invoke("Hello").response_metadata
    parts = [(type(part), part.text) for part in chat.stream("Hello")]
    answer = chat.invoke("Hello")
    return type(answer), answer.text, answer.response_metadata, headers(told["headers"]), parts


def through_litellm(url: str) -> Any:
    """LiteLLM asks the SDK for raw responses, and reads their headers and `.parse()`."""
    settings: dict[str, Any] = {**ASK, "model": "openai/policy", "api_base": url, "api_key": "k"}
    answer = litellm.completion(**settings)
    parts: Any = litellm.completion(**settings, stream=True)
    seen = [(type(part), part.choices[0].delta.content) for part in parts]

    async def run() -> Any:
        found: Any = await litellm.acompletion(**settings)
        chunks: Any = await litellm.acompletion(**settings, stream=True)
        texts = [part.choices[0].delta.content async for part in chunks]
        await close_litellm_async_clients()
        return type(found), found.choices[0].message.content, type(chunks), texts

    hidden = answer._hidden_params["additional_headers"]
    return (
        type(answer),
        answer.choices[0].message.content,
        headers(hidden),
        type(parts),
        seen,
        asyncio.run(run()),
    )


def bare_httpx(url: str) -> Any:
    with httpx.Client() as client:
        found = client.post(f"{url}/chat/completions", json=ASK)
        with client.stream("POST", f"{url}/chat/completions", json=ASK | {"stream": True}) as response:
            state = response.is_stream_consumed, response.num_bytes_downloaded
            pieces = list(response.iter_raw())
    return type(found), headers(found.headers), found.json(), found.extensions.keys(), state, pieces


WAYS: list[Callable[[str], Any]] = [
    plain,
    streamed,
    raw,
    raw_stream,
    streaming_response,
    streaming_response_lines,
    stream_helper,
    iterated_in_steps,
    asynchronous,
    langchain,
    through_litellm,
    bare_httpx,
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_client_gets_what_it_gets_without_us(
    model: ModelServer, recorded: Finish, way: Callable[[str], Any]
) -> None:
    with_us = way(model.url)
    seen = [sorted(seen.headers) for seen in model.seen]
    found = calls(recorded())
    assert len(found) == len(model.seen)
    assert all(c.OUTPUT_MESSAGES in call.attributes for call in found)
    assert all("traceparent" in names for names in seen)
    model.seen.clear()
    assert way(model.url) == with_us
    ours = {"traceparent"}
    assert [sorted(set(names) - ours) for names in seen] == [sorted(seen.headers) for seen in model.seen]


def failing(url: str, kind: str) -> BaseException:
    with pytest.raises(Exception) as caught:
        if kind == "litellm":
            litellm.completion(model="openai/policy", api_base=url, api_key="k", messages=ASK["messages"])
        elif kind == "raw":
            sdk(url).chat.completions.with_raw_response.create(**ASK)
        else:
            sdk(url).chat.completions.create(**ASK, stream=kind == "stream")
    return caught.value


@pytest.mark.parametrize("status", [400, 401, 404, 429, 500])
@pytest.mark.parametrize("kind", ["plain", "stream", "raw", "litellm"])
def test_an_error_is_the_one_without_us(recorded: Finish, status: int, kind: str) -> None:
    answer = whole({"error": {"message": "no", "type": "some_error", "code": "c"}}, status)
    with serving(answer) as server:
        with_us = failing(f"{server.url}/v1", kind)
        found = calls(recorded())
        without = failing(f"{server.url}/v1", kind)
    assert (type(with_us), str(with_us)) == (type(without), str(without))
    assert type(with_us.__cause__) is type(without.__cause__)
    assert {call[c.ERROR_TYPE] for call in found} == {str(status)}


def test_sentinels_for_what_was_not_given_are_nowhere_in_a_span(model: ModelServer, recorded: Finish) -> None:
    client = sdk(model.url)
    for nothing in (openai.NOT_GIVEN, openai.omit):
        client.chat.completions.create(**ASK, temperature=nothing, tools=nothing, stop=nothing, user=nothing)  # type: ignore[arg-type]
        client.responses.create(model="policy", input="Hello", instructions=nothing, tools=nothing)  # type: ignore[arg-type]
    found = calls(recorded())
    assert len(found) == 4
    for call in found:
        text = repr(call.attributes)
        assert "NOT_GIVEN" not in text and "NotGiven" not in text and "omit" not in text.lower()
        assert c.REQUEST_TEMPERATURE not in call.attributes
        assert c.TOOL_DEFINITIONS not in call.attributes
        assert c.REQUEST_STOP not in call.attributes


def test_our_failure_to_record_reaches_no_client(
    model: ModelServer, recorded: Finish, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("ours")

    monkeypatch.setattr(spangrad.tracer.capture, "RawCall", broken)
    assert sdk(model.url).chat.completions.create(**ASK).choices[0].message.content == "You said Hello."
    assert calls(recorded()) == []
