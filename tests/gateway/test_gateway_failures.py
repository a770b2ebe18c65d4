"""Bad days: engine refuses, is gone, dies in mid-stream; client goes away; port taken; exporter fails."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from spangrad.errors import ConfigError, PortInUseError
from spangrad.tracer import conventions as names
from spangrad.tracer.gateway import GatewayConfig, running, serve
from tests.gateway import stub_engine
from tests.gateway.gateway_setup import GatewayFactory, Setup, body, dropped, gateway_before, ids
from tests.gateway.stub_engine import StubEngine, tokens_of
from tests.waiting import wait_until


def only_span(gateway: Setup) -> ReadableSpan:
    (span,) = gateway.spans()
    return span


def test_an_engines_refusal_reaches_the_client_and_the_span(gateway: Setup) -> None:
    with (
        openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="any") as sdk,
        pytest.raises(openai.BadRequestError, match="context too long"),
    ):
        sdk.chat.completions.create(model="stub", messages=[{"role": "user", "content": "FAIL"}])
    span = only_span(gateway)
    assert span.status.status_code is StatusCode.ERROR and "context too long" in (
        span.status.description or ""
    )
    assert (span.attributes or {})[names.ERROR_TYPE] == "400"
    assert gateway.health()["failed"] == 1


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_engine_that_is_not_there_gives_502_and_is_named(is_stream: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    engine = StubEngine(url=url)
    with gateway_before(engine) as gateway:
        answer = httpx.post(f"{gateway.url}/v1/chat/completions", json=body("a", stream=is_stream))
        assert answer.status_code == 502
        assert url in answer.json()["error"]["message"]
        assert gateway.attributes()[names.ERROR_TYPE] == "ConnectError"
        assert httpx.get(f"{gateway.url}/v1/models").status_code == 502
        assert gateway.health()["engine"]["reachable"] is False


def test_an_engine_that_is_silent_too_long_gives_504(start_gateway: GatewayFactory) -> None:
    gateway = start_gateway(request_timeout_s=0.2)
    answer = httpx.post(f"{gateway.url}/v1/chat/completions", json=body("HOLD"), timeout=30)
    assert answer.status_code == 504 and "0.2 s" in answer.json()["error"]["message"]
    assert gateway.attributes()[names.ERROR_TYPE] == "ReadTimeout"


def test_a_stream_that_breaks_off_does_not_look_whole(gateway: Setup) -> None:
    seen = b""
    request = body("one two BREAK four", stream=True)
    with (
        pytest.raises(httpx.RemoteProtocolError),
        httpx.stream("POST", f"{gateway.url}/v1/chat/completions", json=request) as answer,
    ):
        for data in answer.iter_raw():
            seen += data
    assert b"two" in seen and b"[DONE]" not in seen
    assert gateway.engine.url.encode() in seen  # the last event is an error that names the engine
    attributes = gateway.attributes()
    assert attributes[names.STREAM_COMPLETE] is False
    assert attributes[names.ERROR_TYPE] == "RemoteProtocolError"
    assert ids(attributes) == [token.id for token in tokens_of("one two", tools=False)[:2]]


def test_an_engine_killed_in_mid_stream_fails_the_call_and_nothing_else() -> None:
    root = Path(stub_engine.__file__).parents[2]
    command = [sys.executable, "-m", "tests.gateway.stub_engine"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as process:
        assert process.stdout is not None
        engine = StubEngine(url=f"http://127.0.0.1:{process.stdout.readline().strip()}")
        wait_until(lambda: _answers(engine.url))
        with gateway_before(engine) as gateway:
            with (
                openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="any", max_retries=0) as sdk,
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
            attributes = gateway.attributes()
            assert attributes[names.STREAM_COMPLETE] is False and names.ERROR_TYPE in attributes
            assert names.POLICY_VERSIONS not in attributes
            assert httpx.post(f"{gateway.url}/v1/chat/completions", json=body("a")).status_code == 502


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").is_success
    except httpx.TransportError:
        return False


def test_a_client_that_leaves_a_stream_cancels_the_engines_request(gateway: Setup) -> None:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="any") as sdk:
        stream = sdk.chat.completions.create(
            model="stub", messages=[{"role": "user", "content": "one LONG three"}], stream=True
        )
        while next(stream).choices[0].delta.content != "one ":
            pass
        stream.close()
    wait_until(lambda: gateway.engine.cancelled)
    wait_until(lambda: gateway.spans())
    attributes = gateway.attributes()
    assert attributes[names.STREAM_COMPLETE] is False
    assert attributes[names.ERROR_TYPE] == "client_disconnected"


def test_a_client_that_leaves_before_the_reply_cancels_the_engines_request(gateway: Setup) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{gateway.url}/v1/chat/completions", json=body("HOLD"), timeout=httpx.Timeout(5, read=0.2)
        )
    wait_until(lambda: gateway.engine.cancelled)
    wait_until(lambda: gateway.spans())
    assert gateway.attributes()[names.ERROR_TYPE] == "client_disconnected"


def test_a_client_that_stops_reading_at_the_finish_reason_loses_nothing(gateway: Setup) -> None:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="any") as sdk:
        stream = sdk.chat.completions.create(
            model="stub", messages=[{"role": "user", "content": "one two"}], stream=True
        )
        while next(stream).choices[0].finish_reason is None:
            pass
        stream.close()
        attributes = gateway.attributes()
    assert attributes[names.STREAM_COMPLETE] is True and names.ERROR_TYPE not in attributes
    assert len(ids(attributes)) == 3


def test_a_call_that_the_engine_gave_up_is_an_error(gateway: Setup) -> None:
    httpx.post(f"{gateway.url}/v1/chat/completions", json=body("ABORT")).raise_for_status()
    assert gateway.attributes()[names.ERROR_TYPE] == "abort"


def test_an_error_inside_a_stream_is_passed_on_and_recorded(gateway: Setup) -> None:
    answer = httpx.post(f"{gateway.url}/v1/chat/completions", json=body("one two ERROR", stream=True))
    direct = httpx.post(f"{gateway.engine.url}/v1/chat/completions", json=body("one two ERROR", stream=True))
    assert answer.content == direct.content and b"engine core died" in answer.content
    span = only_span(gateway)
    attributes = span.attributes or {}
    assert attributes[names.STREAM_COMPLETE] is False
    assert attributes[names.ERROR_TYPE] == "InternalServerError"
    assert span.status.description == "InternalServerError: engine core died"


def test_a_reply_that_cannot_be_read_is_passed_on_and_recorded_as_an_error(gateway: Setup) -> None:
    answer = httpx.post(f"{gateway.url}/v1/chat/completions", json=body("ODD"))
    assert answer.status_code == 200 and answer.json()["choices"] == [None]
    assert gateway.attributes()[names.ERROR_TYPE] == "invalid_reply"


def test_a_request_that_cannot_be_read_makes_a_span_that_says_so(gateway: Setup) -> None:
    odd = {"model": "stub", "messages": [{"role": "user", "content": "a"}], "stop": 5}
    assert httpx.post(f"{gateway.url}/v1/chat/completions", json=odd).is_success
    attributes = gateway.attributes()
    assert "can't be read" in dropped(attributes)["request"]
    assert attributes[names.POLICY] == "trained"


class FailingExporter(SpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        raise OSError("disk full")


def test_an_exporter_that_fails_disturbs_no_call_and_is_counted(engine: StubEngine) -> None:
    config = GatewayConfig(engine_url=engine.url, store="unused", port=0)
    with running(config, exporter=FailingExporter()) as url:
        assert httpx.post(f"{url}/v1/chat/completions", json=body("a")).is_success
        answer = httpx.post(f"{url}/spangrad/flush").json()
    assert answer["spans"] == {"exported": 0, "dropped": 1, "waiting": 0}


def test_spans_of_ended_calls_are_handed_over_when_the_gateway_stops(engine: StubEngine) -> None:
    exporter = InMemorySpanExporter()
    with running(GatewayConfig(engine_url=engine.url, store="unused", port=0), exporter=exporter) as url:
        httpx.post(f"{url}/v1/chat/completions", json=body("a")).raise_for_status()
    (span,) = exporter.get_finished_spans()
    assert dropped(span.attributes or {}) == {}


def test_a_taken_port_is_one_clear_error_before_anything_starts(engine: StubEngine, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = GatewayConfig(engine_url=engine.url, store=str(tmp_path / "spans.duckdb"), port=port)
        with pytest.raises(PortInUseError, match=f"port {port} on 127.0.0.1 is taken"):
            serve(config)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine_url": "localhost:8000"}, "engine_url is 'localhost:8000'"),
        ({"host": "0.0.0.0"}, "set gateway.agent_key"),
        ({"store": ""}, "store is empty"),
        ({"port": 70000}, "port is 70000"),
        ({"request_timeout_s": 0}, "request_timeout_s is 0"),
        ({"logprobs_mode": "raw_logits"}, "logprobs_mode is 'raw_logits'"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GatewayConfig(**{"engine_url": "http://127.0.0.1:1", "store": "s", **settings})


def test_keys_are_not_in_the_configs_repr() -> None:
    config = GatewayConfig(
        engine_url="http://h:1/v1/", store="s", agent_key="k1x", engine_key="k2x", store_key="k3x"
    )
    assert config.engine_url == "http://h:1"
    assert not any(key in repr(config) for key in ("k1x", "k2x", "k3x"))


def test_flush_waits_for_calls_whose_reply_was_just_sent(gateway: Setup) -> None:
    def call_and_flush(number: int) -> None:
        with httpx.Client() as client:
            client.post(
                f"{gateway.url}/rollout/r-{number}/v1/chat/completions", json=body("a")
            ).raise_for_status()
            client.post(f"{gateway.url}/spangrad/flush").raise_for_status()
        seen = {
            (span.attributes or {}).get(names.ROLLOUT_ID) for span in gateway.exporter.get_finished_spans()
        }
        missing.extend([] if f"r-{number}" in seen else [number])

    missing: list[int] = []
    threads = [threading.Thread(target=call_and_flush, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert missing == []
