"""An error names the server that is down, and not its neighbour."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tests.trainer.control_stub import control_stub
from tests.trainer.json_server import Replying, serving

from spangrad.errors import EngineError, PublishError
from spangrad.tracer.gateway import GatewayConfig, running
from spangrad.trainer.processes import free_port
from spangrad.trainer.rollouts.gateway_client import wait_for_engine
from spangrad.trainer.serving.fleet import Fleet
from spangrad.trainer.serving.publish import served_version


@contextmanager
def answering(body: object, status: int = 200) -> Iterator[str]:
    """A server that gives one answer to everything."""
    text = json.dumps(body).encode()

    class Handler(Replying):
        def do_GET(self) -> None:
            self.content()
            self.reply(text, status)

        do_POST = do_GET

    with serving(Handler) as url:
        yield url


def nowhere() -> str:
    return f"http://127.0.0.1:{free_port()}"


def test_a_publish_goes_on_without_a_gateway_that_is_down_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = nowhere()
    (tmp_path / "weights").write_text("-2.0")
    with control_stub() as engine:
        Fleet([engine.url], gateway_url=gateway).publish(tmp_path / "weights", 1)
        assert engine.version == "1"
    assert f"publishing goes on without the gateway: POST {gateway}/spangrad/engines/swap" in caplog.text
    assert f"is the gateway at {gateway} running?" in caplog.text


def test_what_is_no_gateway_is_found_before_anything_is_published(tmp_path: Path) -> None:
    with (
        control_stub() as engine,
        answering({}, status=404) as other,
        pytest.raises(PublishError) as caught,
    ):
        Fleet([engine.url], gateway_url=other).publish(tmp_path / "weights", 1)
    assert f"{other}/spangrad/engines/swap is unknown there; expected a gateway" in str(caught.value)
    assert engine.events == []


def test_a_gateway_that_has_no_such_engine_says_which_it_has(tmp_path: Path) -> None:
    config = GatewayConfig("http://127.0.0.1:9", store="unused", port=0)
    with (
        control_stub() as engine,
        running(config, exporter=InMemorySpanExporter()) as gateway,
        pytest.raises(PublishError) as caught,
    ):
        Fleet([engine.url], gateway_url=gateway).publish(tmp_path / "weights", 1)
    assert str(caught.value).startswith(f"version 1 was not published to {engine.url}: ")
    assert str(caught.value).endswith(f"no engine '{engine.url}'; there are: http://127.0.0.1:9")


def test_an_engine_that_is_down_is_called_the_engine() -> None:
    engine = nowhere()
    with pytest.raises(PublishError) as caught:
        served_version(engine)
    assert str(caught.value).endswith(f"is the engine at {engine} running?")


def test_a_wait_that_was_in_vain_names_the_gateway_if_that_is_down() -> None:
    gateway = nowhere()
    with pytest.raises(EngineError) as caught:
        wait_for_engine(gateway, 0.0)
    assert str(caught.value).startswith(f"the gateway at {gateway} (`spangrad gateway`) has not answered")


def test_a_wait_that_was_in_vain_names_the_engine_if_the_gateway_says_so() -> None:
    with answering({"engine": {"reachable": False}}) as gateway, pytest.raises(EngineError) as caught:
        wait_for_engine(gateway, 0.0)
    assert str(caught.value).startswith(f"the engine behind the gateway at {gateway} (`spangrad serve`) has")
