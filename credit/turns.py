"""Credit per turn, from rewards that come before the end.

Shape letters: N rollouts, S steps of all rollouts, T steps of one.
"""

import math

import numpy as np

from spangrad.credit.gigpo import pool_ids
from spangrad.credit.groups import Floats, Ints, check_rollouts, pool_statistics
from spangrad.credit.grpo import group_advantages
from spangrad.errors import CreditError


def leave_one_out_to_go(
    step_returns_S: Floats, rollout_index_S: Ints, step_index_S: Ints, group_ids_N: Ints
) -> Floats:
    """Compare the return from a step on with what the others of the group still earn from that step on.

        A_{i,t} = G_{i,t} - mean over j != i of G_{j,t},   G_{j,t} = 0 where j has ended before t

    A baseline of step t that does not depend on what rollout i did, so the gradient is not biased, also where
    an action ends the rollout. `per_turn_index` is not: who has ended leaves its mean.

    Args:
        step_returns_S: Return from each step on, reward units, finite.
        rollout_index_S: Rollout (0 to N - 1) of each step.
        step_index_S: 0, 1, 2, ... of each step in its rollout.
        group_ids_N: Group of each rollout; rollouts without a step count as ended.

    Returns:
        Advantages, shape (S,), float64, reward units. A rollout alone in its group gets zeros.

    Raises:
        CreditError: Shapes differ, a return is not finite, or a step is of no rollout.
    """
    _check_steps(step_returns_S, rollout_index_S, step_index_S, len(group_ids_N))
    if not len(step_returns_S):
        return np.zeros(0)
    group_S = group_ids_N[rollout_index_S]
    pool_S = pool_ids(group_S, step_index_S)
    pools = pool_statistics(step_returns_S, pool_S, ddof=0)
    _, group_N, sizes = np.unique(group_ids_N, return_inverse=True, return_counts=True)
    members_S = sizes[group_N][rollout_index_S].astype(np.float64)
    # Around the mean of those that are there, so that equal returns of all give exact zeros.
    apart_S = pools.count_X * (step_returns_S - pools.mean_X) + (members_S - pools.count_X) * step_returns_S
    return np.divide(apart_S, members_S - 1, out=np.zeros(len(pool_S)), where=members_S > 1)


def per_turn_index(
    step_rewards_S: Floats,
    rollout_index_S: Ints,
    step_index_S: Ints,
    group_ids_N: Ints,
    *,
    scale_by_std: bool = False,
    ddof: int = 1,
    eps: float = 1e-4,
) -> Floats:
    """Normalise the rewards of every turn number in its group: biased, here to compare with.

        A_{i,t} = (r_{i,t} - mean r_t) / (std r_t + eps)   over the rollouts of the group that have a turn t

    Summed over turns, a rollout has as many baselines taken off as it has turns, which its actions decide:
    the gradient is biased by the mean intermediate reward (FORMULAS 6.1; verl#7244). Use
    `leave_one_out_to_go`.

    Arguments, result and errors as in `leave_one_out_to_go`, of rewards instead of returns.
    """
    _check_steps(step_rewards_S, rollout_index_S, step_index_S, len(group_ids_N))
    pool_S = pool_ids(group_ids_N[rollout_index_S], step_index_S)
    return group_advantages(step_rewards_S, pool_S, scale_by_std=scale_by_std, ddof=ddof, eps=eps)


def mt_grpo(
    outcomes_N: Floats,
    intermediate_N: Floats,
    group_ids_N: Ints,
    *,
    turn_weight: float = 1.0,
    ddof: int = 1,
    eps: float = 1e-4,
) -> tuple[Floats, Floats]:
    """Two turns: what comes before the intermediate reward earns both, what comes after the outcome alone.

        A_before = A^O + lambda A^T,   A_after = A^O;   each normalised in its group

    Source: MT-GRPO, arXiv:2505.11821; sample standard deviation and eps of its code. For two turns only:
    every rollout has exactly one intermediate reward.

    Returns:
        Advantages of the steps before and behind the intermediate reward, each of shape (N,), float64.

    Raises:
        CreditError: Shapes differ, or a reward is not finite.
    """
    outcome_N = group_advantages(outcomes_N, group_ids_N, scale_by_std=True, ddof=ddof, eps=eps)
    turn_N = group_advantages(intermediate_N, group_ids_N, scale_by_std=True, ddof=ddof, eps=eps)
    return outcome_N + turn_weight * turn_N, outcome_N


def turn_credit(scores_T: Floats, *, gamma: float, before: float = math.nan) -> Floats:
    """Spread what each turn changed in the score over it and the turns before it.

        d_t = p_t - p_{t-1};   credit_u = sum_{t >= u} d_t gamma^{t-u} / sum_{j=0..t} gamma^j

    Source: prime-rl `turn_credit`, which has no score before the first turn: d_0 = 0. Telescopes: the credit
    of all turns sums to p_last less the first score that there is.

    Args:
        scores_T: Score of the state after each turn; NaN where nobody scored it: its change is counted at the
            next score.
        gamma: How fast credit fades backwards, 0 to 1. 0: all of it stays at the turn itself.
        before: Score of the state before the first turn; NaN where nobody scored it.

    Returns:
        Credit of each turn, shape (T,), float64, score units.

    Raises:
        CreditError: gamma is outside 0 to 1, or a score is infinite.
    """
    if not 0.0 <= gamma <= 1.0:
        raise CreditError(f"gamma is {gamma!r}; expected 0 to 1")
    scores_T1 = np.concatenate([[before], scores_T])
    if np.isinf(scores_T1).any():
        raise CreditError(f"scores {scores_T1.tolist()!r} are not all finite")
    known = np.flatnonzero(~np.isnan(scores_T1))
    deltas_T = np.zeros(len(scores_T))
    deltas_T[known[1:] - 1] = np.diff(scores_T1[known])
    # weight of turn t: its change over the sum of 1, gamma, ..., gamma^t
    norms_T = np.cumsum(gamma ** np.arange(len(scores_T), dtype=np.float64))
    credit_T = np.zeros(len(scores_T))
    following = 0.0
    for t in range(len(scores_T) - 1, -1, -1):
        following = deltas_T[t] / norms_T[t] + gamma * following
        credit_T[t] = following
    return credit_T


def _check_steps(values_S: Floats, rollout_index_S: Ints, step_index_S: Ints, rollouts: int) -> None:
    if not values_S.shape == rollout_index_S.shape == step_index_S.shape:
        shapes = (values_S.shape, rollout_index_S.shape, step_index_S.shape)
        raise CreditError(f"values, rollouts and step numbers have shapes {shapes}; they must be equal")
    check_rollouts(rollout_index_S, rollouts)
