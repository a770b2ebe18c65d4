import math

import pytest

from spangrad.errors import CreditError
from spangrad.trainer.learning.monitors import Totals, bootstrap_interval, group_spread, wilson_interval


def test_group_spread_counts_groups_that_teach_nothing():
    # g1: 0, 1 -> std 0.5; g2: 1, 1 -> 0; g3: alone -> 0; the missing reward of g1 is not 0
    spread = group_spread([0.0, 1.0, math.nan, 1.0, 1.0, 5.0], ["g1", "g1", "g1", "g2", "g2", "g3"])
    assert spread.groups == 3
    assert spread.mean_std == pytest.approx(0.5 / 3)
    assert spread.equal_share == pytest.approx(2 / 3)


def test_group_spread_without_rewards_is_not_a_number():
    spread = group_spread([math.nan], ["g"])
    assert spread.groups == 0 and math.isnan(spread.mean_std) and math.isnan(spread.equal_share)
    with pytest.raises(CreditError, match="one group id per reward"):
        group_spread([1.0], [])


def test_wilson_interval_matches_a_worked_example():
    # 8 of 10, z = 1.959964: centre (0.8 + 0.192073) / 1.384146 = 0.716740, half 0.226577
    low, high = wilson_interval(8, 10)
    assert [low, high] == pytest.approx([0.490162, 0.943318], abs=1e-5)
    assert wilson_interval(0, 5)[0] == pytest.approx(0.0)
    assert wilson_interval(5, 5)[1] == pytest.approx(1.0)
    with pytest.raises(CreditError, match="3 successes of 2"):
        wilson_interval(3, 2)


def test_bootstrap_interval_depends_on_the_seed_alone_and_covers_the_mean():
    values = [0.0, 1.0] * 50
    low, high = bootstrap_interval(values, seed=1)
    assert (low, high) == bootstrap_interval(values, seed=1)
    # standard error 0.5 / sqrt(100) = 0.05, so about 0.5 +- 0.098
    assert low == pytest.approx(0.402, abs=0.02) and high == pytest.approx(0.598, abs=0.02)
    with pytest.raises(CreditError, match="at least one"):
        bootstrap_interval([], seed=0)


def test_totals_weigh_means_by_their_counts():
    totals = Totals()
    totals.add_mean("a", 1.0, 1)
    totals.add_mean("a", 4.0, 2)
    totals.add_mean("empty", 0.0, 0)
    totals.add_sum("b", 2)
    totals.add_sum("b", 3)
    totals.maximum("c", -1.0)
    totals.maximum("c", -2.0)
    assert totals.metrics() == {"a": 3.0, "b": 5.0, "c": -1.0}
