"""LiteLLM's routes, router and fallbacks: each HTTP call once, with what it was about."""

import asyncio
import importlib.util
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import litellm
import openai
import pytest
from litellm.llms.custom_httpx.async_client_cleanup import close_litellm_async_clients
from litellm.router import Router

from spangrad.tracer import conventions as c
from tests.tracer.recording import Recorded, calls
from tests.tracer.scripted_server import Answer, ScriptedServer, scripted_server
from tests.tracer.stub_server import ARGUMENTS, MESSAGE, MESSAGE_EVENTS, RESPONSE, RESPONSE_EVENTS
from tests.tracer.wire.exchange import choice, completion, sse

Finish = Callable[[], list[Recorded]]
ANTHROPIC: Any = vars(litellm)["anthropic"]
HI: list[Any] = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"
BROKEN = Answer({"error": {"message": "the engine died", "type": "server_error"}}, 500)
CALL = {"id": "t", "type": "function", "function": {"name": "f", "arguments": ARGUMENTS}}
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*:UserWarning:pydantic.*", "ignore:.*:DeprecationWarning"),
    # LiteLLM drops a logging task when it finds itself in another loop, as its sync `responses` makes it.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.usefixtures("litellm_loop"),
]


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as running:
        yield running


@pytest.fixture
def whole_litellm(monkeypatch: pytest.MonkeyPatch) -> None:
    """On these paths LiteLLM 1.110 imports `soundfile`, which only its transcriptions need."""
    if importlib.util.find_spec("soundfile") is None:
        monkeypatch.setitem(sys.modules, "soundfile", ModuleType("soundfile"))


def reply(text: str = "Hello.") -> Answer:
    usage = {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}
    return Answer(completion(choice(text), object="chat.completion", created=1, usage=usage))


def stream(*deltas: dict[str, Any], finish: str = "stop") -> Answer:
    head = {"id": "r-1", "object": "chat.completion.chunk", "created": 1, "model": "policy"}
    pieces: list[dict[str, Any]] = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    pieces.append({"index": 0, "delta": {}, "finish_reason": finish})
    return Answer(sse(*(head | {"choices": [piece]} for piece in pieces)) + b"data: [DONE]\n\n")


def deployment(server: ScriptedServer, name: str, path: str = "/v1") -> dict[str, Any]:
    params = {"model": f"openai/{name}", "api_base": server.url + path, "api_key": "k", "max_retries": 0}
    return {"model_name": name, "litellm_params": params}


def text_of(call: Recorded) -> str:
    return str(call.json(c.OUTPUT_MESSAGES)[0]["parts"][0]["content"])


async def closing(request: Any) -> None:
    await request
    await close_litellm_async_clients()


def test_a_fallback_is_two_calls_of_which_one_failed(server: ScriptedServer, recorded: Finish) -> None:
    server.answer("/bad/chat/completions", BROKEN)
    server.answer(CHAT, reply())
    router = Router(
        model_list=[deployment(server, "first", "/bad"), deployment(server, "second")],
        fallbacks=[{"first": ["second"]}],
        num_retries=0,
    )
    assert router.completion("first", HI).choices[0].message.content == "Hello."
    failed, answered = calls(recorded())
    assert (failed[c.REQUEST_MODEL], failed.is_error, failed[c.ERROR_TYPE]) == ("first", True, "500")
    assert (answered[c.REQUEST_MODEL], answered.is_error, text_of(answered)) == ("second", False, "Hello.")


def test_fallbacks_of_the_function_are_two_calls_too(server: ScriptedServer, recorded: Finish) -> None:
    server.answer(CHAT, BROKEN, reply())
    litellm.completion(
        "openai/first",
        HI,
        api_base=server.url + "/v1",
        api_key="k",
        max_retries=0,
        num_retries=0,
        fallbacks=["openai/second"],
    )
    failed, answered = calls(recorded())
    assert [failed.is_error, answered.is_error] == [True, False]
    assert answered[c.REQUEST_MODEL] == "second"


def test_an_async_routed_stream_with_a_tool_call_is_one_call(
    server: ScriptedServer, recorded: Finish, litellm_loop: asyncio.Runner
) -> None:
    head = CALL | {"index": 0, "function": {"name": "f", "arguments": ARGUMENTS[:7]}}
    rest = {"index": 0, "function": {"arguments": ARGUMENTS[7:]}}
    server.answer(
        CHAT, stream({"role": "assistant", "tool_calls": [head]}, {"tool_calls": [rest]}, finish="tool_calls")
    )
    router = Router(model_list=[deployment(server, "policy")], num_retries=0)

    async def ask() -> None:
        chunks: Any = await router.acompletion("policy", HI, stream=True)
        async for _ in chunks:
            pass

    litellm_loop.run(closing(ask()))
    (call,) = calls(recorded())
    assert call[c.STREAM_COMPLETE] is True
    assert call.json(c.OUTPUT_MESSAGES)[0]["parts"] == [
        {"type": "tool_call", "id": "t", "name": "f", "arguments": ARGUMENTS}
    ]


@pytest.mark.parametrize("is_stream", [False, True])
def test_the_responses_route_is_one_call(server: ScriptedServer, recorded: Finish, is_stream: bool) -> None:
    server.answer("/v1/responses", Answer(sse(*RESPONSE_EVENTS) if is_stream else RESPONSE))
    result: Any = litellm.responses(
        "Hi", "openai/policy", api_base=server.url + "/v1", api_key="k", stream=is_stream
    )
    if is_stream:
        list(result)
    (call,) = calls(recorded())
    assert call[c.REQUEST_MODEL] == "policy"
    assert call.json(c.INPUT_MESSAGES) == [{"role": "user", "parts": [{"type": "text", "content": "Hi"}]}]
    assert call.json(c.OUTPUT_MESSAGES)[0]["parts"][1]["arguments"] == ARGUMENTS


@pytest.mark.usefixtures("whole_litellm")
@pytest.mark.parametrize("form", ["messages", "chat", "chat streamed"])
def test_anthropics_route_is_one_call(
    server: ScriptedServer, recorded: Finish, litellm_loop: asyncio.Runner, form: str
) -> None:
    is_stream = form == "chat streamed"
    server.answer("/v1/messages", Answer(sse(*MESSAGE_EVENTS) if is_stream else MESSAGE))
    common = {"model": "anthropic/policy", "api_base": server.url, "api_key": "k", "max_tokens": 9}
    if form == "messages":
        litellm_loop.run(closing(ANTHROPIC.messages.acreate(messages=HI, **common)))
    else:
        result: Any = litellm.completion(messages=HI, num_retries=0, stream=is_stream, **common)
        if is_stream:
            list(result)
    (call,) = calls(recorded())
    assert (call[c.PROVIDER_NAME], call[c.REQUEST_MODEL]) == ("anthropic", "policy")
    kinds = [part["type"] for part in call.json(c.OUTPUT_MESSAGES)[0]["parts"]]
    assert kinds == ["reasoning", "text", "tool_call"]


@pytest.mark.usefixtures("whole_litellm")
def test_a_reply_out_of_litellms_own_cache_is_no_call(server: ScriptedServer, recorded: Finish) -> None:
    server.answer(CHAT, reply())
    before = litellm.cache
    litellm.enable_cache(type="local")
    try:
        for _ in range(2):
            litellm.completion(
                "openai/policy", HI, api_base=server.url + "/v1", api_key="k", caching=True, max_retries=0
            )
    finally:
        litellm.disable_cache()
        litellm.cache = before
    assert len(calls(recorded())) == len(server.asked) == 1


def test_a_reply_out_of_a_gateways_cache_is_marked(server: ScriptedServer, recorded: Finish) -> None:
    whole = reply().body
    server.answer(CHAT, Answer(whole), Answer(whole, headers={"x-litellm-cache-key": "9f86"}))
    with openai.OpenAI(base_url=server.url + "/v1", api_key="k") as agent:
        for _ in range(2):
            agent.chat.completions.create(model="policy", messages=HI)
    sampled, served = calls(recorded())
    assert (sampled.get(c.CACHED), served[c.CACHED]) == (None, True)


def test_embeddings_are_recorded_as_such(server: ScriptedServer, recorded: Finish) -> None:
    vector = {"object": "embedding", "index": 0, "embedding": [0.5, 0.25]}
    usage = {"prompt_tokens": 2, "total_tokens": 2}
    server.answer(
        "/v1/embeddings", Answer({"object": "list", "data": [vector], "model": "e", "usage": usage})
    )
    with openai.OpenAI(base_url=server.url + "/v1", api_key="k") as agent:
        agent.embeddings.create(model="e", input="one", encoding_format="float")
    litellm.embedding("openai/e", ["one"], api_base=server.url + "/v1", api_key="k")
    found = calls(recorded())
    assert len(found) == 2
    for call in found:
        assert (call[c.OPERATION_NAME], call[c.PURPOSE]) == ("embeddings", "embedding")
        assert call.prompt() == "one"
        assert call[c.EMBEDDING_DIMENSIONS] == 2
