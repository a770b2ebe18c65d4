"""Every setting of `spangrad up` changes what it is for: each is changed alone, and that is looked at.

A setting that nobody walks fails `test_every_setting_is_walked`; give it an entry in `WALKS`.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.gateway.gateway_setup import body
from tests.gateway.stub_engine import stub_engine

from spangrad.errors import SpangradError
from spangrad.trainer.processes import free_port
from spangrad.trainer.serving.engine import server_command
from spangrad.trainer.up import Stack, UpConfig

pytestmark = pytest.mark.slow
GONE = "http://127.0.0.1:9"
"""Where no engine answers."""


@dataclass(frozen=True)
class Walk:
    """A setting with another value, and what tells the two apart."""

    after: Callable[[Path], Any]
    look: Callable[[Stack, Path], Any]
    seen: Callable[[Any], Any] = lambda value: value
    """What is seen with a value of the setting."""
    is_started: bool = True
    """Whether hub and gateway run when it is looked at."""


def argument(name: str) -> Callable[[Stack, Path], str]:
    """What vLLM's server would be told."""

    def look(stack: Stack, folder: Path) -> str:
        command = server_command(stack._engine_config("m"), on_cpu=True)
        return command[command.index(name) + 1]

    return look


def adapters_taken(stack: Stack, folder: Path) -> int:
    """The largest rank of adapters that vLLM's server would be told to take; 0: it takes none."""
    command = server_command(stack._engine_config("m"), on_cpu=True)
    return int(command[command.index("--max-lora-rank") + 1]) if "--enable-lora" in command else 0


def refusal(stack: Stack, folder: Path) -> bool:
    """Whether the model's folder can't be served."""
    try:
        stack.check()
    except SpangradError as error:
        return "gone" in str(error)
    return False


def files(stack: Stack, folder: Path) -> set[str]:
    return {file.name for file in folder.rglob("*") if file.suffix in (".duckdb", ".jsonl", ".json")}


def answering(stack: Stack, folder: Path) -> tuple[int | None, int | None, str]:
    """Where hub and gateway answer."""
    hub, gateway = (httpx.URL(url) for url in (stack.hub_url, stack.gateway_url))
    for url in (f"{hub}/healthz", f"{gateway}/spangrad/health"):
        httpx.get(url, timeout=30).raise_for_status()
    return (hub.port, gateway.port, hub.host)


def asked(stack: Stack, folder: Path) -> bool:
    """Whether the engine answers a call, whose raw reply is kept where that is asked for."""
    key = {"authorization": f"Bearer {stack.keys.agent}"}
    url = f"{stack.gateway_url}/v1/chat/completions"
    return httpx.post(url, json=body("a b"), headers=key, timeout=30).is_success


def kept(stack: Stack, folder: Path) -> bool:
    return asked(stack, folder) and "raw.jsonl" in files(stack, folder)


WALKS: dict[str, Walk] = {
    "model": Walk(lambda folder: str(folder / "gone"), refusal, bool, is_started=False),
    "folder": Walk(
        lambda folder: str(folder / "other"),
        lambda stack, folder: next(folder.rglob("keys.json")).parent,
        Path,
    ),
    "store": Walk(
        lambda folder: str(folder / "other.duckdb"),
        lambda stack, folder: next(file.name for file in folder.glob("*.duckdb")),
        lambda value: Path(value).name,
    ),
    "host": Walk(lambda folder: "127.0.0.2", lambda stack, folder: answering(stack, folder)[2]),
    "hub_port": Walk(lambda folder: free_port(), lambda stack, folder: answering(stack, folder)[0]),
    "gateway_port": Walk(lambda folder: free_port(), lambda stack, folder: answering(stack, folder)[1]),
    "engine_port": Walk(lambda folder: free_port(), argument("--port"), str, is_started=False),
    "engine_url": Walk(lambda folder: GONE, asked, lambda value: value != GONE),
    "served_name": Walk(lambda folder: "mine", argument("--served-model-name"), is_started=False),
    "max_model_len": Walk(lambda folder: 77, argument("--max-model-len"), str, is_started=False),
    "max_num_seqs": Walk(lambda folder: 7, argument("--max-num-seqs"), str, is_started=False),
    "lora_rank": Walk(lambda folder: 8, adapters_taken, is_started=False),
    "raw_log": Walk(lambda folder: str(folder / "raw.jsonl"), kept, bool),
}


def test_every_setting_is_walked() -> None:
    assert set(WALKS) == {field.name for field in fields(UpConfig)}


@pytest.mark.parametrize("name", WALKS)
def test_a_setting_changes_what_it_is_for(name: str, tmp_path: Path) -> None:
    walk = WALKS[name]
    found = []
    with stub_engine() as engine:
        for part in ("before", "after"):
            folder = tmp_path / part
            folder.mkdir()
            config = UpConfig(
                model=None,
                folder=str(folder),
                store=str(folder / "store.duckdb"),
                hub_port=free_port(),
                gateway_port=free_port(),
                engine_url=engine.url if walk.is_started else None,
            )
            if part == "after":
                config = replace(config, **{name: walk.after(folder)})
            with Stack(config) as stack:
                if walk.is_started:
                    stack.start_hub()
                    stack.start_gateway()
                found.append(walk.look(stack, folder))
            assert found[-1] == walk.seen(getattr(config, name))
    assert found[0] != found[1]
