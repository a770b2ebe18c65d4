"""What several folders of tests share: one real vLLM server for all that only need some policy."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from spangrad.trainer.processes import free_port
from spangrad.trainer.serving.engine import Engine, EngineConfig

# How long an example takes says how busy the machine is, nothing about the code.
settings.register_profile("spangrad", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("spangrad")

# A shell starts what runs in its background without Ctrl-C, and children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def served_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the small model, tied head, that `engine` serves."""
    from tests.vllm_fixture import make_served_model

    return make_served_model(tmp_path_factory.mktemp("served-model"), is_tied=True)


@pytest.fixture(scope="session")
def engine(served_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A running vLLM server. Tests that publish to it must not rely on the version before."""
    log = tmp_path_factory.mktemp("engine") / "engine.log"
    with Engine(EngineConfig(model=str(served_model), port=free_port(), log=str(log))) as running:
        yield running
