"""Generalised advantage estimation, over tokens that skip observations and over steps.

Shape letters: K tokens of a row, T steps of a trajectory; N trajectories, S their steps, one trajectory's
after the other's.
"""

import numpy as np
from numpy.typing import NDArray

from spangrad.credit.groups import Floats, Ints
from spangrad.credit.returns import returns_to_go
from spangrad.errors import CreditError


def gae_tokens(
    rewards_K: Floats, values_K: Floats, action_mask_K: NDArray[np.bool_], *, gamma: float, lam: float
) -> Floats:
    """GAE over the tokens that the policy sampled; what lies between them is stepped over.

        delta_k = r_k + gamma V_next - V_k,   A_k = delta_k + gamma lambda A_next
        next: the next sampled token; V and A are 0 behind the last one

    Source: arXiv:1506.02438, with observations skipped as in verl. A tool's output takes no time: V_next of
    the last token before it is the value of the first token behind it.

    Args:
        rewards_K: Reward at each token, finite; those outside the mask are paid at the sampled token before.
        values_K: Value before each token. Ignored outside the mask.
        action_mask_K: Tokens that the policy sampled.
        gamma: Discount per token, 0 to 1. Below 1 a wordy step decays credit more than a terse one: prefer
            `gae_steps`.
        lam: lambda, 0 to 1.

    Returns:
        Advantages, shape (K,), float64. Outside the mask a token has the next sampled token's.

    Raises:
        CreditError: Shapes differ, a number is not finite, or gamma or lambda is outside 0 to 1.
    """
    if not rewards_K.shape == values_K.shape == action_mask_K.shape:
        raise CreditError(
            f"rewards, values and mask have shapes {rewards_K.shape}, {values_K.shape}, "
            f"{action_mask_K.shape}; they must be equal"
        )
    sampled = np.flatnonzero(action_mask_K)
    advantages_K = np.zeros(len(rewards_K))
    if not len(sampled):
        return advantages_K
    if sampled[0] and rewards_K[: sampled[0]].any():
        raise CreditError(
            "a reward stands before the first sampled token; nothing that was sampled earned it"
        )
    paid = np.add.reduceat(rewards_K, sampled)
    advantages = gae_steps(paid, values_K[sampled], gamma=gamma, lam=lam)
    following = np.searchsorted(sampled, np.arange(len(rewards_K)))
    inside = following < len(sampled)
    advantages_K[inside] = advantages[following[inside]]
    return advantages_K


def gae_steps(
    rewards_T: Floats, values_T: Floats, *, gamma: float, lam: float, bootstrap: float = 0.0
) -> Floats:
    """GAE over the steps of a trajectory: a step is one action, however many tokens it has.

        delta_t = r_t + gamma V_{t+1} - V_t,   A_t = delta_t + gamma lambda A_{t+1}

    Source: Turn-PPO, arXiv:2512.17008 (gamma 0.99, lambda 0.9 there).

    Args:
        rewards_T: Reward of each step, reward units, finite.
        values_T: Value of the state that each step began in.
        gamma: Discount per step, 0 to 1.
        lam: lambda, 0 to 1. 1: discounted return minus value; 0: one-step error.
        bootstrap: Value behind the last step; 0 where the trajectory ended, the value of the last state where
            it was cut off.

    Returns:
        Advantages, shape (T,), float64, reward units.

    Raises:
        CreditError: Shapes differ, a number is not finite, or gamma or lambda is outside 0 to 1.
    """
    if rewards_T.shape != values_T.shape or rewards_T.ndim != 1:
        raise CreditError(f"rewards have shape {rewards_T.shape}, values {values_T.shape}; must be equal")
    if not (np.isfinite(rewards_T).all() and np.isfinite(values_T).all() and np.isfinite(bootstrap)):
        raise CreditError("rewards and values must be finite")
    for name, value in (("gamma", gamma), ("lam", lam)):
        if not 0.0 <= value <= 1.0:
            raise CreditError(f"{name} is {value!r}; expected 0 to 1")
    advantages_T = np.empty(len(rewards_T))
    next_value, following = bootstrap, 0.0
    for t in range(len(rewards_T) - 1, -1, -1):
        following = rewards_T[t] + gamma * next_value - values_T[t] + gamma * lam * following
        advantages_T[t], next_value = following, values_T[t]
    return advantages_T


def gae_trajectories(
    rewards_S: Floats, values_S: Floats, bootstraps_N: Floats, lengths_N: Ints, *, gamma: float, lam: float
) -> Floats:
    """`gae_steps` of every trajectory, shape (S,): one pass per step of the longest.

    Args:
        rewards_S: Reward of each step, reward units, finite.
        values_S: Value of the state that each step began in.
        bootstraps_N: Value behind the last step of each trajectory.
        lengths_N: Steps of each trajectory; they add up to S.
        gamma: Discount per step, 0 to 1.
        lam: lambda, 0 to 1.
    """
    has_steps_N = lengths_N > 0
    next_S = np.roll(values_S, -1)
    next_S[np.cumsum(lengths_N)[has_steps_N] - 1] = bootstraps_N[has_steps_N]
    return returns_to_go(rewards_S + gamma * next_S - values_S, lengths_N, gamma * lam)
