"""Estimators that compare whole rollouts, against golden numbers, slow references and laws."""

import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from spangrad.credit.gdpo import gdpo
from spangrad.credit.gigpo import step_advantages
from spangrad.credit.grpo import dr_grpo, grpo
from spangrad.credit.maxrl import maxrl
from spangrad.credit.opo import opo
from spangrad.credit.pass_at_k import best_of_group, pass_at_k, pass_hat_k
from spangrad.credit.reinforce_pp import (
    reinforce_pp,
    reinforce_pp_baseline,
    reinforce_pp_baseline_as_published,
)
from spangrad.credit.rloo import rloo
from spangrad.credit.roles import role_advantages
from spangrad.errors import CreditError
from tests.credit.test_estimators import floats, ints
from tests.reference import estimators as reference

ONE_GROUP = ints(0, 0, 0, 0, 0)
RETURNS = floats(1, 0, 0, 1, 0)
TWO_GROUPS = ints(0, 0, 0, 0, 1, 1, 1, 1)
TWO = floats(1, 0, 0, 1, 1, 1, 1, 0)

scores = st.sampled_from([0.0, 1.0, 0.1, 0.3, 2.5, 1e3])
members = st.lists(st.tuples(scores, st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=20)


def test_maxrl_gives_the_golden_numbers():
    assert_allclose(maxrl(RETURNS, ONE_GROUP), [1.5, -1, -1, 1.5, -1])


def test_opo_gives_the_golden_baseline():
    # (10 * 1 + 40 * 1) / 100 = .5
    assert_allclose(opo(floats(1, 0, 0, 1), ints(0, 0, 0, 0), ints(10, 20, 30, 40)), [0.5, -0.5, -0.5, 0.5])


def test_reinforce_pp_baseline_gives_the_golden_numbers():
    expected = [1, -1, -1, 1, 0.5, 0.5, 0.5, -1.5]
    assert_allclose(reinforce_pp_baseline(TWO, TWO_GROUPS), expected, atol=1e-6)
    assert_allclose(reinforce_pp_baseline_as_published(TWO, TWO_GROUPS, ints(*[1] * 8)), expected, atol=1e-6)


def test_reinforce_pp_baseline_as_published_lets_a_long_rollout_set_the_scale():
    tokens = ints(1, 1, 1, 1, 1, 1, 1, 100)
    published = reinforce_pp_baseline_as_published(TWO, TWO_GROUPS, tokens)
    assert abs(published[:4].sum()) > 1
    assert abs(reinforce_pp_baseline(TWO, TWO_GROUPS)[:4].sum()) < 1e-12


def test_gdpo_keeps_one_component_from_hiding_another():
    small, large = floats(1, 0, 0, 0), floats(0, 1000, 0, 0)
    advantages = gdpo(np.stack([small, large]), ints(0, 0, 0, 0), floats(1, 1))
    assert_allclose(advantages[0], advantages[1], rtol=1e-5)
    summed = grpo(small + large, ints(0, 0, 0, 0))
    assert summed[0] < 0 < summed[1]


def test_gdpo_with_one_component_is_grpo_whitened():
    returns, groups = floats(1, 0, 0, 3, 4), ints(0, 0, 0, 1, 1)
    ours = gdpo(returns[None], groups, floats(2.0), eps=0.0)
    alone = grpo(returns, groups)
    assert_allclose(ours, alone / alone.std(), atol=1e-12)


def test_only_the_leader_of_a_group_gets_its_lead():
    returns, groups = floats(3, 1, 0, 2, 2, 7), ints(0, 0, 0, 1, 1, 2)
    assert best_of_group(returns, groups, scale_by_std=False).tolist() == [2, 0, 0, 0, 0, 0]
    # sample std of [3, 1, 0] is 1.527525
    assert_allclose(best_of_group(returns, groups)[0], 2 / 1.527525, rtol=1e-5)


def test_a_role_is_compared_with_rollouts_in_which_it_acts():
    returns, groups = floats(1, 0, 5), ints(0, 0, 0)
    rollouts, roles = ints(0, 0, 0, 1, 1, 2), ints(0, 0, 1, 0, 1, 0)
    advantages = role_advantages(returns, groups, rollouts, roles, scale_by_std=False)
    assert_allclose(advantages, [-1, -1, 0.5, -2, -0.5, 3])


def test_one_role_everywhere_is_grpo():
    rollouts = ints(0, 0, 1, 2, 2, 2, 3, 4)
    advantages = role_advantages(RETURNS, ONE_GROUP, rollouts, ints(*[7] * 8))
    assert_allclose(advantages, grpo(RETURNS, ONE_GROUP)[rollouts])


def test_negative_returns_have_no_share_of_a_mean():
    with pytest.raises(CreditError, match="0 or more"):
        maxrl(floats(1, -1), ints(0, 0))


@pytest.mark.parametrize("lengths", [ints(1), ints(1, 0)])
def test_opo_wants_a_length_for_every_rollout(lengths):
    with pytest.raises(CreditError, match="length"):
        opo(floats(1, 2), ints(0, 0), lengths)


@pytest.mark.parametrize("tokens", [ints(1), ints(1, -1)])
def test_reinforce_pp_wants_token_counts(tokens):
    with pytest.raises(CreditError, match="token"):
        reinforce_pp(floats(1, 2), tokens)


def test_gdpo_refuses_what_does_not_fit_together():
    with pytest.raises(CreditError, match="shape"):
        gdpo(np.zeros((2, 3)), ints(0, 0), floats(1, 1))
    with pytest.raises(CreditError, match="finite"):
        gdpo(np.zeros((1, 2)), ints(0, 0), floats(np.nan))


NO_RETURNS, NO_GROUPS = floats(), ints()


@pytest.mark.parametrize(
    "estimate",
    [
        maxrl,
        reinforce_pp_baseline,
        best_of_group,
        lambda r, g: opo(r, g, np.ones(len(r), np.int64)),
        lambda r, g: reinforce_pp(r, np.ones(len(r), np.int64)),
        lambda r, g: gdpo(r[None], g, floats(1)),
        lambda r, g: role_advantages(r, g, np.arange(len(r)), np.zeros(len(r), np.int64)),
    ],
)
def test_nothing_lone_rollouts_and_equals_get_exact_zeros(estimate):
    assert estimate(NO_RETURNS, NO_GROUPS).tolist() == []
    assert estimate(floats(2), ints(0)).tolist() == [0]
    assert estimate(floats(0.1, 0.1, 0.1), ints(0, 0, 0)).tolist() == [0, 0, 0]
    with pytest.raises(CreditError, match="finite"):
        estimate(floats(1, np.nan), ints(0, 0))


@pytest.mark.parametrize("dtype", [np.uint8, np.bool_, np.int64, np.float32])
@pytest.mark.parametrize("estimate", [grpo, rloo, maxrl, dr_grpo, reinforce_pp_baseline, best_of_group])
def test_returns_of_any_type_of_number_are_taken_as_they_are(estimate, dtype):
    returns, groups = floats(1, 0, 0, 1, 1, 0), ints(0, 0, 0, 1, 1, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = estimate(returns.astype(dtype), groups)
    assert found.dtype == np.float64
    assert_allclose(found, estimate(returns, groups), rtol=1e-12)


@pytest.mark.parametrize("groups", [np.array(["a", "a"]), floats(0.5, 0.5), np.array([True, True])])
@pytest.mark.parametrize("estimate", [grpo, best_of_group, lambda r, g: step_advantages(r, g, ints(0, 0))])
def test_groups_that_are_no_whole_numbers_are_refused(estimate, groups):
    with pytest.raises(CreditError, match="expected whole numbers, such as"):
        estimate(floats(1, 0), groups)


@pytest.mark.parametrize("scale_by_std", [True, False])
def test_a_lead_that_is_rounding_alone_is_none(scale_by_std):
    returns = floats(0.1 + 0.2, 0.3, 0.1 + 0.2, 0.3, 0.0)
    found = best_of_group(returns, ints(0, 0, 1, 1, 1), scale_by_std=scale_by_std, eps=0.0)
    assert found.tolist() == [0.0] * 5


@given(members)
def test_they_agree_with_the_slow_ones(rollouts):
    returns, groups, lengths = ([m[i] for m in rollouts] for i in range(3))
    R, G, L = np.array(returns), np.array(groups), np.array(lengths)
    assert_allclose(maxrl(R, G), reference.maxrl(returns, groups), rtol=1e-9, atol=1e-9)
    assert_allclose(opo(R, G, L), reference.opo(returns, groups, lengths), rtol=1e-9, atol=1e-9)
    slow = reference.over_tokens(returns, lengths, ddof=0)
    assert_allclose(reinforce_pp(R, L, eps=0.0), slow, rtol=1e-6, atol=1e-6)
    slow = reference.over_tokens(dr_grpo(R, G).tolist(), lengths, ddof=1)
    assert_allclose(reinforce_pp_baseline_as_published(R, G, L, eps=0.0), slow, rtol=1e-6, atol=1e-6)


@given(members)
def test_centred_ones_sum_to_zero_in_a_group_and_opo_by_length(rollouts):
    R, G, L = (np.array([m[i] for m in rollouts]) for i in range(3))
    for group in set(G.tolist()):
        here = group == G
        for advantages in (
            maxrl(R, G),
            reinforce_pp_baseline(R, G),
            gdpo(np.stack([R, R[::-1]]), G, floats(1, 2)),
        ):
            assert abs(advantages[here].sum()) < 1e-6
        assert abs((L * opo(R, G, L))[here].sum()) < 1e-6 * max(1.0, R.max())


@given(members, st.randoms(use_true_random=False))
def test_the_order_of_rollouts_does_not_matter(rollouts, random):
    R, G, L = (np.array([m[i] for m in rollouts]) for i in range(3))
    order = list(range(len(R)))
    random.shuffle(order)
    for estimate in (
        maxrl,
        reinforce_pp_baseline,
        best_of_group,
        lambda r, g: opo(r, g, L[: len(r)] if r is R else L[order]),
    ):
        assert_allclose(estimate(R, G)[order], estimate(R[order], G[order]), rtol=1e-9, atol=1e-9)


@given(members, st.sampled_from([-3.0, 0.5, 10.0]))
def test_a_constant_added_to_all_returns_changes_nothing(rollouts, constant):
    R, G, L = (np.array([m[i] for m in rollouts]) for i in range(3))
    for estimate in (reinforce_pp_baseline, lambda r, g: opo(r, g, L), lambda r, g: reinforce_pp(r, L)):
        assert_allclose(estimate(R + constant, G), estimate(R, G), rtol=1e-6, atol=1e-6)


def test_pass_at_k_and_pass_hat_k_of_the_golden_numbers():
    found = [[one(8, 3, k) for k in (1, 2, 4, 8)] for one in (pass_at_k, pass_hat_k)]
    assert_allclose(found, [[0.375, 0.642857, 0.928571, 1.0], [0.375, 0.107143, 0.0, 0.0]], atol=5e-7)


@pytest.mark.parametrize("counts", [(8, 9, 1), (8, -1, 1), (8, 3, 0), (8, 3, 9), (0, 0, 1)])
def test_pass_at_k_is_refused_where_it_is_not_defined(counts):
    for one in (pass_at_k, pass_hat_k):
        with pytest.raises(CreditError, match="expected 0 to"):
            one(*counts)


def test_returns_that_a_rounding_tells_apart_are_equal():
    assert grpo(np.array([0.1 + 0.2, 0.3, 0.3]), np.zeros(3, dtype=np.int64)).tolist() == [0, 0, 0]
