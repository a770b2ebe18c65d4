"""Credit over trees of rollouts: a node is worth what its leaves earn.

A tree is given as the parent of every node, parents first; leaves have returns.

Shape letters: V nodes of all trees, L leaves.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from spangrad.credit.groups import Floats, Ints
from spangrad.credit.grpo import group_advantages
from spangrad.errors import CreditError

NO_PARENT = -1
TreeForm = Literal["sum", "inner", "nested"]


@dataclass(frozen=True, slots=True, eq=False)
class NodeValues:
    """What is below each node."""

    value_V: Floats
    """Mean return of the leaves below (a leaf: its own), smoothed if asked."""
    leaves_V: Ints
    """How many leaves are below; a leaf has 1."""


def node_values(parents_V: Ints, returns_V: Floats, *, prior: float = 0.0) -> NodeValues:
    """Mean of the leaves below every node, pulled toward the parent's value where leaves are few.

        V(n) = (sum of its leaves' returns + prior * V(parent)) / (leaves + prior);   V(root) is not pulled

    Source: mean: TreeRL, arXiv:2506.11902; pull: RTMC, arXiv:2604.11037 (from a digest: a sketch).

    Args:
        parents_V: Index of each node's parent, smaller than its own; `NO_PARENT` for roots.
        returns_V: Return of each leaf; NaN at inner nodes.
        prior: How many leaves the parent's value counts for; 0 or more.

    Raises:
        CreditError: A parent does not stand before its child, a leaf has no finite return, an inner node has
            one, or the prior is negative.
    """
    leaves_V = _check(parents_V, returns_V, prior)
    sums_V = np.where(leaves_V == 1, np.nan_to_num(returns_V), 0.0)
    counts_V = leaves_V.copy()
    for v in range(len(parents_V) - 1, -1, -1):
        if parents_V[v] != NO_PARENT:
            sums_V[parents_V[v]] += sums_V[v]
            counts_V[parents_V[v]] += counts_V[v]
    values_V = sums_V / np.maximum(counts_V, 1)
    if prior:
        for v in range(len(parents_V)):
            if parents_V[v] != NO_PARENT:
                pulled = sums_V[v] + prior * values_V[parents_V[v]]
                values_V[v] = pulled / (counts_V[v] + prior)
    return NodeValues(values_V, counts_V)


def edge_advantages(parents_V: Ints, returns_V: Floats, *, prior: float = 0.0) -> Floats:
    """What taking a step was worth: the value behind it minus the value before it.

        A(n) = V(n) - V(parent of n);   0 at roots

    Source: RTMC, arXiv:2604.11037 (Q of the action minus V of the state), from a digest.

    Arguments and errors as in `node_values`. Returns shape (V,), float64, reward units. Along a path from
    root to leaf the advantages sum to the leaf's return minus the root's value (prior 0).
    """
    values_V = node_values(parents_V, returns_V, prior=prior).value_V
    return np.where(parents_V == NO_PARENT, 0.0, values_V - values_V[parents_V])


def treerl(
    parents_V: Ints, returns_V: Floats, *, leave_one_out: bool = False, divide_by_sqrt: bool = True
) -> Floats:
    """Global and local advantage of a step, less where many leaves share it.

        A(n) = [ (V(n) - V(root)) + (V(n) - V(parent)) ] / sqrt(leaves below n);   0 at roots

    Source: TreeRL, arXiv:2506.11902.

    Args:
        parents_V: As in `node_values`.
        returns_V: As in `node_values`.
        leave_one_out: First replace a leaf's return by itself minus the mean of the tree's other leaves. This
            multiplies everything by n / (n - 1) for a tree of n leaves.
        divide_by_sqrt: Off: without the division.

    Returns:
        Advantages, shape (V,), float64, reward units.

    Raises:
        CreditError: As in `node_values`.
    """
    values = node_values(parents_V, returns_V)
    roots_V = root_of(parents_V)
    is_root_V = parents_V == NO_PARENT
    parent_value_V = np.where(is_root_V, values.value_V, values.value_V[parents_V])
    advantages_V = 2 * values.value_V - values.value_V[roots_V] - parent_value_V
    if leave_one_out:
        n_V = values.leaves_V[roots_V].astype(np.float64)
        advantages_V *= np.divide(n_V, n_V - 1, out=np.zeros_like(n_V), where=n_V > 1)
    scale_V: Floats = np.sqrt(values.leaves_V) if divide_by_sqrt else np.ones(len(parents_V))
    scaled_V: Floats = advantages_V / scale_V
    return scaled_V


def tree_grpo(
    returns_L: Floats, tree_ids_L: Ints, group_ids_L: Ints, *, ddof: int = 0, eps: float = 1e-6
) -> Floats:
    """Compare a leaf with its tree and with all trees of its task.

        A = (R - mean_tree) / (std_tree + eps) + (R - mean_group) / (std_group + eps)

    Source: Tree-GRPO, arXiv:2509.21240. Its code has other forms, too: `tree_grpo_as_published`.

    Args:
        returns_L: Return of each leaf, finite.
        tree_ids_L: Tree of each leaf.
        group_ids_L: Task of each leaf's tree.
        ddof: 0: population, 1: sample standard deviation.
        eps: Added to standard deviations.

    Returns:
        Advantages, shape (L,), float64. Sums to 0 in every group.

    Raises:
        CreditError: Shapes differ, or a return is not finite.
    """
    inside_L = group_advantages(returns_L, tree_ids_L, scale_by_std=True, ddof=ddof, eps=eps)
    return inside_L + group_advantages(returns_L, group_ids_L, scale_by_std=True, ddof=ddof, eps=eps)


def tree_grpo_as_published(
    returns_L: Floats,
    tree_ids_L: Ints,
    group_ids_L: Ints,
    *,
    form: TreeForm = "sum",
    eps: float = 1e-6,
) -> Floats:
    """Tree-GRPO as its published code computes it, to compare with results obtained by it.

        sum:     A = norm_tree(R) + norm_group(R)
        inner:   A = norm_tree(R)
        nested:  A = norm_tree(norm_group(R))
        norm(x) = (x - mean) / (std + eps); of a single leaf: x itself

    Source: github.com/AMAP-ML/Tree-GRPO, its estimators `tree`, `tree_inner` and `tree_2norm`. Differs from
    the paper: (a) sample standard deviation (ddof 1); (b) a tree of one leaf, and a group of one, keeps its
    raw return. Where every tree has two leaves or more, `nested` is `inner` up to eps: the tree takes off the
    group's mean and scale again.

    Args:
        returns_L: As in `tree_grpo`, and so are the trees and groups.
        tree_ids_L: Tree of each leaf.
        group_ids_L: Task of each leaf's tree.
        form: Which of its estimators.
        eps: Added to standard deviations.

    Returns:
        Advantages, shape (L,), float64. Equal returns of a tree or group of several leaves give zeros there.

    Raises:
        CreditError: Shapes differ, a return is not finite, or there is no such form.
    """

    def norm(values_L: Floats, labels_L: Ints) -> Floats:
        return group_advantages(values_L, labels_L, scale_by_std=True, ddof=1, eps=eps, singleton="raw")

    if form == "sum":
        return norm(returns_L, tree_ids_L) + norm(returns_L, group_ids_L)
    if form == "inner":
        return norm(returns_L, tree_ids_L)
    if form == "nested":
        return norm(norm(returns_L, group_ids_L), tree_ids_L)
    raise CreditError(f"form is {form!r}; expected one of {', '.join(get_args(TreeForm))}")


def root_of(parents_V: Ints) -> Ints:
    """Root of every node; parents stand before children."""
    roots_V = np.arange(len(parents_V))
    for v in range(len(parents_V)):
        if parents_V[v] != NO_PARENT:
            roots_V[v] = roots_V[parents_V[v]]
    return roots_V


def _check(parents_V: Ints, returns_V: Floats, prior: float) -> Ints:
    """1 at leaves, 0 at inner nodes."""
    if parents_V.shape != returns_V.shape or parents_V.ndim != 1:
        raise CreditError(f"parents have shape {parents_V.shape}, returns {returns_V.shape}; must be equal")
    if not prior >= 0:
        raise CreditError(f"prior is {prior!r}; expected 0 or more")
    if ((parents_V >= np.arange(len(parents_V))) | (parents_V < NO_PARENT)).any():
        raise CreditError("a node stands before its parent; expected parents first, and -1 for roots")
    leaves_V = np.ones(len(parents_V), dtype=np.int64)
    leaves_V[parents_V[parents_V != NO_PARENT]] = 0
    if not np.isfinite(returns_V[leaves_V == 1]).all():
        raise CreditError("a leaf has no finite return; leave its rollout out of the tree")
    if not np.isnan(returns_V[leaves_V == 0]).all():
        raise CreditError("an inner node has a return; expected NaN there: only leaves have one")
    return leaves_V
