"""A hub that dies and comes back: a span is called stored only once it is, and needs no call to get there."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from spangrad.errors import ConfigError
from spangrad.store.client import HubClient
from spangrad.tracer.gateway import GatewayConfig, running
from tests.gateway.gateway_setup import body
from tests.gateway.stub_engine import StubEngine
from tests.store.hub_process import HubProcess
from tests.tracer.stub_server import hub_server
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

StartHub = Callable[..., HubProcess]


@pytest.fixture
def start_hub(tmp_path: Path) -> Iterator[StartHub]:
    with ExitStack() as stack:
        yield lambda port=0: stack.enter_context(HubProcess(tmp_path / "s.duckdb", port=port))


def config_for(engine: StubEngine, hub: HubProcess, folder: Path) -> GatewayConfig:
    return GatewayConfig(
        engine_url=engine.url, store=hub.url, port=0, spool_dir=folder / "spool", flush_timeout_s=1.5
    )


def call(url: str, number: int) -> None:
    httpx.post(f"{url}/rollout/r-{number}/v1/chat/completions", json=body("a b")).raise_for_status()


def flush(url: str) -> httpx.Response:
    return httpx.post(f"{url}/spangrad/flush", timeout=30)


def stored(hub: HubProcess) -> list[str]:
    client = HubClient(hub.url)
    try:
        return sorted(str(span.rollout_id) for span in client.spans())
    finally:
        client.close()


def counts(url: str) -> dict[str, Any]:
    spans: dict[str, Any] = httpx.get(f"{url}/spangrad/health").json()["spans"]
    return spans


def test_flush_fails_while_spans_wait_for_the_hub_and_then_they_are_stored_once(
    engine: StubEngine, start_hub: StartHub, tmp_path: Path
) -> None:
    hub = start_hub()
    with running(config_for(engine, hub, tmp_path)) as url:
        call(url, 0)
        assert flush(url).status_code == 200
        hub.kill()
        for number in (1, 2, 3):
            call(url, number)
        answer = flush(url)
        assert answer.status_code == 503
        assert answer.json()["waiting"] == 3
        assert hub.url in answer.json()["message"]
        assert counts(url) == {"exported": 1, "dropped": 0, "waiting": 3}
        again = start_hub(hub.port)
        wait_until(lambda: flush(url).status_code == 200)
        assert stored(again) == ["r-0", "r-1", "r-2", "r-3"]
        assert counts(url) == {"exported": 4, "dropped": 0, "waiting": 0}


def test_spans_reach_a_hub_that_comes_back_without_a_call_or_a_flush(
    engine: StubEngine, start_hub: StartHub, tmp_path: Path
) -> None:
    hub = start_hub()
    with running(config_for(engine, hub, tmp_path)) as url:
        hub.kill()
        call(url, 0)
        call(url, 1)
        wait_until(lambda: counts(url)["waiting"] == 2)
        again = start_hub(hub.port)
        wait_until(lambda: stored(again) == ["r-0", "r-1"])
        wait_until(lambda: counts(url) == {"exported": 2, "dropped": 0, "waiting": 0})


def test_flush_fails_while_spans_of_an_earlier_gateway_wait(
    engine: StubEngine, start_hub: StartHub, tmp_path: Path
) -> None:
    hub = start_hub()
    hub.kill()
    with running(config_for(engine, hub, tmp_path)) as url:
        call(url, 0)
        assert flush(url).status_code == 503
    with running(config_for(engine, hub, tmp_path)) as url:
        assert flush(url).json()["waiting"] == 1
        again = start_hub(hub.port)
        wait_until(lambda: stored(again) == ["r-0"])
        assert flush(url).status_code == 200


def test_spans_that_a_hub_refuses_when_it_is_back_are_dropped_and_no_longer_waited_for(
    engine: StubEngine, tmp_path: Path
) -> None:
    with hub_server() as hub:
        config = GatewayConfig(
            engine_url=engine.url, store=hub.url, port=0, spool_dir=tmp_path / "spool", flush_timeout_s=1.5
        )
        with running(config) as url:
            hub.status = 503
            call(url, 0)
            assert flush(url).json()["spans"] == {"exported": 0, "dropped": 0, "waiting": 1}
            hub.status = 400
            wait_until(lambda: flush(url).status_code == 200)
            assert flush(url).json()["spans"] == {"exported": 0, "dropped": 1, "waiting": 0}
            hub.status = 200
            call(url, 1)
            assert flush(url).json()["spans"] == {"exported": 1, "dropped": 1, "waiting": 0}


def test_a_flush_timeout_must_be_above_zero() -> None:
    with pytest.raises(ConfigError, match="flush_timeout_s is 0"):
        GatewayConfig(engine_url="http://127.0.0.1:1", store="s", flush_timeout_s=0)
