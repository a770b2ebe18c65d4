"""Terms that hold rewards against a critic's values, and where the values come from and go to."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from spangrad.credit.assign import assign
from spangrad.credit.credit_config import CreditConfig
from spangrad.credit.gae import gae_steps, gae_trajectories
from spangrad.credit.pipeline import credited_rows
from spangrad.credit.transition import Transition
from spangrad.credit.types import Step, Trajectory
from spangrad.errors import ConfigError, CreditError
from spangrad.store.file_store import FileStore
from tests.credit.test_pipeline import filled
from tests.reference import estimators as reference

GAE = CreditConfig(episode="none", step="gae", gamma=0.99)
BASELINE = CreditConfig(episode="value_baseline")

rewards_of_rollouts = st.lists(
    st.lists(st.sampled_from([0.0, 1.0, -0.5, 0.25]), min_size=1, max_size=6), max_size=5
)
shares = st.sampled_from([0.0, 0.5, 1.0])


def rollout(name: str, rewards: Sequence[float], values: Sequence[float | None], **more: Any) -> Trajectory:
    """The last reward is the outcome."""
    steps = [Step(f"{name}{t}", t, reward=r) for t, r in enumerate([*rewards[:-1], None])]
    return Trajectory(name, None, rewards[-1], steps, values=values, **more)


def given_to(found: Trajectory, config: CreditConfig) -> list[float]:
    return list(assign([found], config).of(found.rollout_id).values())


def test_gae_gives_the_golden_numbers_to_a_rollout_without_a_group():
    found = assign([rollout("a", [0.0, 0.0, 1.0], [0.3, 0.5, 0.6, 9.0])], GAE)
    assert_allclose(list(found.of("a").values()), [0.596306, 0.4504, 0.4], atol=1e-6)
    # Value and advantage: .3 + .596306, ...
    assert_allclose(list(found.value_targets.values()), [0.896306, 0.9504, 1.0], atol=1e-6)
    assert found.diagnostics.metrics()["dropped/missing_value"] == 0


def test_a_rollout_that_was_cut_off_goes_on_with_the_value_behind_its_last_step():
    ended = rollout("a", [0.0, 0.0], [0.5, 0.6, 0.7])
    cut = replace(ended, is_truncated=True)
    assert_allclose(given_to(ended, GAE)[-1], -0.6)
    assert_allclose(given_to(cut, GAE)[-1], 0.99 * 0.7 - 0.6)
    assert given_to(ended, BASELINE) == [-0.5, -0.5]
    assert_allclose(given_to(cut, BASELINE), [0.7 - 0.5] * 2)


@given(rewards_of_rollouts, shares, shares, st.booleans())
def test_gae_of_many_rollouts_is_that_of_each_and_agrees_with_the_sums(rows, gamma, lam, is_truncated):
    values = [[0.3 * (t % 3) - 0.1 * i for t in range(len(row) + 1)] for i, row in enumerate(rows)]
    batch = [
        rollout(f"r{i}", rewards, said, is_truncated=is_truncated)
        for i, (rewards, said) in enumerate(zip(rows, values, strict=True))
    ]
    config = CreditConfig(episode="none", step="gae", gamma=gamma, **({"gae_lambda": lam} if gamma else {}))
    found = assign(batch, config)
    for one, rewards, said in zip(batch, rows, values, strict=True):
        behind = said[-1] if is_truncated else 0.0
        own = list(found.of(one.rollout_id).values())
        each = gae_steps(np.array(rewards), np.array(said[:-1]), gamma=gamma, lam=lam, bootstrap=behind)
        assert_allclose(own, each, atol=1e-12)
        paid = [*rewards[:-1], rewards[-1] + gamma * behind]
        assert_allclose(own, reference.gae(paid, said[:-1], gamma, lam), atol=1e-12)


def test_gae_of_no_rollout_is_empty():
    none = np.zeros(0)
    assert gae_trajectories(none, none, none, np.zeros(0, np.int64), gamma=1.0, lam=1.0).shape == (0,)
    assert assign([], GAE).advantages == {}


@given(st.lists(st.sampled_from([0.0, 1.0, -0.5]), min_size=2, max_size=6), shares, shares, st.data())
def test_a_critic_that_knows_what_comes_finds_no_surprise_wherever_a_rollout_is_cut(
    rewards, gamma, lam, data
):
    """V(s_t) = G_t: no advantage, and the targets are the values."""
    values = [*reference.discounted_returns(rewards, gamma), 0.0]
    cut = data.draw(st.integers(1, len(rewards)))
    config = CreditConfig(episode="none", step="gae", gamma=gamma, **({"gae_lambda": lam} if gamma else {}))
    found = assign(
        [
            rollout("whole", rewards, values),
            rollout("cut", rewards[:cut], values[: cut + 1], is_truncated=True),
        ],
        config,
    )
    assert_allclose([*found.of("whole").values(), *found.of("cut").values()], 0.0, atol=1e-12)
    assert_allclose(list(found.value_targets.values()), [*values[:-1], *values[:cut]], atol=1e-12)


@given(rewards_of_rollouts, st.booleans())
def test_the_value_baseline_is_gae_of_the_first_step_that_trusts_returns_alone(rows, is_truncated):
    batch = [
        rollout(
            f"r{i}", rewards, [0.3 * t - 0.2 * i for t in range(len(rewards) + 1)], is_truncated=is_truncated
        )
        for i, rewards in enumerate(rows)
    ]
    whole, steps = assign(batch, BASELINE), assign(batch, replace(GAE, gamma=1.0, gae_lambda=1.0))
    for one in batch:
        first = next(iter(steps.of(one.rollout_id).values()))
        assert_allclose(list(whole.of(one.rollout_id).values()), first, atol=1e-12)
    assert whole.value_targets == pytest.approx(steps.value_targets)


def test_equal_rewards_say_something_where_they_were_not_expected():
    batch = [replace(rollout(name, [1.0], [v, 0.0]), group_id="g") for name, v in (("a", 0.2), ("b", 0.8))]
    found = assign(batch, replace(GAE, episode="grpo"))
    assert_allclose([*found.of("a").values(), *found.of("b").values()], [0.8, 0.2])
    assert found.diagnostics.informative_groups == 1


@pytest.mark.parametrize("config", [GAE, BASELINE])
def test_a_missing_value_leaves_the_rollout_out_and_is_counted(config):
    known = rollout("a", [0.0, 1.0], [0.1, 0.2, None])
    found = assign([known, rollout("b", [0.0, 1.0], [0.1, None, 0.0])], config)
    assert len(found.of("a")) == 2 and found.of("b") == {}
    assert found.left_out["b"].startswith("the value of a state is missing")
    assert found.diagnostics.metrics()["dropped/missing_value"] == 1
    assert {name for name, _ in found.value_targets} == {"a"}
    assert "a" in assign([replace(known, is_truncated=True), replace(known, rollout_id="b")], config).left_out


@pytest.mark.parametrize("values", [[0.1], [0.1, 0.2], [0.1, float("nan"), 0.0]])
def test_values_that_fit_no_states_are_refused(values):
    with pytest.raises(CreditError, match=r"rollout 'a' has values .*; expected 3 finite numbers or None"):
        assign([rollout("a", [0.0, 1.0], values)], GAE)


def test_without_a_critic_the_batch_is_refused_and_a_potential_is_too():
    with pytest.raises(CreditError, match=r"no rollout has values of its states, .* training run's critic"):
        assign([Trajectory("a", None, 1.0, [Step("c", 0)])], GAE)
    with pytest.raises(ConfigError, match="adds nothing to step 'gae'"):
        replace(GAE, shaping="potential", scores="reward:p")
    with pytest.raises(ConfigError, match="filter 'zero_spread' has no effect with step 'gae'"):
        replace(GAE, filters=("zero_spread",))


# --- from the critic to the rows -----------------------------------------------------------------


@pytest.fixture
def store(tmp_path):
    with FileStore(tmp_path / "store.duckdb") as opened:
        yield opened


def by_length(rows: Sequence[Transition]) -> list[list[float]]:
    """A critic to which a call is worth a tenth of the tokens before it."""
    return [[segment.start / 10 for segment in row.segments] for row in rows]


def test_the_critic_is_asked_about_every_call_and_the_rows_tell_what_it_should_have_said(store):
    config = replace(GAE, gamma=1.0, gae_lambda=0.5)
    batch = credited_rows(store, filled(store, {"a": 1.0}), config, critic=by_length)
    (row,) = batch.rows
    first, second = row.segments
    assert (first.value, second.value) == (0.2, 0.5)  # 2 and 5 tokens are before them
    # 1 - .5; .5 - .2 + .5 * .5
    assert row.advantages[row.action_mask].tolist() == pytest.approx([0.55, 0.55, 0.5])
    assert (first.value_target, second.value_target) == pytest.approx((0.75, 1.0))
    plain = credited_rows(
        store, store.rollouts(run_id="run"), CreditConfig(singleton="raw"), critic=by_length
    )
    assert {segment.value for row in plain.rows for segment in row.segments} == {None}  # nobody was asked


def test_the_value_behind_a_rollout_that_was_cut_off_is_that_before_its_last_call(store):
    (ended,) = filled(store, {"a": 0.0})
    cut = replace(ended, output={"truncated": True})
    (row,) = credited_rows(store, [cut], replace(GAE, gamma=1.0, gae_lambda=0.0), critic=by_length).rows
    assert row.advantages[row.action_mask].tolist() == pytest.approx([0.3, 0.3, 0.0])


def test_a_call_without_ids_has_no_value_and_its_rollout_is_counted(store):
    filled(store, {"a": 1.0}, exact=False)
    batch = credited_rows(store, store.rollouts(run_id="run"), GAE, critic=by_length)
    assert (batch.rows, batch.diagnostics["dropped/missing_value"]) == ([], 1.0)
    with pytest.raises(CreditError, match="no rollout has values"):
        credited_rows(store, store.rollouts(run_id="run"), GAE)
