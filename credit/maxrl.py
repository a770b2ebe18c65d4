"""MaxRL: advantages in units of how often a task is solved, so that hard tasks weigh more.

Shape letters: N rollouts.
"""

import numpy as np

from spangrad.credit.groups import Floats, Ints, pool_statistics
from spangrad.errors import CreditError


def maxrl(returns_N: Floats, group_ids_N: Ints, *, eps: float = 0.0) -> Floats:
    """Compare every rollout with its group's mean, relative to that mean.

        A_i = (R_i - mean_g R) / (mean_g R + eps)

    Source: arXiv:2602.02710. With returns of 0 and 1 this is the gradient of log p of the task, to first
    order: weights go as 1/p. Statistics over rollouts; no standard deviation.

    Args:
        returns_N: Undiscounted return of each rollout, 0 or more, finite.
        group_ids_N: Group of each rollout; equal number = same task.
        eps: Added to the mean.

    Returns:
        Advantages, shape (N,), float64, no unit. Sums to 0 in every group.

    Raises:
        CreditError: Shapes differ, a return is not finite, or one is negative: a share of a mean needs a
            sign.

    A group whose returns are all equal (all 0, say) and a group of one get zeros.
    """
    if (returns_N < 0).any():
        where = int(np.flatnonzero(returns_N < 0)[0])
        raise CreditError(f"return {where} is {float(returns_N[where])!r}; maxrl needs returns of 0 or more")
    pools = pool_statistics(returns_N, group_ids_N, ddof=0)
    is_spread_N = pools.std_X > 0
    return np.divide(
        returns_N - pools.mean_X, pools.mean_X + eps, out=np.zeros(len(returns_N)), where=is_spread_N
    )
