"""A rollout by API key, for agents that can be given nothing but a base URL and a key."""

import json
import logging
from typing import Any

import httpx
import openai
import pytest

from spangrad.errors import ConfigError
from spangrad.tracer import conventions as names
from spangrad.tracer.gateway import GatewayConfig
from tests.gateway.gateway_setup import GatewayFactory, Setup, body

KEY = "sk-agents-0123456789"


def ask(gateway: Setup, headers: dict[str, str], prefix: str = "") -> httpx.Response:
    return httpx.post(f"{gateway.url}{prefix}/v1/chat/completions", json=body("a b"), headers=headers)


def origins(gateway: Setup) -> list[tuple[Any, Any]]:
    """Rollout and attempt of every call so far."""
    told = [span.attributes or {} for span in gateway.spans()]
    return [(attributes.get(names.ROLLOUT_ID), attributes.get(names.ATTEMPT)) for attributes in told]


@pytest.mark.parametrize("header", ["authorization", "x-api-key"])
def test_a_key_names_a_rollout_and_an_attempt(gateway: Setup, header: str) -> None:
    expected = {
        "anything~r-1": ("r-1", 0),
        "anything~r-1~2": ("r-1", 2),
        "~r-1": ("r-1", 0),
        "key~task%2F7%7Ea": ("task/7~a", 0),
        "anything": (None, None),
    }
    for sent in expected:
        ask(gateway, {header: f"Bearer {sent}" if header == "authorization" else sent}).raise_for_status()
    assert origins(gateway) == list(expected.values())


def test_the_openai_sdk_needs_a_key_alone(gateway: Setup) -> None:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="sk-mine~r-1~3") as sdk:
        sdk.chat.completions.create(model="stub", messages=[{"role": "user", "content": "a"}])
    assert origins(gateway) == [("r-1", 3)]
    assert gateway.engine.headers[-1]["authorization"] == "Bearer sk-mine"


def test_the_url_comes_before_the_header_and_the_header_before_the_key(gateway: Setup) -> None:
    by_header = {names.HEADER_ROLLOUT: "by-header"}
    calls: list[tuple[str, dict[str, str], tuple[str, int]]] = [
        ("/rollout/by-url", by_header, ("by-url", 0)),
        ("/rollout/by-url/1", by_header, ("by-url", 1)),
        ("", by_header, ("by-header", 0)),
        ("", {**by_header, names.HEADER_ATTEMPT: "2"}, ("by-header", 2)),
        ("", {}, ("by-key", 7)),
    ]
    for prefix, headers, _ in calls:
        ask(gateway, {"authorization": "Bearer k~by-key~7", **headers}, prefix).raise_for_status()
    assert origins(gateway) == [expected for *_, expected in calls]


@pytest.mark.parametrize("rollout", ["a%2F1", "a%2fb"])
def test_a_slash_in_the_urls_rollout_is_refused_and_not_read_as_an_attempt(
    gateway: Setup, rollout: str
) -> None:
    answer = ask(gateway, {}, f"/rollout/{rollout}")
    assert (answer.status_code, gateway.engine.requests) == (400, [])
    assert names.HEADER_ROLLOUT in answer.json()["error"]["message"]


def test_a_key_that_names_no_rollout_is_a_400_and_not_repeated(gateway: Setup) -> None:
    for sent in ("k~", "k~~1", "k~r~", "k~r~x", "k~r~-1", "k~r~1000000", "k~r~1~2"):
        answer = ask(gateway, {"authorization": f"Bearer secret{sent}"})
        assert answer.status_code == 400
        assert "expected KEY~ROLLOUT" in answer.json()["error"]["message"] and "secret" not in answer.text
    assert not gateway.engine.requests


@pytest.mark.parametrize("header", ["authorization", "x-api-key"])
def test_the_agents_key_is_checked_without_the_rollout(start_gateway: GatewayFactory, header: str) -> None:
    gateway = start_gateway(agent_key=KEY)
    scheme = "Bearer " if header == "authorization" else ""
    for sent in (f"{KEY}~r-1", KEY):
        ask(gateway, {header: f"{scheme}{sent}"}).raise_for_status()
    for sent in ("other~r-1", "~r-1", f"r-1~{KEY}", f"{KEY}r-1"):
        assert ask(gateway, {header: f"{scheme}{sent}"}).status_code == 401
    assert len(gateway.engine.requests) == 2


@pytest.mark.parametrize(
    ("settings", "seen"),
    [
        ({}, {"authorization": "Bearer mine", "x-api-key": "other"}),
        ({"engine_key": "engines"}, {"authorization": "Bearer engines", "x-api-key": None}),
        ({"agent_key": "mine"}, {"authorization": None, "x-api-key": None}),
    ],
)
def test_an_engine_sees_no_rollout_and_no_key_that_is_not_for_it(
    start_gateway: GatewayFactory, settings: dict[str, str], seen: dict[str, str | None]
) -> None:
    gateway = start_gateway(**settings)
    ask(gateway, {"authorization": "Bearer mine~r-1", "x-api-key": "other~r-2"}).raise_for_status()
    (headers,) = gateway.engine.headers
    assert {name: headers.get(name) for name in seen} == seen
    assert "r-1" not in json.dumps(headers) and "r-2" not in json.dumps(headers)
    assert origins(gateway) == [("r-1", 0)]


def test_a_key_is_neither_recorded_nor_logged(
    start_gateway: GatewayFactory, caplog: pytest.LogCaptureFixture, tmp_path: Any
) -> None:
    raw_log = tmp_path / "raw.jsonl"
    with caplog.at_level(logging.DEBUG):
        gateway = start_gateway(agent_key=KEY, raw_log=raw_log)
        ask(gateway, {"authorization": f"Bearer {KEY}~r-1~0"}).raise_for_status()
        ask(gateway, {"authorization": f"Bearer {KEY}~r-1~x"})
        (span,) = gateway.spans()
    assert KEY not in f"{span.name} {span.attributes} {span.resource.attributes}"
    assert KEY not in caplog.text and KEY not in raw_log.read_text()


def test_an_agent_key_with_the_separator_is_refused() -> None:
    with pytest.raises(ConfigError, match="has a '~'"):
        GatewayConfig(engine_url="http://a:1", store="s", agent_key="a~b")
