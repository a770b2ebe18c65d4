"""What an engine is to serve, against a stand-in for it."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.trainer.stub_weights import StubWeights, stub_weights

from spangrad.errors import EngineError, PublishError
from spangrad.trainer.serving.served import ServedPolicy
from spangrad.trainer.serving.serving_config import ServingConfig


@pytest.fixture
def engine() -> Iterator[StubWeights]:
    with stub_weights() as stub:
        yield stub


def served(engine: StubWeights, folder: Path, wait_s: float = 30.0) -> ServedPolicy:
    serving = ServingConfig(engine_url=engine.url, gateway_url=engine.url, engine_wait_s=wait_s)
    return ServedPolicy(serving, None, folder / "weights")


def write(file: str) -> None:
    Path(file).write_bytes(b"weights")


def test_weights_are_kept_under_their_version_until_the_next_are_served(engine, tmp_path):
    policy = served(engine, tmp_path)
    for version in (0, 1, 7):
        policy.publish(version, write)
        assert (policy.version, engine.version) == (version, str(version))
        assert [file.name for file in (tmp_path / "weights").iterdir()] == [f"v{version:05d}.safetensors"]


def test_an_engine_that_was_restarted_gets_the_same_weights_again(engine, tmp_path, caplog):
    policy = served(engine, tmp_path)
    policy.ensure()
    assert engine.loaded == [], "nothing was published yet"
    policy.publish(3, write)
    policy.ensure()
    assert engine.loaded == ["v00003.safetensors"]
    engine.restart()
    policy.ensure()
    assert engine.loaded == ["v00003.safetensors"] * 2 and engine.version == "3"
    assert f"not served by {engine.url}: publishing 3 again" in caplog.text


def test_an_engine_that_is_away_is_waited_for(engine, tmp_path):
    policy = served(engine, tmp_path)
    policy.publish(3, write)
    engine.is_refusing = True

    def come_back() -> None:
        engine.restart()
        engine.is_refusing = False

    threading.Timer(0.7, come_back).start()
    policy.ensure()
    assert engine.version == "3"


def test_an_engine_that_stays_away_is_an_error(engine, tmp_path):
    policy = served(engine, tmp_path, wait_s=0.5)
    policy.publish(3, write)
    engine.is_refusing = True
    with pytest.raises(EngineError, match="has not answered for"):
        policy.ensure()
    with pytest.raises(EngineError, match="has not answered for"):
        policy.was_away()


def test_weights_that_were_not_published_are_not_the_ones_to_serve(engine, tmp_path):
    policy = served(engine, tmp_path)
    policy.publish(3, write)
    engine.is_refusing = True
    with pytest.raises(PublishError):
        policy.publish(4, write)
    engine.is_refusing = False
    assert policy.version == 3 and not policy.was_away()
    engine.restart()
    policy.ensure()
    assert engine.version == "3"
