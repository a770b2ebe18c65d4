"""One of k succeeds, or all of k do: how often, and advantages for the best of a group.

Shape letters: N rollouts.
"""

from math import comb

import numpy as np

from spangrad.credit.groups import ROUNDING, Floats, Ints, pool_statistics
from spangrad.errors import CreditError


def pass_at_k(rollouts: int, successes: int, k: int) -> float:
    """Chance that at least one of k rollouts of a task succeeds, estimated without bias from n of them.

        pass@k = 1 - C(n - c, k) / C(n, k)

    Source: arXiv:2107.03374. Of several tasks take the mean over tasks, never over rollouts.

    Args:
        rollouts: n, graded rollouts of one task.
        successes: c, those that succeeded; 0 to n.
        k: 1 to n.

    Raises:
        CreditError: c or k is outside its range: with fewer than k rollouts it is not defined.
    """
    _check_counts(rollouts, successes, k)
    return 1.0 - comb(rollouts - successes, k) / comb(rollouts, k)


def pass_hat_k(rollouts: int, successes: int, k: int) -> float:
    """Chance that all of k rollouts of a task succeed: how reliable the policy is.

        pass^k = C(c, k) / C(n, k)

    Source: tau-bench, arXiv:2406.12045. Arguments and errors as in `pass_at_k`.
    """
    _check_counts(rollouts, successes, k)
    return comb(successes, k) / comb(rollouts, k)


def best_of_group(
    returns_N: Floats, group_ids_N: Ints, *, scale_by_std: bool = True, ddof: int = 1, eps: float = 1e-6
) -> Floats:
    """Give the best rollout of a group its lead over the second, everybody else nothing.

        A_best = (R_best - R_second) / (std_g R + eps);   A_i = 0 elsewhere

    Source: `grpo_passk` of verl (pass@k training). The group's expected best improves where its best does.

    Args:
        returns_N: Undiscounted return of each rollout, reward units, finite.
        group_ids_N: Group of each rollout; equal number = same task.
        scale_by_std: Divide by the group's standard deviation.
        ddof: 0: population, 1: sample standard deviation.
        eps: Added to the standard deviation.

    Returns:
        Advantages, shape (N,), float64; 0 or more, so they do not sum to 0.

    Raises:
        CreditError: Shapes differ, or a return is not finite.

    Where two share the best return nobody leads: zeros. A group of one gets zero.
    """
    pools = pool_statistics(returns_N, group_ids_N, ddof=ddof)
    returns_N = np.asarray(returns_N, dtype=np.float64)
    order = np.lexsort((-returns_N, group_ids_N))
    groups = group_ids_N[order]
    is_first = np.r_[True, groups[1:] != groups[:-1]][: len(order)]
    has_second = np.r_[groups[1:] == groups[:-1], False][: len(order)] & is_first
    first, second = order[has_second], order[np.flatnonzero(has_second) + 1]
    advantages_N = np.zeros(len(returns_N))
    lead = returns_N[first] - returns_N[second]
    leads = lead > ROUNDING * np.abs(returns_N[first])
    scale = pools.std_X[first] + eps if scale_by_std else np.ones(len(first))
    advantages_N[first] = np.divide(lead, scale, out=np.zeros(len(first)), where=leads)
    return advantages_N


def _check_counts(rollouts: int, successes: int, k: int) -> None:
    if not 0 <= successes <= rollouts or not 1 <= k <= rollouts:
        raise CreditError(
            f"{successes!r} of {rollouts!r} rollouts succeeded, k is {k!r}; expected 0 to {rollouts!r}"
            f" successes and a k of 1 to {rollouts!r}"
        )
