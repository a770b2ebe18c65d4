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
        CreditError: Steps go on from each other in a circle, or nothing branches: then there is no tree, and
            comparing rollouts says all.
    """
    steps = [step for each in trajectories for step in each.steps]
    group_S = np.repeat(group_ids_N, [len(each.steps) for each in trajectories])
    named = zip(group_S.tolist(), steps, strict=True)
    place = {(group, step.call_id): s for s, (group, step) in enumerate(named)}
    above = _above(trajectories, group_S, place)
    order = _parents_first(above, steps)
    has_own_child = np.zeros(len(steps), dtype=np.bool_)
    rollout_S = np.repeat(np.arange(len(trajectories)), [len(each.steps) for each in trajectories])
    children = np.zeros(len(steps), dtype=np.int64)
    for s, parent in enumerate(above):
        if parent != NO_PARENT:
            children[parent] += 1
            has_own_child[parent] |= rollout_S[parent] == rollout_S[s]
    if steps and not (children + ~has_own_child > 1).any():
        raise CreditError(
            "no rollout of this batch goes on from a call of another one, and none branches: there is no"
            " tree; choose terms that compare rollouts, or steps from the same state"
        )
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


def _above(trajectories: Sequence[Trajectory], group_S: Ints, place: dict[tuple[int, str], int]) -> list[int]:
    """Which step each one goes on from; `NO_PARENT`: it begins."""
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
