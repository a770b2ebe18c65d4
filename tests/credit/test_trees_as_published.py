"""Tree-GRPO as its code has it: the three forms, single leaves, and in `assign`."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from spangrad.credit.assign import assign
from spangrad.credit.credit_config import CreditConfig
from spangrad.credit.trees import TreeForm, tree_grpo, tree_grpo_as_published
from spangrad.credit.types import Step, Trajectory
from spangrad.errors import CreditError
from tests.credit.test_estimators import floats, ints
from tests.reference import estimators as reference

FORMS: list[TreeForm] = ["sum", "inner", "nested"]
returns = st.sampled_from([0.0, 1.0, -0.5, 0.25])
forests = st.lists(st.tuples(st.integers(0, 2), st.lists(returns, min_size=1, max_size=4)), max_size=6)
"""Group and leaves of each tree."""


def laid_out(forest: list[tuple[int, list[float]]]) -> tuple[Any, Any, Any]:
    leaves = [(value, tree, group) for tree, (group, own) in enumerate(forest) for value in own]
    values, trees, groups = zip(*leaves, strict=True) if leaves else ((), (), ())
    return floats(*values), ints(*trees), ints(*groups)


def test_a_tree_is_compared_inside_and_with_its_group_by_sample_deviations():
    leaves = floats(1, 0, 0, 0), ints(0, 0, 1, 1), ints(0, 0, 0, 0)
    # Inside: +-.5 / .707107, 0, 0; across: mean .25, sample standard deviation .5.
    inner = [0.707107, -0.707107, 0, 0]
    assert_allclose(tree_grpo_as_published(*leaves, form="inner", eps=0.0), inner, atol=1e-6)
    inter = [1.5, -0.5, -0.5, -0.5]
    assert_allclose(tree_grpo_as_published(*leaves, eps=0.0), np.add(inner, inter), atol=1e-6)
    assert_allclose(tree_grpo_as_published(*leaves), tree_grpo(*leaves, ddof=1), atol=1e-12)


def test_a_single_leaf_keeps_what_it_has():
    # The third leaf is a tree of its own: with the group, mean 1 and sample standard deviation 1.
    leaves = floats(0, 1, 2), ints(0, 0, 1), ints(0, 0, 0)
    assert tree_grpo_as_published(*leaves, form="inner", eps=0.0)[2] == 2.0
    assert tree_grpo_as_published(*leaves, form="sum", eps=0.0)[2] == 2.0 + 1.0
    assert tree_grpo_as_published(*leaves, form="nested", eps=0.0)[2] == 1.0
    alone = [tree_grpo_as_published(floats(3), ints(0), ints(0), form=form) for form in FORMS]
    assert [found.tolist() for found in alone] == [[6.0], [3.0], [3.0]]


@given(forests, st.sampled_from(FORMS))
def test_it_agrees_with_the_slow_one(forest, form):
    leaves = laid_out(forest)
    values, trees, groups = (part.tolist() for part in leaves)
    slow = reference.tree_grpo_as_published(values, trees, groups, form)
    # The slow one divides a single leaf by 1 + eps, as the code does.
    assert_allclose(tree_grpo_as_published(*leaves, form=form), slow, atol=1e-5)


@given(forests)
def test_normalising_over_the_group_first_does_nothing_where_every_tree_has_two_leaves(forest):
    leaves = laid_out([(group, [*own, own[0] + 1]) for group, own in forest])
    nested = tree_grpo_as_published(*leaves, form="nested", eps=0.0)
    assert_allclose(nested, tree_grpo_as_published(*leaves, form="inner", eps=0.0), atol=1e-9)


def test_another_form_is_refused():
    with pytest.raises(CreditError, match="form is 'tree_2norm'; expected one of sum, inner, nested"):
        tree_grpo_as_published(floats(1), ints(0), ints(0), form="tree_2norm")  # type: ignore[arg-type]


# through `assign`


def rollout(name: str, reward: float, *parents: str | None, group: str = "g") -> Trajectory:
    steps = [Step(f"{name}{t}", t, parent=parent) for t, parent in enumerate(parents)]
    return Trajectory(name, group, reward, steps)


def test_a_shared_step_gets_the_mean_of_its_leaves_and_a_single_leaf_its_raw_return():
    batch = [rollout("a", 1.0, None, None), rollout("b", 0.0, "a0"), rollout("c", 0.5, None)]
    found = assign(batch, CreditConfig(episode="tree_grpo_as_published", eps=0.0))
    # a and b: +-.707107 inside; the group has mean .5 and sample standard deviation .5.
    assert found.of("a") == pytest.approx({"a0": 0.0, "a1": 0.707107 + 1}, abs=1e-6)
    assert found.of("b") == pytest.approx({"b0": -0.707107 - 1}, abs=1e-6)
    assert found.of("c") == pytest.approx({"c0": 0.5 + 0.0})


def test_equal_returns_of_a_group_give_zero_also_to_single_leaves_and_are_no_signal():
    tree = [rollout("a", 1.0, None, None), rollout("b", 1.0, "a0"), rollout("c", 1.0, None)]
    lone = rollout("d", 2.0, None, group="alone")
    config = CreditConfig(episode="tree_grpo_as_published")
    found = assign([*tree, lone], config)
    assert found.of("d") == {"d0": 4.0}  # raw in its tree and in its group
    assert not any(value for (name, _), value in found.advantages.items() if name != "d")
    assert (found.diagnostics.informative_groups, found.diagnostics.equal_groups) == (0, 1)
    kept = assign([*tree, lone], CreditConfig(episode="tree_grpo_as_published", filters=("zero_spread",)))
    assert set(kept.left_out) == set("abcd")
