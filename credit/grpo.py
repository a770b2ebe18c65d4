"""Group-relative advantages: GRPO, and Dr.GRPO without the division.

Shape letters: N rollouts.
"""

from typing import Literal

import numpy as np

from spangrad.credit.groups import Floats, Ints, centred

Singleton = Literal["zero", "raw"]


def group_advantages(
    returns_N: Floats,
    group_ids_N: Ints,
    *,
    scale_by_std: bool = False,
    ddof: int = 0,
    eps: float = 0.0,
    singleton: Singleton = "zero",
) -> Floats:
    """Compare every rollout with the mean of its group.

        A_n = R_n - mean(R of n's group)              [ / (std(R of n's group) + eps) ]

    Source: GRPO, arXiv:2402.03300, outcome supervision. Differs: the division by the standard deviation is
    off by default (arXiv:2503.20783), the standard deviation is the population one, and eps is 0 because a
    group without spread is decided by rule instead.

    Args:
        returns_N: Undiscounted return of each rollout, reward units, finite.
        group_ids_N: Group of each rollout; equal number = same task.
        scale_by_std: Also divide by the group's standard deviation.
        ddof: 0: population, 1: sample standard deviation.
        eps: Added to the standard deviation, as published code does (1e-6).
        singleton: What a group of one gets: 'zero', or its 'raw' return as published code gives it.

    Returns:
        Advantages, shape (N,), float64, reward units (no unit if scaled). Sums to 0 in every group, but for
        'raw' singletons.

    Raises:
        CreditError: Shapes differ, or a return is not finite.

    A group whose returns are all equal gets zeros: it carries no signal. So does a group of one, unless
    `singleton` is 'raw'.
    """
    advantages_N, pools = centred(returns_N, group_ids_N, scale_by_std=scale_by_std, ddof=ddof, eps=eps)
    if singleton == "raw":
        return np.where(pools.count_X == 1, returns_N, advantages_N)
    return advantages_N


def grpo(returns_N: Floats, group_ids_N: Ints, *, ddof: int = 0, eps: float = 0.0) -> Floats:
    """GRPO as in its paper: centred and divided by the group's standard deviation.

        A_n = (R_n - mean_g R) / (std_g R + eps)

    Source: arXiv:2402.03300. Differs: eps is 0 by default; the paper does not say which standard deviation,
    here it is the population one (published code: ddof 1, eps 1e-6). Arguments, result, errors and degenerate
    cases as in `group_advantages`.
    """
    return group_advantages(returns_N, group_ids_N, scale_by_std=True, ddof=ddof, eps=eps)


def dr_grpo(returns_N: Floats, group_ids_N: Ints) -> Floats:
    """Dr.GRPO: centred only, so that a question's difficulty does not weigh it.

        A_n = R_n - mean_g R

    Source: arXiv:2503.20783. Its other half is the aggregation with a constant length: `weigh(rows,
    'constant', constant=L_max)`. Arguments, result, errors and degenerate cases as in `group_advantages`.
    """
    return group_advantages(returns_N, group_ids_N, scale_by_std=False)
