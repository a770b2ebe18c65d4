import json
from pathlib import Path
from typing import Any

import pytest

from spangrad.store.file_store import FileStore
from spangrad.store.records import Reward, Rollout
from spangrad.trainer.demo import DemoOptions, prepare
from spangrad.trainer.policies.warm_start import cache_name
from tests.bench.combinations.page import by_kind, curve, lengths, svg, table
from tests.bench.combinations.runs import COMBINATIONS, is_done, points_of, read_runs

EXAMPLE = Path(__file__).parents[3] / "examples" / "05_frozen_lake"


def measured(name: str, seed: int, share: float) -> dict[str, Any]:
    wins = round(share * 10)
    points = [
        {"update": update, "how": how, "by": {"6": [10, 10], "10": [wins if update else 0, 10]}}
        for update, how in ((0, "greedy"), (0, "sampled"), (8, "greedy"), (8, "sampled"), (0, "train"))
    ]
    return {"name": name, "seed": seed, "updates": 8, "points": points}


RUNS = [
    measured("grpo-ppo", 0, 0.2),
    measured("grpo-ppo", 1, 0.4),
    measured("gigpo-ppo", 0, 0.9),
    measured("gigpo-ppo", 1, 0.7),
]


def test_combinations_can_be_trained_and_begin_with_one_policy(tmp_path):
    starts = set()
    for combination in COMBINATIONS.values():
        options = DemoOptions(example=str(EXAMPLE), folder=str(tmp_path), changes=combination.changes)
        prepared = prepare(options)
        credit, learner = prepared.config.credit, prepared.config.learner
        assert (credit.episode, credit.step) == (combination.episode, combination.step)
        assert learner.objective == combination.objective
        starts.add(cache_name(prepared.warm, prepared.unchanged, 0))
    assert len(starts) == 1


def test_there_are_five_combinations_or_more_of_both_kinds():
    assert len(COMBINATIONS) >= 5
    assert {combination.has_steps for combination in COMBINATIONS.values()} == {True, False}


def test_mean_and_range_of_seeds_are_told_for_the_longest_tasks():
    assert lengths(RUNS) == ["6", "10"]
    assert curve(RUNS, "grpo-ppo", "greedy", "10") == {0: [0.0, 0.0], 8: [0.2, 0.4]}
    assert curve(RUNS, "grpo-ppo", "greedy", None) == {0: [0.5, 0.5], 8: [0.6, 0.7]}
    assert "| `gigpo` | `ppo` | yes | 80% (70% to 90%) | 80% (70% to 90%) | 0% (0% to 0%) |" in table(RUNS)
    assert by_kind(RUNS) == pytest.approx({"step": 0.8, "episode": 0.3})
    other_loss = [measured("rloo-dapo", 0, 1.0), measured("grpo_gigpo-cispo", 0, 0.0)]
    assert by_kind([*RUNS, *other_loss]) == by_kind(RUNS)


def test_a_run_that_ended_early_keeps_its_last_values():
    early = measured("gigpo-ppo", 2, 1.0)
    for point in early["points"]:
        point["update"] = min(point["update"], 5)
    assert curve([*RUNS, early], "gigpo-ppo", "greedy", "10") == {
        0: [0, 0, 0],
        5: [0, 0, 1],
        8: [0.9, 0.7, 1],
    }


def test_a_run_that_stopped_keeps_its_last_greedy_value_and_has_no_sampled_one():
    stopped = measured("gigpo-ppo", 2, 0.1) | {"has_stopped": True, "updates": 5}
    stopped["points"] = [
        point | {"update": min(point["update"], 4)}
        for point in stopped["points"]
        if point["update"] == 0 or point["how"] == "greedy"
    ]
    runs = [*RUNS, stopped]
    assert curve(runs, "gigpo-ppo", "greedy", "10")[8] == [0.9, 0.7, 0.1]
    assert curve(runs, "gigpo-ppo", "sampled", "10") == {0: [0, 0, 0], 8: [0.9, 0.7]}
    assert "| 57% (10% to 90%) | 80% (70% to 90%) |" in table(runs)
    assert "| 3, 1 of them stopped |" in table(runs)


def test_tasks_of_one_kind_are_told_as_they_are():
    runs = [
        {**run, "points": [{**point, "by": {"all": point["by"]["10"]}} for point in run["points"]]}
        for run in RUNS
    ]
    assert table(runs).splitlines()[0] == (
        "| credit | loss | by step | greedy | sampled | sampled, while training | seeds |"
    )
    assert "| `gigpo` | `ppo` | yes | 80% (70% to 90%) | 80% (70% to 90%) | 0% (0% to 0%) | 2 |" in table(
        runs
    )
    assert len({line.count("|") for line in table(runs).splitlines()}) == 1
    assert svg(runs).count("<polyline") == 2 * 2


def test_picture_has_a_line_and_a_band_for_each_combination_in_each_panel():
    picture = svg(RUNS)
    assert picture.count("<polyline") == picture.count("<polygon") == 2 * 2 * 2
    assert "grpo, ppo" in picture and "gigpo, ppo" in picture


def test_successes_are_counted_by_length_update_and_how_they_were_sampled(tmp_path):
    told = {
        "lake-u00003-g000-m00": (6, 1.0),
        "lake-u00003r1-g000-m00": (6, 0.0),
        "lake-u00003-g001-m00": (10, 1.0),
        "lake-eval-before-greedy-v00000-0000": (6, 1.0),
        "lake-eval-after-sampled-v00004-0000": (10, None),  # no reward: no success, but a rollout
        "lake-eval-between-v00002-0001": (10, 1.0),
        "lake-eval-between-v00004-0000": (10, 1.0),
        "lake-eval-after-greedy-v00004-0000": (10, 0.0),  # the same task and policy: counted once
        "expert-abc-00001": (6, 1.0),
    }
    with FileStore(tmp_path / "store.duckdb") as store:
        for name, (shortest, _) in told.items():
            store.enqueue([Rollout(name, task={"task_id": name[-4:], "shortest": shortest})])
        for rollout in store.claim(worker="w", limit=len(told)):
            store.finish(rollout.rollout_id, rollout.attempt)
        given = [Reward(name, value) for name, (_, value) in told.items() if value is not None]
        store.put_rewards(given)
        points = points_of(store)
    assert points == [
        {"update": 0, "how": "greedy", "by": {"6": [1, 1]}},
        {"update": 2, "how": "greedy", "by": {"10": [1, 1]}},
        {"update": 3, "how": "train", "by": {"6": [1, 2], "10": [1, 1]}},
        {"update": 4, "how": "greedy", "by": {"10": [1, 1]}},
        {"update": 4, "how": "sampled", "by": {"10": [0, 1]}},
    ]


def test_a_finished_run_is_not_run_again(tmp_path):
    assert not is_done(tmp_path, "grpo-ppo", 0) and read_runs(tmp_path) == []
    (tmp_path / "grpo-ppo-0.json").write_text(json.dumps(RUNS[0]))
    (tmp_path / "grpo-ppo-1.part").write_text("{")
    assert is_done(tmp_path, "grpo-ppo", 0) and not is_done(tmp_path, "grpo-ppo", 1)
    assert read_runs(tmp_path) == [RUNS[0]]
