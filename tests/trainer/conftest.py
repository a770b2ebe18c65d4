"""A small policy and learners of it, for tests that want nothing special of either."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.trainer.json_server import json_server
from tests.trainer.small_policy import make_policy

from spangrad.trainer.learning.learner import Learner
from spangrad.trainer.learning.learner_config import LearnerConfig


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("models") / "policy")


@pytest.fixture
def make_learner(policy: Path) -> Callable[..., Learner]:
    def make(**settings: Any) -> Learner:
        return Learner(LearnerConfig(**{"model_path": str(policy), "lr": 1e-3, "threads": 1, **settings}))

    return make


@pytest.fixture(scope="module")
def engine_url() -> Iterator[str]:
    """An engine that serves version 0, as far as the loop asks before it learns."""

    with json_server(lambda path, body: (200, {"weight_version": "0"})) as url:
        yield url
