"""What `spangrad up` does about parts that die."""

import socket
from pathlib import Path

import pytest

from spangrad.trainer.processes import free_port
from spangrad.trainer.up import Stack, UpConfig, up, watch

pytestmark = pytest.mark.slow


def test_a_part_that_cant_be_started_again_is_tried_until_it_can(tmp_path: Path) -> None:
    port = free_port()
    config = UpConfig(
        model=None,
        folder=str(tmp_path),
        gateway_port=port,
        hub_port=free_port(),
        engine_url="http://127.0.0.1:9",
    )
    said: list[str] = []
    blocker = socket.socket()
    blocker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

    def say(line: str) -> None:
        said.append(line)
        if sum("can't be started" in text for text in said) == 2:
            blocker.close()
        if "is back" in line:
            raise KeyboardInterrupt

    with blocker, Stack(config) as stack:
        stack.start_gateway()
        assert stack.gateway is not None
        stack.gateway.stop()
        blocker.bind(("127.0.0.1", port))
        blocker.listen()
        watch(stack, say=say, interval_s=0.05)
        assert stack.gateway.is_alive()
    assert [line.partition("(")[0].strip() for line in said] == [
        "gateway  died; starting it again",
        "gateway  can't be started",
        "gateway  can't be started",
        "gateway  is back",
        "stopping",
    ]
    assert "is taken" in said[1] or "can't be listened on" in said[1], said[1]
    assert said[1].endswith("trying again in 0.05 s") and said[2].endswith("trying again in 0.1 s")


def test_without_an_engine_what_is_missing_is_said(tmp_path: Path) -> None:
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        if line.startswith("gateway"):
            raise KeyboardInterrupt

    config = UpConfig(
        model=None,
        folder=str(tmp_path),
        store=str(tmp_path / "s.duckdb"),
        gateway_port=free_port(),
        hub_port=free_port(),
        engine_port=free_port(),
    )
    with pytest.raises(KeyboardInterrupt):
        up(config, say=say)
    (line,) = [line for line in said if line.startswith("engine")]
    assert line.startswith(
        f"engine   none: name a model folder, or start one at http://127.0.0.1:{config.engine_port}"
    )
