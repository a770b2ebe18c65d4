"""`spangrad.flush()` is true only when everything is at the hub, whatever happened to the hub."""

import fcntl
import os
import threading
from pathlib import Path

import httpx
import pytest

import spangrad
from spangrad.store.client import HubClient
from spangrad.tracer.hub_exporter import HubExporter
from tests.store.hub_process import HubProcess
from tests.tracer.stub_server import HubServer, ModelServer
from tests.waiting import wait_until


def ask(model: ModelServer, prompt: str) -> None:
    body = {"model": "policy", "messages": [{"role": "user", "content": prompt}]}
    assert httpx.post(f"{model.url}/chat/completions", json=body).status_code == 200


@pytest.mark.slow
def test_flush_is_false_while_the_hub_is_dead_and_true_once_everything_is_stored(
    model: ModelServer, tmp_path: Path
) -> None:
    with HubProcess(tmp_path / "s.duckdb") as hub:
        spangrad.init(store=hub.url, spool_dir=tmp_path / "spool")
        ask(model, "before")
        assert spangrad.flush()
        hub.kill()
    for prompt in ("one", "two"):
        ask(model, prompt)
        assert not spangrad.flush(0.5)
    with HubProcess(tmp_path / "s.duckdb", port=hub.port) as again:
        assert spangrad.flush()  # although the hub failed a moment ago
        client = HubClient(again.url)
        assert len(list(client.spans())) == 3
        client.close()
    assert list((tmp_path / "spool").glob("*.seg")) == []


def test_force_flush_waits_for_a_hub_that_comes_back(hub: HubServer, tmp_path: Path) -> None:
    exporter = HubExporter(hub.url, spool_dir=tmp_path / "spool")
    hub.status = 503
    assert exporter.export_request(b"")
    answers: list[bool] = []
    flushing = threading.Thread(target=lambda: answers.append(exporter.force_flush(30_000)))
    flushing.start()
    wait_until(lambda: hub.refused > 2)
    hub.status = 200
    flushing.join()
    assert (answers, len(hub.requests)) == ([True], 1)
    assert exporter.export_request(b"")  # at once: the hub is no longer left alone
    assert len(hub.requests) == 2


def test_a_segment_that_another_process_holds_is_not_delivered(hub: HubServer, tmp_path: Path) -> None:
    exporter = HubExporter(hub.url, spool_dir=tmp_path / "spool")
    hub.status = 503
    assert exporter.export_request(b"")
    hub.status = 200
    (segment,) = (tmp_path / "spool").glob("*.seg")
    held = os.open(segment, os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_EX)
    assert not exporter.force_flush(300)
    assert exporter.is_waiting
    os.close(held)
    assert exporter.force_flush()
    assert (exporter.is_waiting, len(hub.requests)) == (False, 1)


def test_threads_that_flush_at_once_send_each_batch_once(hub: HubServer, tmp_path: Path) -> None:
    exporter = HubExporter(hub.url, spool_dir=tmp_path / "spool")
    hub.status = 503
    for _ in range(20):
        assert exporter.export_request(b"")
    hub.status = 200
    answers: list[bool] = []
    threads = [threading.Thread(target=lambda: answers.append(exporter.force_flush())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [True] * 4
    assert len(hub.requests) == 20
