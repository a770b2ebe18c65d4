"""Rollouts of a group as trees of steps: which step goes on from which, and what is at the leaves.

A step follows the step before it, unless its `parent` names another one: the call that a
branched rollout goes on from, or the call that a second continuation in its rollout does. Where
that one is no scored step of the group, it begins a tree of its own.

Shape letters: S steps of all rollouts, V nodes: the groups' roots, the steps, the leaves.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spangrad.credit.filters import Bools
from spangrad.credit.groups import Floats, Ints
from spangrad.credit.trees import NO_PARENT, root_of
from spangrad.credit.types import Trajectory
from spangrad.errors import CreditError


@dataclass(frozen=True, slots=True, eq=False)
class Branches:
    """Trees of a batch, parents before children. Every rollout has a leaf below each of its last steps."""

    parents_V: Ints
    returns_V: Floats
    """Return of each leaf: the outcome and what was given for steps on the way; NaN elsewhere."""
    node_of_S: Ints
    """Node of each step."""
    tree_ids_V: Ints
    """Node of the step that the tree began with; a group's root is its own."""
    group_ids_V: Ints
    """Node of the group's root."""


def branches(trajectories: Sequence[Trajectory], group_ids_N: Ints) -> Branches:
    """Build the trees.

    Raises:
        CreditError: Steps go on from each other in a circle.

    A group in which nothing branches has a tree for every rollout.
    """
    steps = [step for each in trajectories for step in each.steps]
    group_S = np.repeat(group_ids_N, [len(each.steps) for each in trajectories])
    above = _above(trajectories, group_S)
    order = _parents_first(above, steps)
    rollout_S = np.repeat(np.arange(len(trajectories)), [len(each.steps) for each in trajectories])
    _, has_own_child = _children(above, rollout_S)
    roots, root_S = np.unique(group_S, return_inverse=True)
    node_of_S = np.empty(len(steps), dtype=np.int64)
    node_of_S[order] = len(roots) + np.arange(len(steps))
    parents, given = [NO_PARENT] * len(roots), np.zeros(len(steps))
    for s in order:
        parent = above[s]
        parents.append(int(root_S[s]) if parent == NO_PARENT else int(node_of_S[parent]))
        inherited = 0.0 if parent == NO_PARENT else given[parent]
        given[s] = math.fsum([inherited, steps[s].reward or 0.0])
    ends = np.flatnonzero(~has_own_child)
    outcome_N = [each.reward or 0.0 for each in trajectories]
    returns = [given[s] + outcome_N[rollout_S[s]] for s in ends]
    parents_V = np.array([*parents, *node_of_S[ends]], dtype=np.int64)
    returns_V = np.concatenate([np.full(len(parents), np.nan), np.array(returns, dtype=np.float64)])
    group_ids_V = root_of(parents_V)
    tree_parents_V = np.where(parents_V < len(roots), NO_PARENT, parents_V)
    return Branches(parents_V, returns_V, node_of_S, root_of(tree_parents_V), group_ids_V)


def check_branches(trajectories: Sequence[Trajectory], group_ids_N: Ints) -> None:
    """Refuse a batch without a tree; what is left of one, when rollouts are left out, may have none.

    Raises:
        CreditError: Nothing branches, so comparing rollouts says all.
    """
    lengths_N = [len(each.steps) for each in trajectories]
    above = _above(trajectories, np.repeat(group_ids_N, lengths_N))
    children_S, has_own_child_S = _children(above, np.repeat(np.arange(len(trajectories)), lengths_N))
    if above and not (children_S + ~has_own_child_S > 1).any():
        raise CreditError(
            "no rollout of this batch goes on from a call of another one, and none branches: there is no"
            " tree; choose terms that compare rollouts, or steps from the same state"
        )


def _children(above: list[int], rollout_S: Ints) -> tuple[Ints, Bools]:
    """How many steps go on from each one, and whether one of its own rollout does."""
    has_own_child_S = np.zeros(len(above), dtype=np.bool_)
    children_S = np.zeros(len(above), dtype=np.int64)
    for s, parent in enumerate(above):
        if parent != NO_PARENT:
            children_S[parent] += 1
            has_own_child_S[parent] |= rollout_S[parent] == rollout_S[s]
    return children_S, has_own_child_S


def _above(trajectories: Sequence[Trajectory], group_S: Ints) -> list[int]:
    """Which step each one goes on from; `NO_PARENT`: it begins."""
    steps = [step for each in trajectories for step in each.steps]
    named = zip(group_S.tolist(), steps, strict=True)
    place = {(group, step.call_id): s for s, (group, step) in enumerate(named)}
    above: list[int] = []
    for each in trajectories:
        for step in each.steps:
            s = len(above)
            if step.parent is None:
                above.append(s - 1 if step is not each.steps[0] else NO_PARENT)
            elif (parent := place.get((int(group_S[s]), step.parent))) is None:
                above.append(NO_PARENT)
            else:
                above.append(parent)
    return above


def _parents_first(above: list[int], steps: Sequence[object]) -> list[int]:
    below: dict[int, list[int]] = {}
    for s, parent in enumerate(above):
        below.setdefault(parent, []).append(s)
    order: list[int] = []
    waiting = below.get(NO_PARENT, [])
    while waiting:
        order += waiting
        waiting = [child for s in waiting for child in below.get(s, ())]
    if len(order) < len(steps):
        raise CreditError(f"{len(steps) - len(order)} steps go on from each other in a circle")
    return order
