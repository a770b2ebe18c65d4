import json
from pathlib import Path

import pytest

from spangrad.errors import ConfigError
from spangrad.trainer.config import EvalConfig
from spangrad.trainer.demo import DemoOptions, measured_by, prepare
from spangrad.trainer.policies.warm_start import cache_name

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_every_seed_is_measured_on_held_out_tasks_of_its_own(tmp_path):
    seeds = []
    for seed in (0, 1, 2):
        prepared = prepare(
            DemoOptions(example=str(EXAMPLES / "01_text_to_sql"), folder=str(tmp_path), seed=seed)
        )
        assert prepared.config.run.seed == seed
        seeds.append(prepared.config.eval.seed)
    assert seeds == [EvalConfig().seed + seed for seed in (0, 1, 2)]


def test_report_says_where_the_cloning_curve_comes_from():
    curve = {
        "seed": 0,
        "schedule": "cosine",
        "date": "2026-11-29",
        "command": "make bench-demo",
        "points": [],
    }
    assert measured_by(curve) == "`make bench-demo`, date 2026-11-29, seed 0, schedule cosine"
    assert measured_by({"points": []}) == ""


def test_the_committed_cloning_curve_says_how_it_was_measured():
    curve = json.loads((EXAMPLES / "01_text_to_sql" / "cloning_curve.json").read_text())
    assert set(curve) == {"command", "date", "seed", "schedule", "points"}


LAKE = str(EXAMPLES / "05_frozen_lake")


def test_changes_are_of_training_alone_and_leave_the_warm_start_as_it_is(tmp_path):
    changes = ["credit.gamma=0.5", "learner.lr=0.1", "rollout.group_size=2"]
    plain = prepare(DemoOptions(example=LAKE, folder=str(tmp_path)))
    changed = prepare(DemoOptions(example=LAKE, folder=str(tmp_path), changes=changes))
    assert (changed.config.credit.gamma, changed.config.learner.lr) == (0.5, 0.1)
    assert changed.config.rollout.group_size == 2
    assert changed.config.eval == plain.config.eval
    assert plain.config == plain.unchanged
    names = {cache_name(found.warm, found.unchanged, 0) for found in (plain, changed)}
    assert names == {cache_name(plain.warm, plain.config, 0)}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("hub.url=http://elsewhere", "itself"),
        ("serving.model=mine", "itself"),
        ("run.seed=3", "itself"),
        ("run.sed=3", "did you mean 'seed'"),
        ("warm_start.steps=3", "unknown section 'warm_start'"),
        ("learner.lr", "expected section.key=value"),
    ],
)
def test_changes_that_a_demo_can_not_follow_are_refused(tmp_path, change, reason):
    with pytest.raises(ConfigError, match=reason):
        prepare(DemoOptions(example=LAKE, folder=str(tmp_path), changes=[change]))


def test_the_engine_is_asked_for_no_longer_conversations_than_the_policy_was_made_for(tmp_path):
    prepared = prepare(DemoOptions(example=LAKE, folder=str(tmp_path)))
    assert prepared.stack.config.max_model_len == prepared.warm.max_length == 128
