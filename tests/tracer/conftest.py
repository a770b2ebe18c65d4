import asyncio
import gc
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
os.environ["LANGSMITH_TRACING"] = "false"

import spangrad
from spangrad.tracer.structure import place
from tests.tracer.recording import Recorded, spans_of_store
from tests.tracer.stub_server import HubServer, ModelServer, hub_server, model_server


@pytest.fixture
def model() -> Iterator[ModelServer]:
    with model_server() as server:
        yield server


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with hub_server() as server:
        yield server


@pytest.fixture(scope="module", autouse=True)
def leftovers_of_clients() -> Iterator[None]:
    """Collect the sockets that clients leave open, LiteLLM's for one: no later test is to blame for them."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture(scope="session")
def litellm_loop() -> Iterator[asyncio.Runner]:
    """One event loop for all: LiteLLM's logging task lives as long as the loop that it began in.

    LiteLLM makes a loop of its own, and never closes it, where it finds none.
    """
    with asyncio.Runner() as runner:
        runner.get_loop()
        yield runner


@pytest.fixture(autouse=True)
def nothing_stays_set_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("SPANGRAD_STORE", "SPANGRAD_KEY", "SPANGRAD_ROLLOUT", "SPANGRAD_REDACT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    place.MARKS.set(None)
    yield
    spangrad.shutdown()


@pytest.fixture
def recorded(tmp_path: Path) -> Callable[[], list[Recorded]]:
    """Records into a file store; call it to end recording and get the spans."""
    store = tmp_path / "store.duckdb"
    spangrad.init(store=store)

    def finish() -> list[Recorded]:
        assert spangrad.shutdown()
        return spans_of_store(store)

    return finish
