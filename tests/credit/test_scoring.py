"""Scores of states: what shaping and `turn_credit` make of them, and where they come from."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from spangrad.credit.assign import assign
from spangrad.credit.credit_config import CreditConfig
from spangrad.credit.information_gain import answer_potentials
from spangrad.credit.pipeline import credited_rows
from spangrad.credit.turns import turn_credit
from spangrad.credit.types import Step, Trajectory
from spangrad.errors import ConfigError, CreditError
from spangrad.store.file_store import FileStore
from spangrad.store.records import Reward, RewardAuthor
from tests.credit.test_estimators import floats
from tests.credit.test_pipeline import filled

TO_GO: dict[str, Any] = {"episode": "none", "step": "leave_one_out_to_go", "scores": "reward:p"}


def rollout(name: str, reward: float, states: str, scores: Sequence[float | None], **more: Any) -> Trajectory:
    """Goes through the states; the last one is behind its last step."""
    steps = [Step(f"{name}{t}", t, anchor=state) for t, state in enumerate(states[:-1])]
    return Trajectory(name, "g", reward, steps, scores=scores, **more)


def test_a_potential_gives_every_step_the_return_less_the_potential_of_its_state():
    batch = [rollout("a", 1.0, "st_", [0.2, 0.6, 0.9]), rollout("b", 0.0, "sv_", [0.2, 0.1, 0.9])]
    found = assign(batch, CreditConfig(**TO_GO, shaping="potential", gamma=1.0))
    # At t: 1 - 0.6 against 0 - 0.1; what was scored behind the last step is the end, and 0.
    assert_allclose(list(found.of("a").values()), [1.0, 0.5])
    assert_allclose(list(found.of("b").values()), [-1.0, -0.5])
    half = assign(batch, CreditConfig(**TO_GO, shaping="potential", shaping_weight=0.5, gamma=1.0))
    assert_allclose(list(half.of("a").values()), [1.0, 0.75])


def test_a_rollout_that_was_cut_off_keeps_the_potential_of_its_last_state():
    ended = [rollout("a", 0.0, "s_", [0.0, 0.5]), rollout("b", 1.0, "s_", [0.0, 0.0])]
    cut = [dataclasses.replace(ended[0], is_truncated=True), ended[1]]
    config = CreditConfig(**TO_GO, shaping="potential", gamma=1.0)
    assert assign(ended, config).of("a") == {"a0": -1.0}
    assert assign(cut, config).of("a") == {"a0": -0.5}


potentials = st.lists(st.floats(-5, 5), min_size=4, max_size=4)


@settings(max_examples=30)
@given(st.lists(st.tuples(st.sampled_from([0.0, 1.0]), potentials), min_size=2, max_size=4), st.floats(0, 1))
def test_a_potential_changes_no_rollout_as_a_whole(members, gamma):
    batch = [rollout(f"r{n}", reward, "stv_", [0.3, *phi[1:]]) for n, (reward, phi) in enumerate(members)]
    plain = CreditConfig(step="leave_one_out_to_go", gamma=gamma)
    shaped = dataclasses.replace(plain, scores="reward:p", shaping="potential")
    before, after = assign(batch, plain), assign(batch, shaped)
    for each in batch:  # all began alike: the first step, which has the whole return, keeps its advantage
        name = each.steps[0].call_id
        assert after.of(each.rollout_id)[name] == pytest.approx(before.of(each.rollout_id)[name], abs=1e-9)
    assert before.diagnostics.informative_groups == after.diagnostics.informative_groups
    if not before.diagnostics.informative_groups:
        assert set(after.advantages.values()) == {0.0}


def test_gains_of_a_score_add_up_to_how_far_the_agent_came():
    batch = [rollout("a", 0.0, "st_", [0.2, 0.4, 0.9]), rollout("b", 0.0, "sv_", [0.2, 0.2, 0.2])]
    found = assign(batch, CreditConfig(scores="reward:p", shaping="score_gain", scale_by_std=False))
    assert_allclose(list(found.of("a").values()), [0.35, 0.35])  # 0.7 against 0
    assert found.diagnostics.metrics()["shaping/passes"] == 1.0


@pytest.mark.parametrize(
    "changed",
    [
        {"scores": "reward:p", "shaping": "score_gain"},
        {"overlong": "penalize", "overlong_limit": 4, "overlong_buffer": 4},
    ],
)
def test_rewards_are_told_as_they_were_scored(changed):
    batch = [rollout("a", 1.0, "st_", [0.0, 4.0, 8.0]), rollout("b", 0.0, "sv_", [0.0, 0.0, 0.0])]
    batch = [
        dataclasses.replace(one, steps=[dataclasses.replace(step, tokens=2) for step in one.steps])
        for one in batch
    ]
    result = assign(batch, CreditConfig(**changed, scale_by_std=False))
    told = {k: value for k, value in result.diagnostics.metrics().items() if k.startswith("reward/")}
    assert told == {"reward/mean": 0.5, "reward/std": 0.5, "reward/std_in_groups": 0.5}
    plain = assign(batch, CreditConfig(scale_by_std=False)).advantages
    assert (result.advantages == plain) == (changed.get("overlong") is not None)  # both are as long


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"step": "turn_credit", "shaping": "terms"}, "'turn_credit' for scores of states"),
        ({"episode": "none", "step": "turn_credit", "shaping": "score_gain"}, "does not take"),
        ({"episode": "gdpo", "step": "turn_credit", "shaping": "score_gain"}, "does not take"),
        (
            {"episode": "gdpo", "step": "gigpo", "step_weight": 0.0, "shaping": "score_gain"},
            "step 'gigpo' and step_weight 0 does not take",
        ),
        ({"shaping": "score_gain", "scores": "nowhere"}, "scores is 'nowhere'; expected"),
        ({"shaping": "score_gain", "scores": "reward:"}, "scores is 'reward:'; expected"),
        ({"shaping": "score_gain", "scores": ""}, "scores is ''; expected"),
    ],
)
def test_shaping_that_no_term_counts_is_refused(settings, says):
    with pytest.raises(ConfigError, match=says):
        CreditConfig(**{"scores": "reward:p", **settings})


def test_a_penalty_that_no_term_counts_is_refused():
    settings: dict[str, Any] = {
        "overlong": "penalize",
        "overlong_limit": 4,
        "overlong_buffer": 4,
        "scores": "reward:p",
    }
    CreditConfig(step="turn_credit", **settings)
    with pytest.raises(ConfigError, match="'turn_credit' does not count; choose 'mask'"):
        CreditConfig(episode="none", step="turn_credit", **settings)


def test_the_test_of_circles_is_kept_with_the_batch():
    circle = rollout("a", 0.0, "stst_", [0.5, 0.5, 0.5, 0.0])
    config = CreditConfig(scores="reward:p", shaping="terms", shaping_weight=2.0)
    found = assign([circle, rollout("b", 0.0, "uv_", [9.0, 9.0])], config).diagnostics.metrics()
    # s to s and t to t: 2 * (0.5 + 0.5) each
    assert (found["shaping/farming_gain"], found["shaping/cycles"], found["shaping/passes"]) == (
        2.0,
        2.0,
        0.0,
    )
    costs = dataclasses.replace(circle, rollout_id="c", scores=[-0.5] * 4)
    found = assign([costs], config).diagnostics.metrics()
    assert (found["shaping/farming_gain"], found["shaping/passes"]) == (-2.0, 1.0)
    for batch in ([costs, circle], [circle, costs]):  # the best circle counts
        found = assign(batch, config).diagnostics.metrics()
        assert (found["shaping/farming_gain"], found["shaping/cycles"]) == (2.0, 4.0)
    potential = CreditConfig(**TO_GO, shaping="potential")
    assert (
        "shaping/passes" not in assign([rollout("a", 0.0, "st_", [1.0] * 3)], potential).diagnostics.metrics()
    )


def test_turn_credit_is_added_to_the_episode_term():
    scores = [0.2, 0.2, 0.7, 0.6]
    batch = [rollout("a", 1.0, "abcd_", [None, *scores]), rollout("b", 0.0, "ab_", [None, None, 0.5])]
    config = CreditConfig(step="turn_credit", scores="reward:p", gamma=0.8, step_weight=2.0)
    found = assign(batch, config)
    golden = np.array([0.113803, 0.142254, 0.177818, -0.033875])
    assert_allclose(list(found.of("a").values()), 1.0 + 2.0 * golden, atol=3e-6)
    assert_allclose(list(found.of("b").values()), [-1.0, -1.0], atol=3e-6)  # the only score that b has
    assert_allclose(turn_credit(floats(*scores), gamma=0.8), golden, atol=1e-6)


def test_turn_credit_counts_what_the_first_step_changed():
    batch = [rollout("a", 1.0, "ab_", [0.25, 0.75, 1.0]), rollout("b", 1.0, "a_", [0.5, 0.0])]
    config = CreditConfig(episode="none", step="turn_credit", scores="reward:p", gamma=0.0)
    found = assign(batch, config)
    assert (found.of("a"), found.of("b")) == ({"a0": 0.5, "a1": 0.25}, {"b0": -0.5})


def test_a_missing_score_leaves_the_rollout_out_and_is_counted():
    batch = [rollout("a", 1.0, "s_", [0.0, 0.5]), rollout("b", 0.0, "s_", [0.0, None])]
    batch.append(dataclasses.replace(batch[0], rollout_id="c", scores=None))
    found = assign(batch, CreditConfig(**TO_GO, shaping="potential"))
    assert found.left_out == dict.fromkeys("bc", "the score of a state is missing")
    assert found.diagnostics.metrics()["dropped/missing_score"] == 2


@pytest.mark.parametrize("scores", [[0.0], [0.0, 1.0, 2.0], [0.0, float("nan")]])
def test_scores_that_fit_no_states_are_refused(scores):
    with pytest.raises(CreditError, match=r"rollout 'a' has scores .* from 'reward:p'; expected 2 finite"):
        assign([rollout("a", 1.0, "s_", scores)], CreditConfig(**TO_GO, shaping="potential"))


def test_answer_potentials_are_log_ratios_over_all_forms_of_the_answer():
    found = answer_potentials(np.log([[0.1, 0.2, 0.5], [0.1, 0.2, 0.3]]))
    assert_allclose(found, np.log([1.0, 2.0, 4.0]), atol=1e-12)
    wrongs: list[Any] = [[[0.1]], [[-np.inf]], [[np.nan]], [[]], [-1.0]]
    for wrong in wrongs:
        with pytest.raises(CreditError, match="logprobs of the answer"):
            answer_potentials(np.array(wrong))


@pytest.fixture
def store(tmp_path):
    with FileStore(tmp_path / "store.duckdb") as opened:
        yield opened


def test_a_function_or_rewards_of_steps_give_the_scores(store, tmp_path):
    rollouts = filled(store, {"good": 1.0, "bad": 0.0})
    (tmp_path / "score.py").write_text(
        "def progress(task, calls):\n"
        "    assert task is None\n"
        "    return [0.0] + [call.prompt_token_ids[-1] / 10 for call in calls]\n"
    )
    config = CreditConfig(**TO_GO, shaping="score_gain", gamma=1.0)
    by_function = dataclasses.replace(config, scores="score.py:progress")
    batch = credited_rows(store, rollouts, by_function, base_dir=str(tmp_path))
    given = {row.rollout_id: row.advantages[row.action_mask].tolist() for row in batch.rows}
    # Both gain 0.2 and then 0.3, good the reward besides.
    assert_allclose(given["good"], [1.0, 1.0, 1.0])
    calls = {(call.rollout_id, call.start_ns): call.call_id for call in batch.calls}
    told = {("good", 10): 0.5, ("good", 11): 0.5, ("bad", 10): 0.0, ("bad", 11): 1.0}
    store.put_rewards(
        [Reward(place[0], value, "p", call_id=calls[place]) for place, value in told.items()],
        author=RewardAuthor.EVALUATOR,
    )
    batch = credited_rows(store, rollouts, config)
    given = {row.rollout_id: row.advantages[row.action_mask].tolist() for row in batch.rows}
    # good: 1.5, 1; bad: 1, 1
    assert_allclose(given["good"], [0.5, 0.5, 0.0])
    store.put_rewards(
        [Reward("bad", float("0"), "p", call_id="gone")], author=RewardAuthor.EVALUATOR
    )  # of a call that is none
    assert len(credited_rows(store, rollouts, config).rows) == 2
    with pytest.raises(ConfigError, match="does not exist"):
        credited_rows(
            store, rollouts, dataclasses.replace(config, scores="none.py:f"), base_dir=str(tmp_path)
        )


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "calls[9]",
            r"can't be had for 2 calls, '[\w-]+' to '[\w-]+': IndexError: list index out of range; mend",
        ),
        ("[0.0]", r"has scores \[0.0\] from .*; expected 3 finite numbers or None for its 2 steps"),
        ("[0.0, float('nan'), 0.5]", r"nan is no finite number, at call '[\w-]+'; expected"),
        ("[0.0, 0.5, 'x']", r"'x' is no finite number, at the end; expected"),
        ("None", r"TypeError: 'NoneType'"),
    ],
)
def test_what_a_score_function_gets_wrong_is_told_with_its_place(store, tmp_path, body, message):
    rollouts = filled(store, {"good": 1.0, "bad": 0.0})
    (tmp_path / "score.py").write_text(f"def progress(task, calls):\n    return {body}\n")
    config = dataclasses.replace(CreditConfig(**TO_GO, shaping="score_gain"), scores="score.py:progress")
    with pytest.raises(CreditError, match=message) as raised:
        credited_rows(store, rollouts, config, base_dir=str(tmp_path))
    assert "'score.py:progress'" in str(raised.value) and "rollout 'good'" in str(raised.value)
    (tmp_path / "mended.py").write_text("def progress(task, calls):\n    return [0.0, 0.0, 1.0]\n")
    mended = dataclasses.replace(config, scores="mended.py:progress")
    assert len(credited_rows(store, rollouts, mended, base_dir=str(tmp_path)).rows) == 2


def test_a_reward_that_comes_after_the_update_counts_when_credit_is_given_again(store):
    rollouts = filled(store, {"good": 1.0, "bad": 0.0})
    config = CreditConfig(scale_by_std=False)
    assert credited_rows(store, rollouts, config).rows[0].advantages.max() == 0.5
    store.put_rewards([Reward("good", -1.0)], author=RewardAuthor.OPERATOR)
    again = credited_rows(store, rollouts, config)
    assert again.rows[0].advantages.min() == -0.5
    assert again.diagnostics["reward/mean"] == -0.5
