"""What the engine says of how it samples counts more than what the gateway's config says."""

import json
from typing import Any

import httpx
import pytest

from spangrad.tracer import conventions as names
from tests.gateway.gateway_setup import GatewayFactory, Setup, body, dropped
from tests.gateway.stub_engine import StubEngine
from tests.waiting import wait_until


def told(mode: str = "processed_logprobs", source: str = "vllm", **override: Any) -> dict[str, Any]:
    model = {"logprobs_mode": mode, "generation_config": source, "override_generation_config": override}
    return {"vllm_config": {"model_config": model}}


def ask(gateway: Setup) -> None:
    httpx.post(f"{gateway.url}/v1/chat/completions", json=body("a b"), timeout=30).raise_for_status()


@pytest.mark.parametrize(
    ("info", "mode", "defaults"),
    [
        (told(), "processed", {}),
        (told("raw_logprobs"), "raw", {}),
        (told(temperature=0.6, top_k=20, max_new_tokens=9), "processed", {"temperature": 0.6, "top_k": 20}),
        (None, "processed", None),  # no development mode: the config's word
        ({"vllm_config": {}}, "processed", None),
        ({"vllm_config": "a text, of an older one"}, "processed", None),
        ([], "processed", None),
    ],
)
def test_the_engine_tells_how_it_samples(
    engine: StubEngine, gateway: Setup, info: Any, mode: str, defaults: dict[str, Any] | None
) -> None:
    engine.server_info = info
    ask(gateway)
    attributes = gateway.attributes()
    assert attributes[names.LOGPROBS_MODE] == mode
    found = attributes.get(names.SAMPLING_DEFAULTS)
    assert (None if found is None else json.loads(found)) == defaults


def test_defaults_of_a_models_folder_are_not_known(engine: StubEngine, gateway: Setup) -> None:
    engine.server_info = told(source="auto")
    ask(gateway)
    assert "--generation-config auto" in json.loads(gateway.attributes()[names.SAMPLING_DEFAULTS])


def test_logits_are_no_logprobs(engine: StubEngine, gateway: Setup) -> None:
    engine.server_info = told("raw_logits")
    ask(gateway)
    attributes = gateway.attributes()
    assert not {names.SAMPLED_LOGPROBS, names.LOGPROBS_MODE} & attributes.keys()
    assert "raw_logits" in dropped(attributes)[names.SAMPLED_LOGPROBS]


def test_an_engine_is_asked_once_and_again_after_it_was_out(
    engine: StubEngine, start_gateway: GatewayFactory
) -> None:
    gateway = start_gateway(health_interval_s=3600.0)
    engine.server_info = told()
    for _ in range(3):
        ask(gateway)
    gateway.flush()
    assert engine.asked_settings == 1
    engine.health_status = 503
    gateway.health()
    engine.health_status, engine.server_info = 200, told("raw_logprobs")
    gateway.health()
    ask(gateway)
    assert (gateway.spans()[-1].attributes or {})[names.LOGPROBS_MODE] == "raw"
    assert engine.asked_settings == 2


def test_an_engine_that_fails_to_tell_is_asked_again(engine: StubEngine, gateway: Setup) -> None:
    engine.server_info, engine.server_info_status = told("raw_logits"), 503
    ask(gateway)
    gateway.flush()
    engine.server_info_status = 200
    ask(gateway)
    first, second = (span.attributes or {} for span in gateway.spans())
    assert first[names.LOGPROBS_MODE] == "processed"  # the config's word
    assert names.SAMPLED_LOGPROBS not in second


def test_a_silent_engine_holds_spans_back_for_one_timeout(
    engine: StubEngine, start_gateway: GatewayFactory
) -> None:
    gateway = start_gateway(version_timeout_s=0.5)
    engine.server_info = told("raw_logprobs")
    engine.tell_settings.clear()
    for _ in range(3):
        ask(gateway)
    assert [(span.attributes or {})[names.LOGPROBS_MODE] for span in gateway.spans()] == ["processed"] * 3
    engine.tell_settings.set()
    wait_until(lambda: mode_of_next(gateway) == "raw")
    assert engine.asked_settings == 1


def mode_of_next(gateway: Setup) -> Any:
    ask(gateway)
    return (gateway.spans()[-1].attributes or {})[names.LOGPROBS_MODE]
