"""OPO: the baseline that varies least, if a rollout's gradient grows with its length.

Shape letters: N rollouts.
"""

import numpy as np

from spangrad.credit.groups import Floats, Ints, pool_statistics
from spangrad.errors import CreditError


def opo(returns_N: Floats, group_ids_N: Ints, lengths_N: Ints) -> Floats:
    """Compare every rollout with its group's mean, weighted by length.

        A_i = R_i - sum_j L_j R_j / sum_j L_j      over the rollouts j of i's group

    Source: OPO, arXiv:2505.23585, as verl computes it. The baseline minimises the variance of the gradient
    where the squared norm of a rollout's score is proportional to its length.

    Args:
        returns_N: Undiscounted return of each rollout, reward units, finite.
        group_ids_N: Group of each rollout; equal number = same task.
        lengths_N: Trained tokens of each rollout, 1 or more.

    Returns:
        Advantages, shape (N,), float64, reward units. Weighted by length they sum to 0 in every group;
        plainly they do not.

    Raises:
        CreditError: Shapes differ, a return is not finite, or a length is below 1.

    A group whose returns are all equal and a group of one get zeros.
    """
    if lengths_N.shape != returns_N.shape or (lengths_N < 1).any():
        raise CreditError(
            f"lengths have shape {lengths_N.shape} and minimum {lengths_N.min(initial=1)}; "
            f"expected one of at least 1 for each of {len(returns_N)} returns"
        )
    pools = pool_statistics(returns_N, group_ids_N, ddof=0)
    _, group_N = np.unique(group_ids_N, return_inverse=True)
    groups = int(group_N.max(initial=-1)) + 1
    offset_N = returns_N - pools.mean_X
    weighted = np.bincount(group_N, weights=lengths_N * offset_N, minlength=groups)
    total = np.bincount(group_N, weights=lengths_N, minlength=groups)
    return np.where(pools.std_X > 0, offset_N - (weighted / np.maximum(total, 1))[group_N], 0.0)
