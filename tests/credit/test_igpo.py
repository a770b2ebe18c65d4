"""IGPO, from its paper and as published: golden numbers, slow versions, laws, and in `assign`."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from spangrad.credit.assign import assign
from spangrad.credit.credit_config import CreditConfig
from spangrad.credit.igpo import igpo, igpo_as_published
from spangrad.credit.information_gain import information_gains
from spangrad.credit.types import Step, Trajectory
from spangrad.errors import ConfigError, CreditError
from tests.credit.test_estimators import floats, ints
from tests.reference import estimators as reference

BOTH: list[Any] = [igpo, igpo_as_published]
rewards = st.lists(st.sampled_from([0.0, 1.0, -0.5, 0.25]), min_size=1, max_size=6)
grouped = st.lists(st.tuples(st.integers(0, 2), rewards), min_size=1, max_size=6)
gammas = st.sampled_from([0.0, 0.5, 1.0])


def laid_out(rows: list[list[float]], groups: list[int]) -> tuple[Any, Any, Any]:
    lengths = ints(*map(len, rows))
    return floats(*(reward for row in rows for reward in row)), lengths, ints(*groups)


def found(estimate: Any, rows: list[list[float]], groups: list[int], **settings: Any) -> list[list[float]]:
    advantages = estimate(*laid_out(rows, groups), **settings)
    ends = np.cumsum([len(row) for row in rows])
    return [part.tolist() for part in np.split(advantages, ends[:-1])]


def test_gains_of_the_golden_example_and_outcomes_are_on_one_scale():
    # Gains .165859, .195391, outcome 1; the other one answers at once, wrongly. Mean .340313, std .388084.
    gains = information_gains(floats(-2, -1.2, -0.7)).tolist()
    first, second = found(igpo, [[*gains, 1.0], [0.0]], [0, 0], gamma=0.5, eps=0.0)
    # Scaled: -.449528, -.373430, 1.699858, -.876905; summed from the end, with half of what follows.
    assert_allclose(first, [-0.211277, 0.476499, 1.699858], atol=1e-5)
    assert_allclose(second, [-0.876905], atol=1e-5)


def test_outcomes_apart_are_compared_with_outcomes():
    together = found(igpo, [[0.2, 1.0], [0.4, 0.0]], [0, 0], gamma=0.0, eps=0.0)
    apart = found(igpo, [[0.2, 1.0], [0.4, 0.0]], [0, 0], gamma=0.0, eps=0.0, outcomes_apart=True)
    assert_allclose(apart, [[-1, 1], [1, -1]])
    assert together[1][0] == pytest.approx(0.0, abs=1e-12)  # just the mean of .2, 1, .4, 0


def test_as_published_a_gain_of_exactly_nothing_is_no_turn():
    rows, groups = [[0.5, 0.0, 1.0], [0.25, 0.0]], [0, 0]
    paper = found(igpo, rows, groups, gamma=0.5)
    code = found(igpo_as_published, rows, groups, gamma=0.5)
    # What counts is .5, 1, .25, 0: mean .4375, standard deviation .369755.
    scaled = [(value - 0.4375) / 0.369755 for value in (0.5, 1.0, 0.25, 0.0)]
    assert_allclose(code[0], [scaled[0] + 0.5 * scaled[1], scaled[1], scaled[1]], rtol=1e-5)
    assert_allclose(code[1], [scaled[2] + 0.5 * scaled[3], scaled[3]], rtol=1e-5)
    # With the 0: mean .35, standard deviation .374166, and one turn more to discount over.
    scaled = [(value - 0.35) / 0.374166 for value in (0.5, 0.0, 1.0)]
    assert_allclose(
        paper[0],
        [scaled[0] + 0.5 * scaled[1] + 0.25 * scaled[2], scaled[1] + 0.5 * scaled[2], scaled[2]],
        rtol=1e-5,
    )


@given(grouped, gammas, st.booleans(), st.sampled_from([0, 1]))
def test_it_agrees_with_the_slow_one(rollouts, gamma, apart, ddof):
    groups, rows = [group for group, _ in rollouts], [row for _, row in rollouts]
    settings = {"gamma": gamma, "outcomes_apart": apart, "ddof": ddof, "eps": 1e-6}
    slow = reference.igpo(rows, groups, **settings)
    for fast, expected in zip(found(igpo, rows, groups, **settings), slow, strict=True):
        assert_allclose(fast, expected, atol=1e-9)


@given(grouped, gammas, st.booleans())
def test_as_published_it_agrees_with_the_loops_of_its_code(rollouts, gamma, apart):
    groups, rows = [group for group, _ in rollouts], [row for _, row in rollouts]
    settings = {"gamma": gamma, "outcomes_apart": apart}
    slow = reference.igpo_as_published(rows, groups, **settings)
    for fast, expected in zip(found(igpo_as_published, rows, groups, **settings), slow, strict=True):
        assert_allclose(fast, expected, atol=1e-9)


@given(grouped, st.booleans())
def test_what_is_normalised_adds_up_to_zero_in_every_group(rollouts, apart):
    groups, rows = [group for group, _ in rollouts], [row for _, row in rollouts]
    for estimate in BOTH:
        scaled = found(estimate, rows, groups, gamma=0.0, outcomes_apart=apart)
        for group in set(groups):
            own = [
                value
                for row, advantages, its_group in zip(rows, scaled, groups, strict=True)
                for t, (reward, value) in enumerate(zip(row, advantages, strict=True))
                if its_group == group
                # What is no turn as published has the number of the next one.
                and (estimate is igpo or reward != 0.0 or t == len(row) - 1)
            ]
            assert sum(own) == pytest.approx(0.0, abs=1e-8)


@given(grouped, grouped, gammas, st.randoms(use_true_random=False))
def test_neither_order_nor_rollouts_of_other_groups_matter(rollouts, others, gamma, random):
    more = [*rollouts, *((group + 3, row) for group, row in others)]
    order = list(range(len(more)))
    random.shuffle(order)
    for estimate in BOTH:
        alone = found(estimate, [row for _, row in rollouts], [group for group, _ in rollouts], gamma=gamma)
        mixed = found(estimate, [more[i][1] for i in order], [more[i][0] for i in order], gamma=gamma)
        for i, place in enumerate(order):
            if place < len(rollouts):
                assert_allclose(mixed[i], alone[place], atol=1e-9)


@pytest.mark.parametrize("estimate", BOTH)
@pytest.mark.parametrize("apart", [False, True])
def test_equal_rewards_and_a_single_turn_say_nothing(estimate, apart):
    nearly = [[0.1 + 0.2, 0.3], [0.3]]  # 0.30000000000000004 and 0.3
    silent: list[list[list[float]]] = [nearly, [[0.0, 0.0], [0.0]], [[0.5]], [[]]]
    for rows in silent:
        groups = [0] * len(rows)
        settings = {"gamma": 0.9, "outcomes_apart": apart, "eps": 0.0}
        if estimate is igpo_as_published:
            settings["variance_eps"] = 0.0
        assert not any(value for row in found(estimate, rows, groups, **settings) for value in row)
    assert estimate(floats(), ints(), ints(), gamma=1.0).tolist() == []


@pytest.mark.parametrize("estimate", BOTH)
def test_rollouts_of_no_one_and_a_thousand_steps_are_taken(estimate):
    rows: list[list[float]] = [[], [1.0], [0.001 * t for t in range(1, 1001)]]
    advantages = found(estimate, rows, [0, 0, 0], gamma=1.0)
    mean, std = np.mean([1.0, *rows[2]]), np.std([1.0, *rows[2]])
    assert_allclose(advantages[1], [(1.0 - mean) / std], rtol=1e-4)
    assert_allclose(advantages[2][0], (sum(rows[2]) - 1000 * mean) / std, rtol=1e-4)


@pytest.mark.parametrize("estimate", BOTH)
def test_what_does_not_fit_is_refused(estimate):
    with pytest.raises(CreditError, match=r"expected a reward for every step"):
        estimate(floats(1, 2), ints(1), ints(0), gamma=1.0)
    with pytest.raises(CreditError, match="shape"):
        estimate(floats(1, 2), ints(2), ints(0, 0), gamma=1.0)
    with pytest.raises(CreditError, match=r"gamma is 1\.5"):
        estimate(floats(1), ints(1), ints(0), gamma=1.5)
    with pytest.raises(CreditError, match="finite"):
        estimate(floats(1, np.nan), ints(2), ints(0), gamma=1.0)


# through `assign`


def rollout(name: str, outcome: float, *given: float | None, **more: Any) -> Trajectory:
    steps = [Step(f"{name}{t}", t, reward=reward) for t, reward in enumerate(given)]
    return Trajectory(name, more.pop("group", "g"), outcome, steps, **more)


def values(batch: list[Trajectory], **config: Any) -> list[float]:
    advantages = assign(batch, CreditConfig(episode="none", **config)).advantages.values()
    return [float("nan") if a is None else a for a in advantages]


@pytest.mark.parametrize("step", ["igpo", "igpo_as_published"])
def test_gains_of_scores_are_its_rewards(step):
    batch = [
        rollout("a", 1.0, None, None, scores=[0.1, 0.1, 0.6]),
        rollout("b", 0.0, None, scores=[0.1, 0.3]),
    ]
    shaped = values(batch, step=step, gamma=0.5, shaping="score_gain", scores="reward:p")
    estimate = igpo if step == "igpo" else igpo_as_published
    # Gains 0, .5 and .2; the outcome is paid with the last one.
    assert_allclose(shaped, estimate(floats(0, 1.5, 0.2), ints(2, 1), ints(0, 0), gamma=0.5), atol=1e-9)


@pytest.mark.parametrize("step", ["igpo", "igpo_as_published"])
@pytest.mark.parametrize(
    "batch",
    [
        [rollout("a", 1.0, None, None), rollout("b", 1.0, None)],  # the outcome alone, sooner or later
        [rollout("a", 1.0, 0.25, None), rollout("b", 1.0, 0.25, None)],  # alike in every step
        [rollout("a", 1.0, None), rollout("b", 0.5, 0.5, None)],  # in one payment, or in two
        [rollout("a", 1.0, 0.5, None)],  # nobody to compare with
    ],
)
def test_rollouts_that_do_not_differ_say_nothing_whatever_their_turns_do(step, batch):
    assert not any(values(batch, step=step))
    assert any(igpo(floats(0, 1, 1), ints(2, 1), ints(0, 0), gamma=0.9)), "the function alone compares turns"


def test_equal_returns_that_are_earned_in_different_steps_say_something():
    batch = [rollout("a", 0.0, 0.75, 0.25), rollout("b", 0.0, 0.25, 0.75)]
    assert_allclose(values(batch, step="igpo", gamma=1.0), [0, -1, 0, 1], atol=1e-5)


@pytest.mark.parametrize("step", ["igpo", "igpo_as_published"])
def test_a_potential_would_change_nothing_and_is_refused(step):
    with pytest.raises(ConfigError, match="changes returns of steps alone, and no term uses them"):
        CreditConfig(step=step, shaping="potential", scores="reward:p")
