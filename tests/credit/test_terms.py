"""Terms that need more than returns and states: components, roles, actions, tokens, branches."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from spangrad.adapters.model_call import Choice
from spangrad.credit.actions import action_of
from spangrad.credit.assign import assign
from spangrad.credit.credit_config import CreditConfig
from spangrad.credit.forks import parents_of
from spangrad.credit.gdpo import gdpo
from spangrad.credit.gigpo import NO_ANCHOR
from spangrad.credit.state_actions import NO_ACTION, state_action_advantages
from spangrad.credit.transitions import trajectory_of
from spangrad.credit.types import Step, Trajectory
from spangrad.errors import ConfigError, CreditError
from spangrad.store.records import Rollout
from tests.adapters.building import call
from tests.credit.test_estimators import floats, ints
from tests.reference import estimators as reference


def rollout(name: str, reward: float | None, *steps: dict[str, Any], **more: Any) -> Trajectory:
    made = [Step(f"{name}{t}", t, **step) for t, step in enumerate(steps)]
    return Trajectory(name, more.pop("group", "g"), reward, made, **more)


def values(batch: list[Trajectory], **config: Any) -> list[float]:
    found = assign(batch, CreditConfig(**config)).advantages.values()
    return [float("nan") if a is None else a for a in found]


def test_mt_grpo_gives_the_golden_numbers_before_the_intermediate_reward_and_the_outcome_behind_it():
    given = zip((1.0, 0.0, 1.0, 0.0), (0.3, 0.0, 0.2, 0.1), strict=True)
    batch = [rollout(f"r{n}", o, {"reward": t}, {}) for n, (o, t) in enumerate(given)]
    found = values(batch, step="mt_grpo", ddof=1, eps=1e-4)
    assert_allclose(found[::2], [2.026871, -2.026871, 1.252874, -1.252874], atol=1e-6)
    # Outcomes alone: (1 - 0.5) / (0.57735 + 1e-4)
    assert_allclose(found[1::2], [0.865876, -0.865876, 0.865876, -0.865876], atol=1e-6)


@pytest.mark.parametrize(
    ("steps", "reward"), [([{}], 1.0), ([{"reward": 0.0}, {"reward": 1.0}], 1.0), ([{"reward": 1.0}], None)]
)
def test_mt_grpo_refuses_another_number_of_intermediate_rewards_and_a_missing_outcome(steps, reward):
    batch = [rollout("b", 0.0, {"reward": 1.0}), rollout("a", reward, *steps)]
    with pytest.raises(CreditError, match=r"rollout 'a' has .* one intermediate reward and an outcome"):
        assign(batch, CreditConfig(step="mt_grpo"))


COMPONENTS = {"correct": [1.0, 0.0, 0.0, 1.0], "brief": [0.0, 100.0, 50.0, 100.0]}


def with_components(weights: dict[str, float]) -> list[Trajectory]:
    return [
        rollout(
            f"r{n}", a * weights["correct"] + b * weights["brief"], {}, components={"correct": a, "brief": b}
        )
        for n, (a, b) in enumerate(zip(*COMPONENTS.values(), strict=True))
    ]


def test_gdpo_keeps_the_rewards_apart_that_have_a_weight():
    weights = {"correct": 2.0, "brief": 1.0}
    found = values(with_components(weights), episode="gdpo", reward_weights=weights)
    expected = gdpo(np.array(list(COMPONENTS.values())), ints(0, 0, 0, 0), floats(2, 1))
    assert_allclose(found, expected)
    only = values(with_components(weights), episode="gdpo", reward_weights={"correct": 1.0})
    assert_allclose(only, [1.0, -1.0, -1.0, 1.0], atol=1e-5)


def test_gdpo_leaves_out_a_rollout_that_lacks_a_component_and_counts_components_that_cancel_out():
    batch = [
        rollout("a", 1.0, {}, components={"x": 1.0, "y": 0.0}),
        rollout("b", 1.0, {}, components={"x": 0.0, "y": 1.0}),
        rollout("c", 1.0, {}, components={"x": 1.0, "y": None}),
    ]
    result = assign(batch, CreditConfig(episode="gdpo", reward_weights={"x": 3.0, "y": 1.0}))
    assert (result.of("a")["a0"], result.of("b")["b0"]) == pytest.approx((1.0, -1.0), abs=1e-5)
    assert result.advantages["c", "c0"] is None
    assert (result.diagnostics.missing_reward, result.diagnostics.informative_groups) == (1, 1)


def test_gdpo_refuses_rewards_of_steps_that_it_would_not_count():
    batch = [rollout("a", 1.0, {"reward": 1.0}, components={"reward": 1.0})]
    with pytest.raises(CreditError, match="a step has a reward, and episode 'gdpo' counts outcomes alone"):
        assign(batch, CreditConfig(episode="gdpo"))
    with pytest.raises(CreditError, match="choose a step term that counts it"):
        assign(batch, CreditConfig(episode="gdpo", step="leave_one_out_to_go", step_weight=0.0))
    assert values(batch, episode="gdpo", step="leave_one_out_to_go") == [0.0]


@pytest.mark.parametrize("weights", [{}, {"a": 0.0}])
def test_weights_that_weigh_nothing_are_refused(weights):
    with pytest.raises(ConfigError, match=r"reward_weights is .*; expected weights, not all 0"):
        CreditConfig(reward_weights=weights)


def test_roles_are_compared_with_their_like():
    planner, coder = {"role": "planner"}, {"role": "coder"}
    batch = [rollout("a", 1.0, planner, coder), rollout("b", 0.0, planner), rollout("c", 0.5, coder)]
    found = values(batch, episode="grpo_per_role", scale_by_std=False)
    assert found == [0.5, 0.25, -0.5, -0.25]  # planners of 1 and 0, coders of 1 and .5
    with pytest.raises(CreditError, match="no call of this batch names its agent"):
        values([rollout("a", 1.0, {})], episode="grpo_per_role")


@pytest.mark.parametrize(
    ("known", "terms", "expected"),
    [
        ({"role": "planner"}, {"episode": "grpo_per_role", "scale_by_std": False}, [0.5, -0.5]),
        (
            {"action": "x", "anchor": "s"},
            {"episode": "none", "step": "rtmc", "value_prior": 0.0},
            [0.5, -0.5],
        ),
    ],
)
def test_calls_without_names_or_actions_that_a_filter_leaves_get_what_they_get_beside_others(
    known, terms, expected
):
    named = [rollout(name, 1.0, known, group="named") for name in "ab"]
    nameless = [rollout("c", 1.0, {"anchor": "s"}), rollout("d", 0.0, {"anchor": "s"})]
    assert values([*named, *nameless], **terms) == [0.0, 0.0, *expected]
    found = assign([*named, *nameless], CreditConfig(**terms, filters=("zero_spread",)))
    assert [found.advantages[name, f"{name}0"] for name in "abcd"] == [None, None, *expected]
    assert found.diagnostics.dropped == {"zero_spread": 2}


def test_reinforce_pp_whitens_over_tokens_of_all_groups():
    batch = [
        rollout("a", 1.0, {"tokens": 1}, {"tokens": 3}, group=None),
        rollout("b", 0.0, {"tokens": 4}, group=None),
    ]
    found = values(batch, episode="none", step="reinforce_pp", gamma=0.5, eps=0.0)
    returns, counts = np.array([0.5, 1.0, 0.0]), np.array([1, 3, 4])
    mean = (returns * counts).sum() / 8
    std = np.sqrt((counts * (returns - mean) ** 2).sum() / 8)
    assert_allclose(found, (returns - mean) / std)
    with pytest.raises(CreditError, match="no token ids"):
        values([rollout("a", 1.0, {})], episode="none", step="reinforce_pp")


def test_an_action_is_worth_what_followed_it_less_what_its_state_was_worth():
    batch = [
        rollout(name, reward, {"anchor": "s", "action": action})
        for name, reward, action in (("a", 1.0, "x"), ("b", 1.0, "x"), ("c", 0.0, "y"), ("d", 0.0, "x"))
    ]
    # V = 1/2, x: 2/3, y: 0; the prior counts for one step: x (2 + .5) / 4, y .5 / 2
    found = values(batch, episode="none", step="rtmc", value_prior=1.0)
    assert_allclose(found, [0.125, 0.125, -0.25, 0.125])
    with pytest.raises(CreditError, match="no step of this batch tells what was done"):
        values([rollout("a", 1.0, {"anchor": "s"})], episode="none", step="rtmc")


steps_seen = st.lists(
    st.tuples(st.sampled_from([0.0, 0.3, 1.0]), st.integers(0, 1), st.integers(-1, 2), st.integers(-1, 1)),
    max_size=12,
)


@settings(max_examples=40)
@given(steps_seen, st.sampled_from([0.0, 1.0, 2.5]))
def test_state_action_values_agree_with_the_slow_ones(steps, prior):
    returns, groups, anchors, actions = zip(*steps, strict=True) if steps else ((), (), (), ())
    found = state_action_advantages(
        floats(*returns), ints(*groups), ints(*anchors), ints(*actions), prior=prior
    )
    expected = reference.state_action_advantages(steps, prior=prior, no_anchor=NO_ANCHOR, no_action=NO_ACTION)
    assert_allclose(found, expected, atol=1e-12)


GOLDEN_TREE = [
    rollout("a", 1.0, {}, {}),
    rollout("b", 0.0, {"parent": "a0"}),
    rollout("c", 1.0, {}, {}),
    rollout("d", 1.0, {"parent": "c0"}),
]
"""root -> a {1, 0}, c {1, 1}"""


def test_branched_rollouts_give_the_golden_numbers_of_trees():
    edges = assign(GOLDEN_TREE[::-1], CreditConfig(episode="none", step="tree_edges", value_prior=0.0))
    assert edges.of("a") == {"a0": -0.25, "a1": 0.5}
    assert edges.of("b") == {"b0": -0.5}
    assert edges.of("c") == {"c0": 0.25, "c1": 0.0}
    both = assign(GOLDEN_TREE, CreditConfig(episode="none", step="treerl"))
    # -.5 before the root of two leaves, times 4 / 3: each leaf less the mean of the three others
    assert both.of("a")["a0"] == pytest.approx(-0.5 * 4 / 3 / np.sqrt(2))
    assert both.of("d")["d0"] == pytest.approx(0.25 * 4 / 3)


def test_tree_grpo_compares_leaves_in_their_tree_and_in_their_group_and_a_shared_step_gets_the_mean():
    found = assign(GOLDEN_TREE, CreditConfig(episode="tree_grpo", eps=0.0))
    group = np.array([1.0, 0.0, 1.0, 1.0])
    outer = (group - group.mean()) / group.std()
    assert found.of("a")["a1"] == pytest.approx(1.0 + outer[0])
    assert found.of("b")["b0"] == pytest.approx(-1.0 + outer[1])
    assert found.of("a")["a0"] == pytest.approx((outer[0] + outer[1]) / 2)
    assert found.of("c")["c0"] == pytest.approx(outer[2])


def test_a_branch_inside_a_rollout_ends_in_a_leaf_with_what_was_given_on_its_way():
    tried: list[dict[str, Any]] = [{}, {"reward": 1.0}, {"reward": 0.0, "parent": "a0"}]
    found = values([rollout("a", 0.0, *tried)], episode="none", step="tree_edges", value_prior=0.0)
    assert found == [0.0, 0.5, -0.5]


TREE_TERMS = [
    {"episode": "tree_grpo"},
    {"episode": "tree_grpo_as_published"},
    {"step": "tree_edges"},
    {"step": "treerl"},
]


@pytest.mark.parametrize("terms", TREE_TERMS)
def test_without_branches_there_is_no_tree(terms):
    with pytest.raises(CreditError, match="none branches: there is no tree; choose terms"):
        assign([rollout("a", 1.0, {}, {}), rollout("b", 0.0, {"parent": "gone"})], CreditConfig(**terms))
    circle = [rollout("a", 1.0, {"parent": "b0"}, {}), rollout("b", 1.0, {"parent": "a0"})]
    with pytest.raises(CreditError, match="in a circle"):
        assign(circle, CreditConfig(**terms))


@pytest.mark.parametrize("terms", TREE_TERMS)
@pytest.mark.parametrize("left_out_by", [{"filters": ("zero_spread",)}, {"overlong": "mask"}])
def test_where_what_branches_is_left_out_the_others_are_compared(terms, left_out_by):
    flat = [rollout("a", 1.0, {}, {}, group="flat"), rollout("b", 0.0, {}, group="flat")]
    tree = [rollout("c", 1.0, {}, {}), rollout("d", 1.0, {"parent": "c0"}, is_truncated=True)]
    found = assign([*flat, *tree], CreditConfig(**terms, **left_out_by))
    assert "d" in found.left_out
    assert found.of("a")["a1"] > 0 > found.of("b")["b0"]
    with pytest.raises(CreditError, match="there is no tree"):
        assign(flat, CreditConfig(**terms, **left_out_by))


def test_tokens_tell_which_rollouts_go_on_from_calls_of_others():
    calls = {
        "a": [call("a0", [1], [2]), call("a1", [1, 2, 3], [4])],
        "b": [call("b0", [1, 2, 3], [5]), call("b1", [1, 2, 3, 5, 6], [7])],  # branched off a0
        "c": [call("c0", [1], [2]), call("c1", [1, 2, 3], [4])],  # by chance the same as a
        "d": [call("d0", [1], [9]), call("d1", [8], [8]), call("d2", [1, 9, 3], [4])],  # a sub-agent between
        "e": [call("e0", [1], [6]), call("e1", [1, 6, 3], [4]), call("e2", [1, 6, 5], [4])],  # a retry
    }
    calls = {
        name: [dataclasses.replace(one, start_ns=10 * n + t) for t, one in enumerate(own)]
        for n, (name, own) in enumerate(calls.items())
    }
    ids = {f"{name}{t}": one.call_id for name, own in calls.items() for t, one in enumerate(own)}
    rollouts = [Rollout(name, group_id="g") for name in calls]
    assert parents_of(rollouts, calls) == {ids["b0"]: ids["a0"], ids["e2"]: ids["e0"]}
    apart = [dataclasses.replace(one, group_id=one.rollout_id) for one in rollouts]
    assert parents_of(apart, calls) == {ids["e2"]: ids["e0"]}
    said = [dataclasses.replace(rollouts[2], task={"forked_from": "x-1"})]
    assert parents_of(said, calls) == {ids["c0"]: "x-1"}


def test_an_action_is_the_tools_that_are_called_or_else_the_text():
    def done(**message: Any) -> str | None:
        return action_of(dataclasses.replace(call("a", [1], [2]), choices=[Choice(message)]))

    def walk(arguments: str, **more: Any) -> list[dict[str, Any]]:
        return [{**more, "function": {"name": "walk", "arguments": arguments}}]

    north = done(tool_calls=walk('{"to": "north", "n": 1}', id="x"))
    assert north == done(tool_calls=walk('{"n":1,"to":"north"}', id="y"), content="I walk")
    assert north != done(tool_calls=walk('{"to": "south", "n": 1}'))
    assert done(tool_calls=walk("{half")) not in (None, north)
    assert done(content="north") == done(content="north", reasoning_content="hm") != done(content="south")
    assert done(content="") is None


def test_arguments_that_a_policy_nested_too_deep_are_an_action_as_they_are_written():
    def done(arguments: Any) -> str | None:
        tools = [{"function": {"name": "walk", "arguments": arguments}}]
        return action_of(dataclasses.replace(call("a", [1], [2]), choices=[Choice({"tool_calls": tools})]))

    assert done("[" * 5000 + "]" * 5000) == done("[" * 5000 + "]" * 5000) not in (None, done("[" * 5001))
    nested: list[Any] = []
    for _ in range(5000):
        nested = [nested]
    assert done(nested) is None  # it can't be written


def test_actions_are_hashed_for_terms_that_compare_them_alone():
    calls = [dataclasses.replace(call("a", [1], [2]), choices=[Choice({"content": "north"})])]
    config = CreditConfig(episode="none", step="rtmc")
    assert (config.needs_actions, CreditConfig(step="gigpo").needs_actions) == (True, False)
    assert trajectory_of(calls, 1.0).steps[0].action is not None
    assert trajectory_of(calls, 1.0, with_actions=False).steps[0].action is None
