"""Normalisation per agent role: a planner is compared with planners, a coder with coders.

Shape letters: N rollouts, S steps.
"""

import numpy as np

from spangrad.credit.groups import Floats, Ints, check_rollouts
from spangrad.credit.grpo import group_advantages
from spangrad.errors import CreditError


def role_advantages(
    returns_N: Floats,
    group_ids_N: Ints,
    rollout_index_S: Ints,
    role_ids_S: Ints,
    *,
    scale_by_std: bool = True,
    ddof: int = 0,
    eps: float = 0.0,
) -> Floats:
    """Compare every rollout with those of its group in which the same role acted.

        A_s = (R_i - mean R) / (std R + eps)   over the rollouts of i's group with a step of s's role

    Source: Dr.MAS, arXiv:2602.08847 (from a digest: a sketch). A rollout counts once per role that acts in
    it, however many steps the role has. With one role in all rollouts it is GRPO.

    Args:
        returns_N: Undiscounted return of each rollout, reward units, finite.
        group_ids_N: Group of each rollout; equal number = same task.
        rollout_index_S: Which rollout (0 to N - 1) each step belongs to.
        role_ids_S: Role that acted in each step.
        scale_by_std: Divide by the standard deviation.
        ddof: 0: population, 1: sample standard deviation.
        eps: Added to the standard deviation.

    Returns:
        Advantages, shape (S,), float64.

    Raises:
        CreditError: Shapes differ, a return is not finite, or a step is of no rollout.

    A role that acts in one rollout of the group only gets zero there: nobody to compare it with.
    """
    if rollout_index_S.shape != role_ids_S.shape:
        raise CreditError(
            f"rollout indices have shape {rollout_index_S.shape}, roles {role_ids_S.shape}; must be equal"
        )
    check_rollouts(rollout_index_S, min(len(group_ids_N), len(returns_N)))
    if not len(role_ids_S):
        return np.zeros(0)
    pairs, pair_S = np.unique(np.stack([rollout_index_S, role_ids_S], 1), axis=0, return_inverse=True)
    groups = np.stack([group_ids_N[pairs[:, 0]], pairs[:, 1]], axis=1)
    pool_P = np.unique(groups, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)
    advantages_P = group_advantages(
        returns_N[pairs[:, 0]], pool_P, scale_by_std=scale_by_std, ddof=ddof, eps=eps
    )
    return advantages_P[pair_S.reshape(-1)]
