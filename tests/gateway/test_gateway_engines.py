"""Several engines behind one gateway: who gets a call, and what happens when one is slow, leaves or dies."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from spangrad.errors import ConfigError
from spangrad.tracer import conventions as names
from spangrad.tracer.gateway import EngineConfig, GatewayConfig
from spangrad.tracer.gateway import engines as engines_module
from spangrad.tracer.gateway.engines import EnginePool
from tests.gateway import stub_engine as stub_module
from tests.gateway.gateway_setup import Setup, body, gateway_before, versions
from tests.gateway.stub_engine import StubEngine, stub_engine
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def three_stubs() -> Iterator[list[StubEngine]]:
    with ExitStack() as stack:
        yield [stack.enter_context(stub_engine()) for _ in range(3)]


@pytest.fixture
def stubs(three_stubs: list[StubEngine]) -> list[StubEngine]:
    for stub in three_stubs:
        stub.reset()
    return three_stubs


@contextmanager
def gateway_over(engines: Sequence[StubEngine], **settings: Any) -> Iterator[Setup]:
    first, *rest = engines
    with gateway_before(first, engines=[engine.url for engine in rest], **settings) as gateway:
        try:
            yield gateway
        finally:
            for engine in engines:
                engine.release.set()


def ask(gateway: Setup, text: str = "a b", *, rollout: str | None = None, **more: Any) -> httpx.Response:
    prefix = "" if rollout is None else f"/rollout/{rollout}"
    return httpx.post(f"{gateway.url}{prefix}/v1/chat/completions", json=body(text, **more), timeout=30)


def counts(engines: Sequence[StubEngine]) -> list[int]:
    return [len(engine.requests) for engine in engines]


@contextmanager
def held_call(gateway: Setup, engine: StubEngine, text: str = "HOLD") -> Iterator[list[httpx.Response]]:
    """A call that some engine works on until it is released; gives its answer when it is over."""
    before, answers = len(engine.requests), list[httpx.Response]()
    thread = threading.Thread(target=lambda: answers.append(ask(gateway, text)))
    thread.start()
    try:
        wait_until(lambda: len(engine.requests) > before)
        yield answers
    finally:
        engine.release.set()
        thread.join()


def listed(gateway: Setup) -> dict[str, dict[str, Any]]:
    entries = httpx.get(f"{gateway.url}/spangrad/engines").json()["engines"]
    return {entry["url"]: entry for entry in entries}


@contextmanager
def cutting_engine() -> Iterator[tuple[StubEngine, list[bytes]]]:
    """An engine that reads every request and hangs up; gives the first lines of the requests."""
    seen: list[bytes] = []

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                seen.append(connection.recv(65536).split(b"\r\n")[0])

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield StubEngine(url=f"http://127.0.0.1:{listener.getsockname()[1]}"), seen
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def test_a_call_goes_to_the_engine_with_the_fewest_calls_in_flight(stubs: list[StubEngine]) -> None:
    with gateway_over(stubs) as gateway, held_call(gateway, stubs[0]), held_call(gateway, stubs[1]):
        assert [entry["in_flight"] for entry in listed(gateway).values()] == [1, 1, 0]
        for _ in range(4):
            ask(gateway).raise_for_status()
        assert counts(stubs) == [1, 1, 4]


def test_equal_load_goes_round(stubs: list[StubEngine]) -> None:
    with gateway_over(stubs) as gateway:
        for _ in range(6):
            ask(gateway).raise_for_status()
    assert counts(stubs) == [2, 2, 2]


def test_calls_of_a_rollout_go_to_one_engine_however_loaded(stubs: list[StubEngine]) -> None:
    with gateway_over(stubs) as gateway:
        for _ in range(3):
            for rollout in ("r-0", "r-1", "r-2"):
                ask(gateway, rollout=rollout).raise_for_status()
        used = Counter(
            (str((span.attributes or {})[names.ROLLOUT_ID]), str((span.attributes or {})[names.ENGINE]))
            for span in gateway.spans()
        )
    assert sorted(used.values()) == [3, 3, 3]
    assert {engine for _, engine in used} == {stub.url for stub in stubs}


def test_the_memory_of_rollouts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines_module, "MAX_STICKY", 100)
    pool = EnginePool(GatewayConfig(store="s", engines=["http://a:1", "http://b:1"]))

    async def lease_many() -> None:
        first = await pool.lease("m", "r-0").next()
        second = await pool.lease("m", "r-1").next()
        for number in range(2, 5000):
            with pool.lease("m", f"r-{number}") as lease:
                await lease.next()
            assert await pool.lease("m", "r-1").next() is second  # in use: it is not the oldest
        assert first is not None and pool.remembered_rollouts() == 100

    asyncio.run(lease_many())


def test_a_refused_connection_moves_the_call_and_puts_the_engine_out(stubs: list[StubEngine]) -> None:
    gone = StubEngine(url=f"http://127.0.0.1:{free_port()}")
    with gateway_over([gone, stubs[0]], health_interval_s=3600.0) as gateway:
        for _ in range(3):
            assert ask(gateway, rollout="r-0").status_code == 200
        assert listed(gateway)[gone.url]["healthy"] is False
        assert listed(gateway)[gone.url]["calls"] == 1  # tried once, then left alone
        spans = gateway.spans()
        assert [(span.attributes or {})[names.ENGINE] for span in spans] == [stubs[0].url] * 3
        assert all(names.ERROR_TYPE not in (span.attributes or {}) for span in spans)


def test_an_engine_that_answers_again_is_back(stubs: list[StubEngine]) -> None:
    port = free_port()
    gone = StubEngine(url=f"http://127.0.0.1:{port}")
    with gateway_over([gone, stubs[0]], health_interval_s=0.05) as gateway:
        ask(gateway).raise_for_status()
        assert listed(gateway)[gone.url]["healthy"] is False
        with stub_engine(port) as back:
            wait_until(lambda: listed(gateway)[back.url]["healthy"])
            for _ in range(2):
                ask(gateway).raise_for_status()
            assert len(back.requests) == 1


def test_an_engine_whose_health_fails_gets_no_calls_and_keeps_those_it_has(stubs: list[StubEngine]) -> None:
    with gateway_over(stubs[:2], health_interval_s=0.05) as gateway:
        with held_call(gateway, stubs[0]) as answers:
            stubs[0].health_status = 500
            wait_until(lambda: not listed(gateway)[stubs[0].url]["healthy"])
            assert listed(gateway)[stubs[0].url]["problem"] == "GET /health answered 500"
            for _ in range(3):
                ask(gateway).raise_for_status()
            assert counts(stubs[:2]) == [1, 3]
        assert answers[0].status_code == 200


def test_a_request_that_may_have_been_sampled_is_not_sent_again(stubs: list[StubEngine]) -> None:
    with cutting_engine() as (cutting, seen), gateway_over([cutting, stubs[0]]) as gateway:
        answer = ask(gateway)
    assert answer.status_code == 502 and "broke off" in answer.json()["error"]["message"]
    assert [line for line in seen if line.startswith(b"POST")] == [b"POST /v1/chat/completions HTTP/1.1"]
    assert counts(stubs[:1]) == [0]


def test_without_any_engine_the_error_names_all_and_what_each_said() -> None:
    gone = [StubEngine(url=f"http://127.0.0.1:{free_port()}") for _ in range(2)]
    with gateway_over(gone) as gateway:
        answer = ask(gateway, rollout="r-0")
        message = answer.json()["error"]["message"]
        assert answer.status_code == 502
        assert all(f"{engine.url} (no connection (ConnectError))" in message for engine in gone)
        assert gateway.attributes()[names.ERROR_TYPE] == "ConnectError"
        assert gateway.health()["engine"]["reachable"] is False
        read = httpx.get(f"{gateway.url}/v1/models")
        assert read.status_code == 502 and all(engine.url in read.text for engine in gone)


def test_engines_that_are_out_are_asked_when_no_other_is_left(stubs: list[StubEngine]) -> None:
    with gateway_over(stubs[:2], health_interval_s=0.05) as gateway:
        for stub in stubs[:2]:
            stub.health_status = 500
        wait_until(lambda: not any(entry["healthy"] for entry in listed(gateway).values()))
        assert ask(gateway).status_code == 200


def test_a_drain_waits_for_running_calls_and_lets_no_new_one_in(stubs: list[StubEngine]) -> None:
    drained: list[httpx.Response] = []

    def drain() -> None:
        request = {"engine": f"{stubs[0].url}/v1/"}
        drained.append(httpx.post(f"{gateway.url}/spangrad/engines/drain", json=request, timeout=30))

    with gateway_over(stubs[:2]) as gateway:
        ask(gateway, rollout="r-0").raise_for_status()
        assert len(stubs[0].requests) == 1
        with held_call(gateway, stubs[1]), held_call(gateway, stubs[0]) as answers:
            draining = threading.Thread(target=drain)
            draining.start()
            wait_until(lambda: listed(gateway)[stubs[0].url]["draining"])
            ask(gateway, rollout="r-0").raise_for_status()  # sticks to it no longer
            assert counts(stubs[:2]) == [2, 2] and not drained
            stubs[0].release.set()
            draining.join()
        assert answers[0].status_code == 200
        assert drained[0].status_code == 200 and drained[0].json()["engine"]["in_flight"] == 0
        for _ in range(2):
            ask(gateway).raise_for_status()
        assert len(stubs[0].requests) == 2
        httpx.post(
            f"{gateway.url}/spangrad/engines/undrain", json={"engine": stubs[0].url}
        ).raise_for_status()
        for _ in range(2):
            ask(gateway).raise_for_status()
        assert len(stubs[0].requests) == 3


def test_a_drain_that_takes_too_long_says_so_and_goes_on(stubs: list[StubEngine]) -> None:
    with gateway_over(stubs[:1], drain_timeout_s=0.05) as gateway, held_call(gateway, stubs[0]):
        answer = httpx.post(f"{gateway.url}/spangrad/engines/drain", json={"engine": stubs[0].url})
        assert answer.status_code == 503 and "1 calls" in answer.json()["message"]
        refused = ask(gateway)
        assert refused.status_code == 503
        assert f"{stubs[0].url} (draining)" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("request_body", "status"), [({"engine": "http://other:1"}, 404), ({}, 400), (["engine"], 400)]
)
def test_a_drain_of_what_is_no_engine_is_refused(
    stubs: list[StubEngine], request_body: Any, status: int
) -> None:
    with gateway_over(stubs[:1]) as gateway:
        for action in ("drain", "undrain", "swap", "swapped"):
            answer = httpx.post(f"{gateway.url}/spangrad/engines/{action}", json=request_body)
            assert answer.status_code == status, answer.text


def test_every_engine_has_a_policy_version_of_its_own(stubs: list[StubEngine]) -> None:
    stubs[0].version, stubs[1].version = "4", "5"
    with gateway_over(stubs[:2]) as gateway:
        for _ in range(2):
            ask(gateway).raise_for_status()
        seen = {(span.attributes or {})[names.ENGINE]: span.attributes or {} for span in gateway.spans()}
        assert set(versions(seen[stubs[0].url])) == {4} and set(versions(seen[stubs[1].url])) == {5}
        assert [entry["policy_version"] for entry in listed(gateway).values()] == [4, 5]
        httpx.post(f"{gateway.url}/spangrad/refresh").raise_for_status()
        assert [entry["policy_version"] for entry in listed(gateway).values()] == [None, None]


def test_a_model_that_engines_name_goes_to_them_alone(stubs: list[StubEngine]) -> None:
    teacher = EngineConfig(stubs[1].url, models=["teacher"], policy="frozen")
    stubs[1].served = "teacher"
    with gateway_before(stubs[0], engines=[teacher]) as gateway:
        for model in ("teacher", "policy", "teacher", "policy"):
            ask(gateway, rollout="r-0", model=model).raise_for_status()
        assert counts(stubs[:2]) == [2, 2]
        assert {request["model"] for request in stubs[1].requests} == {"teacher"}
        policies = {(span.attributes or {})[names.REQUEST_MODEL]: span.attributes for span in gateway.spans()}
        assert (policies["teacher"] or {})[names.POLICY] == "frozen"
        assert (policies["policy"] or {})[names.POLICY] == "trained"
        models = httpx.get(f"{gateway.url}/v1/models").json()["data"]
        assert [model["id"] for model in models] == ["stub", "teacher"]


def test_a_model_that_no_engine_serves_is_a_404_that_names_those_served(stubs: list[StubEngine]) -> None:
    engines = [EngineConfig(stubs[0].url, models=["policy"]), EngineConfig(stubs[1].url, models=["teacher"])]
    config: dict[str, Any] = {"engine_url": None, "engines": engines}
    with gateway_before(stubs[0], **config) as gateway:
        answer = ask(gateway, model="other")
        assert answer.status_code == 404
        message = answer.json()["error"]["message"]
        assert message == "no engine serves the model 'other'; served are: policy, teacher"
        assert gateway.attributes()[names.ERROR_TYPE] == "model_not_found"


def test_a_models_list_comes_from_an_engine_that_answers(stubs: list[StubEngine]) -> None:
    gone = StubEngine(url=f"http://127.0.0.1:{free_port()}")
    with gateway_over([gone, stubs[0]]) as gateway:
        assert httpx.get(f"{gateway.url}/v1/models").json()["data"][0]["id"] == "stub"


def test_health_keeps_the_fields_of_one_engine_and_lists_all(stubs: list[StubEngine]) -> None:
    gone = StubEngine(url=f"http://127.0.0.1:{free_port()}")
    with gateway_over([gone, stubs[0]]) as gateway:
        ask(gateway).raise_for_status()
        health = gateway.health()
        assert health["engine"] == {
            "url": stubs[0].url,
            "reachable": True,
            "policy_version": 3,
            "policy_version_problem": None,
        }
        assert [entry["healthy"] for entry in health["engines"]] == [False, True]


def test_an_engine_killed_among_others_costs_its_running_calls_and_no_more(stubs: list[StubEngine]) -> None:
    command = [sys.executable, "-m", "tests.gateway.stub_engine"]
    root = Path(stub_module.__file__).parents[2]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as process:
        assert process.stdout is not None
        dying = StubEngine(url=f"http://127.0.0.1:{process.stdout.readline().strip()}")
        wait_until(lambda: _answers(dying.url))
        with (
            gateway_over([dying, stubs[0]]) as gateway,
            openai.OpenAI(base_url=f"{gateway.url}/rollout/r-0/v1", api_key="any", max_retries=0) as sdk,
            sdk.chat.completions.create(
                model="stub", messages=[{"role": "user", "content": "one HOLD"}], stream=True
            ) as stream,
        ):
            chunks = iter(stream)
            while next(chunks).choices[0].delta.content != "one ":
                pass
            os.kill(process.pid, signal.SIGKILL)
            with pytest.raises(openai.APIError, match="broke off"):
                list(chunks)
            for _ in range(4):
                assert ask(gateway, rollout="r-0").status_code == 200
            first, *rest = gateway.spans()
            assert (first.attributes or {})[names.STREAM_COMPLETE] is False
            assert [(span.attributes or {})[names.ENGINE] for span in rest] == [stubs[0].url] * 4


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").is_success
    except httpx.TransportError:
        return False


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "has no engine"),
        ({"engines": "http://a:1"}, "expected a list"),
        ({"engines": ["http://a:1", "http://a:1/v1"]}, "twice"),
        ({"engine_url": "http://a:1", "engines": ["http://a:1/"]}, "twice"),
        ({"engines": ["a:1"]}, "expected http://host:port"),
        ({"engines": ["http://me:secret@a:1"]}, "before 'a'"),
        ({"engines": ["http://a:1"], "health_interval_s": 0}, "health_interval_s is 0"),
    ],
)
def test_settings_of_engines_that_cannot_be_used_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refusal:
        GatewayConfig(store="s", **settings)
    assert "secret" not in str(refusal.value)


@pytest.mark.parametrize("settings", [{"models": "name"}, {"models": [""]}, {"policy": "other"}])
def test_an_engines_settings_are_checked(settings: Any) -> None:
    with pytest.raises(ConfigError, match=r"engine http://a:1: (models|policy) is"):
        EngineConfig("http://a:1/v1", **settings)
