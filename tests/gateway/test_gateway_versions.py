"""Which policy version a call's tokens get, and when none."""

import threading
import time
from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from spangrad.tracer import conventions as names
from tests.gateway.gateway_setup import GatewayFactory, Setup, body, dropped, ids, versions
from tests.gateway.stub_engine import StubEngine
from tests.waiting import wait_until


def ask(gateway: Setup, text: str = "a b", **more: Any) -> None:
    httpx.post(f"{gateway.url}/v1/chat/completions", json=body(text, **more), timeout=30).raise_for_status()


def attributes_over(gateway: Setup, version: str) -> Mapping[str, Any]:
    """Of a call during which the engine, which served version 3, gets this one."""
    thread = threading.Thread(target=ask, args=(gateway, "HOLD"))
    thread.start()
    wait_until(lambda: gateway.engine.requests)
    gateway.engine.version = version
    gateway.engine.release.set()
    thread.join()
    attributes = gateway.attributes()
    assert len(ids(attributes)) == 2  # everything else is kept
    return attributes


def test_tokens_of_a_call_that_spans_a_publish_are_at_least_of_the_version_before(gateway: Setup) -> None:
    attributes = attributes_over(gateway, "4")
    assert versions(attributes) == [3, 3] and attributes[names.NEWEST_POLICY_VERSION] == 4
    assert not dropped(attributes)


def test_an_engine_that_goes_back_to_older_weights_during_a_call_has_no_version(gateway: Setup) -> None:
    attributes = attributes_over(gateway, "2")
    assert names.POLICY_VERSIONS not in attributes
    assert dropped(attributes) == {"policy_versions": "fell from 3 to 2 during the call"}


def test_a_call_after_a_publish_gets_the_new_version(gateway: Setup) -> None:
    ask(gateway)
    gateway.flush()
    gateway.engine.version = "4"
    httpx.post(f"{gateway.url}/spangrad/refresh").raise_for_status()
    ask(gateway)
    first, second = gateway.spans()
    assert set(versions(first.attributes or {})) == {3}
    assert set(versions(second.attributes or {})) == {4}


def test_a_known_version_is_used_until_it_is_forgotten(start_gateway: GatewayFactory) -> None:
    gateway = start_gateway(version_ttl_s=3600.0)
    for _ in range(3):
        ask(gateway)
        gateway.flush()
    assert gateway.engine.asked_versions == 4  # before the first call, and after each
    httpx.post(f"{gateway.url}/spangrad/refresh").raise_for_status()
    ask(gateway)
    gateway.flush()
    assert gateway.engine.asked_versions == 6


@pytest.mark.parametrize(
    ("served", "initial", "expected"),
    [
        ("7", 0, 7),
        (7, 0, 7),
        ("default", 0, 0),
        (None, 0, 0),
        ("default", 5, 5),
        ("default", None, "the engine's weight version is 'default'"),
        ("step-12", 0, "the engine's weight version 'step-12' is no integer"),
        ("-1", 0, "the engine's weight version '-1' is no integer"),
        (True, 0, "the engine's weight version True is no integer"),
    ],
)
def test_only_whole_numbers_and_the_untouched_value_are_versions(
    engine: StubEngine, start_gateway: GatewayFactory, served: Any, initial: int | None, expected: Any
) -> None:
    engine.version = served
    gateway = start_gateway(initial_version=initial)
    ask(gateway)
    attributes = gateway.attributes()
    if isinstance(expected, int):
        assert set(versions(attributes)) == {expected}
    else:
        assert names.POLICY_VERSIONS not in attributes
        assert dropped(attributes) == {"policy_versions": expected}


def test_an_engine_without_weight_info_leaves_versions_unknown(gateway: Setup) -> None:
    gateway.engine.weight_info_status = 404
    ask(gateway)
    attributes = gateway.attributes()
    assert dropped(attributes) == {"policy_versions": "GET /weight_info answered 404"}
    assert len(ids(attributes)) == 3


def test_a_silent_engine_delays_the_calls_of_one_timeout_and_not_those_after_it(
    engine: StubEngine, start_gateway: GatewayFactory
) -> None:
    gateway = start_gateway(version_ttl_s=0.0, version_timeout_s=1.0)
    engine.tell_version.clear()
    ask(gateway)
    gateway.flush()
    asked = engine.asked_versions
    began = time.monotonic()
    for _ in range(5):
        ask(gateway)
    waited_s = time.monotonic() - began
    gateway.flush()
    # Nobody waits: at most one more request can have begun and timed out meanwhile.
    assert engine.asked_versions - asked <= 1 + int(waited_s)
    assert [dropped(span.attributes or {}).get("policy_versions") for span in gateway.spans()] == [
        "GET /weight_info was not answered within 1 s"
    ] * 6
    engine.tell_version.set()
    wait_until(lambda: knows_version(gateway))
    gateway.flush()


def knows_version(gateway: Setup) -> bool:
    ask(gateway)
    attributes: Mapping[str, Any] = gateway.spans()[-1].attributes or {}
    return names.POLICY_VERSIONS in attributes
