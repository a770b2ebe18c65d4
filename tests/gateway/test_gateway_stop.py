"""A gateway that is told to stop: running calls end, for a while, and every span is in the store."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from spangrad.store import open_store
from spangrad.tracer import conventions as names
from spangrad.tracer.gateway import GatewayConfig, running
from spangrad.trainer.processes import free_port
from tests.gateway.gateway_setup import body
from tests.gateway.stub_engine import StubEngine, stub_engine
from tests.waiting import wait_until


@contextmanager
def gateway_process(*arguments: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    port = free_port()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SPANGRAD_")}
    command = [sys.executable, "-m", "spangrad", "gateway", "--port", str(port), *arguments]
    with subprocess.Popen(command, env=environment) as process:
        url = f"http://127.0.0.1:{port}"
        try:
            wait_until(lambda: process.poll() is not None or _answers(url))
            yield url, process
        finally:
            process.kill()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/spangrad/health").is_success
    except httpx.TransportError:
        return False


def attributes_in(store: Path) -> list[dict[str, Any]]:
    with open_store(str(store)) as opened:
        return [dict(span.attributes) for span in opened.spans()]


@pytest.mark.slow
def test_sigterm_lets_running_calls_end_and_stores_their_spans(engine: StubEngine, tmp_path: Path) -> None:
    store = tmp_path / "spans.duckdb"
    answers: list[httpx.Response] = []
    with stub_engine() as other:
        options = ["--engine", engine.url, "--engine", other.url, "--store", str(store)]
        with gateway_process(*options) as (url, process):

            def ask() -> None:
                request = body("one HOLD two", stream=True)
                answers.append(httpx.post(f"{url}/v1/chat/completions", json=request, timeout=60))

            calls = [threading.Thread(target=ask) for _ in range(2)]
            for call in calls:
                call.start()
            wait_until(lambda: engine.requests and other.requests)  # least loaded: one call each
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: not _answers(url))
            for stub in (engine, other):
                stub.release.set()
            for call in calls:
                call.join()
            process.wait(30)
    assert [answer.status_code for answer in answers] == [200, 200]
    assert all(answer.text.endswith("data: [DONE]\n\n") for answer in answers)
    recorded = attributes_in(store)
    assert {attributes[names.ENGINE] for attributes in recorded} == {engine.url, other.url}
    assert all(attributes[names.STREAM_COMPLETE] is True for attributes in recorded)


def test_a_call_that_does_not_end_in_time_is_cut_and_recorded_as_far_as_it_came(engine: StubEngine) -> None:
    exporter = InMemorySpanExporter()
    config = GatewayConfig(engine_url=engine.url, store="unused", port=0, shutdown_s=1)
    failures: list[Exception] = []

    def ask(url: str) -> None:
        try:
            httpx.post(f"{url}/v1/chat/completions", json=body("one HOLD", stream=True), timeout=60)
        except httpx.HTTPError as error:
            failures.append(error)

    with running(config, exporter=exporter) as url:
        call = threading.Thread(target=ask, args=(url,))
        call.start()
        wait_until(lambda: engine.requests)
    call.join()
    (span,) = exporter.get_finished_spans()
    assert (span.attributes or {})[names.STREAM_COMPLETE] is False
    assert names.ERROR_TYPE in (span.attributes or {})
    assert failures
