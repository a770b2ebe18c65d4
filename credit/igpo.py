"""IGPO: the rewards of all turns of a group on one scale, each turn with what follows from it.

A turn is a step. What a turn told about the answer is its reward (`information_gains`), that of the last one
is the outcome; any other rewards of steps will do.

Shape letters: N rollouts, S their steps, one rollout's after the other's; K steps that count.
"""

import numpy as np

from spangrad.credit.filters import Bools
from spangrad.credit.gigpo import pool_ids
from spangrad.credit.groups import Floats, Ints, centred, pool_statistics
from spangrad.credit.returns import returns_to_go
from spangrad.errors import CreditError


def igpo(
    step_rewards_S: Floats,
    lengths_N: Ints,
    group_ids_N: Ints,
    *,
    gamma: float,
    outcomes_apart: bool = False,
    ddof: int = 0,
    eps: float = 1e-6,
) -> Floats:
    """Normalise the rewards of all turns of a group together, and give each turn what follows from it.

        A_{i,t} = sum_{u >= t} gamma^{u-t} (r_{i,u} - mean r) / (std r + eps)   over all turns of the group

    Source: IGPO, arXiv:2510.14967, which does not say which standard deviation; here it is the population
    one by default. A rollout has as many means taken off as it has turns, which its actions decide: where
    an action can end a rollout the gradient is biased, as that of `per_turn_index` is.

    Args:
        step_rewards_S: Reward of each step, that of the last one with the outcome; reward units, finite.
        lengths_N: Steps of each rollout; they add up to S.
        group_ids_N: Group of each rollout.
        gamma: Discount per step, 0 to 1.
        outcomes_apart: Normalise the last rewards of the group's rollouts apart from all others.
        ddof: 0: population, 1: sample standard deviation.
        eps: Added to the standard deviation; keeps rounding in equal rewards from being blown up.

    Returns:
        Advantages, shape (S,), float64, no unit. Before the sum over turns they add up to 0 in every group.

    Raises:
        CreditError: Shapes differ, lengths do not add up, gamma is outside 0 to 1, or a reward is not finite.

    Rewards that are all equal in a group give zeros, and so does a single turn. A lone rollout of several
    turns has them compared with each other, and equal rollouts have theirs; `assign` gives zero to both.
    """
    pool_S, _ = _pools(step_rewards_S, lengths_N, group_ids_N, gamma, outcomes_apart)
    normalized_S, _ = centred(step_rewards_S, pool_S, scale_by_std=True, ddof=ddof, eps=eps)
    return returns_to_go(normalized_S, lengths_N, gamma)


def igpo_as_published(
    step_rewards_S: Floats,
    lengths_N: Ints,
    group_ids_N: Ints,
    *,
    gamma: float,
    outcomes_apart: bool = False,
    eps: float = 1e-6,
    variance_eps: float = 1e-8,
) -> Floats:
    """IGPO as its published code computes it, to compare with results obtained by it.

        A_{i,t} = r~_{i,t} + gamma A_{i,t'},   r~ = (r - mean r) / (sqrt(var r + variance_eps) + eps)
        t' the next turn of i that counts: the last one does, and any other whose reward is not 0

    Source: github.com/GuoqingWang1/IGPO, `verl/trainer/ppo/core_algos.py` at 49a8c4e. Differs from the paper:
    a turn before the last one that told exactly nothing (reward 0) is no turn. It is in no statistic, nothing
    is discounted over it, and its tokens get the advantage of the next turn that counts. The variance is the
    population's.

    Arguments, result and errors as in `igpo`; `outcomes_apart` is its `info_gain_norm_mode` "separate",
    `variance_eps` is in squared reward units. The normalised rewards of what counts add up to 0.
    """
    step_rewards_S = np.asarray(step_rewards_S, dtype=np.float64)
    pool_S, is_last_S = _pools(step_rewards_S, lengths_N, group_ids_N, gamma, outcomes_apart)
    counts_S = is_last_S | (step_rewards_S != 0.0)
    rewards_K = step_rewards_S[counts_S]
    pools = pool_statistics(rewards_K, pool_S[counts_S], ddof=0)
    scale_K = np.sqrt(pools.std_X**2 + variance_eps) + eps
    differs_K = pools.std_X > 0
    normalized_K = np.divide(rewards_K - pools.mean_X, scale_K, out=np.zeros_like(rewards_K), where=differs_K)
    rollout_K = np.repeat(np.arange(len(lengths_N)), lengths_N)[counts_S]
    counted_N = np.bincount(rollout_K, minlength=len(lengths_N)).astype(np.int64)
    advantages_K = returns_to_go(normalized_K, counted_N, gamma)
    following_S = np.cumsum(counts_S) - counts_S  # its own place in K, or that of the next one that counts
    advantages_S: Floats = advantages_K[following_S]
    return advantages_S


def _pools(
    step_rewards_S: Floats, lengths_N: Ints, group_ids_N: Ints, gamma: float, outcomes_apart: bool
) -> tuple[Ints, Bools]:
    """Which steps are normalised together, and which is the last of its rollout."""
    if lengths_N.shape != group_ids_N.shape or step_rewards_S.shape != (lengths_N.sum(),):
        raise CreditError(
            f"rewards have shape {step_rewards_S.shape}, lengths {lengths_N.shape} adding up to"
            f" {lengths_N.sum()}, groups {group_ids_N.shape}; expected a reward for every step"
        )
    if not 0.0 <= gamma <= 1.0:
        raise CreditError(f"gamma is {gamma!r}; expected 0 to 1")
    is_last_S = np.zeros(len(step_rewards_S), dtype=np.bool_)
    is_last_S[np.cumsum(lengths_N)[lengths_N > 0] - 1] = True
    kind_S = (is_last_S & outcomes_apart).astype(np.int64)
    return pool_ids(np.repeat(group_ids_N, lengths_N), kind_S), is_last_S
