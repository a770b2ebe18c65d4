"""An engine has adapters: calls get the newest, whose name says the version of all their tokens."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from spangrad.tracer import conventions as names
from spangrad.tracer.gateway.adapters import Adapter, adapter_of
from spangrad.trainer.processes import free_port
from tests.gateway.gateway_setup import GatewayFactory, Setup, body, gateway_before, versions
from tests.gateway.stub_engine import StubEngine, stub_engine
from tests.waiting import wait_until

OLD, NEW = "stub-v7-0123abcd", "stub-v8-89abcdef"


def ask(gateway: Setup, text: str = "a b", **more: Any) -> httpx.Response:
    return httpx.post(f"{gateway.url}/v1/chat/completions", json=body(text, **more), timeout=30)


def swapped(gateway: Setup) -> dict[str, Any]:
    answer = httpx.post(f"{gateway.url}/spangrad/engines/swapped", json={"engine": gateway.engine.url})
    answer.raise_for_status()
    told: dict[str, Any] = answer.json()["engine"]
    return told


def models(engine: StubEngine) -> list[str]:
    return [request["model"] for request in engine.requests]


def told_versions(gateway: Setup) -> list[list[int]]:
    return [sorted(set(versions(span.attributes or {}))) for span in gateway.spans()]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        (OLD, Adapter(OLD, "stub", 7)),
        ("a-v1-x-v12-0123abcd", Adapter("a-v1-x-v12-0123abcd", "a-v1-x", 12)),
        ("stub-v7", None),
        ("stub-v-0123abcd", None),
        ("stub-v7-0123abcX", None),
        ("stub", None),
    ],
)
def test_a_name_says_model_and_version(name: str, found: Adapter | None) -> None:
    assert adapter_of(name) == found


def test_a_call_gets_the_adapter_that_was_loaded_last_and_its_version(
    engine: StubEngine, gateway: Setup
) -> None:
    engine.adapters = [NEW, OLD]  # another run's, perhaps: the order counts, not the number
    reply = ask(gateway).json()
    assert models(engine) == [OLD] and reply["model"] == OLD
    assert told_versions(gateway) == [[7]]
    assert engine.asked_versions == 0
    assert (gateway.attributes())[names.REQUEST_MODEL] == "stub"


def test_a_publish_is_seen_by_the_next_call_and_not_by_one_that_runs(
    engine: StubEngine, gateway: Setup
) -> None:
    engine.adapters = [OLD]
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(ask, gateway, "HOLD")
        wait_until(lambda: len(engine.requests) == 1)
        engine.adapters = [OLD, NEW]
        assert swapped(gateway)["adapters"] == {OLD: 1}
        ask(gateway).raise_for_status()
        engine.release.set()
        assert running.result().status_code == 200
    assert swapped(gateway)["adapters"] == {}
    assert models(engine) == [OLD, NEW] and told_versions(gateway) == [[7], [8]]


def test_an_adapter_can_be_asked_for_by_its_own_name(engine: StubEngine, gateway: Setup) -> None:
    engine.adapters = [OLD, NEW]
    ask(gateway, model=OLD).raise_for_status()
    assert models(engine) == [OLD] and told_versions(gateway) == [[7]]


def test_adapters_of_other_models_are_left_alone(engine: StubEngine, start_gateway: GatewayFactory) -> None:
    engine.adapters = ["other-v3-0123abcd", "stub-someones-own"]
    gateway = start_gateway(models={"mine": "stub"})
    ask(gateway, model="mine").raise_for_status()
    assert models(engine) == ["stub"] and told_versions(gateway) == [[3]]  # the engine's own version


def test_a_mapped_name_gets_the_adapter_of_what_is_served(
    engine: StubEngine, start_gateway: GatewayFactory
) -> None:
    engine.adapters = [OLD]
    ask(start_gateway(models={"*": "stub"}), model="gpt-4o").raise_for_status()
    assert models(engine) == [OLD]


def test_an_engine_is_asked_once_a_publish(engine: StubEngine, gateway: Setup) -> None:
    for _ in range(3):
        ask(gateway).raise_for_status()
    assert engine.asked_models == 1
    swapped(gateway)
    ask(gateway).raise_for_status()
    assert engine.asked_models == 2


def test_an_engine_that_does_not_list_models_serves_its_own(engine: StubEngine, gateway: Setup) -> None:
    engine.models_status = 404
    for _ in range(2):
        ask(gateway).raise_for_status()
    assert models(engine) == ["stub", "stub"] and engine.asked_models == 1


def test_an_engine_that_was_restarted_unnoticed_costs_one_call(engine: StubEngine) -> None:
    engine.adapters = [OLD]
    with gateway_before(engine, health_interval_s=3600.0) as gateway:
        ask(gateway).raise_for_status()
        engine.adapters = []
        assert ask(gateway).status_code == 404
        ask(gateway).raise_for_status()
        assert models(engine) == [OLD, OLD, "stub"]


def test_a_follow_up_with_own_tokens_gets_the_adapter(
    engine: StubEngine, start_gateway: GatewayFactory
) -> None:
    engine.adapters, engine.has_template = [OLD], True
    gateway = start_gateway(fidelity="tokens-in")
    url = f"{gateway.url}/rollout/r-1/v1/chat/completions"
    first = body("a b")
    reply = httpx.post(url, json=first).json()["choices"][0]["message"]["content"]
    said = [{"role": "assistant", "content": reply}, {"role": "user", "content": "c"}]
    httpx.post(url, json={**first, "messages": [*first["messages"], *said]}).raise_for_status()
    assert models(engine) == [OLD, OLD]
    assert "kv_transfer_params" in engine.requests[1]


def test_an_engine_that_was_not_there_is_asked_when_it_is() -> None:
    port = free_port()
    with gateway_before(StubEngine(url=f"http://127.0.0.1:{port}"), health_interval_s=3600.0) as gateway:
        assert ask(gateway).status_code == 502
        with stub_engine(port) as engine:
            engine.adapters = [OLD]
            ask(gateway).raise_for_status()
            assert models(engine) == [OLD]


def test_an_engine_that_does_not_answer_delays_one_call_and_not_the_next(
    engine: StubEngine, start_gateway: GatewayFactory
) -> None:
    gateway = start_gateway(version_timeout_s=0.2)
    engine.tell_models.clear()
    for _ in range(3):
        ask(gateway).raise_for_status()
    assert models(engine) == ["stub"] * 3
    engine.adapters = [OLD]
    engine.tell_models.set()
    wait_until(lambda: ask(gateway).json()["model"] == OLD)
