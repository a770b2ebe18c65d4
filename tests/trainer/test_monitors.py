import numpy as np
import pytest

from spangrad.errors import CreditError
from spangrad.trainer.learning.monitors import Totals, wilson_interval


def test_wilson_interval_matches_a_worked_example():
    # 8 of 10, z = 1.959964: centre (0.8 + 0.192073) / 1.384146 = 0.716740, half 0.226577
    low, high = wilson_interval(8, 10)
    assert [low, high] == pytest.approx([0.490162, 0.943318], abs=1e-5)
    assert wilson_interval(0, 5)[0] == pytest.approx(0.0)
    assert wilson_interval(5, 5)[1] == pytest.approx(1.0)
    with pytest.raises(CreditError, match="3 successes of 2"):
        wilson_interval(3, 2)


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


def test_totals_give_the_effective_sample_size_of_all_weights_as_a_share():
    totals = Totals()
    totals.add_weights("share", np.array([1.0, 1.0]))
    totals.add_weights("share", np.array([4.0, 0.0]))
    totals.add_weights("empty", np.array([]))
    # (1 + 1 + 4 + 0)^2 / (4 * (1 + 1 + 16 + 0)) = 36 / 72
    assert totals.metrics() == {"share": 0.5}
