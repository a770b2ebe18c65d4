"""REINFORCE++: one scale for the whole batch, instead of one for each group.

Shape letters: N rollouts, S steps.
"""

import math

import numpy as np

from spangrad.credit.groups import Floats, Ints, pool_statistics
from spangrad.credit.grpo import dr_grpo
from spangrad.errors import CreditError


def reinforce_pp(returns_S: Floats, tokens_S: Ints, *, eps: float = 1e-8) -> Floats:
    """Whiten returns over all trained tokens of the batch.

        A_s = (G_s - mean) / (std + eps),   mean and std over tokens: a step counts tokens_s times

    Source: arXiv:2501.03262. Differs: the paper has a KL in the token reward; here G is taken as it is, and
    all tokens of a step have its return.

    Args:
        returns_S: Return from each step on, reward units, finite.
        tokens_S: Trained tokens of each step, 0 or more.
        eps: Added to the standard deviation (population).

    Returns:
        Advantages, shape (S,), float64, no unit. Weighted by tokens they sum to 0 over the batch.

    Raises:
        CreditError: Shapes differ, a return is not finite, or a count is negative.

    A batch whose returns are all equal gets zeros, and so does one without a token.
    """
    return _whitened(returns_S, tokens_S, ddof=0, eps=eps)


def reinforce_pp_baseline(
    returns_N: Floats, group_ids_N: Ints, *, ddof: int = 1, eps: float = 1e-8
) -> Floats:
    """Centre in the group, divide by the standard deviation of the batch.

        A~_i = R_i - mean_g R;   A_i = A~_i / (std_batch(A~) + eps)

    Source: arXiv:2501.03262, baseline variant. Statistics over rollouts, in the group and in the batch.
    Published code takes the batch's over tokens: `reinforce_pp_baseline_as_published`.

    Args:
        returns_N: Undiscounted return of each rollout, reward units, finite.
        group_ids_N: Group of each rollout; equal number = same task.
        ddof: 0: population, 1: sample standard deviation.
        eps: Added to the standard deviation.

    Returns:
        Advantages, shape (N,), float64, no unit. Sums to 0 in every group.

    Raises:
        CreditError: Shapes differ, or a return is not finite.

    Groups of one and groups of equal returns get zeros; they count in the batch's standard deviation.
    """
    centred_N = dr_grpo(returns_N, group_ids_N)
    if len(centred_N) <= ddof or not centred_N.any():
        return np.zeros(len(returns_N))
    return centred_N / (float(centred_N.std(ddof=ddof)) + eps)


def reinforce_pp_baseline_as_published(
    returns_N: Floats, group_ids_N: Ints, tokens_N: Ints, *, eps: float = 1e-8
) -> Floats:
    """The baseline variant as verl computes it: whitened over tokens.

        A_i = (A~_i - mean) / (std + eps),   mean and sample std over tokens: a rollout counts tokens_i times

    Differs from the paper: long rollouts dominate mean and scale, so advantages of a group need not sum to 0.

    Arguments, result and errors as in `reinforce_pp_baseline`; tokens_N as in `reinforce_pp`.
    """
    return _whitened(dr_grpo(returns_N, group_ids_N), tokens_N, ddof=1, eps=eps)


def _whitened(values_X: Floats, tokens_X: Ints, *, ddof: int, eps: float) -> Floats:
    if tokens_X.shape != values_X.shape or (tokens_X < 0).any():
        raise CreditError(
            f"token counts have shape {tokens_X.shape} and minimum {tokens_X.min(initial=0)}; "
            f"expected one of at least 0 for each of {len(values_X)} values"
        )
    total = int(tokens_X.sum())
    one_pool = pool_statistics(values_X, np.zeros(len(values_X), dtype=np.int64), ddof=0)
    if total <= ddof or not (one_pool.std_X > 0).any():
        return np.zeros(len(values_X))
    offset_X = values_X - one_pool.mean_X
    mean = float((tokens_X * offset_X).sum()) / total
    variance = float((tokens_X * (offset_X - mean) ** 2).sum()) / (total - ddof)
    if variance == 0.0:
        return np.zeros(len(values_X))
    return (offset_X - mean) / (math.sqrt(variance) + eps)
