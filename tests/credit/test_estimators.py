"""Every estimator against its published numbers and its slow reference."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from spangrad.credit.gigpo import NO_ANCHOR, gigpo, gigpo_as_published, step_advantages
from spangrad.credit.groups import Floats, Ints
from spangrad.credit.grpo import dr_grpo, group_advantages, grpo
from spangrad.credit.returns import discounted_returns
from spangrad.credit.rloo import rloo
from spangrad.errors import CreditError
from tests.reference import estimators as reference

ONE_GROUP = np.zeros(5, dtype=np.int64)
RETURNS = np.array([1.0, 0.0, 0.0, 1.0, 0.0])


def floats(*values: float) -> Floats:
    return np.array(values, dtype=np.float64)


def ints(*values: int) -> Ints:
    return np.array(values, dtype=np.int64)


def test_grpo_gives_the_golden_numbers_with_the_sample_standard_deviation():
    # mean .4, sample std sqrt((2 * .36 + 3 * .16) / 4) = .547723; .6 / .547724 = 1.095443
    expected = [1.095443, -0.730295, -0.730295, 1.095443, -0.730295]
    assert_allclose(grpo(RETURNS, ONE_GROUP, ddof=1, eps=1e-6), expected, atol=5e-7)


def test_grpo_gives_the_golden_numbers_with_the_population_standard_deviation():
    expected = [1.224742, -0.816495, -0.816495, 1.224742, -0.816495]
    assert_allclose(grpo(RETURNS, ONE_GROUP, ddof=0, eps=1e-6), expected, atol=5e-7)


def test_dr_grpo_gives_the_golden_numbers():
    assert_allclose(dr_grpo(RETURNS, ONE_GROUP), [0.6, -0.4, -0.4, 0.6, -0.4])


def test_rloo_gives_the_golden_numbers():
    assert_allclose(rloo(RETURNS, ONE_GROUP), [0.75, -0.5, -0.5, 0.75, -0.5])


# GiGPO's example: rollout A goes s0, s1 and is paid 10 at the end; B goes s0, s1, s1, s2 for nothing.
EXAMPLE: dict[str, Any] = {
    "returns_N": floats(10, 0),
    "group_ids_N": ints(0, 0),
    "step_returns_S": floats(9.5, 10, 0, 0, 0, 0),
    "rollout_index_S": ints(0, 0, 1, 1, 1, 1),
    "anchor_ids_S": ints(0, 1, 0, 1, 1, 2),
}
EPISODE = 0.707107  # (10 - 5) / sample std of [10, 0]
STEP_S0 = 0.707107  # (9.5 - 4.75) / sample std of [9.5, 0]
STEP_S1 = 1.154700  # (10 - 3.33) / sample std of [10, 0, 0]


def test_gigpo_returns_of_the_golden_example():
    assert_allclose(discounted_returns(floats(0, 10), 0.95), [9.5, 10])


def test_gigpo_step_term_gives_the_golden_numbers():
    steps = step_advantages(EXAMPLE["step_returns_S"], ints(*[0] * 6), EXAMPLE["anchor_ids_S"], ddof=1)
    assert_allclose(steps, [STEP_S0, STEP_S1, -STEP_S0, -0.577350, -0.577350, 0.0], atol=1e-6)


def test_gigpo_gives_the_golden_numbers_with_statistics_over_rollouts():
    expected = [
        EPISODE + STEP_S0,
        EPISODE + STEP_S1,
        -EPISODE - STEP_S0,
        -EPISODE - 0.577350,
        -EPISODE - 0.577350,
        -EPISODE,
    ]
    assert_allclose(gigpo(**EXAMPLE, ddof=1), expected, atol=1e-6)


def test_gigpo_as_published_gives_the_golden_numbers_with_statistics_over_steps():
    steps = [STEP_S0, STEP_S1, -STEP_S0, -0.577350, -0.577350, 0.0]
    episode = [1.290994, 1.290994, -0.645497, -0.645497, -0.645497, -0.645497]
    assert_allclose(gigpo_as_published(**EXAMPLE), np.add(episode, steps), atol=2e-6)


def test_gigpo_as_published_keeps_the_raw_return_of_a_singleton():
    alone: dict[str, Any] = {
        "returns_N": floats(3),
        "group_ids_N": ints(0),
        "step_returns_S": floats(3),
        "rollout_index_S": ints(0),
        "anchor_ids_S": ints(0),
    }
    assert gigpo_as_published(**alone).tolist() == [3.0]
    assert gigpo(**alone).tolist() == [0.0]


def test_gigpo_step_weight_scales_the_step_term_alone():
    doubled = gigpo(**EXAMPLE, step_weight=2.0, ddof=1)
    once = gigpo(**EXAMPLE, ddof=1)
    assert_allclose(gigpo(**EXAMPLE, step_weight=0.0, ddof=1), 2 * once - doubled)


def test_a_step_without_an_anchor_gets_no_step_credit():
    advantages = step_advantages(floats(5, 1, 3), ints(0, 0, 0), ints(NO_ANCHOR, NO_ANCHOR, 0))
    assert advantages.tolist() == [0, 0, 0]


def test_anchors_of_different_groups_are_never_pooled():
    advantages = step_advantages(floats(5, 1), ints(0, 1), ints(0, 0))
    assert advantages.tolist() == [0, 0]


@pytest.mark.parametrize("estimator", [grpo, dr_grpo, rloo])
def test_a_lone_rollout_and_a_group_of_equals_get_exact_zeros(estimator):
    advantages = estimator(floats(2.0, 0.1, 0.1, 0.1), ints(7, 3, 3, 3))
    assert advantages.tolist() == [0, 0, 0, 0]


def test_a_lone_rollout_keeps_its_raw_return_if_asked():
    assert group_advantages(floats(2.0, 1.0, 3.0), ints(0, 1, 1), singleton="raw").tolist() == [
        2.0,
        -1.0,
        1.0,
    ]


@pytest.mark.parametrize("estimator", [grpo, dr_grpo, rloo])
def test_a_return_that_is_not_finite_is_an_error(estimator):
    with pytest.raises(CreditError, match="nan"):
        estimator(floats(1.0, float("nan")), ints(0, 0))
    with pytest.raises(CreditError, match=r"value 1 is -1e\+308; expected a finite number of size 1e\+100"):
        estimator(floats(1.0, -1e308), ints(0, 0))


@pytest.mark.parametrize("method", [gigpo, gigpo_as_published])
@pytest.mark.parametrize("wrong", [2, -1])
def test_a_step_of_an_unknown_rollout_is_an_error(method, wrong):
    index = EXAMPLE["rollout_index_S"].copy()
    index[3] = wrong
    message = f"step 3 is of rollout {wrong}; expected 0 to {len(EXAMPLE['returns_N']) - 1}"
    with pytest.raises(CreditError, match=message):
        method(**EXAMPLE | {"rollout_index_S": index})


def test_shapes_that_differ_are_an_error():
    with pytest.raises(CreditError, match="shape"):
        grpo(floats(1.0, 2.0), ints(0))


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("length", [0, 1, 2, 7])
def test_discounted_returns_agree_with_the_sum_of_each_step(gamma, length):
    rewards = [(-1.5) ** t for t in range(length)]
    assert_allclose(
        discounted_returns(np.array(rewards), gamma), reference.discounted_returns(rewards, gamma), rtol=1e-12
    )


@pytest.mark.parametrize("gamma", [-0.1, 1.1])
def test_gamma_outside_its_range_is_an_error(gamma):
    with pytest.raises(CreditError, match="gamma"):
        discounted_returns(floats(1.0), gamma)


scores = st.sampled_from([0.0, 1.0, 0.1, 0.3, -2.5, 1e3])
grouped = st.lists(st.tuples(scores, st.integers(0, 3)), min_size=1, max_size=20)


@given(grouped, st.booleans(), st.sampled_from([0, 1]))
def test_group_advantages_agree_with_the_reference_and_sum_to_zero(members, scale, ddof):
    returns, groups = [m[0] for m in members], [m[1] for m in members]
    fast = group_advantages(np.array(returns), np.array(groups), scale_by_std=scale, ddof=ddof)
    slow = reference.group_advantages(returns, groups, scale_by_std=scale, ddof=ddof, eps=0.0)
    assert_allclose(fast, slow, rtol=1e-9, atol=1e-9)
    for group in set(groups):
        assert abs(fast[np.array(groups) == group].sum()) < 1e-8


@given(grouped)
def test_rloo_agrees_with_the_reference_and_sums_to_zero(members):
    returns, groups = [m[0] for m in members], [m[1] for m in members]
    fast = rloo(np.array(returns), np.array(groups))
    assert_allclose(fast, reference.rloo(returns, groups), rtol=1e-9, atol=1e-9)
    for group in set(groups):
        assert abs(fast[np.array(groups) == group].sum()) < 1e-8


step = st.tuples(scores, st.sampled_from(["a", "b", "c", None]))
rollout = st.tuples(st.integers(0, 1), st.lists(step, min_size=1, max_size=5))


@given(st.lists(rollout, min_size=1, max_size=6), st.booleans(), st.sampled_from([0, 1]))
def test_gigpo_agrees_with_the_reference(rollouts, scale, ddof):
    groups = [group for group, _ in rollouts]
    rewards = [[reward for reward, _ in steps] for _, steps in rollouts]
    anchors = [[anchor for _, anchor in steps] for _, steps in rollouts]
    gamma = 0.5  # exact in binary, so that equal returns are equal whichever way they are summed
    slow = reference.gigpo(
        rewards, anchors, groups, gamma=gamma, step_weight=1.0, scale_by_std=scale, ddof=ddof, eps=1e-6
    )
    names = {"a": 0, "b": 1, "c": 2, None: NO_ANCHOR}
    fast = gigpo(
        np.array([np.sum(r) for r in rewards]),
        np.array(groups),
        np.concatenate([discounted_returns(np.array(r), gamma) for r in rewards]),
        np.repeat(np.arange(len(rewards)), [len(r) for r in rewards]),
        np.array([names[anchor] for row in anchors for anchor in row]),
        scale_by_std=scale,
        ddof=ddof,
        eps=1e-6,
    )
    assert_allclose(fast, np.concatenate(slow), rtol=1e-6, atol=1e-6)
