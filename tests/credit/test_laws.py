"""What holds for every term: order, constants, pools, short and long rollouts, cost."""

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from spangrad.credit.assign import assign
from spangrad.credit.credit_config import CreditConfig
from spangrad.credit.returns import _from_the_end, discounted_returns, returns_to_go, sums_to_go
from spangrad.credit.types import Step, Trajectory
from tests.credit.test_assign import SEEN, TERMS, rich_for
from tests.reference import estimators as reference

ragged = st.lists(st.lists(st.sampled_from([0.0, 0.1, 0.2, 0.3, -1.5]), max_size=9), max_size=6)
states = st.text("stuv", min_size=1, max_size=5)
members = st.lists(st.tuples(st.sampled_from([0.0, 0.3, 1.0]), st.integers(0, 1), states), max_size=8)
OF_STATES = [
    CreditConfig(episode="none", step="gigpo", gamma=1.0),
    CreditConfig(episode="none", step="gigpo", gamma=1.0, scale_by_std=False, evidence_prior=2.0),
    CreditConfig(episode="none", step="gigpo", gamma=1.0, anchors="similar", similarity=0.9),
]


def rollouts(found, constant=0.0):
    return [
        Trajectory(
            f"r{i}",
            f"g{group}",
            reward + constant,
            [Step(str(t), t, state, observation=SEEN.get(state, state)) for t, state in enumerate(seen)],
        )
        for i, (reward, group, seen) in enumerate(found)
    ]


def pools(batch, config):
    """Advantages of the steps of a group that are in one state."""
    is_similar = config.anchors == "similar"
    found: dict[tuple[str | None, str | None], list[float]] = {}
    advantages = assign(batch, config).advantages
    for each in batch:
        for step in each.steps:
            state = "u" if is_similar and step.anchor == "v" else step.anchor
            found.setdefault((each.group_id, state), []).append(
                advantages[each.rollout_id, step.call_id] or 0.0
            )
    return found


def test_order_changes_nothing_in_any_combination():
    for number, terms in enumerate(TERMS):
        batch, config = list(rich_for(terms)), CreditConfig(**terms)
        before = assign(batch, config).advantages
        random.Random(number).shuffle(batch)
        for key, value in assign(batch, config).advantages.items():
            assert value == pytest.approx(before[key], abs=1e-9), (terms, key)


@settings(max_examples=20)
@given(members, st.sampled_from(OF_STATES))
def test_step_advantages_sum_to_zero_in_every_pool(found, config):
    assert all(abs(math.fsum(values)) < 1e-9 for values in pools(rollouts(found), config).values())


@settings(max_examples=20)
@given(members, st.sampled_from([*OF_STATES, CreditConfig(episode="none", step="hgpo", gamma=1.0)]))
def test_a_constant_added_to_all_outcomes_changes_no_step_advantage(found, config):
    # Undiscounted: with gamma < 1 the constant itself is paid sooner or later.
    before = assign(rollouts(found), config).advantages
    for key, value in assign(rollouts(found, 2.0), config).advantages.items():
        assert value == pytest.approx(before[key], abs=1e-6)


@settings(max_examples=30)
@given(ragged, st.sampled_from([0.0, 0.9, 1.0]))
def test_returns_of_many_rollouts_are_those_of_each(rows, gamma):
    rewards = np.array([r for row in rows for r in row], dtype=np.float64)
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    each = [discounted_returns(np.array(row, dtype=np.float64), gamma) for row in rows]
    assert_allclose(returns_to_go(rewards, lengths, gamma), [g for row in each for g in row], rtol=0)
    exact = [math.fsum(row[t:]) for row in rows for t in range(len(row))]
    assert sums_to_go(rewards, lengths).tolist() == exact


def test_every_step_is_touched_once_per_pass_whatever_the_lengths():
    lengths = np.array([1000, 1, 0, 1000, 3])
    assert sorted(np.concatenate(list(_from_the_end(lengths))).tolist()) == list(range(2004))


def test_rollouts_of_one_and_of_a_thousand_steps_get_what_the_slow_ones_give():
    lengths, outcomes = (1000, 1, 400), (1.0, 0.0, 0.25)
    names = [[f"s{(t * t + i) % 97}" for t in range(n)] for i, n in enumerate(lengths)]
    batch = [
        Trajectory(str(i), "g", outcome, [Step(str(t), t, name) for t, name in enumerate(own)])
        for i, (outcome, own) in enumerate(zip(outcomes, names, strict=True))
    ]
    found = assign(batch, CreditConfig(step="gigpo", gamma=0.99)).advantages
    expected = reference.gigpo(
        [[0.0] * (n - 1) + [outcome] for n, outcome in zip(lengths, outcomes, strict=True)],
        names,
        ["g"] * 3,
        gamma=0.99,
        step_weight=1.0,
        scale_by_std=True,
        ddof=0,
        eps=1e-6,
    )
    assert list(found.values()) == pytest.approx([a for row in expected for a in row], abs=1e-9)
