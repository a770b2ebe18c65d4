"""Estimators side by side on one batch."""

import math

import numpy as np
import pytest

from spangrad.credit.compare import (
    ALONE,
    EQUAL,
    NO_REWARD,
    NOT_BETWEEN,
    ComparedEstimator,
    ComparedStep,
    Comparison,
    compare,
)
from spangrad.credit.credit_config import CreditConfig
from spangrad.credit.spelling import parsed
from spangrad.credit.types import Step, Trajectory
from spangrad.errors import CreditError


def rollout(name: str, group: str | None, reward: float | None, *anchors: str | None) -> Trajectory:
    steps = [Step(f"{name}-{t}", t, anchor, tokens=10) for t, anchor in enumerate(anchors or ("s",))]
    return Trajectory(name, group, reward, steps)


def compared(batch: list[Trajectory], *names: str):
    return compare({name: (parsed(name), batch) for name in names})


MIXED = [
    rollout("a", "g", 1.0, "s", "t"),
    rollout("b", "g", 0.0, "s", "u"),
    rollout("c", "g", 0.0, "s", "u"),
    rollout("d", "g", 1.0, "v", "w"),
]


def test_noise_of_leave_one_out_is_that_of_the_others_mean() -> None:
    batch = [rollout(name, "g", reward) for name, reward in zip("abcd", (1.0, 0.0, 0.0, 1.0), strict=True)]
    (one,) = compared(batch, "rloo").estimators
    # A = +-2/3. Others of a: 0, 0, 1 with sample variance 1/3: their mean's is 1/9; so for all.
    assert one.noise == pytest.approx(math.sqrt((1 / 9) / (4 / 9)))
    # four steps of equal size
    assert one.effective_steps == pytest.approx(4)
    assert one.abs_mean == pytest.approx(2 / 3)


def test_noise_of_large_groups_is_by_parts() -> None:
    rng = np.random.default_rng(0)
    batch = [rollout(str(number), "g", float(rng.integers(2))) for number in range(64)]
    (one,) = compared(batch, "rloo").estimators
    # standard error of a mean of 63, beside A of size std: 1 / sqrt(63), here by 7 parts
    assert one.noise == pytest.approx(1 / math.sqrt(63), rel=0.5)


def test_noise_needs_three_to_compare() -> None:
    found = compared([rollout("a", "g", 1.0), rollout("b", "g", 0.0)], "grpo")
    assert found.estimators[0].noise is None


def test_noise_of_a_tree_that_hangs_on_one_rollout_is_not_known() -> None:
    branch = Trajectory("e", "g", 0.5, [Step("e-0", 0, parent="a-0")])
    found = compared([*MIXED, branch], "tree_edges", "rloo")
    assert [(one.refused, one.noise is None) for one in found.estimators] == [(None, True), (None, False)]


def test_ranks_of_the_same_order_agree_whatever_the_scale() -> None:
    found = compared(MIXED, "grpo", "rloo", "gigpo")
    assert found.rank_correlation["grpo"]["rloo"] == pytest.approx(1.0)
    assert found.rank_correlation["gigpo"]["grpo"] == pytest.approx(found.rank_correlation["grpo"]["gigpo"])
    assert found.rank_correlation["grpo"]["gigpo"] < 1.0


def test_rank_correlation_of_nothing_is_not_known() -> None:
    batch = [rollout("a", "g", 1.0), rollout("b", "g", 1.0)]
    assert compared(batch, "grpo", "rloo").rank_correlation["grpo"] == {"grpo": None, "rloo": None}


def test_disagreements_come_first_where_ranks_are_farthest_apart() -> None:
    pairs = [(-1.0, -9.0), (0.0, 5.0), (1.0, 1.0), (2.0, 1.0)]
    steps = [
        ComparedStep("g", "r", str(n), n, 1.0, {"one": one, "other": other})
        for n, (one, other) in enumerate(pairs)
    ]
    estimators = [ComparedEstimator("one", {}), ComparedEstimator("other", {})]
    found = Comparison(estimators, {}, [], steps).disagreements()
    # ranks 0 1 2 3 beside 0 3 1.5 1.5, of at most 3
    assert [(share, step.call_id) for share, step in found] == [
        (pytest.approx(2 / 3), "1"),
        (pytest.approx(1.5 / 3), "3"),
        (pytest.approx(0.5 / 3), "2"),
        (0.0, "0"),
    ]


@pytest.mark.parametrize(
    ("batch", "why"),
    [
        ([rollout("a", "g", None), rollout("b", "g", None)], NO_REWARD),
        ([rollout("a", "g", 1.0), rollout("b", "g", None)], ALONE),
        ([rollout("a", "g", 1.0), rollout("b", "g", 1.0)], EQUAL),
        ([rollout("a", "g", 1.0, "x"), rollout("b", "g", 0.0, "y")], NOT_BETWEEN),
    ],
)
def test_wasted_groups_say_why(batch: list[Trajectory], why: str) -> None:
    # beside a group that is not wasted
    found = compared([*batch, *(rollout(f"o{n}", "other", float(n), "s") for n in range(2))], "gigpo")
    assert [one.wasted for one in found.groups] == [{"gigpo": why}, {}]
    assert found.estimators[0].informative_groups == 1


def test_an_estimator_that_lacks_something_is_refused_and_the_others_compared() -> None:
    batch = [Trajectory(name, "g", reward, [Step(name, 0)]) for name, reward in (("a", 1.0), ("b", 0.0))]
    found = compared(batch, "opo", "grpo")
    assert "no token ids" in str(found.estimators[0].refused)
    assert [step.advantages for step in found.steps] == [
        {"grpo": 1.0 / (1 + 2e-6)},
        {"grpo": -1 / (1 + 2e-6)},
    ]
    with pytest.raises(CreditError, match="no token ids"):
        compared(batch, "opo")


def test_what_one_estimator_filters_out_the_others_keep() -> None:
    batch = [*MIXED, *(rollout(f"o{n}", "other", 1.0, "s") for n in range(2))]
    filtering = CreditConfig(filters=("zero_spread",))
    found = compare({"all": (parsed("grpo"), batch), "some": (filtering, batch)})
    kept, gone = found.groups
    assert not kept.wasted
    assert gone.wasted["all"] == EQUAL
    assert "filter" in gone.wasted["some"]
    assert found.steps[-1].advantages == {"all": 0.0, "some": None}
    assert [one.nonzero_share for one in found.estimators] == [0.8, 1.0]
    assert found.rank_correlation["all"]["some"] == pytest.approx(1.0)


def test_settings_shown_are_those_that_are_used() -> None:
    found = compare({"mine": (CreditConfig("rloo", "leave_one_out_to_go", gamma=0.5), MIXED)})
    assert found.estimators[0].settings["gamma"] == 0.5
    assert "scale_by_std" not in found.estimators[0].settings


def test_as_json_it_is_plain() -> None:
    found = compared(MIXED, "grpo").to_json()
    assert found["estimators"][0]["diagnostics"]["groups/informative_share"] == 1.0
    assert found["steps"][0]["return"] == 1.0
