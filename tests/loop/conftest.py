"""A running hub and gateway in front of the shared engine, and configs for runs against them."""

import contextlib
import dataclasses
import json
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spangrad.store import open_store
from spangrad.store.base import Store
from spangrad.trainer.processes import free_port
from spangrad.trainer.serving.engine import Engine
from spangrad.trainer.up import Stack, UpConfig

HERE = Path(__file__).parent
RAW_LOG = "engine_replies.jsonl"


@dataclasses.dataclass
class Ground:
    """Addresses, keys and files that a training run needs."""

    stack: Stack
    engine: Engine
    model: Path
    folder: Path
    store: Store

    def config(self, run_id: str, **changes: object) -> Path:
        """Write the TOML file of a run."""
        defaults = {
            **{"updates": 3, "function": "run", "reward": "reward", "max_attempts": 3},
            **{"refills": 3, "max_staleness": 1},
        }
        values = {**defaults, **changes}
        file = self.folder / f"{run_id}.toml"
        file.write_text(
            textwrap.dedent(f"""
            [run]
            id = "{run_id}"
            folder = "runs"
            updates = {values["updates"]}
            [hub]
            url = "{self.stack.hub_url}"
            keys = "{self.stack.keys_file}"
            [serving]
            engine_url = "{self.stack.engine_url}"
            gateway_url = "{self.stack.gateway_url}"
            model = "{self.model}"
            engine_wait_s = 180
            [agent]
            function = "{HERE}/counting_agent.py:{values["function"]}"
            tasks = "{HERE}/counting_agent.py:tasks"
            reward = "{HERE}/counting_agent.py:{values["reward"]}"
            concurrency = 8
            max_attempts = {values["max_attempts"]}
            [rollout]
            groups_per_update = 2
            group_size = 4
            refills = {values["refills"]}
            max_staleness = {values["max_staleness"]}
            [credit]
            step = "gigpo"
            [learner]
            lr = 1e-3
            threads = 1
            """)
        )
        return file

    def start(self, config: Path, *changes: str) -> "subprocess.Popen[str]":
        """`spangrad train CONFIG --set CHANGE ...` in a process of its own."""
        options = [option for change in changes for option in ("--set", change)]
        return subprocess.Popen(
            [sys.executable, "-m", "spangrad", "train", str(config), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def raw_replies(self) -> list[dict[str, Any]]:
        """The engine's replies as the gateway got them, those that are no completion left out."""
        lines = map(json.loads, (self.folder / RAW_LOG).read_text().splitlines())
        return [line for line in lines if "choices" in (line["response"] or {})]


@contextlib.contextmanager
def open_ground(engine: Engine, model: Path, folder: Path) -> Iterator[Ground]:
    """Hub and gateway with keys, the raw replies of the engine kept."""
    config = UpConfig(
        model=None,
        folder=str(folder),
        store=str(folder / "store.duckdb"),
        hub_port=free_port(),
        gateway_port=free_port(),
        engine_url=engine.url,
        raw_log=str(folder / RAW_LOG),
    )
    with Stack(config) as stack:
        stack.start_hub()
        stack.start_gateway()
        store = open_store(stack.hub_url, stack.keys.trainer)
        yield Ground(stack, engine, model, folder, store)
        store.close()


@pytest.fixture(scope="session")
def ground(engine: Engine, served_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    """A ground that the tests of a session share."""
    with open_ground(engine, served_model, tmp_path_factory.mktemp("ground")) as shared:
        yield shared


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A hub alone, with keys."""
    folder = tmp_path_factory.mktemp("worker")
    config = UpConfig(model=None, folder=str(folder), store=str(folder / "s.duckdb"), hub_port=free_port())
    with Stack(config) as stack:
        stack.start_hub()
        yield stack


def end(process: "subprocess.Popen[str]", timeout_s: float = 180) -> tuple[int, str, str]:
    """Wait for a process: exit code, output, errors."""
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"still running after {timeout_s} s: {out}\n{err}") from None
    return process.returncode, out, err
