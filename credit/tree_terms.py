"""Advantages of steps from trees of rollouts: `branches` finds the trees, `trees` has the arithmetic.

Returns are taken from the group's first leaf on, so that equal returns give exact zeros; no advantage
depends on it.

Shape letters: N rollouts, S steps of all rollouts, V nodes.
"""

from collections.abc import Sequence

import numpy as np

from spangrad.credit import trees
from spangrad.credit.branches import Branches, branches
from spangrad.credit.groups import Floats, Ints, pool_statistics
from spangrad.credit.types import Trajectory


def tree_edges(trajectories: Sequence[Trajectory], group_ids_N: Ints, *, prior: float) -> Floats:
    """What each step was worth, `trees.edge_advantages`: the mean of the leaves behind it minus before it.

    Statistics over leaves: a rollout has one, and one more for each branch inside it. Returns shape (S,),
    float64, reward units. Raises CreditError as `branches` does.
    """
    found = branches(trajectories, group_ids_N)
    return trees.edge_advantages(found.parents_V, _from_first_leaf(found), prior=prior)[found.node_of_S]


def tree_rl(trajectories: Sequence[Trajectory], group_ids_N: Ints) -> Floats:
    """TreeRL as in its paper, `trees.treerl` with leave-one-out. Arguments and result as in `tree_edges`."""
    found = branches(trajectories, group_ids_N)
    return trees.treerl(found.parents_V, _from_first_leaf(found), leave_one_out=True)[found.node_of_S]


def tree_grpo(trajectories: Sequence[Trajectory], group_ids_N: Ints, *, ddof: int, eps: float) -> Floats:
    """Tree-GRPO, `trees.tree_grpo`: leaves against their tree and their group.

    A step that several leaves share gets their mean: here it is trained once, where the paper trains it in
    the sequence of every leaf. A tree is what began with the same first step. Arguments as in `tree_edges`.
    Returns shape (S,), no unit.
    """
    found = branches(trajectories, group_ids_N)
    return _shared(found, trees.tree_grpo(*_leaves(found), ddof=ddof, eps=eps))


def tree_grpo_as_published(trajectories: Sequence[Trajectory], group_ids_N: Ints, *, eps: float) -> Floats:
    """Tree-GRPO as its code has it, `trees.tree_grpo_as_published` in the form of a sum.

    A group of several leaves that all return the same gets zeros, also in trees of one leaf, which keep
    their raw return elsewhere. Arguments and result as in `tree_grpo`.
    """
    found = branches(trajectories, group_ids_N)
    returns_L, tree_ids_L, group_ids_L = _leaves(found)
    groups = pool_statistics(returns_L, group_ids_L, ddof=0)
    advantages_L = trees.tree_grpo_as_published(returns_L, tree_ids_L, group_ids_L, eps=eps)
    return _shared(found, np.where((groups.std_X > 0) | (groups.count_X == 1), advantages_L, 0.0))


def _leaves(found: Branches) -> tuple[Floats, Ints, Ints]:
    """Return, tree and group of each leaf."""
    is_leaf_V = ~np.isnan(found.returns_V)
    return found.returns_V[is_leaf_V], found.tree_ids_V[is_leaf_V], found.group_ids_V[is_leaf_V]


def _shared(found: Branches, advantages_L: Floats) -> Floats:
    """To each step the mean of the leaves behind it."""
    advantages_V = np.full(len(found.returns_V), np.nan)
    advantages_V[~np.isnan(found.returns_V)] = advantages_L
    shared_V: Floats = trees.node_values(found.parents_V, advantages_V).value_V
    shared_S: Floats = shared_V[found.node_of_S]
    return shared_S


def _from_first_leaf(found: Branches) -> Floats:
    is_leaf_V = ~np.isnan(found.returns_V)
    groups, first = np.unique(found.group_ids_V[is_leaf_V], return_index=True)
    base = found.returns_V[is_leaf_V][first]
    shifted_V: Floats = found.returns_V - base[np.searchsorted(groups, found.group_ids_V)]
    return shifted_V
