"""Sessions that their agent ends at the gateway: a real hub and gateway, asked over HTTP alone."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from tests.gateway.gateway_setup import body
from tests.gateway.stub_engine import StubEngine, stub_engine
from tests.store.hub_process import HubProcess
from tests.waiting import wait_until

from spangrad.adapters import account_unread
from spangrad.adapters.model_call import Grade
from spangrad.store.client import HubClient
from spangrad.store.records import Reward, Rollout
from spangrad.tracer.gateway import GatewayConfig, running
from spangrad.trainer.production.eligibility import Moment, Rules, ready, states

RULES = Rules(
    idle_s=3600.0,
    reward_wait_s=0.0,
    held_out=0.0,
    min_grade=Grade.EXACT,
    max_staleness=0,
    authors=("evaluator", "operator"),
    names=("reward",),
)
VERSION = 3
"""What the engine says that it serves."""


@dataclass
class Live:
    """What agents talk to, and the file behind it."""

    gateway: str
    hub: HubProcess
    store: Path

    def act(self, rollout_id: str, *, fails: bool = False) -> None:
        path = f"{self.gateway}/rollout/{rollout_id}/v1/chat/completions"
        answer = httpx.post(path, json=body("FAIL" if fails else "a b"))
        assert answer.is_success != fails

    def end(self, rollout_id: str) -> None:
        httpx.post(f"{self.gateway}/rollout/{rollout_id}/v1/end", timeout=30).raise_for_status()

    def ready(self) -> list[str]:
        """What an update may take, when all that was recorded is in the store and read."""
        wait_until(lambda: httpx.post(f"{self.gateway}/spangrad/flush", timeout=30).is_success)
        with HubClient(self.hub.url) as store:
            account_unread(store)
            now = Moment(VERSION, time.time_ns())
            found = ready(store, RULES, now, most=99)
            assert states(store, RULES, now)["ready"] == len(found)
        return found

    def reward(self, *names: str) -> None:
        with HubClient(self.hub.url) as store:
            store.put_rewards([Reward(name, 1.0) for name in names])


@pytest.fixture(scope="module")
def engine() -> Iterator[StubEngine]:
    with stub_engine() as engine:
        yield engine


@pytest.fixture
def live(engine: StubEngine, tmp_path: Path) -> Iterator[Live]:
    store = tmp_path / "s.duckdb"
    with HubProcess(store) as hub:
        config = GatewayConfig(engine.url, store=hub.url, spool_dir=tmp_path / "spool", port=0)
        with running(config) as gateway:
            yield Live(gateway, hub, store)


def test_a_session_is_taken_as_soon_as_its_agent_has_ended_it(live: Live) -> None:
    for name in ("ended", "goes on"):
        live.act(name)
        live.act(name)
    live.reward("ended", "goes on")
    assert live.ready() == []
    live.end("ended")
    assert live.ready() == ["ended"]
    live.end("ended")
    live.end("ended")
    assert live.ready() == ["ended"]
    with HubClient(live.hub.url) as store:
        assert len(store.query("SELECT call_id FROM calls WHERE rollout_id = 'ended'")) == 2
        assert {one.rollout_id: one.status for one in store.rollouts()} == dict.fromkeys(
            ("ended", "goes on"), "succeeded"
        )


def test_a_call_after_the_end_opens_the_session_again(live: Live) -> None:
    live.act("s")
    live.end("s")
    live.reward("s")
    assert live.ready() == ["s"]
    live.act("s")
    assert live.ready() == []
    live.end("s")
    assert live.ready() == ["s"]


def test_an_agent_that_ends_its_session_says_that_what_failed_before_was_nothing(live: Live) -> None:
    live.act("s")
    live.act("s", fails=True)
    live.reward("s")
    with HubClient(live.hub.url) as store:
        live.ready()
        assert [one.status for one in store.rollouts()] == ["failed"]
    live.end("s")
    assert live.ready() == ["s"]


def test_an_end_reaches_a_hub_that_was_killed_before_it(live: Live) -> None:
    live.act("s")
    live.reward("s")
    assert live.ready() == []
    live.hub.kill()
    live.end("s")  # it is answered all the same
    with HubProcess(live.store, port=live.hub.port) as again:
        live.hub = again
        assert live.ready() == ["s"]


def test_a_rollout_that_a_worker_has_ends_with_its_worker_alone(live: Live) -> None:
    with HubClient(live.hub.url) as store:
        store.enqueue([Rollout("given")])
        store.claim(worker="w", limit=1)
        live.act("given")
        live.end("given")
        assert live.ready() == []
        assert [one.status for one in store.rollouts()] == ["running"]
