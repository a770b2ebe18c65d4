"""Learner workers under Ray Train, as the loop sees them: one actor with a learner's methods."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from safetensors.torch import load_file
from tests.trainer.small_policy import make_policy, make_row
from tests.waiting import wait_until

from spangrad.errors import ClusterError, EmptyBatchError, PolicyError
from spangrad.trainer.cluster import call, start_learner, start_ray, wait_for
from spangrad.trainer.learning.checkpoint import latest
from spangrad.trainer.learning.learner import Learner
from spangrad.trainer.learning.learner_config import LearnerConfig

pytestmark = pytest.mark.slow

ROWS = [make_row(seed, tokens=12 + 5 * seed) for seed in range(6)]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    start_ray(2)
    yield make_policy(tmp_path_factory.mktemp("group") / "policy")
    ray.shutdown()


def config_of(policy: Path, workers: int = 2, **settings: Any) -> LearnerConfig:
    return LearnerConfig(model_path=str(policy), lr=1e-3, workers=workers, threads=1, **settings)


def processes_of_ranks() -> list[int]:
    """Ids of those that Ray Train runs this process's learners in."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # ended since
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found = []
    for pid in parents:
        ancestor = pid
        while ancestor not in (0, os.getpid()):
            ancestor = parents.get(ancestor, 0)
        with contextlib.suppress(OSError):
            if ancestor and b"RayTrainWorker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def test_a_group_does_what_a_learner_does_and_is_resumed_after_a_worker_was_killed(policy, tmp_path):
    group = start_learner(config_of(policy, sharding="fsdp2"))
    alone = Learner(config_of(policy, workers=1))
    found = call(group.update, ROWS, policy_version=1)
    assert found["loss/total"] == pytest.approx(alone.update(ROWS, policy_version=1)["loss/total"], rel=1e-5)
    with pytest.raises(EmptyBatchError):  # all ranks raise it, and go on
        call(group.update, [])
    for got, wanted in zip(call(group.score, ROWS), alone.score(ROWS), strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-4)
    assert call(group.trained_calls).keys() == alone.trained_calls().keys()
    call(group.export_weights, str(tmp_path / "weights.safetensors"))
    own = dict(alone.model.state_dict())
    for name, tensor in load_file(tmp_path / "weights.safetensors").items():
        torch.testing.assert_close(tensor, own[name], atol=2e-5, rtol=0)
    assert call(group.save, str(tmp_path / "run"), record={"update": 1}) == latest(tmp_path / "run")

    _, victim = processes_of_ranks()
    os.kill(victim, signal.SIGSTOP)  # so that the update can't be over before it dies
    pending = group.update.remote(ROWS, policy_version=1)
    time.sleep(1.0)
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(ClusterError, match=r"a learner worker of 2 was lost: .* from its last checkpoint"):
        wait_for(pending)
    with pytest.raises(ClusterError, match="was lost"):
        call(group.score, ROWS)
    del group
    wait_until(lambda: not processes_of_ranks())

    again = start_learner(config_of(policy, sharding="ddp"))
    assert call(again.load, str(latest(tmp_path / "run"))) == {"update": 1}
    expected = alone.update(ROWS, policy_version=1)["loss/total"]
    assert call(again.update, ROWS, policy_version=1)["loss/total"] == pytest.approx(expected, rel=1e-4)
    del again  # the last handle
    wait_until(lambda: not processes_of_ranks())


def test_a_model_that_is_not_there_is_the_error_of_the_first_call(tmp_path, policy):
    group = start_learner(config_of(tmp_path / "none"))
    with pytest.raises(PolicyError, match=r"has no config\.json"):
        call(group.score, ROWS)


def test_more_workers_than_the_cluster_has_places_for_are_refused(policy):
    with pytest.raises(ClusterError, match=r"workers is 999, each with a CPU, and the Ray cluster has"):
        start_learner(config_of(policy, workers=999))
