"""An error names the server that is down, and not its neighbour."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from spangrad.errors import EngineError, PublishError
from spangrad.trainer.processes import free_port
from spangrad.trainer.rollouts.gateway_client import wait_for_engine
from spangrad.trainer.serving.publish import publish, served_version


@contextmanager
def answering(body: object, status: int = 200) -> Iterator[str]:
    """A server that gives one answer to everything."""
    text = json.dumps(body).encode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            self.send_response(status)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_POST = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            serving.join()


def nowhere() -> str:
    return f"http://127.0.0.1:{free_port()}"


def test_a_gateway_that_is_down_after_a_publish_is_called_the_gateway(tmp_path: Path) -> None:
    gateway = nowhere()
    with answering({"weight_version": "0", "success": True}) as engine, pytest.raises(PublishError) as caught:
        publish(engine, tmp_path / "weights.safetensors", 1, gateway_url=gateway)
    said = str(caught.value)
    assert said.startswith("the engine serves version 1, but the gateway was not told: ")
    assert said.endswith(f"is the gateway at {gateway} running?")


def test_what_is_no_gateway_is_not_asked_to_be_an_engine(tmp_path: Path) -> None:
    with (
        answering({"weight_version": "0", "success": True}) as engine,
        answering({}, status=404) as other,
        pytest.raises(PublishError) as caught,
    ):
        publish(engine, tmp_path / "weights.safetensors", 1, gateway_url=other)
    assert f"{other}/spangrad/refresh is unknown there; expected a gateway" in str(caught.value)


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
