"""What is left out of a batch, in which order, and how it is told."""

from typing import Any

import pytest

from spangrad.credit.assign import assign
from spangrad.credit.credit_config import CreditConfig
from spangrad.credit.types import Step, Trajectory
from spangrad.errors import ConfigError, CreditError
from tests.credit.test_assign import trajectory


def group(name: str, *rewards: float, tokens: int = 1) -> list[Trajectory]:
    return [trajectory(f"{name}{i}", reward, group=name, tokens=tokens) for i, reward in enumerate(rewards)]


BATCH = [
    *group("wide", 0.0, 8.0),
    *group("middle", 0.0, 4.0),
    *group("near", 1.0, 2.0),
    *group("equal", 1.0, 1.0),
]
"""Standard deviations 4, 2, 0.5 and 0."""


def left_out(batch: list[Trajectory], **settings: Any) -> dict[str, float]:
    found = assign(batch, CreditConfig(**settings)).diagnostics.metrics()
    return {name.removeprefix("dropped/"): n for name, n in found.items() if name.startswith("dropped/")}


def test_filters_are_applied_in_their_order_and_each_counts_what_it_leaves_out():
    # Half of 4 groups are 2, half of the 3 that differ are 2, too; then the widest has 4 / 6 of the spread.
    assert left_out(BATCH, filters=("zero_spread", "top_share"), top_share=0.5) == {
        "zero_spread": 2,
        "top_share": 2,
    }
    assert left_out(BATCH, filters=("top_share", "zero_spread"), top_share=0.5) == {
        "top_share": 4,
        "zero_spread": 0,
    }
    assert left_out(BATCH, filters=("top_share", "top_p"), top_share=0.5, top_p=0.6) == {
        "top_share": 4,
        "top_p": 2,
    }
    assert left_out(BATCH) == {}


@pytest.mark.parametrize("settings", [{"top_share": 0.5}, {"top_p": 0.5}])
def test_which_of_equal_groups_stay_depends_on_no_order(settings):
    tied = [one for name in "abcd" for one in group(name, 1.0, 0.0)]
    config = CreditConfig(filters=(next(iter(settings)),), **settings)
    found = [assign(batch, config).left_out for batch in (tied, tied[::-1])]
    assert found[0] == found[1] and len(found[0]) == 4


def test_what_is_left_out_has_no_advantage_but_a_reason_and_no_part_in_statistics():
    config = CreditConfig(episode="reinforce_pp_baseline", filters=("top_share",), top_share=0.25, eps=0.0)
    result = assign(BATCH, config)
    assert set(result.of("wide1").values()) == {1.0}  # 4 in standard deviations of what stays: 4
    assert result.advantages["near1", "near1-0"] is None
    assert result.left_out["near1"].startswith("filter top_share: the rewards of its group differ less")
    assert "wide1" not in result.left_out
    found = result.diagnostics
    assert (found.groups, found.informative_groups, found.equal_groups) == (4, 3, 1)  # of what came in


def test_zero_spread_goes_by_what_the_terms_compare():
    # Equal returns, earned in other steps of the same states.
    batch = [trajectory("a", 0.0, rewards=[1.0, 0.0]), trajectory("b", 0.0, rewards=[0.0, 1.0])]
    assert left_out(batch, filters=("zero_spread",)) == {"zero_spread": 2}
    assert left_out(batch, filters=("zero_spread",), step="gigpo") == {"zero_spread": 0}


@pytest.mark.parametrize(
    "settings",
    [
        {"filters": ("zero_spread",)},
        {"filters": ("zero_spread",), "step": "gigpo"},
        {"filters": ("zero_spread",), "step": "tree_edges", "step_weight": 0.0},
        {"filters": ("top_share",), "step": "tree_edges"},
        {"filters": ("zero_spread", "top_p")},
    ],
)
def test_what_a_lone_rollout_gets_is_refused_where_filters_leave_every_one_out(settings):
    with pytest.raises(ConfigError, match=r"^singleton = 'raw' has no effect with .* filters \["):
        CreditConfig(singleton="raw", **settings)


def test_a_lone_rollout_that_branches_may_get_its_raw_return():
    steps = [Step("a0", 0), Step("a1", 1, reward=2.0), Step("a2", 2, reward=0.0, parent="a0")]
    filters: dict[str, Any] = {"step": "tree_edges", "filters": ("zero_spread",)}
    found = [
        assign([Trajectory("a", "g", 1.0, steps)], CreditConfig(singleton=lone, **filters)).of("a")["a0"]
        for lone in ("zero", "raw")
    ]
    assert found == [0.0, 3.0]


def test_an_overlong_rollout_is_left_out_with_its_reward_and_not_scored_zero():
    long = trajectory("long", 0.0, "abcdef", tokens=2)
    batch = [trajectory("a", 1.0, tokens=2), trajectory("b", 0.5, tokens=2), long]
    masked = assign(batch, CreditConfig(overlong="mask", overlong_limit=11, scale_by_std=False))
    assert masked.of("a")["a-0"] == 0.25
    assert masked.left_out == {
        "long": "overlong: it was cut off, or sampled more tokens than credit.overlong_limit"
    }
    assert (masked.diagnostics.dropped, masked.diagnostics.missing_reward) == ({"overlong": 1}, 0)
    assert assign(batch, CreditConfig(overlong="mask", overlong_limit=12)).left_out == {}


def test_an_overlong_rollout_pays_as_the_golden_numbers_say():
    batch = [trajectory(str(n), 1.0, "a", tokens=n) for n in (16000, 17000, 20480)]
    settings: dict[str, Any] = {"overlong": "penalize", "overlong_limit": 20480, "overlong_buffer": 4096}
    found = assign(batch, CreditConfig(scale_by_std=False, **settings))
    paid = [1.0, 1.0 - 0.150391, 0.0]
    expected = [each - sum(paid) / 3 for each in paid]
    assert [found.of(str(n))[f"{n}-0"] for n in (16000, 17000, 20480)] == pytest.approx(expected, abs=1e-6)


def test_a_limit_wants_lengths():
    with pytest.raises(CreditError, match="rollout 'a' has a call without token ids, so it has no length"):
        assign([trajectory("a", 1.0)], CreditConfig(overlong="mask", overlong_limit=9))
