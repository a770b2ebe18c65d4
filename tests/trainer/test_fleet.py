"""A publish to several engines behind a real gateway: who serves meanwhile, and what a failure leaves."""

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tests.trainer.control_stub import ControlStub, control_stub

from spangrad.errors import PublishError, UnansweredError
from spangrad.tracer.gateway import GatewayConfig, running
from spangrad.trainer.processes import free_port
from spangrad.trainer.serving.fleet import Fleet, Probe

ROWS = [[1, 2, 3, 4]]
MESSAGES = [{"role": "user", "content": "a"}]


@dataclass
class Ground:
    """Two engines, the gateway before them, and a fleet that knows all."""

    engines: list[ControlStub]
    gateway: str
    folder: Path
    events: list[tuple[str, str]]
    fleet: Fleet = field(init=False)

    def __post_init__(self) -> None:
        self.fleet = Fleet([engine.url for engine in self.engines], gateway_url=self.gateway)

    def weights(self, logprob: float) -> Path:
        path = self.folder / "weights.safetensors"
        path.write_text(str(logprob))
        return path

    def ask(self, times: int = 1) -> list[int]:
        """How many of these calls each engine got."""
        before = [engine.calls for engine in self.engines]
        for _ in range(times):
            body = {"model": "policy", "messages": MESSAGES}
            httpx.post(f"{self.gateway}/v1/chat/completions", json=body).raise_for_status()
        return [engine.calls - count for engine, count in zip(self.engines, before, strict=True)]

    def stale(self) -> list[str | None]:
        entries = httpx.get(f"{self.gateway}/spangrad/engines").json()["engines"]
        return [entry["stale"] for entry in entries]


@pytest.fixture
def ground(tmp_path: Path) -> Iterator[Ground]:
    events: list[tuple[str, str]] = []
    with ExitStack() as stack:
        engines = [stack.enter_context(control_stub(events=events)) for _ in range(2)]
        config = GatewayConfig(store="unused", port=0, engines=[engine.url for engine in engines])
        url = stack.enter_context(running(config, exporter=InMemorySpanExporter()))
        yield Ground(engines, url, tmp_path, events)


def probe(logprob: float, before: float | None = None) -> Probe:
    rows = [np.full(3, logprob, dtype=np.float32)]
    learner_before = None if before is None else [np.full(3, before, dtype=np.float32)]
    return Probe(ROWS, rows, tolerance_nats=0.01, learner_before=learner_before)


def test_every_engine_is_updated_and_proven_while_the_other_serves(ground: Ground) -> None:
    first, second = ground.engines
    served: list[list[int]] = []
    for engine in ground.engines:
        engine.while_paused = lambda: served.append(ground.ask(2))
    report = ground.fleet.publish(ground.weights(-2.0), 7, probe=probe(-2.0, before=-1.0))
    assert served == [[0, 2], [2, 0]]
    assert [engine.version for engine in ground.engines] == ["7", "7"] and report.failed == {}
    assert {url: proof.moved for url, proof in report.proofs.items()} == {first.url: 1.0, second.url: 1.0}
    paused = [event for event in ground.events if event[1] in ("/pause?mode=keep", "/resume")]
    assert paused == [
        (engine.url, path) for engine in ground.engines for path in ("/pause?mode=keep", "/resume")
    ]
    assert sum(ground.ask(4)) == 4 and ground.stale() == [None, None]


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_the_pause_mode_is_the_engines(ground: Ground, mode: Any) -> None:
    Fleet([ground.engines[0].url], mode=mode).publish(ground.weights(-2.0), 1)
    assert (ground.engines[0].url, f"/pause?mode={mode}") in ground.events


def test_a_file_that_nobody_takes_leaves_all_serving_what_they_did(ground: Ground) -> None:
    ground.fleet.publish(ground.weights(-2.0), 3)
    for engine in ground.engines:
        engine.refuses = "is damaged"
    with pytest.raises(PublishError) as caught:
        ground.fleet.publish(ground.weights(-3.0), 4, probe=probe(-3.0))
    said = str(caught.value)
    assert said.startswith("version 4 was published to none of 2 engines: ")
    assert said.count("is damaged; the engine serves version 3") == 2
    assert [engine.version for engine in ground.engines] == ["3", "3"]
    assert ground.stale() == [None, None] and ground.ask(4) == [2, 2]


@pytest.mark.parametrize(
    ("failure", "served", "reason"),
    [
        ({"refuses": "can't be read"}, "3", "can't be read; the engine serves version 3"),
        ({"breaks": True}, "unknown", "worker died; the engine may serve a mix"),
        ({"computes": -9.0}, "unknown", "serves other weights than the learner's"),
    ],
)
def test_an_engine_that_does_not_take_it_gets_no_calls_until_it_does(
    ground: Ground, failure: dict[str, Any], served: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    ground.fleet.publish(ground.weights(-2.0), 3)
    first, second = ground.engines
    for name, value in failure.items():
        setattr(first, name, value)
    report = ground.fleet.publish(ground.weights(-3.0), 4, probe=probe(-3.0))
    assert list(report.failed) == [first.url] and reason in report.failed[first.url]
    assert report.metrics()["serving/engines_out"] == 1.0
    assert f"the engine at {first.url} gets no calls" in caplog.text
    assert [first.version, second.version] == [served, "4"]
    assert ground.stale() == [report.failed[first.url], None] and ground.ask(4) == [0, 4]

    assert ground.fleet.others(4) == [first.url]
    first.refuses, first.breaks, first.computes = None, False, None
    repaired = ground.fleet.publish(ground.weights(-3.0), 4, probe=probe(-3.0), only=[first.url])
    assert repaired.failed == {} and ground.fleet.others(4) == []
    assert ground.stale() == [None, None] and ground.ask(4) == [2, 2]


def test_a_repair_that_fails_again_is_no_failed_publish(ground: Ground) -> None:
    first, second = ground.engines
    ground.fleet.publish(ground.weights(-2.0), 3)
    first.version, first.refuses = "default", "can't be read"  # it was restarted
    report = ground.fleet.publish(ground.weights(-2.0), 3, only=[first.url])
    assert list(report.failed) == [first.url] and ground.ask(2) == [0, 2]
    second.version = "default"  # so nobody serves it
    with pytest.raises(PublishError, match="can't be read"):
        ground.fleet.publish(ground.weights(-2.0), 3, only=[first.url])


def test_where_one_breaks_and_the_other_refuses_the_old_policy_is_served_by_the_latter(
    ground: Ground,
) -> None:
    ground.fleet.publish(ground.weights(-2.0), 3)
    ground.engines[0].breaks, ground.engines[1].refuses = True, "can't be read"
    with pytest.raises(PublishError, match="published to none of 2 engines"):
        ground.fleet.publish(ground.weights(-3.0), 4)
    broken, kept = ground.stale()
    assert broken is not None and "mix of old and new" in broken and kept is None
    assert ground.ask(2) == [0, 2]


def test_the_only_engine_is_never_taken_out(ground: Ground) -> None:
    first = ground.engines[0]
    first.breaks = True
    fleet = Fleet([first.url], gateway_url=ground.gateway)
    with pytest.raises(PublishError, match="labelled 'unknown': publish again or restart it"):
        fleet.publish(ground.weights(-2.0), 1)
    assert ground.stale() == [None, None] and ground.ask(2) == [1, 1]


def test_an_engine_that_is_gone_costs_the_others_nothing(ground: Ground) -> None:
    port = free_port()
    with control_stub(port) as back:
        gone = back.url
    urls = [gone, ground.engines[0].url]
    config = GatewayConfig(store="unused", port=0, engines=urls, health_interval_s=3600.0)
    with running(config, exporter=InMemorySpanExporter()) as gateway:
        fleet = Fleet(urls, gateway_url=gateway)
        assert fleet.others(5) == [ground.engines[0].url]
        report = fleet.publish(ground.weights(-2.0), 5, probe=probe(-2.0))
        assert list(report.failed) == [gone] and "is the engine at" in report.failed[gone]
        assert fleet.others(5) == []
        with control_stub(port) as back:
            assert fleet.others(5) == [gone]
            assert fleet.publish(ground.weights(-2.0), 5, only=[gone]).failed == {}
            assert back.version == "5"


def test_without_any_engine_it_is_said_who_does_not_answer() -> None:
    gone = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(UnansweredError, match=f"is the engine at {gone} running"):
        Fleet([gone]).others(0)


def test_of_several_proofs_the_worst_counts(ground: Ground) -> None:
    ground.engines[1].computes = -2.005
    found = ground.fleet.publish(ground.weights(-2.0), 1, probe=probe(-2.0)).metrics()
    assert found["gap/published_mean"] == pytest.approx(0.005) == found["gap/published_max"]
    assert "gap/published_moved" not in found


def test_an_interrupt_leaves_no_engine_that_is_paused_or_waited_for(ground: Ground) -> None:
    main = threading.main_thread().ident
    assert main is not None
    ground.engines[0].while_paused = lambda: signal.pthread_kill(main, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        ground.fleet.publish(ground.weights(-2.0), 1)
    assert (ground.engines[0].url, "/resume") in ground.events
    assert ground.ask(2) == [1, 1]
