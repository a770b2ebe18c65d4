"""The client must see the engine's reply as if there were no gateway."""

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from tests.gateway.gateway_setup import GatewayFactory, Setup, body
from tests.gateway.stub_engine import StubEngine
from tests.waiting import wait_until

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
EVERYTHING: dict[str, Any] = {"return_token_ids": True, "logprobs": True}
REQUESTS = [
    body("some words"),
    body("naïve café"),
    body("TOOL", tools=TOOLS),
    body("two of them", n=2),
    body("asks for ids", return_token_ids=True),
    body("asks for logprobs TOOL", logprobs=True, top_logprobs=0, tools=TOOLS),
    body("asks for all TOOL", tools=TOOLS, **EVERYTHING),
    body("usage", stream_options={"include_usage": True}),
    body("FAIL"),
]


def post(base: str, request: Any) -> httpx.Response:
    return httpx.post(f"{base}/v1/chat/completions", json=request)


@pytest.mark.parametrize("is_stream", [False, True])
def test_the_reply_is_byte_for_byte_the_one_without_a_gateway(gateway: Setup, is_stream: bool) -> None:
    for request in REQUESTS:
        request = {**request, "stream": is_stream}
        direct, through = post(gateway.engine.url, request), post(gateway.url, request)
        assert through.status_code == direct.status_code, request
        assert through.headers["content-type"] == direct.headers["content-type"], request
        assert through.content == direct.content, request


def test_a_request_that_asks_for_everything_reaches_the_engine_unchanged(gateway: Setup) -> None:
    request = body("a", **EVERYTHING, odd={"kept": [1, None]})
    post(gateway.url, request)
    assert gateway.engine.requests[-1] == request


def test_the_engine_gets_the_query_and_every_header_that_is_for_it(gateway: Setup) -> None:
    headers = [
        ("x-tag", "a"),
        ("x-tag", "b"),
        ("cookie", "c=1"),
        ("cookie", "d=2"),
        ("connection", "keep-alive, X-Hop"),
        ("x-hop", "for the gateway alone"),
    ]
    url = f"{gateway.url}/v1/chat/completions?beta=true&note=a%20%26b"
    httpx.post(url, json=body("a"), headers=headers).raise_for_status()
    httpx.post(f"{gateway.url}/v1/chat/completions", json=body("a")).raise_for_status()
    assert gateway.engine.queries == ["beta=true&note=a%20%26b", ""]
    sent = gateway.engine.headers[0]
    assert (sent["x-tag"], sent["cookie"]) == ("a, b", "c=1; d=2")
    assert "x-hop" not in sent


def test_a_body_that_is_no_json_gets_the_engines_own_answer(gateway: Setup) -> None:
    answer = httpx.post(f"{gateway.url}/v1/chat/completions", content=b"{not json")
    assert answer.status_code == 500  # the stub fails on it
    assert gateway.attributes()["error.type"] == "500"


def test_a_chunk_reaches_the_client_before_the_engine_has_made_the_next(gateway: Setup) -> None:
    with (
        openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="any") as sdk,
        sdk.chat.completions.create(
            model="stub", messages=[{"role": "user", "content": "first HOLD second"}], stream=True
        ) as stream,
    ):
        texts = (chunk.choices[0].delta.content for chunk in stream)
        while next(texts) != "first ":
            pass
        assert not gateway.engine.release.is_set()
        gateway.engine.release.set()
        assert list(texts) == ["HOLD ", "second ", None]


def test_many_calls_at_once_keep_their_own_replies_and_spans(gateway: Setup) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="any") as sdk:

            async def one(number: int) -> str:
                messages: Any = [{"role": "user", "content": f"call {number}"}]
                if number % 2:
                    reply = await sdk.chat.completions.create(model="stub", messages=messages)
                    return reply.choices[0].message.content or ""
                stream = await sdk.chat.completions.create(model="stub", messages=messages, stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*(one(number) for number in range(40)))

    assert asyncio.run(ask()) == [f"call {number} " for number in range(40)]
    outputs = [json.loads(str((span.attributes or {})["gen_ai.output.messages"])) for span in gateway.spans()]
    texts = [output[0]["parts"][0]["content"] for output in outputs]
    assert sorted(texts) == sorted(f"call {number} " for number in range(40))
    # 40 calls need an observation before and one after, but they share them
    assert gateway.engine.asked_versions < 40


def test_models_and_other_reads_are_passed_on(gateway: Setup) -> None:
    with openai.OpenAI(base_url=f"{gateway.url}/rollout/r-1/v1", api_key="any") as sdk:
        assert [model.id for model in sdk.models.list()] == ["stub"]
    assert httpx.get(f"{gateway.url}/health").status_code == 200
    assert gateway.spans() == []


def test_agents_cannot_reach_the_engines_control_plane(gateway: Setup) -> None:
    for method, path in (
        ("POST", "/pause"),
        ("POST", "/v1/load_lora_adapter"),
        ("POST", "/v1/audio/speech"),
        ("GET", "/weight_info"),
        ("GET", "/v1/%2e%2e/weight_info"),
    ):
        answer = httpx.request(method, f"{gateway.url}{path}")
        assert answer.status_code in (404, 405), path
        assert answer.json()["error"]["type"] == "not_found", path


@pytest.mark.parametrize("kind", [None, "application/x-www-form-urlencoded", "text/plain; charset=utf-8"])
def test_json_is_taken_whatever_the_client_calls_it(gateway: Setup, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    content = json.dumps(body("hello"))
    answer = httpx.post(f"{gateway.url}/v1/chat/completions", content=content, headers=headers)
    assert answer.status_code == 200
    assert gateway.engine.headers[-1]["content-type"] == "application/json"
    httpx.post(
        f"{gateway.url}/v1/chat/completions", json=body("b"), headers={"content-type": "Application/JSON"}
    )
    assert gateway.engine.headers[-1]["content-type"] == "Application/JSON"


def test_a_path_that_is_not_there_is_told_with_those_that_are(gateway: Setup) -> None:
    for method, path in (
        ("GET", "/v1/nosuch"),
        ("POST", "/v1/nosuch"),
        ("POST", "/nosuch"),
        ("GET", "/nosuch"),
    ):
        answer = httpx.request(method, f"{gateway.url}{path}")
        error = answer.json()["error"]
        assert (answer.status_code in (404, 405), error["type"]) == (True, "not_found"), path
        assert f"no {method} {path}" in error["message"]
        assert "POST /v1/chat/completions, " in error["message"] and "GET /v1/models" in error["message"]
    with (
        openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="any") as sdk,
        pytest.raises(openai.NotFoundError),
    ):
        sdk.models.retrieve("other")


def test_a_wrong_or_missing_key_is_refused(start_gateway: GatewayFactory) -> None:
    gateway = start_gateway(agent_key="agents", engine_key="engines")
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "agents"}):
        answer = httpx.post(f"{gateway.url}/v1/chat/completions", json=body("a"), headers=headers)
        assert answer.status_code == 401
        assert httpx.get(f"{gateway.url}/v1/models", headers=headers).status_code == 401
    with (
        openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="nope", max_retries=0) as sdk,
        pytest.raises(openai.AuthenticationError),
    ):
        sdk.models.list()
    assert gateway.engine.requests == []
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="agents") as sdk:
        sdk.chat.completions.create(model="stub", messages=[{"role": "user", "content": "a"}])
    assert gateway.engine.headers[0]["authorization"] == "Bearer engines"
    assert len(gateway.spans()) == 1


def test_the_agents_own_key_is_passed_on_where_no_key_is_configured(gateway: Setup) -> None:
    headers = {"authorization": "Bearer own"}
    httpx.post(f"{gateway.url}/v1/chat/completions", json=body("a"), headers=headers)
    assert gateway.engine.headers[0]["authorization"] == "Bearer own"


def test_the_reply_does_not_wait_for_what_is_asked_after_the_call(
    engine: StubEngine, start_gateway: GatewayFactory
) -> None:
    gateway = start_gateway(version_ttl_s=3600.0)
    post(gateway.url, body("a")).raise_for_status()
    gateway.flush()
    engine.tell_version.clear()
    post(gateway.url, body("b")).raise_for_status()
    wait_until(lambda: engine.asked_versions == 3)
    assert len(gateway.exporter.get_finished_spans()) == 1
    engine.tell_version.set()
    assert len(gateway.spans()) == 2
