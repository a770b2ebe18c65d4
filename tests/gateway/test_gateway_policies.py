"""Calls that ask for a version of the policy: latest, promoted, or a share of each."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from spangrad.errors import ConfigError
from spangrad.store.client import HubClient
from spangrad.store.keys import Keys
from spangrad.store.records import Decision, DecisionAuthor, Policy, PolicyDecision
from spangrad.tracer import conventions as names
from spangrad.tracer.gateway import EngineConfig, GatewayConfig
from spangrad.tracer.gateway.policy_choice import place_of
from tests.gateway.gateway_setup import Setup, body, gateway_before, versions
from tests.gateway.stub_engine import StubEngine, stub_engine
from tests.store.hub_process import HubProcess


@pytest.fixture(scope="module")
def two_stubs() -> Iterator[list[StubEngine]]:
    with ExitStack() as stack:
        yield [stack.enter_context(stub_engine()) for _ in range(2)]


@pytest.fixture
def stubs(two_stubs: list[StubEngine]) -> list[StubEngine]:
    """One engine serves version 7, the other one version 9."""
    for stub, version in zip(two_stubs, ("7", "9"), strict=True):
        stub.reset()
        stub.version = version
    return two_stubs


@contextmanager
def gateway_over(engines: Sequence[StubEngine], **settings: Any) -> Iterator[Setup]:
    settings = {"version_ttl_s": 0.0, "promoted_version": 7} | settings
    first, *rest = engines
    with gateway_before(first, engines=[engine.url for engine in rest], **settings) as gateway:
        yield gateway


def ask(gateway: Setup, asked: str | None = None, *, rollout: str | None = None) -> httpx.Response:
    prefix = "" if rollout is None else f"/rollout/{rollout}"
    headers = {} if asked is None else {names.HEADER_POLICY: asked}
    url = f"{gateway.url}{prefix}/v1/chat/completions"
    return httpx.post(url, json=body("a b"), headers=headers, timeout=30)


def recorded(gateway: Setup) -> list[tuple[str | None, set[int]]]:
    """Of each call what it asked for, and the versions that sampled its reply."""
    told: list[Mapping[str, Any]] = [span.attributes or {} for span in gateway.spans()]
    return [
        (one.get(names.POLICY_ASKED), set(versions(one)) if names.POLICY_VERSIONS in one else set())
        for one in told
    ]


def test_a_call_gets_the_version_that_it_asks_for_and_its_span_says_so(stubs: list[StubEngine]) -> None:
    with gateway_over(stubs) as gateway:
        for asked in ("promoted", "latest", "Promoted", "LATEST", "promoted"):
            assert ask(gateway, asked).status_code == 200
        told = recorded(gateway)
        assert told == [
            (asked, {version}) for asked, version in [("promoted", 7), ("latest", 9)] * 2 + [("promoted", 7)]
        ]
        assert {ask(gateway, "any").status_code, ask(gateway).status_code} == {200}
        assert [asked for asked, _ in recorded(gateway)[5:]] == [None, None]
    assert all(names.HEADER_POLICY not in sent for stub in stubs for sent in stub.headers)


def test_the_gateway_says_it_for_calls_that_do_not(stubs: list[StubEngine]) -> None:
    with gateway_over(stubs, serve="promoted") as gateway:
        for asked in (None, "latest", None, "any"):
            assert ask(gateway, asked, rollout="r").status_code == 200
        told = recorded(gateway)
    assert told[:3] == [("promoted", {7}), ("latest", {9}), ("promoted", {7})]
    assert told[3][0] is None
    with gateway_over(stubs, serve="latest") as gateway:
        ask(gateway)
        assert recorded(gateway) == [("latest", {9})]


def test_where_no_engine_serves_it_the_refusal_says_what_each_serves(stubs: list[StubEngine]) -> None:
    with gateway_over(stubs, promoted_version=8, serve="promoted") as gateway:
        answer = ask(gateway)
        assert answer.status_code == 503
        error = answer.json()["error"]
        assert error["type"] == "policy_not_served"
        assert "none serves the promoted version, 8" in error["message"]
        for stub, version in zip(stubs, (7, 9), strict=True):
            assert f"{stub.url} serves version {version}" in error["message"]
        stubs[0].version = "8"
        assert ask(gateway).status_code == 200
        failed, whole = gateway.spans()
        assert (failed.attributes or {})[names.POLICY_ASKED] == "promoted"
        assert versions(whole.attributes or {}) == [8, 8, 8]
    assert [len(stub.requests) for stub in stubs] == [1, 0]


def test_one_engine_serves_the_promoted_version_or_nobody_who_asks_for_it(stubs: list[StubEngine]) -> None:
    with gateway_over(stubs[:1], serve="promoted") as gateway:
        assert ask(gateway).status_code == 200
        stubs[0].version = "8"
        assert ask(gateway).status_code == 503
        assert ask(gateway, "latest").status_code == 200


def test_an_engine_that_does_not_say_what_it_serves_is_not_asked(stubs: list[StubEngine]) -> None:
    for stub in stubs:
        stub.version = "unknown"
    with gateway_over(stubs) as gateway:
        for asked in ("latest", "promoted"):
            answer = ask(gateway, asked)
            assert answer.status_code == 503
            assert answer.json()["error"]["message"].count("serves an unknown version") == 2
    assert [len(stub.requests) for stub in stubs] == [0, 0]


def test_an_engine_that_drains_gives_the_call_to_another_of_its_version(stubs: list[StubEngine]) -> None:
    stubs[1].version = "7"
    with gateway_over(stubs, serve="promoted") as gateway:
        httpx.post(f"{gateway.url}/spangrad/engines/drain", json={"engine": stubs[0].url}).raise_for_status()
        assert [ask(gateway).status_code for _ in range(3)] == [200] * 3
        stubs[1].version = "9"
        answer = ask(gateway)
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "no_engine")
        assert f"{stubs[0].url} (draining)" in answer.json()["error"]["message"]
    assert [len(stub.requests) for stub in stubs] == [0, 3]


def test_frozen_models_have_one_version(stubs: list[StubEngine]) -> None:
    teacher = EngineConfig(stubs[1].url, models=["stub"], policy="frozen")
    config = {"engine_url": stubs[0].url, "engines": [teacher], "serve": "promoted"}
    with gateway_before(stubs[0], promoted_version=1, **config) as gateway:
        assert ask(gateway).status_code == 200
    assert [len(stub.requests) for stub in stubs] == [0, 1]


def test_a_header_that_says_something_else_is_refused(stubs: list[StubEngine]) -> None:
    with gateway_over(stubs) as gateway:
        answer = ask(gateway, "newest")
    assert answer.status_code == 400
    assert "x-spangrad-policy is 'newest'; expected any, latest or promoted" in answer.text


def test_a_canary_is_a_share_of_the_rollouts_and_a_rollout_never_switches(stubs: list[StubEngine]) -> None:
    ids = [f"r-{number}" for number in range(40)]
    canaries = {rollout for rollout in ids if place_of(rollout) < 0.3}
    assert 0 < len(canaries) < 40
    for _ in range(2):  # another gateway, or one that was started again, says the same
        with gateway_over(stubs, serve="promoted", canary=0.3) as gateway:
            for rollout in [*ids, *ids]:
                assert ask(gateway, rollout=rollout).status_code == 200
            assert ask(gateway).status_code == 200  # of no rollout
            told = [(span.attributes or {}) for span in gateway.spans()]
        for one in told:
            is_canary = one.get(names.ROLLOUT_ID) in canaries
            assert one[names.POLICY_ASKED] == ("canary" if is_canary else "promoted")
            assert set(versions(one)) == {9 if is_canary else 7}


def test_shares_are_what_they_say() -> None:
    places = [place_of(f"rollout-{number}") for number in range(20_000)]
    assert min(places) >= 0 and max(places) < 1
    tenths = Counter(int(10 * place) for place in places)
    # 2,000 expected in each; the standard deviation is sqrt(20000 * 0.1 * 0.9) = 42.
    assert all(abs(count - 2000) < 5 * 42 for count in tenths.values())
    assert place_of("r-17") == place_of("r-17") != place_of("r-18")


def promoted(version: int) -> PolicyDecision:
    by = DecisionAuthor.ADMIN
    return PolicyDecision("run", version, Decision.PROMOTED, by, "by hand", time_ns=version)


def test_the_hub_says_which_version_is_promoted(stubs: list[StubEngine], tmp_path: Path) -> None:
    keys = Keys.generate()
    keys.save(tmp_path / "keys.json")
    assert keys.admin is not None
    settings = {"promoted_version": None, "run": "run", "store_key": keys.evaluator, "serve": "promoted"}
    with (
        HubProcess(tmp_path / "s.duckdb", keys=tmp_path / "keys.json") as hub,
        HubClient(hub.url, keys.admin) as admin,
    ):
        for version in (7, 9):
            admin.put_policy(Policy("run", version, "p"))
        with gateway_over(stubs, store=hub.url, **settings) as gateway:
            answer = ask(gateway)
            assert answer.status_code == 503
            assert "no version of run 'run' is promoted" in answer.json()["error"]["message"]
            for version in (7, 9):
                admin.decide(promoted(version))
                httpx.post(f"{gateway.url}/spangrad/refresh").raise_for_status()
                assert ask(gateway).status_code == 200
                listed = httpx.get(f"{gateway.url}/spangrad/engines").json()
                assert listed["promoted"] == {"version": version, "problem": None}
            hub.kill()
            httpx.post(f"{gateway.url}/spangrad/refresh").raise_for_status()
            assert ask(gateway).status_code == 200  # the last answer stands
            listed = httpx.get(f"{gateway.url}/spangrad/engines").json()
            assert listed["promoted"]["version"] == 9
            assert "the hub did not say" in listed["promoted"]["problem"]
            told = recorded(gateway)
    assert told[1:] == [("promoted", {7}), ("promoted", {9}), ("promoted", {9})]


def test_a_gateway_that_starts_anew_asks_the_hub(stubs: list[StubEngine], tmp_path: Path) -> None:
    settings = {"promoted_version": None, "run": "run", "serve": "promoted"}
    with HubProcess(tmp_path / "s.duckdb") as hub, HubClient(hub.url) as admin:
        admin.put_policy(Policy("run", 9, "p"))
        admin.decide(promoted(9))
        for _ in range(2):
            with gateway_over(stubs, store=hub.url, **settings) as gateway:
                assert ask(gateway).status_code == 200
    assert [len(stub.requests) for stub in stubs] == [0, 2]


def test_without_the_hub_and_without_an_answer_the_refusal_says_so(stubs: list[StubEngine]) -> None:
    settings = {"promoted_version": None, "run": "run", "serve": "promoted", "store": "http://127.0.0.1:1"}
    with gateway_over(stubs, **settings) as gateway:
        answer = ask(gateway)
        assert answer.status_code == 503
        assert "the hub did not say which version of run 'run' is promoted" in json.dumps(answer.json())
        assert ask(gateway, "latest").status_code == 200


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"serve": "newest"}, "gateway.serve is 'newest'"),
        ({"serve": "promoted"}, "name the training run as gateway.run"),
        ({"run": "r"}, "not a hub that says which version is promoted"),
        ({"run": "r", "promoted_version": 1, "store": "http://h:1"}, "give one of them"),
        ({"promoted_version": -1}, "gateway.promoted_version is -1"),
        ({"canary": 0.1, "promoted_version": 1}, "gateway.canary is 0.1 and gateway.serve 'any'"),
        ({"canary": 1.0, "promoted_version": 1, "serve": "promoted"}, "gateway.canary is 1.0"),
        ({"canary": 0.0, "promoted_version": 1, "serve": "promoted"}, "gateway.canary is 0.0"),
    ],
)
def test_settings_that_can_not_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GatewayConfig(**{"engine_url": "http://h:1", "store": "s", **settings})
