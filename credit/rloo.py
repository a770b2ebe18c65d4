"""Leave-one-out advantages.

Shape letters: N rollouts, n members of a group.
"""

import numpy as np

from spangrad.credit.groups import Floats, Ints, pool_statistics


def rloo(returns_N: Floats, group_ids_N: Ints) -> Floats:
    """Compare every rollout with the mean of the others of its group.

        A_i = R_i - (1 / (n - 1)) * sum_{j != i} R_j  =  n / (n - 1) * (R_i - mean_g R)

    Source: arXiv:2402.14740. Differs: the paper subtracts a sequence-level KL from R before; here R is taken
    as it is.

    Args:
        returns_N: Undiscounted return of each rollout, reward units, finite.
        group_ids_N: Group of each rollout; equal number = same task.

    Returns:
        Advantages, shape (N,), float64, reward units. Sums to 0 in every group.

    Raises:
        CreditError: Shapes differ, or a return is not finite.

    A group of one has no others and gets zero (published code keeps its raw return); so does a group whose
    returns are all equal.
    """
    pools = pool_statistics(returns_N, group_ids_N, ddof=0)
    n_N = pools.count_X.astype(np.float64)
    factor_N = np.divide(n_N, n_N - 1, out=np.zeros_like(n_N), where=n_N > 1)
    return np.where(pools.std_X > 0, factor_N * (returns_N - pools.mean_X), 0.0)
