"""Which tasks are drawn: laws that hold for any counts, and figures worked out by hand."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spangrad.errors import CreditError
from spangrad.trainer.curriculum.difficulty import (
    Floats,
    chance_in_band,
    draw,
    drawing_chances,
    relative_entropy,
    success_means,
)

COUNTS = st.lists(st.tuples(st.floats(0, 300), st.floats(0, 300)), min_size=1, max_size=30)
BANDS = st.tuples(st.floats(0, 0.9), st.floats(0.05, 1.0)).filter(lambda band: band[0] + 0.05 < band[1])


def counts(*pairs) -> tuple[Floats, Floats]:
    """Successes and failures."""
    columns = np.array(pairs, dtype=np.float64)
    return columns[:, 0], columns[:, 1]


def test_nothing_known_is_as_likely_in_the_band_as_the_band_is_wide():
    successes, failures = counts((0, 0))
    assert chance_in_band(successes, failures, (0.2, 0.8)) == pytest.approx([0.6], abs=1e-9)
    assert success_means(successes, failures) == pytest.approx([0.5])


def test_chances_are_those_of_the_beta_distribution():
    # P(p <= x) of Beta(2, 1) is x^2, of Beta(1, 3) it is 1 - (1 - x)^3, of Beta(2, 2) 3 x^2 - 2 x^3.
    successes, failures = counts((1, 0), (0, 2), (1, 1))
    low, high = 0.15, 0.62
    expected = [
        high**2 - low**2,
        (1 - low) ** 3 - (1 - high) ** 3,
        (3 * high**2 - 2 * high**3) - (3 * low**2 - 2 * low**3),
    ]
    assert chance_in_band(successes, failures, (low, high)) == pytest.approx(expected, abs=1e-5)


def test_against_a_sum_over_binomials():
    # P(p <= x), p ~ Beta(1 + s, 1 + f), is P(more than s of s + f + 1 draws are <= x).
    for s, f in ((7, 1), (0, 8), (40, 25)):
        n = s + f + 1

        def below(x, s=s, n=n):
            return sum(math.comb(n, k) * x**k * (1 - x) ** (n - k) for k in range(s + 1, n + 1))

        successes, failures = counts((s, f))
        expected = below(0.8) - below(0.2)
        assert chance_in_band(successes, failures, (0.2, 0.8)) == pytest.approx([expected], abs=2e-5)


@given(COUNTS, BANDS, st.floats(0.01, 0.99), st.floats(0.1, 5.0))
@settings(deadline=None)
def test_no_task_is_ever_lost_and_better_ones_are_drawn_more(pairs, band, exploration, focus):
    successes, failures = counts(*pairs)
    weights = chance_in_band(successes, failures, band)
    chances = drawing_chances(weights, exploration=exploration, focus=focus)
    assert ((weights >= 0) & (weights <= 1)).all()
    assert chances.sum() == pytest.approx(1.0)
    assert chances.min() >= exploration / len(pairs) * (1 - 1e-12)
    assert (np.diff(chances[np.argsort(weights, kind="stable")]) >= -1e-15).all()
    assert -1e-9 <= relative_entropy(chances) <= 1 + 1e-9


@given(COUNTS)
@settings(deadline=None)
def test_successes_and_failures_change_places_in_a_band_that_is_symmetric(pairs):
    successes, failures = counts(*pairs)
    there, back = (
        chance_in_band(*each, (0.25, 0.75)) for each in ((successes, failures), (failures, successes))
    )
    assert there == pytest.approx(back, abs=1e-9)


@given(COUNTS, st.integers(0, 2**31))
@settings(deadline=None)
def test_a_draw_has_each_task_once_and_is_the_same_for_the_same_seed(pairs, seed):
    chances = drawing_chances(chance_in_band(*counts(*pairs), (0.2, 0.8)), exploration=0.1, focus=2.0)
    drawn = draw(chances, len(pairs), np.random.default_rng(seed))
    assert sorted(drawn) == list(range(len(pairs)))
    half = draw(chances, len(pairs) // 2, np.random.default_rng(seed))
    assert half == drawn[: len(pairs) // 2]


def test_the_first_is_drawn_by_its_chance():
    rng, chances = np.random.default_rng(0), np.array([0.5, 0.3, 0.15, 0.05])
    firsts = np.bincount([draw(chances, 1, rng)[0] for _ in range(20_000)], minlength=4) / 20_000
    assert firsts == pytest.approx(chances, abs=0.015)  # 3.5 standard errors of the first are 0.0124


def test_all_weights_zero_are_all_alike():
    assert drawing_chances(np.zeros(4), exploration=0.1, focus=2.0) == pytest.approx([0.25] * 4)
    assert relative_entropy(np.array([1.0, 0.0, 0.0])) == 0.0
    assert relative_entropy(np.full(5, 0.2)) == pytest.approx(1.0)


def test_a_task_that_always_fails_keeps_its_share_of_the_exploration():
    # 10 of 10 failed: P(p >= 0.2) under Beta(1, 11) is 0.8^11 = 0.0859, against 0.6 of an unknown task.
    successes, failures = counts((0, 10), (0, 0))
    weights = chance_in_band(successes, failures, (0.2, 0.8))
    chances = drawing_chances(weights, exploration=0.1, focus=1.0)
    assert chances == pytest.approx([0.05 + 0.9 * 0.0859 / 0.6859, 0.05 + 0.9 * 0.6 / 0.6859], abs=1e-4)
    # Squared: 0.00738 and 0.36.
    chances = drawing_chances(weights, exploration=0.1, focus=2.0)
    assert chances == pytest.approx([0.05 + 0.9 * 0.00738 / 0.36738, 0.05 + 0.9 * 0.36 / 0.36738], abs=1e-4)


@pytest.mark.parametrize("pair", [(-1, 0), (0, float("nan")), (float("inf"), 0)])
def test_counts_that_are_none_are_refused(pair):
    with pytest.raises(CreditError, match="negative or not finite"):
        chance_in_band(*counts(pair), (0.2, 0.8))
