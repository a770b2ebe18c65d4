"""Reward functions of a run that give one reward, several by name, or none."""

import json
import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from spangrad.store.file_store import FileStore
from spangrad.store.records import Reward, Rollout, RolloutStatus
from spangrad.trainer.config import TrainConfig, load_config
from spangrad.trainer.evaluation import values_of
from spangrad.trainer.policies.warm_start import read_expert
from spangrad.trainer.resuming import repair
from spangrad.trainer.rollouts.endings import Endings, WorkerReport
from spangrad.trainer.rollouts.grading import other_names_told, rewards_given
from spangrad.trainer.rollouts.scheduling import RunKeys

AUTHORS = ("evaluator", "operator")
WEIGHTS = {"answer": 1.0, "format": 0.5}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileStore]:
    with FileStore(tmp_path / "s.duckdb") as opened:
        yield opened


def config_of(folder: Path, weights: dict[str, float] | None = None) -> TrainConfig:
    file = folder / "run.toml"
    told = "" if weights is None else f"[credit]\nreward_weights = {json.dumps(weights).replace(':', ' =')}\n"
    file.write_text(
        f'[run]\nid = "r"\n[hub]\nurl = "{folder / "given.duckdb"}"\n'
        f'[agent]\nfunction = "a:run"\ntasks = "a:tasks"\nreward = "a:reward"\n{told}'
    )
    return load_config(file)


def finish(
    store: FileStore, config: TrainConfig, names: list[str], reward: Callable[..., Any]
) -> WorkerReport:
    """End rollouts as a worker does when their agent has returned."""
    report = WorkerReport()
    endings = Endings(store, reward, report, counted=tuple(config.credit.reward_weights), told=set())
    store.enqueue([Rollout(name, run_id="r", task={"t": name}, split="train") for name in names])
    for rollout in store.claim(worker="w", limit=len(names)):
        endings.succeed(rollout, {"said": rollout.rollout_id})
    assert sorted(endings.hand_in()) == names
    return report


def stored(store: FileStore) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for reward in store.rewards():
        found.setdefault(reward.rollout_id, {})[reward.name] = reward.value
    return found


def test_a_number_is_the_reward(store: FileStore, tmp_path: Path) -> None:
    report = finish(store, config_of(tmp_path), ["a"], lambda task, output: True)
    assert stored(store) == {"a": {"reward": 1.0}}
    assert (report.finished, report.reward_errors, report.other_names) == (1, 0, None)


def test_every_reward_of_a_function_is_stored_by_its_name(store: FileStore, tmp_path: Path) -> None:
    report = finish(
        store, config_of(tmp_path, WEIGHTS), ["a", "b"], lambda task, output: {"answer": 1, "format": 0.5}
    )
    assert stored(store) == {name: {"answer": 1.0, "format": 0.5} for name in "ab"}
    assert (report.reward_errors, report.other_names) == (0, None)
    rollouts = store.rollouts()
    assert values_of(store, rollouts, AUTHORS, WEIGHTS) == {"a": 1.25, "b": 1.25}  # 1 * 1 + 0.5 * 0.5
    assert values_of(store, rollouts, AUTHORS) == {}
    expert = read_expert(store, ["a", "b"], AUTHORS, success_at=1.25, reward_weights=WEIGHTS)
    assert expert.success == 1.0


def test_names_that_do_not_count_and_names_that_are_missing_are_told_once(
    store: FileStore, tmp_path: Path
) -> None:
    report = finish(store, config_of(tmp_path), ["a", "b"], lambda task, output: {"answer": 1, "format": 0.5})
    assert report.other_names == (
        "the reward function gives 'answer', 'format', credit.reward_weights counts 'reward';"
        " 'answer', 'format' will train nothing; without 'reward', unless somebody else gives it, a rollout"
        " has no reward"
    )
    assert stored(store)["b"] == {"answer": 1.0, "format": 0.5}


def test_only_the_difference_of_names_is_told() -> None:
    given = [Reward("a", 1.0, name="answer"), Reward("a", 1.0, name="style")]
    assert other_names_told(given[:1], {"answer": 1.0}) is None
    assert other_names_told([], {"answer": 1.0}) is None
    assert "; 'style' will train nothing" in str(other_names_told(given, {"answer": 1.0}))
    assert "will train nothing" not in str(other_names_told(given[:1], {"answer": 1.0, "style": 1.0}))


def test_a_repaired_function_grades_again_by_name(
    store: FileStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(tmp_path, WEIGHTS)
    finish(store, config, ["a", "b"], lambda task, output: {"answer": 0.0, "format": 1.0})

    def repaired(task: dict[str, Any], output: Any) -> dict[str, float]:
        return {"answer": float(output["said"] == "b"), "format": 1.0}

    repair(store, config, RunKeys(), repaired)
    with FileStore(config.hub.url) as given:
        assert stored(given) == {"b": {"answer": 1.0}}, "what is as before is not given again"
    with caplog.at_level(logging.WARNING):
        repair(store, config, RunKeys(), lambda task, output: 1.0)
    assert "gives 'reward', credit.reward_weights counts 'answer', 'format'" in caplog.text


@pytest.mark.parametrize("value", [math.nan, math.inf, "1", [], {"a": "1"}, {"a": math.nan}, {1: 1.0}])
def test_what_is_no_finite_number_is_no_reward(store: FileStore, tmp_path: Path, value: Any) -> None:
    report = finish(store, config_of(tmp_path), ["a"], lambda task, output: value)
    assert (stored(store), report.reward_errors, report.finished) == ({}, 1, 1)


@pytest.mark.parametrize("value", [None, {}, {"reward": None}])
def test_no_opinion_is_no_reward_and_no_error(store: FileStore, tmp_path: Path, value: Any) -> None:
    assert rewards_given(lambda task, output: value, Rollout("a"), None) == []
    report = finish(store, config_of(tmp_path), ["a"], lambda task, output: value)
    assert (stored(store), report.reward_errors, report.other_names) == ({}, 0, None)
    assert [rollout.status for rollout in store.rollouts()] == [RolloutStatus.SUCCEEDED]
