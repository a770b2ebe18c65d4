"""GiGPO: credit per step from states that several rollouts of a group came through.

Shape letters: N rollouts, S steps of all rollouts.
"""

import numpy as np

from spangrad.credit.groups import Floats, Ints, centred, check_labels, check_rollouts
from spangrad.credit.grpo import group_advantages
from spangrad.errors import CreditError

NO_ANCHOR = -1
"""Anchor id of a step whose state is not known."""


def step_advantages(
    step_returns_S: Floats,
    group_ids_S: Ints,
    anchor_ids_S: Ints,
    *,
    scale_by_std: bool = True,
    ddof: int = 0,
    eps: float = 0.0,
) -> Floats:
    """Compare every step with the steps of its group that began in the same state.

        A^S_s = (G_s - mean(G of s's pool)) / F
        pool: same group, same anchor;   F = std of the pool + eps, or 1

    Source: GiGPO, arXiv:2505.10978, step-level term. The standard deviation is the population one by default.

    Args:
        step_returns_S: Discounted return from each step on, reward units, finite.
        group_ids_S: Group of each step's rollout.
        anchor_ids_S: State that each step began in; equal number in a group = same state; `NO_ANCHOR` = not
            known.
        scale_by_std: Whether F is the standard deviation.
        ddof: 0: population, 1: sample standard deviation.
        eps: Added to the standard deviation.

    Returns:
        Advantages, shape (S,), float64. Sums to 0 in every pool.

    Raises:
        CreditError: Shapes differ, or a return is not finite.

    A pool of one, a pool of equal returns and a step without an anchor get zero. A pool whose returns differ
    by their discount alone does not; `assign` gives zero to groups in which nothing else differs.
    """
    if not step_returns_S.shape == group_ids_S.shape == anchor_ids_S.shape:
        shapes = (step_returns_S.shape, group_ids_S.shape, anchor_ids_S.shape)
        raise CreditError(f"step returns, groups and anchors have shapes {shapes}; they must be equal")
    advantages_S, _ = centred(
        step_returns_S, pool_ids(group_ids_S, anchor_ids_S), scale_by_std=scale_by_std, ddof=ddof, eps=eps
    )
    return np.where(anchor_ids_S == NO_ANCHOR, 0.0, advantages_S)


def gigpo(
    returns_N: Floats,
    group_ids_N: Ints,
    step_returns_S: Floats,
    rollout_index_S: Ints,
    anchor_ids_S: Ints,
    *,
    step_weight: float = 1.0,
    scale_by_std: bool = True,
    ddof: int = 0,
    eps: float = 0.0,
) -> Floats:
    """GiGPO as in its paper: the rollout's advantage plus the step's.

        A_{i,t} = A^E_i + omega * A^S_{i,t},   A^E_i = (R_i - mean_g R) / F   over rollouts

    Source: arXiv:2505.10978. Statistics over rollouts (not steps), a group of one gets zero. The paper does
    not say which standard deviation; here it is the population one unless `ddof` is 1.

    Args:
        returns_N: Undiscounted return of each rollout.
        group_ids_N: Group of each rollout.
        step_returns_S: Discounted return from each step on.
        rollout_index_S: Which rollout (0 to N - 1) each step belongs to.
        anchor_ids_S: As in `step_advantages`.
        step_weight: omega.
        scale_by_std: Whether F is the standard deviation.
        ddof: 0: population, 1: sample standard deviation.
        eps: Added to the standard deviation.

    Returns:
        Advantages, shape (S,), float64.

    Raises:
        CreditError: Shapes differ, a return is not finite, or a step's rollout is none of these.
    """
    check_rollouts(rollout_index_S, len(group_ids_N))
    episode_N = group_advantages(returns_N, group_ids_N, scale_by_std=scale_by_std, ddof=ddof, eps=eps)
    step_S = step_advantages(
        step_returns_S,
        group_ids_N[rollout_index_S],
        anchor_ids_S,
        scale_by_std=scale_by_std,
        ddof=ddof,
        eps=eps,
    )
    return episode_N[rollout_index_S] + step_weight * step_S


def gigpo_as_published(
    returns_N: Floats,
    group_ids_N: Ints,
    step_returns_S: Floats,
    rollout_index_S: Ints,
    anchor_ids_S: Ints,
    *,
    step_weight: float = 1.0,
    scale_by_std: bool = True,
    eps: float = 1e-6,
) -> Floats:
    """GiGPO as its published code computes it, to compare with results obtained by it.

        A^E_{i,t} = (R_i - mean) / F with mean and std over all STEPS of the group

    Source: verl-agent `gigpo/core_gigpo.py`. Differs from the paper: (a) a rollout counts once per step, so
    long (usually failed) ones pull the mean down; (b) a group with one step only keeps its raw return; (c)
    sample standard deviation (ddof 1); (d) eps 1e-6.

    Arguments, result and errors as in `gigpo`.
    """
    check_rollouts(rollout_index_S, min(len(group_ids_N), len(returns_N)))
    group_ids_S = group_ids_N[rollout_index_S]
    episode_S = group_advantages(
        returns_N[rollout_index_S], group_ids_S, scale_by_std=scale_by_std, ddof=1, eps=eps, singleton="raw"
    )
    step_S = step_advantages(
        step_returns_S, group_ids_S, anchor_ids_S, scale_by_std=scale_by_std, ddof=1, eps=eps
    )
    return episode_S + step_weight * step_S


def pool_ids(group_ids_S: Ints, anchor_ids_S: Ints) -> Ints:
    """One label from 0 on for every pair of group and anchor; without sorting where there are few pairs."""
    check_labels(group_ids_S)
    check_labels(anchor_ids_S)
    if not len(group_ids_S):
        return group_ids_S
    groups_S, anchors_S = _from_zero(group_ids_S), _from_zero(anchor_ids_S)
    pairs_S: Ints = groups_S * (anchors_S.max() + 1) + anchors_S
    if pairs_S.max() < 2 * len(pairs_S):
        return pairs_S
    return np.unique(pairs_S, return_inverse=True)[1].astype(np.int64)


def _from_zero(ids_S: Ints) -> Ints:
    """Numbers from 0 in the same order, small enough to be multiplied with each other."""
    low, high = int(ids_S.min()), int(ids_S.max())
    return ids_S - low if high - low < 1 << 31 else np.unique(ids_S, return_inverse=True)[1].astype(np.int64)
