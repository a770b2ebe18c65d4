"""Weights of an engine are replaced: its calls go elsewhere or wait, and no call is sampled twice."""

import asyncio
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from spangrad.tracer import conventions as names
from spangrad.tracer.gateway import GatewayConfig
from spangrad.tracer.gateway.app import create_app
from spangrad.tracer.gateway.engines import EnginePool
from spangrad.tracer.gateway.swaps import Swap
from spangrad.trainer.processes import free_port
from tests.gateway.gateway_setup import Setup, body, gateway_before, versions
from tests.gateway.stub_engine import StubEngine, stub_engine
from tests.waiting import wait_until


@pytest.fixture
def other() -> Iterator[StubEngine]:
    with stub_engine() as running:
        yield running


def ask(gateway: Setup, text: str = "a b") -> httpx.Response:
    return httpx.post(f"{gateway.url}/v1/chat/completions", json=body(text), timeout=30)


def tell(gateway: Setup, action: str, engine: StubEngine, **more: Any) -> dict[str, Any]:
    answer = httpx.post(f"{gateway.url}/spangrad/engines/{action}", json={"engine": engine.url, **more})
    answer.raise_for_status()
    told: dict[str, Any] = answer.json()["engine"]
    return told


def entry(gateway: Setup, engine: StubEngine) -> dict[str, Any]:
    entries = httpx.get(f"{gateway.url}/spangrad/engines").json()["engines"]
    return next(entry for entry in entries if entry["url"] == engine.url)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def test_with_one_engine_a_call_waits_for_the_new_weights_and_knows_them(
    engine: StubEngine, gateway: Setup, threads: ThreadPoolExecutor
) -> None:
    ask(gateway).raise_for_status()  # the old version is known now
    assert tell(gateway, "swap", engine)["swapping"] is True
    answer = threads.submit(ask, gateway, "c")
    wait_until(lambda: gateway.health()["calls"] == 2)
    assert len(engine.requests) == 1 and not answer.done()
    engine.version = "4"
    assert tell(gateway, "swapped", engine)["swapping"] is False
    assert answer.result().status_code == 200 and len(engine.requests) == 2
    assert set(versions(gateway.spans()[1].attributes or {})) == {4}


def test_with_another_engine_no_call_waits(engine: StubEngine, other: StubEngine) -> None:
    with gateway_before(engine, engines=[other.url]) as gateway:
        tell(gateway, "swap", engine)
        for _ in range(3):
            ask(gateway).raise_for_status()
        tell(gateway, "swapped", engine)
        tell(gateway, "swap", other)
        ask(gateway).raise_for_status()
    assert [len(engine.requests), len(other.requests)] == [1, 3]


def test_with_the_other_engine_gone_a_call_waits_rather_than_fails(
    engine: StubEngine, threads: ThreadPoolExecutor
) -> None:
    gone = "http://127.0.0.1:9"
    with gateway_before(engine, engines=[gone], health_interval_s=3600.0) as gateway:
        for _ in range(2):
            ask(gateway).raise_for_status()  # one of them finds out
        tell(gateway, "swap", engine)
        answer = threads.submit(ask, gateway)
        wait_until(lambda: gateway.health()["calls"] == 3)
        assert not answer.done()
        tell(gateway, "swapped", engine)
        assert answer.result().status_code == 200


def test_a_call_that_was_running_goes_on(
    engine: StubEngine, gateway: Setup, threads: ThreadPoolExecutor
) -> None:
    answer = threads.submit(ask, gateway, "HOLD")
    wait_until(lambda: len(engine.requests) == 1)
    tell(gateway, "swap", engine)
    engine.release.set()
    assert answer.result().status_code == 200 and len(engine.requests) == 1


def test_a_503_because_of_a_swap_is_waited_for_and_any_other_is_passed_on(
    engine: StubEngine, gateway: Setup, threads: ThreadPoolExecutor
) -> None:
    engine.refuses = True
    assert ask(gateway).status_code == 503
    answer = threads.submit(ask, gateway, "HOLD")
    wait_until(lambda: len(engine.requests) == 2)
    tell(gateway, "swap", engine)
    engine.release.set()
    wait_until(lambda: entry(gateway, engine)["in_flight"] == 0)
    assert not answer.done()
    engine.refuses = False
    tell(gateway, "swapped", engine)
    assert answer.result().status_code == 200 and len(engine.requests) == 3
    assert [names.ERROR_TYPE in (span.attributes or {}) for span in gateway.spans()] == [True, False]


def test_a_refused_connection_because_of_a_swap_is_waited_for() -> None:
    pool = EnginePool(GatewayConfig("http://127.0.0.1:9", store="s"))
    (engine,) = pool.engines

    async def refused() -> None:
        with pool.lease("m", None) as lease:
            assert await lease.next() is engine
            engine.swap.begin(60.0)
            lease.no_connection(httpx.ConnectError("refused"))
            assert engine.problem is None and lease.error is None
            waiting = asyncio.ensure_future(lease.next())
            await asyncio.sleep(0)
            assert not waiting.done()
            engine.swap.end()
            assert await waiting is engine
            lease.no_connection(httpx.ConnectError("refused"))  # it has no excuse now
            assert engine.problem == "no connection (ConnectError)"
            assert await lease.next() is None and lease.failure()[0] == 502

    asyncio.run(refused())


def test_an_openai_client_survives_an_engine_that_is_restarted_for_a_swap(
    threads: ThreadPoolExecutor,
) -> None:
    port = free_port()
    gone = StubEngine(url=f"http://127.0.0.1:{port}")
    message: Any = [{"role": "user", "content": "a b"}]
    with gateway_before(gone, health_interval_s=0.05) as gateway:
        # Its default patience is 600 s, ten times a swap of 60 s.
        client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", timeout=20.0)
        tell(gateway, "swap", gone)
        answers = [
            threads.submit(client.chat.completions.create, model="stub", messages=message) for _ in range(4)
        ]
        wait_until(lambda: gateway.health()["calls"] == 4)
        wait_until(lambda: entry(gateway, gone)["problem"] is not None)
        assert not any(answer.done() for answer in answers)
        with stub_engine(port) as back:
            assert tell(gateway, "swapped", back)["healthy"] is True
            assert [answer.result().choices[0].message.content for answer in answers] == ["a b "] * 4
            assert len(back.requests) == 4
        assert gateway.health()["calls"] == 4  # the client never had to ask again


def test_a_swap_that_nobody_ends_is_over_in_time(
    engine: StubEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with gateway_before(engine, swap_timeout_s=0.05) as gateway:
        tell(gateway, "swap", engine)
        assert ask(gateway).status_code == 200
    assert f"engine {engine.url}: nobody said that its new weights are there" in caplog.text


def test_a_client_that_goes_away_does_not_get_its_call_sampled(engine: StubEngine, gateway: Setup) -> None:
    tell(gateway, "swap", engine)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{gateway.url}/v1/chat/completions", json=body("a"), timeout=0.2)
    wait_until(lambda: gateway.health()["failed"] == 1)
    tell(gateway, "swapped", engine)
    ask(gateway).raise_for_status()
    assert len(engine.requests) == 1


def test_an_engine_with_old_weights_gets_no_calls_before_it_has_new_ones(
    engine: StubEngine, other: StubEngine
) -> None:
    with gateway_before(engine, engines=[other.url]) as gateway:
        assert tell(gateway, "swapped", engine, stale="serves version 3")["stale"] == "serves version 3"
        for _ in range(2):
            ask(gateway).raise_for_status()
        assert [len(engine.requests), len(other.requests)] == [0, 2]
        tell(gateway, "swapped", other, stale="was not reached")
        answer = ask(gateway)
        assert answer.status_code == 503
        assert f"{engine.url} (serves version 3), {other.url} (was not reached)" in answer.text
        tell(gateway, "swapped", engine)
        tell(gateway, "undrain", other)
        for _ in range(2):
            ask(gateway).raise_for_status()
        assert [len(engine.requests), len(other.requests)] == [1, 3]


@pytest.mark.parametrize("stale", [3, "", ["a"]])
def test_a_reason_that_is_no_text_is_refused(engine: StubEngine, gateway: Setup, stale: Any) -> None:
    request = {"engine": engine.url, "stale": stale}
    answer = httpx.post(f"{gateway.url}/spangrad/engines/swapped", json=request)
    assert answer.status_code == 400 and entry(gateway, engine)["stale"] is None


@pytest.mark.parametrize("action", ["swap", "swapped"])
def test_an_agent_can_not_swap(action: str) -> None:
    config = GatewayConfig("http://127.0.0.1:9", store="unused", agent_key="the-agents-key")
    app = create_app(config, exporter=InMemorySpanExporter())

    async def ask() -> int:
        transport = httpx.ASGITransport(app, client=("10.0.0.9", 4711))
        headers = {"authorization": "Bearer the-agents-key"}
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            request = {"engine": "http://127.0.0.1:9"}
            answer = await client.post(f"/spangrad/engines/{action}", json=request, headers=headers)
        return answer.status_code

    assert asyncio.run(ask()) == 403


def test_beginning_again_starts_the_time_anew() -> None:
    swap = Swap("http://e:1")

    async def twice() -> None:
        swap.begin(0.02)
        swap.begin(60.0)
        waiting = asyncio.ensure_future(swap.over())
        await asyncio.sleep(0.05)
        assert swap.is_on and not waiting.done()
        swap.end()
        await waiting

    asyncio.run(twice())
