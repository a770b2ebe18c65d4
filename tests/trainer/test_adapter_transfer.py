"""Adapters under names that are never reused, into engines behind a real gateway."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tests.trainer.control_stub import ControlStub, control_stub, make_adapter
from tests.waiting import wait_until

from spangrad.errors import PublishError
from spangrad.tracer.gateway import GatewayConfig, running
from spangrad.trainer.serving.adapter_transfer import WEIGHTS, AdapterTransfer
from spangrad.trainer.serving.fleet import Fleet, Probe


@dataclass
class Ground:
    """Two engines that take adapters, the gateway before them, and a fleet that knows all."""

    engines: list[ControlStub]
    gateway: str
    root: Path
    fleet: Fleet = field(init=False)

    def __post_init__(self) -> None:
        urls = [engine.url for engine in self.engines]
        self.fleet = Fleet(urls, gateway_url=self.gateway, transfer=AdapterTransfer("policy"))

    def ask(self) -> str:
        """The model that answers."""
        body = {"model": "policy", "messages": [{"role": "user", "content": "a"}]}
        answer = httpx.post(f"{self.gateway}/v1/chat/completions", json=body, timeout=30.0)
        answer.raise_for_status()
        return str(answer.json()["model"])

    def loaded(self) -> list[list[str]]:
        return [list(engine.adapters) for engine in self.engines]


@pytest.fixture
def ground(tmp_path: Path) -> Iterator[Ground]:
    with ExitStack() as stack:
        engines = [stack.enter_context(control_stub()) for _ in range(2)]
        config = GatewayConfig(store="unused", port=0, engines=[engine.url for engine in engines])
        url = stack.enter_context(running(config, exporter=InMemorySpanExporter()))
        yield Ground(engines, url, tmp_path / "adapters")


def probe(logprob: float, before: float | None = None) -> Probe:
    rows = [np.full(3, logprob, dtype=np.float32)]
    learner_before = None if before is None else [np.full(3, before, dtype=np.float32)]
    return Probe([[1, 2, 3, 4]], rows, tolerance_nats=0.01, learner_before=learner_before)


def test_every_engine_serves_the_new_adapter_and_agents_ask_as_before(ground: Ground) -> None:
    first = make_adapter(ground.root, 1, -1.5)
    ground.fleet.publish(first, 1, probe=probe(-1.5))
    assert [ground.ask() for _ in range(2)] == [first.name] * 2
    second = make_adapter(ground.root, 2, -2.0)
    report = ground.fleet.publish(second, 2, probe=probe(-2.0, before=-1.5))
    assert [proof.moved for proof in report.proofs.values()] == [0.5, 0.5]
    assert [ground.ask() for _ in range(2)] == [second.name] * 2
    assert ground.loaded() == [[second.name]] * 2 and ground.fleet.others(2) == []
    assert [folder.name for folder in ground.root.iterdir()] == [second.name]
    assert not any("/pause" in path for engine in ground.engines for _, path in engine.events)


def test_an_adapter_with_a_running_call_stays_until_it_has_ended(ground: Ground) -> None:
    first = make_adapter(ground.root, 1, -1.0)
    ground.fleet.publish(first, 1)
    release = threading.Event()
    for engine in ground.engines:
        engine.while_asked = lambda: release.wait(20.0)
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(ground.ask)
        wait_until(lambda: sum(engine.calls for engine in ground.engines) == 1)
        second = make_adapter(ground.root, 2, -2.0)
        ground.fleet.publish(second, 2)
        assert sorted(ground.loaded()) == [[first.name, second.name], [second.name]]
        assert first.exists()
        release.set()
        assert answer.result() == first.name
    third = make_adapter(ground.root, 3, -3.0)
    ground.fleet.publish(third, 3)
    assert ground.loaded() == [[third.name]] * 2 and not first.exists()


def test_publishing_again_makes_a_version_the_newest_under_its_own_name(ground: Ground) -> None:
    first, second = make_adapter(ground.root, 1, -1.0), make_adapter(ground.root, 2, -2.0)
    for engine in ground.engines:  # drained by nobody
        engine.adapters = {first.name: str(first), second.name: str(second)}
    ground.fleet.publish(first, 1, probe=probe(-1.0))
    assert ground.loaded() == [[first.name]] * 2 and ground.ask() == first.name
    before = len(ground.engines[0].events)
    ground.fleet.publish(first, 1)
    assert len(ground.engines[0].events) == before  # nothing to do


def test_an_engine_that_was_restarted_gets_it_again(ground: Ground) -> None:
    adapter = make_adapter(ground.root, 4, -1.0)
    ground.fleet.publish(adapter, 4)
    ground.engines[1].adapters.clear()
    assert ground.fleet.others(4) == [ground.engines[1].url]
    ground.fleet.publish(adapter, 4, only=[ground.engines[1].url])
    assert ground.fleet.others(4) == []


def test_what_no_engine_can_load_leaves_the_old_adapter_served(ground: Ground) -> None:
    old = make_adapter(ground.root, 1, -1.0)
    ground.fleet.publish(old, 1)
    for engine in ground.engines:
        engine.refuses = "rank 64 is greater than max_lora_rank 16"
    with pytest.raises(PublishError, match=r"rank 64 is greater.*; the engine serves version 1"):
        ground.fleet.publish(make_adapter(ground.root, 2, -2.0), 2)
    assert ground.ask() == old.name and ground.fleet.others(1) == []


def test_an_adapter_that_computes_something_else_is_unloaded(ground: Ground) -> None:
    old = make_adapter(ground.root, 1, -1.0)
    ground.fleet.publish(old, 1)
    new = make_adapter(ground.root, 2, -2.0)
    with pytest.raises(PublishError, match="serves other weights than the learner's"):
        ground.fleet.publish(new, 2, probe=probe(-3.0))
    assert ground.loaded() == [[old.name]] * 2 and ground.ask() == old.name


def test_a_folder_that_is_not_what_its_name_says_is_never_loaded(ground: Ground) -> None:
    adapter = make_adapter(ground.root, 1, -1.0)
    other = make_adapter(ground.root, 1, -2.0)
    (other / WEIGHTS).replace(adapter / WEIGHTS)
    with pytest.raises(PublishError, match=r"lacks 'adapter_model\.safetensors' with the digest of its name"):
        ground.fleet.publish(adapter, 1)
    with pytest.raises(PublishError, match="is not named policy-v7-DIGEST"):
        ground.fleet.publish(adapter, 7)
    assert ground.loaded() == [[], []]
