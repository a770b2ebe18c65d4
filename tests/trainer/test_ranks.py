"""Two processes that train one policy become what one becomes alone, however weights are divided."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.trainer.ranked_updates import SCENARIOS, SHARDINGS, Outcome, outcome, uneven_rows
from tests.trainer.small_policy import make_policy, make_row

from spangrad.errors import ConfigError
from spangrad.trainer.learning.checkpoint import latest
from spangrad.trainer.learning.learner import Learner
from spangrad.trainer.learning.learner_config import LearnerConfig
from spangrad.trainer.learning.packing import trimmed_length
from spangrad.trainer.learning.ranks import Ranks

SIZE = 2
CASES = [(name, sharding) for name, scenario in SCENARIOS.items() for sharding in scenario.shardings]
NUMBERS = 1e-4
"""Largest difference of a metric, of the larger number: float32 sums in another order, four updates deep."""
WEIGHTS = 2e-5
"""Largest difference of a weight; an update moves weights by about its learning rate, 1e-3."""
OF_LAYOUT = ("packing/", "data/forward", "data/shared", "data/padding")
"""Numbers of how rows are laid out, which dividing them changes."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What all ranks found, each in a file of its own."""
    folder = tmp_path_factory.mktemp("ranked")
    make_policy(folder / "policy")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.trainer.ranked_updates", str(rank), str(SIZE), str(folder)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(SIZE)
    ]
    try:
        said = [process.communicate(timeout=240)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * SIZE, "\n".join(said)[-4000:]
    return folder


def of_rank(folder: Path, name: str, sharding: str, rank: int) -> Outcome:
    place = folder / "ranks" / name / sharding
    metrics, scores = json.loads((place / f"{rank}.json").read_text())
    return Outcome(metrics, scores, torch.load(place / f"{rank}.pt"))


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Outcome]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found = {
        name: outcome(scenario, folder / "policy", folder / "alone" / name, Ranks())
        for name, scenario in SCENARIOS.items()
    }
    torch.set_num_threads(threads)
    return found


@pytest.mark.parametrize(("name", "sharding"), CASES)
def test_ranks_become_what_one_becomes_alone(folder, alone, name, sharding):
    found, expected = of_rank(folder, name, sharding, 0), alone[name]
    for got, wanted in zip(found.metrics, expected.metrics, strict=True):
        assert got.keys() - wanted.keys() <= {"packing/padded"}
        for key in wanted:
            if not key.startswith(OF_LAYOUT):
                assert got[key] == pytest.approx(wanted[key], rel=NUMBERS, abs=1e-6, nan_ok=True), key
    np.testing.assert_allclose(found.scores, expected.scores, atol=1e-3)
    assert found.tensors.keys() == expected.tensors.keys()
    for key, tensor in expected.tensors.items():
        assert found.tensors[key].shape == tensor.shape
        assert float((found.tensors[key] - tensor).abs().max()) < WEIGHTS, key


@pytest.mark.parametrize(("name", "sharding"), CASES)
def test_all_ranks_say_the_same_and_have_the_same_weights(folder, name, sharding):
    first, second = (of_rank(folder, name, sharding, rank) for rank in range(SIZE))
    assert first.scores == second.scores
    for got, wanted in zip(first.metrics, second.metrics, strict=True):
        assert got == pytest.approx(wanted, rel=0, abs=0, nan_ok=True)
    assert all(torch.equal(tensor, second.tensors[key]) for key, tensor in first.tensors.items())


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_one_alone_goes_on_from_the_checkpoint_of_ranks(folder, sharding):
    place = folder / "ranks" / "ppo" / sharding / "checkpoints"
    config = LearnerConfig(model_path=str(folder / "policy"), lr=1e-3, **SCENARIOS["ppo"].settings)
    learner = Learner(config)
    assert learner.load(latest(place) or "none") == {"n": 1}
    metrics = learner.update(uneven_rows(), policy_version=1)
    continued = of_rank(folder, "ppo", sharding, 0).metrics[3]
    assert metrics["loss/total"] == pytest.approx(continued["loss/total"], rel=1e-4)
    assert metrics["grad/norm"] == pytest.approx(continued["grad/norm"], rel=1e-4)


def test_rows_are_divided_by_tokens_and_every_row_once():
    rows = [make_row(seed, tokens=10 + 7 * (seed % 5)) for seed in range(11)]
    parts = [Ranks(rank, 3).share(rows) for rank in range(3)]
    assert sorted(place for part in parts for place in part) == list(range(11))
    loads = [sum(trimmed_length(rows[i]) for i in part) for part in parts]
    assert max(loads) - min(loads) <= max(map(trimmed_length, rows))
    assert [Ranks(rank, 3).share(rows) for rank in range(3)] == parts


def test_rows_of_a_rollout_stay_together():
    rows = SCENARIOS["tree"].rows()
    for rank in range(2):
        assert len({rows[i].rollout_id for i in Ranks(rank, 2).share(rows)}) == 1


def test_one_alone_shares_nothing():
    rows = uneven_rows()
    assert Ranks().share(rows) == list(range(len(rows)))
    assert Ranks().gather("mine") == ["mine"]
    assert Ranks(is_sharded=False).idle_passes(3) == 0


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"workers": 2, "sharding": "fsdp"}, "learner.sharding is 'fsdp', expected .*fsdp2"),
        ({"sharding": "fsdp2"}, "learner.sharding = 'fsdp2' has no effect with workers 1"),
        ({"workers": 2, "device": "cuda:1"}, "each worker gets a GPU of its own"),
        ({"workers": 2, "sharding": "fsdp2", "lora_rank": 4}, "merged whole; choose 'ddp'"),
    ],
)
def test_settings_that_can_not_be_are_refused(settings, says):
    with pytest.raises(ConfigError, match=says):
        LearnerConfig(**settings)
