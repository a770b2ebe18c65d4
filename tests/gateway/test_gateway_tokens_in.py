"""`fidelity = "tokens-in"`: follow-up calls reach the engine with the rollout's own ids."""

from typing import Any

import httpx
import openai
import pytest

from spangrad.errors import ConfigError
from spangrad.tracer import conventions as names
from spangrad.tracer.gateway import GatewayConfig
from tests.gateway.gateway_setup import GatewayFactory, Setup, ids
from tests.gateway.stub_engine import StubEngine, template_ids, tokens_of
from tests.gateway.test_gateway_recording import TOOLS

Message = dict[str, Any]


@pytest.fixture
def gateway(engine: StubEngine, start_gateway: GatewayFactory) -> Setup:
    engine.has_template = True
    return start_gateway(fidelity="tokens-in")


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def ask(gateway: Setup, messages: list[Message], *, is_stream: bool = False, **more: Any) -> Message:
    """The reply's message as the client has it."""
    url = f"{gateway.url}/rollout/r-1/v1"
    with openai.OpenAI(base_url=url, api_key="any", max_retries=0) as sdk:
        asked: dict[str, Any] = {"model": "stub", "messages": messages, **more}
        if not is_stream:
            message: Message = sdk.chat.completions.create(**asked).choices[0].message.model_dump()
            return message
        text = ""
        with sdk.chat.completions.create(**asked, stream=True) as stream:
            for chunk in stream:
                text += chunk.choices[0].delta.content or ""
                if chunk.choices[0].finish_reason is not None:
                    return {"role": "assistant", "content": text}
    raise AssertionError("the stream has no end")


def prompt(attributes: Any) -> list[int]:
    return names.unpack_ints(attributes[names.PROMPT_TOKEN_IDS])


def outcomes(gateway: Setup) -> list[Any]:
    return [(span.attributes or {}).get(names.TOKENS_IN) for span in gateway.spans()]


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_follow_up_is_sent_with_the_rollouts_own_ids(gateway: Setup, is_stream: bool) -> None:
    messages = [user("first of three")]
    for text in ("and one", "and two"):
        reply = ask(gateway, messages, is_stream=is_stream)
        messages += [reply, user(text)]
    ask(gateway, messages, is_stream=is_stream)
    calls = [span.attributes or {} for span in gateway.spans()]
    assert [call[names.TOKENS_IN] for call in calls] == [
        "fallback: first call of the rollout",
        "used",
        "used",
    ]
    for before, after, text in zip(calls[:-1], calls[1:], ("and one", "and two"), strict=True):
        news = template_ids({"messages": [user(text)]})
        assert prompt(after) == [*prompt(before), *ids(before), 3, *news]
    assert gateway.engine.requests[-1]["kv_transfer_params"] == {"prompt_token_ids": prompt(calls[-1])}
    assert gateway.engine.requests[-1]["messages"] == messages
    assert ids(calls[0]) == [token.id for token in tokens_of("first of three", tools=False)]
    counted = {"used": 2, "fallback": {"first call of the rollout": 1}, "failed": 0}
    assert gateway.health()["tokens_in"] == counted


def test_a_reply_of_tool_calls_is_continued(gateway: Setup) -> None:
    reply = ask(gateway, [user("TOOL")], tools=TOOLS)
    answer = {"role": "tool", "tool_call_id": "call_1", "content": "rain"}
    ask(gateway, [user("TOOL"), reply, answer], tools=TOOLS)
    first, second = (span.attributes or {} for span in gateway.spans())
    news = template_ids({"messages": [answer]})
    assert prompt(second) == [*prompt(first), *ids(first), 3, *news]


def test_the_client_gets_what_it_would_get_without_the_ids(gateway: Setup) -> None:
    first = {"model": "stub", "messages": [user("a b")]}
    url = f"{gateway.url}/rollout/r-1/v1/chat/completions"
    said = httpx.post(url, json=first).json()["choices"][0]["message"]
    request = {**first, "messages": [user("a b"), said, user("c")], "stream": True}
    through = httpx.post(url, json=request)
    assert through.content == httpx.post(f"{gateway.engine.url}/v1/chat/completions", json=request).content
    assert outcomes(gateway)[-1] == "used"


def test_a_cut_turn_ends_as_the_template_ends_it_once_that_is_known(gateway: Setup) -> None:
    cut = [user("CUT short")]
    cut += [ask(gateway, cut), user("go on")]
    ask(gateway, cut)
    ask(gateway, [user("learn the end")])
    ask(gateway, cut)
    first, _, _, last = (span.attributes or {} for span in gateway.spans())
    assert outcomes(gateway)[1:] == [
        "fallback: the turn was cut, and the token that ends a turn is not known",
        "fallback: continues no earlier call",
        "used",
    ]
    news = template_ids({"messages": [user("go on")]})
    assert prompt(last) == [*prompt(first), *ids(first), 2, 3, *news]
    assert 2 not in ids(first)


def test_an_engine_that_cannot_render_gets_the_plain_request(engine: StubEngine, gateway: Setup) -> None:
    messages = [user("a")]
    messages += [ask(gateway, messages), user("b")]
    engine.has_template = False
    ask(gateway, messages)
    assert outcomes(gateway)[1] == "fallback: the engine does not render: it refused or gave no tokens"
    assert "kv_transfer_params" not in engine.requests[-1]
    assert gateway.health()["tokens_in"]["fallback"]["the engine does not render"] == 1


def test_an_engine_that_ignores_the_ids_is_found_out(engine: StubEngine, gateway: Setup) -> None:
    engine.takes_ids = False
    messages = [user("a")]
    messages += [ask(gateway, messages), user("b")]
    ask(gateway, messages)
    last = gateway.spans()[-1].attributes or {}
    assert str(last[names.TOKENS_IN]).startswith("failed: the engine reports another prompt")
    assert prompt(last) == template_ids({"messages": messages})  # the truth, whatever was asked for
    assert gateway.health()["tokens_in"]["failed"] == 1


def test_a_call_that_did_not_end_is_not_continued(gateway: Setup) -> None:
    messages = [user("ABORT")]
    messages += [ask(gateway, messages), user("b")]
    ask(gateway, messages)
    assert outcomes(gateway)[1] == "fallback: first call of the rollout"


def test_a_call_without_a_rollout_is_sent_as_it_is_asked(gateway: Setup) -> None:
    request = {"model": "stub", "messages": [user("a")]}
    httpx.post(f"{gateway.url}/v1/chat/completions", json=request).raise_for_status()
    assert outcomes(gateway) == ["fallback: the call belongs to no rollout"]


@pytest.mark.parametrize("content", [b"{not json", b"[1]", b'{"model":"stub","messages":[[]]}'])
def test_a_request_that_cannot_be_read_gets_the_engines_own_answer(gateway: Setup, content: bytes) -> None:
    path = "/rollout/r-1/v1/chat/completions"
    assert httpx.post(gateway.url + path, content=content).status_code == 500  # the stub fails on it
    assert str(outcomes(gateway)[0]).startswith("fallback: ")


def test_requests_are_sent_as_they_are_asked_unless_told_otherwise(
    engine: StubEngine, start_gateway: GatewayFactory
) -> None:
    engine.has_template = True
    gateway = start_gateway()
    messages = [user("a")]
    messages += [ask(gateway, messages), user("b")]
    ask(gateway, messages)
    assert engine.rendered == [] and outcomes(gateway) == [None, None]
    assert "tokens_in" not in gateway.health()


def test_an_unknown_fidelity_is_refused() -> None:
    with pytest.raises(ConfigError, match="fidelity is 'ids'"):
        GatewayConfig(engine_url="http://h:1", store="s", fidelity="ids")  # type: ignore[arg-type]
