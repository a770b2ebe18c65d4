"""`cases/capture.md`, Streams: however a stream ends, it is recorded once and as what it was."""

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import litellm
import openai
import pytest
from langchain_openai import ChatOpenAI
from litellm.llms.custom_httpx.async_client_cleanup import close_litellm_async_clients
from pydantic import SecretStr

import spangrad
from spangrad.adapters import Grade, ModelCall, calls_of
from spangrad.store.file_store import FileStore
from spangrad.tracer import capture
from spangrad.tracer import conventions as c
from spangrad.tracer.gateway.reply import Reply
from tests.gateway.gateway_setup import body, dropped, gateway_before, ids
from tests.gateway.stub_engine import StubEngine, stub_engine, tokens_of
from tests.tracer.canned import Answer, chunk, serving, stream
from tests.tracer.recording import Recorded, calls, roots
from tests.tracer.stub_server import ModelServer
from tests.waiting import wait_until

Finish = Callable[[], list[Recorded]]
SETTINGS: dict[str, Any] = {"model": "policy", "stream": True}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


@pytest.fixture
def engine() -> Iterator[StubEngine]:
    with stub_engine() as engine:
        yield engine


@pytest.fixture
def model_calls(tmp_path: Path) -> Callable[[], list[ModelCall]]:
    """Records into a file store; call it to end recording and get the graded calls."""
    path = tmp_path / "store.duckdb"
    spangrad.init(store=path)

    def finish() -> list[ModelCall]:
        assert spangrad.shutdown()
        with FileStore(path) as store:
            return calls_of(store)

    return finish


# Left early


opened_clients: list[openai.OpenAI] = []


@pytest.fixture(autouse=True)
def clients_are_closed() -> Iterator[None]:
    yield
    while opened_clients:
        opened_clients.pop().close()


def sdk(url: str) -> openai.OpenAI:
    opened_clients.append(openai.OpenAI(base_url=url, api_key="k", max_retries=0))
    return opened_clients[-1]


def sync_stream(url: str) -> Any:
    return sdk(url).chat.completions.create(messages=user("GATED"), **SETTINGS)


def leave_by_break(url: str) -> None:
    for _ in sync_stream(url):
        break
    gc.collect()


def leave_by_exception(url: str) -> None:
    with pytest.raises(KeyError), sync_stream(url) as opened:
        next(opened)
        raise KeyError


def leave_stream_helper(url: str) -> None:
    with sdk(url).chat.completions.stream(model="policy", messages=user("GATED")) as events:
        next(iter(events))


def leave_streaming_response(url: str) -> None:
    with sdk(url).chat.completions.with_streaming_response.create(
        messages=user("GATED"), **SETTINGS
    ) as response:
        next(response.iter_bytes())


def leave_langchain_stream(url: str) -> None:
    chat = ChatOpenAI(base_url=url, api_key=SecretStr("k"), model="policy", max_retries=0)
    parts: Any = chat.stream("GATED")
    next(parts)
    parts.close()


def leave_litellm_stream(url: str) -> None:
    parts: Any = litellm.completion(
        model="openai/policy", api_base=url, api_key="k", messages=user("GATED"), stream=True
    )
    next(parts)
    del parts
    gc.collect()


def leave_httpx_stream(url: str) -> None:
    with (
        httpx.Client() as client,
        client.stream(
            "POST", f"{url}/chat/completions", json=SETTINGS | {"messages": user("GATED")}
        ) as response,
    ):
        next(response.iter_lines())


async def async_left(url: str, leave: str) -> None:
    async with openai.AsyncOpenAI(base_url=url, api_key="k", max_retries=0) as client:
        opened: Any = await client.chat.completions.create(messages=user("GATED"), **SETTINGS)
        if leave == "with":
            async with opened:
                await anext(opened)
        elif leave == "close":
            await anext(opened)
            await opened.close()
        elif leave == "break":
            async for _ in opened:
                break
        else:

            async def relay() -> AsyncIterator[Any]:
                async for part in opened:
                    yield part

            parts = relay()
            await anext(parts)
            await parts.aclose()  # type: ignore[attr-defined]


async def leave_langchain_astream(url: str) -> None:
    chat = ChatOpenAI(base_url=url, api_key=SecretStr("k"), model="policy", max_retries=0)
    parts: Any = chat.astream("GATED")
    await anext(parts)
    await parts.aclose()


async def leave_litellm_astream(url: str) -> None:
    parts: Any = await litellm.acompletion(
        model="openai/policy", api_base=url, api_key="k", messages=user("GATED"), stream=True
    )
    await anext(parts)
    del parts
    gc.collect()
    await close_litellm_async_clients()


WAYS: dict[str, Callable[[str], Any]] = {
    "break": leave_by_break,
    "exception in with": leave_by_exception,
    "stream helper": leave_stream_helper,
    "streaming response": leave_streaming_response,
    "langchain": leave_langchain_stream,
    "litellm": leave_litellm_stream,
    "httpx": leave_httpx_stream,
    "async with": partial(async_left, leave="with"),
    "async close": partial(async_left, leave="close"),
    "async break": partial(async_left, leave="break"),
    "async relay": partial(async_left, leave="relay"),
    "async langchain": leave_langchain_astream,
    "async litellm": leave_litellm_astream,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings(
    "ignore:.*:UserWarning:pydantic.*",
    "ignore:.*:DeprecationWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",  # sockets and loops that LangChain and LiteLLM leave
)
def test_a_stream_that_is_left_in_whatever_way_is_one_partial_call(
    model: ModelServer, recorded: Finish, way: str
) -> None:
    done = WAYS[way](model.url)
    if done is not None:
        asyncio.run(done)
    # It has ended, and not only when recording stops; a thread of LiteLLM's may hold it a moment longer.
    wait_until(lambda: gc.collect() >= 0 and not capture._open_calls)
    model.gate.set()
    (call,) = calls(recorded())
    assert call[c.STREAM_COMPLETE] is False
    assert call.json(c.OUTPUT_MESSAGES)[0]["parts"] in (
        [],
        [{"type": "text", "content": "You"}],
        [{"type": "text", "content": ""}],
    )


# Where the span ends


def test_a_stream_that_is_read_after_its_rollout_has_ended_is_whole_and_belongs_to_it(
    model: ModelServer, recorded: Finish
) -> None:
    @spangrad.rollout(rollout_id="r-1")
    def answer() -> Any:
        return sync_stream(model.url)

    opened = answer()
    model.gate.set()
    list(opened)
    spans = recorded()
    (call,) = calls(spans)
    assert call[c.STREAM_COMPLETE] is True
    assert call.json(c.OUTPUT_MESSAGES)[0]["parts"][0]["content"] == "You said GATED."
    assert call[c.ROLLOUT_ID] == "r-1"
    assert call.end_ns > roots(spans)[0].end_ns


def test_a_stream_whose_connection_breaks_is_a_failed_call_with_what_came(
    engine: StubEngine, recorded: Finish
) -> None:
    client = sdk(f"{engine.url}/v1")
    extra = {"return_token_ids": True}
    with pytest.raises(openai.APIConnectionError):
        list(client.chat.completions.create(messages=user("a b BREAK"), extra_body=extra, **SETTINGS))
    (call,) = calls(recorded())
    assert call.is_error
    assert call[c.ERROR_TYPE].endswith(".RemoteProtocolError")
    assert call[c.STREAM_COMPLETE] is False
    assert call.json(c.OUTPUT_MESSAGES)[0]["parts"] == [{"type": "text", "content": "a b "}]
    assert c.unpack_ints(call[c.SAMPLED_TOKEN_IDS]) == [t.id for t in tokens_of("a b", tools=False)[:2]]


# Token ids


@pytest.mark.parametrize("through", ["client", "gateway"])
def test_a_streamed_tool_call_keeps_the_ids_of_its_control_tokens(
    engine: StubEngine, recorded: Finish, through: str
) -> None:
    tokens = tokens_of("TOOL", tools=True)
    assert tokens[0].delta == tokens[-1].delta == {}  # neither has visible text
    if through == "client":
        client = sdk(f"{engine.url}/v1")
        extra = {"return_token_ids": True}
        list(client.chat.completions.create(messages=user("TOOL"), tools=TOOLS, extra_body=extra, **SETTINGS))
        (call,) = calls(recorded())
        assert c.unpack_ints(call[c.SAMPLED_TOKEN_IDS]) == [token.id for token in tokens]
    else:
        spangrad.shutdown()  # the gateway is in this process
        with gateway_before(engine) as gateway:
            httpx.post(f"{gateway.url}/v1/chat/completions", json=body("TOOL", stream=True, tools=TOOLS))
            assert ids(gateway.attributes()) == [token.id for token in tokens]


REASONED = (
    chunk({"role": "assistant", "content": ""}),
    chunk({"reasoning": "hm"}, token_ids=[1]),
    chunk({"reasoning_content": None, "reasoning": ", yes"}, token_ids=[2]),
    chunk({}, token_ids=[3]),  # the end-of-thinking token
    chunk({"content": "Hi"}, token_ids=[4]),
    chunk(finish="stop", token_ids=[5]),
)


@pytest.mark.parametrize("through", ["client", "gateway"])
def test_reasoning_and_its_ids_are_no_empty_chunks(recorded: Finish, through: str) -> None:
    with serving(stream(*REASONED)) as server:
        if through == "client":
            httpx.post(f"{server.url}/v1/chat/completions", json=body("x", stream=True))
            (call,) = calls(recorded())
            message, sampled = call.json(c.OUTPUT_MESSAGES)[0], c.unpack_ints(call[c.SAMPLED_TOKEN_IDS])
        else:
            spangrad.shutdown()  # the gateway is in this process
            with gateway_before(StubEngine(server.url)) as gateway:
                httpx.post(f"{gateway.url}/v1/chat/completions", json=body("x", stream=True))
                attributes = gateway.attributes()
            message, sampled = json.loads(attributes[c.OUTPUT_MESSAGES])[0], ids(attributes)
    assert sampled == [1, 2, 3, 4, 5]
    assert message["parts"] == [
        {"type": "reasoning", "content": "hm, yes"},
        {"type": "text", "content": "Hi"},
    ]


def test_ids_that_a_proxy_has_lost_on_the_way_are_left_out_and_named(recorded: Finish) -> None:
    """A LiteLLM proxy moves ids to `provider_specific_fields` and loses those of the last chunk."""
    chunks = (
        chunk({"content": "a"}, provider_specific_fields={"token_ids": [1]}, logprobs=logprob(-0.5)),
        chunk({"content": "b"}, provider_specific_fields={"token_ids": [2]}, logprobs=logprob(-1.0)),
        chunk(finish="stop", logprobs=logprob(-2.0)),
        {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4}},
    )
    with serving(stream(*chunks)) as server:
        httpx.post(f"{server.url}/v1/chat/completions", json=body("x", stream=True))
    (call,) = calls(recorded())
    assert c.SAMPLED_TOKEN_IDS not in call.attributes
    assert "token" in "".join(call.json(c.DROPPED))
    assert call.json(c.OUTPUT_MESSAGES)[0]["parts"] == [{"type": "text", "content": "ab"}]


def logprob(value: float) -> dict[str, Any]:
    return {"content": [{"token": "t", "logprob": value, "bytes": None, "top_logprobs": []}]}


def test_the_gateway_leaves_out_ids_with_a_hole_and_names_them() -> None:
    chunks = (
        chunk({"content": "a"}, token_ids=[1], logprobs=logprob(-0.5)),
        chunk(finish="stop", logprobs=logprob(-1)),
    )
    with serving(stream(*chunks)) as server, gateway_before(StubEngine(server.url)) as gateway:
        httpx.post(f"{gateway.url}/v1/chat/completions", json=body("x", stream=True))
        attributes = gateway.attributes()
    assert c.SAMPLED_TOKEN_IDS not in attributes
    assert dropped(attributes)


def test_the_chunks_of_a_gateways_reply_add_up_to_the_whole_reply() -> None:
    reply = Reply()
    for part in REASONED:
        reply.add(part)
    assert reply.choices[0].message == {"role": "assistant", "reasoning": "hm, yes", "content": "Hi"}
    assert reply.choices[0].token_ids == [1, 2, 3, 4, 5]


# Partial text


UNFINISHED = (chunk({"content": "so f"}, token_ids=[1]), chunk({"content": "ar"}, token_ids=[2]))


@pytest.mark.parametrize(
    "answer",
    [
        stream(*UNFINISHED),
        stream(*UNFINISHED, done=False),
        stream(*UNFINISHED, done=False, is_cut=True),
        stream(*UNFINISHED, {"error": {"message": "died", "type": "InternalServerError"}}),
    ],
    ids=["DONE without a finish reason", "no DONE", "connection cut", "error event"],
)
def test_a_stream_without_a_finish_reason_is_never_trained(
    model_calls: Callable[[], list[ModelCall]], answer: Answer
) -> None:
    with serving(answer) as server, httpx.Client() as client:
        try:
            client.post(f"{server.url}/v1/chat/completions", json=body("x", stream=True))
        except httpx.RemoteProtocolError:
            assert answer.is_cut
    (call,) = model_calls()
    assert call.grade is Grade.UNUSABLE
    assert call.choices[0].message["content"] == "so far"
