"""Estimators that compare steps, trees and shaping terms, against golden numbers, references and laws."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from spangrad.credit.filters import overlong_penalty, top_p_by_spread, top_share_by_spread, with_spread
from spangrad.credit.gae import gae_steps, gae_tokens
from spangrad.credit.gigpo import NO_ANCHOR, step_advantages
from spangrad.credit.hgpo import hgpo, hgpo_as_published
from spangrad.credit.information_gain import information_gains
from spangrad.credit.returns import discounted_returns
from spangrad.credit.roles import role_advantages
from spangrad.credit.shaping import farming_gain, potential_based
from spangrad.credit.trees import NO_PARENT, edge_advantages, node_values, tree_grpo, treerl
from spangrad.credit.turns import leave_one_out_to_go, mt_grpo, per_turn_index, turn_credit
from spangrad.errors import CreditError
from tests.credit.test_estimators import floats, ints
from tests.reference import estimators as reference

rewards_of_a_rollout = st.lists(st.sampled_from([0.0, 1.0, -0.5, 0.25]), min_size=1, max_size=6)


def flat(rows):
    return np.array([value for row in rows for value in row])


def indices(rows):
    rollouts = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    steps = np.concatenate([np.arange(len(row)) for row in rows])
    return rollouts, steps


# GAE


def test_gae_over_tokens_steps_over_observations():
    rewards, values = floats(0, 0, 0, 0, 0, 1), floats(0.2, 0.3, 0.9, 0.9, 0.4, 0.6)
    mask = np.array([1, 1, 0, 0, 1, 1], bool)
    expected = [0.691653, 0.632273, 0.5702, 0.5702, 0.5702, 0.4]
    assert_allclose(gae_tokens(rewards, values, mask, gamma=0.99, lam=0.95), expected, atol=1e-6)
    observed = [0.671723, 0.611082, 0.021353, 0.032273, 0.5702, 0.4]
    assert_allclose(gae_steps(rewards, values, gamma=0.99, lam=0.95), observed, atol=1e-6)


def test_gae_over_turns_gives_the_golden_numbers():
    advantages = gae_steps(floats(0, 0, 1), floats(0.3, 0.5, 0.6), gamma=0.99, lam=0.9)
    assert_allclose(advantages, [0.596306, 0.4504, 0.4], atol=1e-6)


def test_values_of_observations_do_not_matter_and_their_rewards_go_to_who_earned_them():
    mask = np.array([1, 0, 1, 0], bool)
    plain = gae_tokens(floats(2, 0, 3, 0), floats(0.1, 9, 0.2, 9), mask, gamma=0.9, lam=0.8)
    moved = gae_tokens(floats(0, 2, 0, 3), floats(0.1, -9, 0.2, 0), mask, gamma=0.9, lam=0.8)
    assert_allclose(plain, moved)
    assert plain[3] == 0


def test_gae_refuses_what_makes_no_sense():
    mask = np.array([0, 1], bool)
    with pytest.raises(CreditError, match="before the first"):
        gae_tokens(floats(1, 0), floats(0, 0), mask, gamma=1, lam=1)
    with pytest.raises(CreditError, match="shape"):
        gae_tokens(floats(1), floats(0, 0), mask, gamma=1, lam=1)
    with pytest.raises(CreditError, match="lam"):
        gae_steps(floats(1), floats(0), gamma=1, lam=1.5)
    with pytest.raises(CreditError, match="finite"):
        gae_steps(floats(np.inf), floats(0), gamma=1, lam=1)
    assert gae_tokens(floats(0, 0), floats(0, 0), np.zeros(2, bool), gamma=1, lam=1).tolist() == [0, 0]


@given(rewards_of_a_rollout, st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([0.0, 0.9, 1.0]))
def test_gae_agrees_with_the_sums(rewards, gamma, lam):
    values = [0.3 * (t % 3) for t in range(len(rewards))]
    fast = gae_steps(np.array(rewards), np.array(values), gamma=gamma, lam=lam)
    assert_allclose(fast, reference.gae(rewards, values, gamma, lam), atol=1e-12)
    if lam == 1.0:
        assert_allclose(fast, discounted_returns(np.array(rewards), gamma) - values, atol=1e-12)


# HGPO: the golden example of GiGPO. Rollout A goes s0, s1 and is paid 10; B goes s0, s1, s1, s2.
STEP_RETURNS = floats(9.5, 10, 0, 0, 0, 0)
ROLLOUTS, ANCHORS, SAME_GROUP = ints(0, 0, 1, 1, 1, 1), ints(0, 1, 0, 1, 1, 2), ints(0, 0, 0, 0, 0, 0)


@pytest.mark.parametrize("estimate", [hgpo, hgpo_as_published])
def test_hgpo_gives_the_golden_numbers(estimate):
    expected = [0.999999, 1.165685, -0.999999, -0.882842, -0.707106, 0]
    assert_allclose(estimate(STEP_RETURNS, SAME_GROUP, ROLLOUTS, ANCHORS, history=1), expected, atol=2e-6)


def test_hgpo_averages_an_average_step_in_and_published_code_does_not():
    # k = 1: returns 2, 0, 1, 1: the third is average. k = 2 compares it with the second: (1 - 0).
    returns, rollouts = floats(5, 2, 6, 0, 6, 1, 7, 1), ints(0, 0, 1, 1, 2, 2, 3, 3)
    anchors, group = ints(3, 0, 1, 0, 1, 0, 4, 0), ints(*[0] * 8)
    ours = hgpo(returns, group, rollouts, anchors, history=1, eps=0.0)
    theirs = hgpo_as_published(returns, group, rollouts, anchors, history=1, eps=0.0)
    assert_allclose((ours[5], theirs[5]), (0.6, 1.0))


def test_hgpo_without_history_is_the_step_term_of_gigpo():
    ours = hgpo(STEP_RETURNS, SAME_GROUP, ROLLOUTS, ANCHORS, history=0)
    assert_allclose(ours, step_advantages(STEP_RETURNS, SAME_GROUP, ANCHORS, eps=1e-6))


anchored = st.tuples(st.sampled_from([0.0, 1.0, 0.5]), st.sampled_from(["a", "b", None]))
anchored_rollouts = st.lists(
    st.tuples(st.integers(0, 1), st.lists(anchored, min_size=1, max_size=5)), min_size=1, max_size=5
)


@given(anchored_rollouts, st.integers(0, 3), st.sampled_from([0.0, 1.0]), st.booleans())
def test_hgpo_agrees_with_the_slow_one(rollouts, history, alpha, published):
    groups = [group for group, _ in rollouts]
    returns = [[value for value, _ in steps] for _, steps in rollouts]
    anchors = [[anchor for _, anchor in steps] for _, steps in rollouts]
    slow = reference.hgpo(
        returns, anchors, groups, history=history, alpha=alpha, eps=1e-6, only_non_zero=published
    )
    index, _ = indices(returns)
    names = {"a": 0, "b": 1, None: NO_ANCHOR}
    estimate = hgpo_as_published if published else hgpo
    fast = estimate(
        flat(returns),
        np.array(groups)[index],
        index,
        np.array([names[anchor] for row in anchors for anchor in row]),
        history=history,
        alpha=alpha,
    )
    assert_allclose(fast, flat(slow), atol=1e-9)


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_hgpo_looks_back_further_than_there_are_steps(count):
    index = np.arange(count)
    assert hgpo(np.ones(count), 0 * index, index, 0 * index, history=9).tolist() == [0.0] * count


def test_hgpo_refuses_negative_history():
    with pytest.raises(CreditError, match="history"):
        hgpo(STEP_RETURNS, SAME_GROUP, ROLLOUTS, ANCHORS, history=-1)


# turns


def test_stopping_or_going_on_has_no_gradient_and_only_the_index_wise_baseline_sees_one():
    # "stop" pays 1, "go on" pays .5 and .5: both return 1, so the true gradient is 0.
    stop, on = [1.0], [0.5, 0.5]
    groups = np.zeros(10_000, np.int64)
    rows = [stop if i % 2 else on for i in range(len(groups))]
    rollouts, steps = indices(rows)
    is_stop = np.arange(len(groups)) % 2 == 1

    def summed(advantages):
        return np.bincount(rollouts, weights=advantages)

    biased = summed(per_turn_index(flat(rows), rollouts, steps, groups))
    assert_allclose((biased[is_stop].mean(), biased[~is_stop].mean()), (0.25, -0.25), atol=1e-9)
    returns = flat([discounted_returns(np.array(row), 1.0) for row in rows])
    correct = leave_one_out_to_go(returns, rollouts, steps, groups)
    first = correct[steps == 0]  # the step in which the choice is made
    assert_allclose((first[is_stop].mean(), first[~is_stop].mean()), (0, 0), atol=1e-9)


@given(st.lists(st.tuples(st.integers(0, 1), rewards_of_a_rollout), min_size=1, max_size=6))
def test_leave_one_out_agrees_with_the_slow_one(rollouts):
    groups = [group for group, _ in rollouts]
    returns = [reference.discounted_returns(rewards, 0.5) for _, rewards in rollouts]
    index, steps = indices(returns)
    fast = leave_one_out_to_go(flat(returns), index, steps, np.array(groups))
    assert_allclose(fast, flat(reference.leave_one_out_to_go(returns, groups)), atol=1e-9)


def test_mt_grpo_gives_the_golden_numbers():
    before, after = mt_grpo(floats(1, 0, 1, 0), floats(0.3, 0, 0.2, 0.1), ints(0, 0, 0, 0))
    assert_allclose(before, [2.026871, -2.026871, 1.252874, -1.252874], atol=1e-6)
    assert_allclose(after, [0.865875, -0.865875, 0.865875, -0.865875], atol=1e-6)


def test_turn_credit_gives_the_golden_numbers():
    credit = turn_credit(floats(0.2, 0.2, 0.7, 0.6), gamma=0.8)
    assert_allclose(credit, [0.113803, 0.142254, 0.177818, -0.033875], atol=1e-6)
    assert_allclose(credit.sum(), 0.4)


def test_a_score_that_is_missing_passes_its_change_on():
    assert_allclose(turn_credit(floats(0, np.nan, 1), gamma=0.0), [0, 0, 1])
    assert turn_credit(floats(np.nan), gamma=0.5).tolist() == [0]
    assert turn_credit(floats(np.nan, 1), gamma=0.0, before=0.25).tolist() == [0, 0.75]
    with pytest.raises(CreditError, match="gamma"):
        turn_credit(floats(0), gamma=2)


@given(rewards_of_a_rollout, st.sampled_from([0.0, 0.5, 1.0]))
def test_turn_credit_telescopes(scores, gamma):
    credit = turn_credit(np.array(scores), gamma=gamma)
    assert_allclose(credit, reference.turn_credit(scores, gamma), atol=1e-12)
    assert_allclose(credit.sum(), scores[-1] - scores[0], atol=1e-12)
    credit = turn_credit(np.array(scores), gamma=gamma, before=0.25)
    assert_allclose(credit, reference.turn_credit(scores, gamma, 0.25), atol=1e-12)
    assert_allclose(credit.sum(), scores[-1] - 0.25, atol=1e-12)


def test_information_gains_give_the_golden_numbers():
    assert_allclose(information_gains(floats(-2, -1.2, -0.7)), [0.165859, 0.195391], atol=1e-6)
    assert information_gains(floats(-np.inf, 0)).tolist() == [1]
    for wrong in (floats(), floats(0.1), floats(np.nan)):
        with pytest.raises(CreditError, match="0 or below"):
            information_gains(wrong)


# shaping


def test_a_potential_gives_the_golden_numbers():
    terms = potential_based(floats(0.1, 0.4, 0.3, 0), gamma=0.9, is_truncated=False)
    assert_allclose(terms, [0.26, -0.13, -0.3])
    assert_allclose(discounted_returns(terms, 0.9)[0], -0.1)


potentials = st.lists(st.sampled_from([0.0, 0.5, -1.0, 2.0]), min_size=1, max_size=8)


@given(potentials, st.sampled_from([0.0, 0.5, 0.9, 1.0]), st.booleans())
def test_a_potential_telescopes_also_where_a_rollout_was_cut_off(phi, gamma, is_truncated):
    terms = potential_based(np.array(phi), gamma=gamma, is_truncated=is_truncated)
    assert len(terms) == len(phi) - 1
    if len(terms):
        end = gamma ** len(terms) * phi[-1] if is_truncated else 0.0
        assert_allclose(discounted_returns(terms, gamma)[0], end - phi[0], atol=1e-9)


@given(potentials, st.lists(st.sampled_from("abc"), min_size=2, max_size=9))
def test_no_circle_farms_a_potential(phi, states):
    of_state = dict(zip("abc", [*phi, 0.0, 0.0], strict=False))
    values = np.array([of_state[state] for state in states])
    terms = potential_based(values, gamma=1.0, is_truncated=True)
    assert farming_gain(states, terms).passes


def test_a_bonus_for_moving_is_farmed_and_the_test_says_where():
    found = farming_gain(["a", "b", "c", "b", "d"], floats(0, 0.1, 0.2, 0))
    assert not found.passes
    assert (found.cycles, found.first, found.last) == (1, 1, 3)
    assert_allclose(found.gain, 0.3)
    assert farming_gain(["a", "b", "c"], floats(1, 1)).passes
    with pytest.raises(CreditError, match="one more"):
        farming_gain(["a"], floats(1))


@given(st.lists(st.sampled_from("abc"), min_size=2, max_size=9), st.sampled_from([0.5, 1.0]))
def test_what_a_circle_earns_is_the_largest_of_the_sums(states, gamma):
    terms = np.array([(-0.5) ** t for t in range(len(states) - 1)])
    sums = [
        sum(gamma ** (t - i) * terms[t] for t in range(i, j))
        for i in range(len(states))
        for j in range(i + 1, len(states))
        if states[i] == states[j] and states[i] not in states[i + 1 : j]
    ]
    found = farming_gain(states, terms, gamma=gamma)
    assert found.cycles == len(sums)
    assert_allclose(found.gain, max(sums, default=0.0), atol=1e-12)


# trees: root 0, a 1, b 2, leaves 3 to 6
PARENTS = ints(NO_PARENT, 0, 0, 1, 1, 2, 2)
LEAVES = floats(np.nan, np.nan, np.nan, 1, 0, 1, 1)


def test_trees_give_the_golden_numbers():
    assert_allclose(edge_advantages(PARENTS, LEAVES)[:3], [0, -0.25, 0.25])
    assert_allclose(treerl(PARENTS, LEAVES, divide_by_sqrt=False)[:3], [0, -0.5, 0.5])
    assert_allclose(treerl(PARENTS, LEAVES)[1:3], [-0.5 / np.sqrt(2), 0.5 / np.sqrt(2)])
    assert_allclose(treerl(PARENTS, LEAVES, leave_one_out=True, divide_by_sqrt=False)[1], -2 / 3)


def test_a_prior_pulls_a_node_with_few_leaves_to_its_parent():
    # a: (1 + 2 * .75) / (2 + 2) = .625
    assert_allclose(node_values(PARENTS, LEAVES, prior=2).value_V[:3], [0.75, 0.625, 0.875])


def test_tree_grpo_adds_the_comparison_inside_the_tree_and_across_trees():
    returns, trees, group = floats(1, 0, 0, 0), ints(0, 0, 1, 1), ints(0, 0, 0, 0)
    # inside: +-1, 0, 0; across: mean .25, std .433013
    assert_allclose(
        tree_grpo(returns, trees, group, eps=0.0), [1 + 1.732051, -1 - 0.57735, -0.57735, -0.57735], atol=1e-6
    )


@pytest.mark.parametrize(
    ("parents", "returns", "reason"),
    [
        (ints(1, NO_PARENT), floats(1, np.nan), "before its parent"),
        (ints(NO_PARENT, 0), floats(1, 1), "inner node"),
        (ints(NO_PARENT, 0), floats(np.nan, np.nan), "leaf"),
        (ints(NO_PARENT), floats(1, 2), "shape"),
    ],
)
def test_what_is_no_tree_is_refused(parents, returns, reason):
    with pytest.raises(CreditError, match=reason):
        node_values(parents, returns)


@given(st.lists(st.integers(0, 9), max_size=12), st.sampled_from([0.0, 1.5]))
def test_values_are_means_of_leaves_and_advantages_add_up_along_a_path(choices, prior):
    parents = [NO_PARENT, *(choice % (i + 1) for i, choice in enumerate(choices))]
    leaves = set(range(len(parents))) - set(parents)
    returns = np.array([float(v % 3) if v in leaves else np.nan for v in range(len(parents))])
    values = node_values(np.array(parents), returns)
    for node in range(len(parents)):
        below = reference.leaves_below(parents, node)
        assert values.leaves_V[node] == len(below)
        assert_allclose(values.value_V[node], reference.mean([returns[leaf] for leaf in below]))
    steps = edge_advantages(np.array(parents), returns, prior=prior)
    if prior == 0.0:
        for leaf in leaves:
            path, node = 0.0, leaf
            while node != NO_PARENT:
                path, node = path + steps[node], parents[node]
            assert_allclose(path, returns[leaf] - values.value_V[0], atol=1e-12)


# filters

SPREAD = floats(1, 0, 1, 1, 3, 0, 2, 0)
OF = ints(9, 9, 4, 4, 2, 2, 7, 7)  # standard deviations .5, 0, 1.5, 1


def test_groups_without_spread_are_left_out():
    assert with_spread(SPREAD, OF).tolist() == [True, True, False, False, True, True, True, True]


def test_the_groups_with_the_largest_spread_stay():
    assert OF[top_share_by_spread(SPREAD, OF, 0.25)].tolist() == [2, 2]
    assert OF[top_share_by_spread(SPREAD, OF, 0.5)].tolist() == [2, 2, 7, 7]
    assert set(OF[top_share_by_spread(SPREAD, OF, 1.0)]) == {9, 2, 7}


def test_the_fewest_groups_that_have_most_of_the_spread_stay():
    # of 3 in all: 1.5, 2.5, 3
    assert OF[top_p_by_spread(SPREAD, OF, 0.5)].tolist() == [2, 2]
    assert OF[top_p_by_spread(SPREAD, OF, 0.6)].tolist() == [2, 2, 7, 7]
    assert set(OF[top_p_by_spread(SPREAD, OF, 1.0)]) == {9, 2, 7}


@pytest.mark.parametrize("choose", [top_share_by_spread, top_p_by_spread])
def test_a_share_of_groups_is_above_zero_and_nothing_of_nothing_stays(choose):
    for share in (0.0, 1.1):
        with pytest.raises(CreditError, match="expected above 0"):
            choose(SPREAD, OF, share)
    assert not choose(floats(1, 1), ints(0, 0), 0.5).any()
    assert choose(floats(), ints(), 0.5).tolist() == []


def test_the_overlong_penalty_gives_the_golden_numbers():
    penalties = overlong_penalty(ints(16000, 17000, 20480), limit=20480, buffer=4096)
    assert_allclose(penalties, [0, -0.150391, -1], atol=1e-6)
    with pytest.raises(CreditError, match="buffer"):
        overlong_penalty(ints(1), limit=10, buffer=11)


@pytest.mark.parametrize("wrong", [2, -1])
@pytest.mark.parametrize("method", [leave_one_out_to_go, per_turn_index, role_advantages])
def test_a_step_of_a_rollout_that_is_not_there_is_an_error(method, wrong):
    index, groups = ints(0, wrong), ints(0, 0)
    of_rollouts = (floats(1, 0), groups, index, ints(0, 0))
    with pytest.raises(CreditError, match=f"step 1 is of rollout {wrong}; expected 0 to 1, of 2 rollouts"):
        method(*(of_rollouts if method is role_advantages else (floats(1, 0), index, ints(0, 0), groups)))
