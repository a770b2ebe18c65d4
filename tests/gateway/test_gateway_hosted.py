"""Hosted models through LiteLLM: a teacher's calls are recorded as frozen, its failures are its own."""

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, cast

import anthropic
import httpx
import openai
import pytest
from litellm.llms.custom_httpx.async_client_cleanup import close_litellm_async_clients

from spangrad.errors import ConfigError
from spangrad.tracer import conventions as names
from spangrad.tracer.gateway import GatewayConfig, create_app
from tests.gateway.gateway_setup import Setup, body, gateway_before, ids
from tests.gateway.stub_engine import StubEngine, stub_engine, tokens_of
from tests.waiting import wait_until

pytestmark = pytest.mark.filterwarnings(  # LiteLLM's own
    "ignore::DeprecationWarning", "ignore::UserWarning", "ignore::ResourceWarning"
)


@pytest.fixture(scope="module")
def running_provider() -> Iterator[StubEngine]:
    with stub_engine() as running:
        yield running
    asyncio.run(close_litellm_async_clients())


@pytest.fixture
def provider(running_provider: StubEngine) -> StubEngine:
    running_provider.reset()
    return running_provider


def hosted(provider: StubEngine, **settings: Any) -> dict[str, Any]:
    api = {"api_base": f"{provider.url}/v1", "api_key": "sk-of-the-teacher"}
    return {"teacher": {"model": "openai/teacher-large", **api, **settings}}


@contextmanager
def gateway_with_teacher(engine: StubEngine, provider: StubEngine, **settings: Any) -> Iterator[Setup]:
    with gateway_before(engine, hosted=hosted(provider), **settings) as gateway:
        yield gateway
        provider.release.set()


def ask(gateway: Setup, text: str = "a b", **more: Any) -> httpx.Response:
    request = body(text, **{"model": "teacher", **more})
    return httpx.post(f"{gateway.url}/v1/chat/completions", json=request, timeout=60)


def text_of(text: str) -> str:
    return "".join(token.delta.get("content", "") for token in tokens_of(text, tools=False))


def test_a_teachers_call_is_recorded_as_frozen_text(engine: StubEngine, provider: StubEngine) -> None:
    with gateway_with_teacher(engine, provider) as gateway:
        with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="any~r-1") as sdk:
            reply = sdk.chat.completions.create(
                model="teacher", messages=[{"role": "user", "content": "a b"}], temperature=0.5
            )
        assert reply.choices[0].message.content == text_of("a b")
        assert reply.choices[0].finish_reason == "stop" and reply.usage is not None
        (request,) = provider.requests
        assert request["model"] == "teacher-large" and request["temperature"] == 0.5
        assert not {"return_token_ids", "logprobs"} & request.keys()
        assert provider.headers[0]["authorization"] == "Bearer sk-of-the-teacher"
        assert not engine.requests
        attributes = gateway.attributes()
    assert attributes[names.POLICY] == "frozen"
    assert attributes[names.ENGINE] == "litellm://openai/teacher-large"
    assert attributes[names.PROVIDER_NAME] == "openai"
    assert attributes[names.ROLLOUT_ID] == "r-1"
    assert text_of("a b").strip() in attributes[names.OUTPUT_MESSAGES]
    assert names.SAMPLED_TOKEN_IDS not in attributes and names.ERROR_TYPE not in attributes


def test_a_teachers_stream_is_passed_on_and_recorded(engine: StubEngine, provider: StubEngine) -> None:
    with gateway_with_teacher(engine, provider) as gateway:
        with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="any") as sdk:
            chunks = list(
                sdk.chat.completions.create(
                    model="teacher",
                    messages=[{"role": "user", "content": "one two three"}],
                    stream=True,
                    stream_options={"include_usage": True},
                )
            )
        said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert said == text_of("one two three")
        attributes = gateway.attributes()
    assert attributes[names.STREAM_COMPLETE] is True and attributes[names.POLICY] == "frozen"
    assert list(attributes[names.RESPONSE_FINISH_REASONS]) == ["stop"]
    assert attributes[names.OUTPUT_TOKENS] == 4


def test_the_policys_calls_beside_a_teachers_are_as_without_it(
    engine: StubEngine, provider: StubEngine
) -> None:
    with gateway_with_teacher(engine, provider) as gateway:
        ask(gateway, model="policy").raise_for_status()
        attributes = gateway.attributes()
        models = httpx.get(f"{gateway.url}/v1/models").json()["data"]
        assert [model["id"] for model in models] == ["stub", "teacher"]
        health = gateway.health()
    assert len(ids(attributes)) == 3 and attributes[names.POLICY] == "trained"
    assert not provider.requests
    assert health["engine"]["url"] == engine.url
    assert [entry["url"] for entry in health["engines"]] == [engine.url, "litellm://openai/teacher-large"]


def test_a_teachers_refusal_has_its_status_in_openais_form(engine: StubEngine, provider: StubEngine) -> None:
    with gateway_with_teacher(engine, provider) as gateway:
        with (
            openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="any", max_retries=0) as sdk,
            pytest.raises(openai.BadRequestError, match="context too long"),
        ):
            sdk.chat.completions.create(model="teacher", messages=[{"role": "user", "content": "FAIL"}])
        attributes = gateway.attributes()
    assert attributes[names.ERROR_TYPE] == "400" and attributes[names.POLICY] == "frozen"
    assert len(provider.requests) == 1  # nobody asked again


def test_a_teacher_that_is_not_there_is_an_error_in_openais_form(engine: StubEngine) -> None:
    nowhere = StubEngine(url="http://127.0.0.1:9")
    with gateway_with_teacher(engine, nowhere) as gateway:
        answer = ask(gateway)
        assert answer.status_code >= 500 and "onnection" in answer.json()["error"]["message"]
        assert ask(gateway, model="policy").status_code == 200


def test_a_stream_that_a_teacher_breaks_off_does_not_look_whole(
    engine: StubEngine, provider: StubEngine
) -> None:
    with gateway_with_teacher(engine, provider) as gateway:
        answer = ask(gateway, "one two BREAK four", stream=True)
        assert "two" in answer.text and "[DONE]" not in answer.text
        last = json.loads(answer.text.strip().splitlines()[-1].removeprefix("data: "))
        assert last["error"]["message"]
        attributes = gateway.attributes()
    assert attributes[names.STREAM_COMPLETE] is False and names.ERROR_TYPE in attributes


def test_an_agent_that_leaves_a_teachers_stream_ends_it(engine: StubEngine, provider: StubEngine) -> None:
    with gateway_with_teacher(engine, provider) as gateway:
        with httpx.stream(
            "POST",
            f"{gateway.url}/v1/chat/completions",
            json=body("one LONG two", model="teacher", stream=True),
        ) as answer:
            next(answer.iter_raw())
        wait_until(lambda: provider.cancelled)
        attributes = gateway.attributes()
    assert attributes[names.ERROR_TYPE] == "client_disconnected"


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_teacher_answers_the_responses_route(
    engine: StubEngine, provider: StubEngine, is_stream: bool
) -> None:
    with gateway_with_teacher(engine, provider) as gateway:
        with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="any~r-1", max_retries=0) as sdk:
            if is_stream:
                with sdk.responses.stream(model="teacher", input="a b") as stream:
                    reply = stream.until_done().get_final_response()
            else:
                reply = cast(Any, sdk.responses.create(model="teacher", input="a b"))
        assert reply.output_text == text_of("a b")
        attributes = gateway.attributes()
    assert attributes[names.POLICY] == "frozen" and attributes[names.ROLLOUT_ID] == "r-1"
    assert text_of("a b").strip() in attributes[names.OUTPUT_MESSAGES]
    assert names.ERROR_TYPE not in attributes


HAS_LITELLMS_PROXY = all(find_spec(name) is not None for name in ("soundfile", "backoff", "redis"))
NEEDS_LITELLMS_PROXY = pytest.mark.skipif(
    not HAS_LITELLMS_PROXY, reason="LiteLLM streams this route with its extra 'proxy' alone"
)


@pytest.mark.parametrize("is_stream", [False, pytest.param(True, marks=NEEDS_LITELLMS_PROXY)])
def test_a_teacher_answers_anthropics_route(
    engine: StubEngine, provider: StubEngine, is_stream: bool
) -> None:
    claude = {"model": "anthropic/claude-large", "api_base": provider.url, "api_key": "sk-of-claude"}
    with gateway_before(engine, hosted={"claude": claude}) as gateway:
        request: Any = {"model": "claude", "messages": [{"role": "user", "content": "a b"}]}
        with anthropic.Anthropic(base_url=gateway.url, api_key="any~r-1", max_retries=0) as sdk:
            if is_stream:
                with sdk.messages.stream(**request, max_tokens=9) as stream:
                    reply: Any = stream.get_final_message()
            else:
                reply = sdk.messages.create(**request, max_tokens=9)
        assert reply.content[0].text == text_of("a b")
        refused = httpx.post(f"{gateway.url}/v1/messages", json={**request, "api_base": "http://a"})
        attributes = dict(gateway.spans()[0].attributes or {})
    assert refused.status_code == 400 and refused.json()["type"] == "error"
    assert provider.headers[0]["x-api-key"] == "sk-of-claude"
    assert provider.requests[0]["model"] == "claude-large"
    assert attributes[names.PROVIDER_NAME] == "anthropic" and attributes[names.POLICY] == "frozen"
    assert text_of("a b").strip() in str(attributes[names.OUTPUT_MESSAGES])
    assert names.ERROR_TYPE not in attributes


@pytest.mark.skipif(HAS_LITELLMS_PROXY, reason="LiteLLM has its extra 'proxy'")
def test_a_part_of_litellm_that_is_missing_is_named(engine: StubEngine, provider: StubEngine) -> None:
    claude = {"model": "anthropic/claude-large", "api_base": provider.url, "api_key": "k"}
    with gateway_before(engine, hosted={"claude": claude}) as gateway:
        request = {**body("a", model="claude"), "max_tokens": 9, "stream": True}
        answer = httpx.post(f"{gateway.url}/v1/messages", json=request, timeout=60)
    assert answer.status_code == 501 and "litellm[proxy]" in answer.json()["error"]["message"]


def test_a_teachers_embeddings_are_recorded_without_their_vectors(
    engine: StubEngine, provider: StubEngine
) -> None:
    with gateway_with_teacher(engine, provider) as gateway:
        with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="any") as sdk:
            reply = sdk.embeddings.create(model="teacher", input=["a", "b"], encoding_format="float")
        assert len(reply.data) == 2
        attributes = gateway.attributes()
    assert attributes[names.POLICY] == "frozen" and attributes[names.PURPOSE] == "embedding"


@pytest.mark.parametrize("field", ["api_base", "base_url", "api_key", "extra_headers", "mock_response"])
def test_an_agent_cannot_send_our_keys_elsewhere(
    engine: StubEngine, provider: StubEngine, field: str
) -> None:
    with gateway_with_teacher(engine, provider) as gateway:
        answer = ask(gateway, **{field: "http://127.0.0.1:9/v1"})
    assert answer.status_code == 400 and repr(field) in answer.json()["error"]["message"]
    assert not provider.requests


def test_a_star_in_models_does_not_catch_hosted_names(engine: StubEngine, provider: StubEngine) -> None:
    with gateway_with_teacher(engine, provider, models={"*": "policy", "gpt-4o": "teacher"}) as gateway:
        for model in ("teacher", "gpt-4o", "whatever"):
            ask(gateway, model=model).raise_for_status()
    assert [request["model"] for request in provider.requests] == ["teacher-large"] * 2
    assert [request["model"] for request in engine.requests] == ["policy"]


def test_teachers_alone_need_no_engine(provider: StubEngine) -> None:
    with gateway_before(provider, engine_url=None, hosted=hosted(provider)) as gateway:
        ask(gateway).raise_for_status()
        assert gateway.health()["engine"]["reachable"] is True
        answers: list[httpx.Response] = []
        calls = [threading.Thread(target=lambda: answers.append(ask(gateway, "HOLD"))) for _ in range(3)]
        for call in calls:
            call.start()
        wait_until(lambda: len(provider.requests) == 4)
        entry = httpx.get(f"{gateway.url}/spangrad/engines").json()["engines"][0]
        assert entry["in_flight"] == 3 and entry["policy"] == "frozen"
        provider.release.set()
        for call in calls:
            call.join()
    assert [answer.status_code for answer in answers] == [200] * 3


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"api_base": "http://a:1"}, "names no model"),
        ("", "names no model"),
        ("no-provider-has-this", "LiteLLM knows no provider"),
    ],
)
def test_a_hosted_model_that_cannot_be_used_is_refused(entry: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        create_app(GatewayConfig(store="s", hosted={"teacher": entry}))


def test_a_hosted_name_is_no_engines_name() -> None:
    from spangrad.tracer.gateway import EngineConfig

    engines = [EngineConfig("http://a:1", models=["teacher"])]
    with pytest.raises(ConfigError, match="also an engine's model"):
        GatewayConfig(store="s", engines=engines, hosted={"teacher": "openai/x"})


def test_the_key_of_a_hosted_model_is_not_shown() -> None:
    config = GatewayConfig(store="s", hosted={"teacher": {"model": "openai/x", "api_key": "secret"}})
    assert "secret" not in repr(config) and "secret" not in repr(config.hosted_models)


def test_litellm_is_imported_for_hosted_models_alone_and_missed_with_advice() -> None:
    script = """
import sys
sys.modules["litellm"] = None  # as if it were not installed
from spangrad.errors import ConfigError
from spangrad.tracer.gateway import GatewayConfig, create_app
create_app(GatewayConfig(engine_url="http://127.0.0.1:1", store="/tmp/unused.duckdb"))
try:
    create_app(GatewayConfig(store="/tmp/unused.duckdb", hosted={"teacher": "openai/x"}))
except ConfigError as error:
    print(error)
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout == (
        "gateway.hosted names 'teacher', which is reached through LiteLLM; `pip install litellm`\n"
    )
