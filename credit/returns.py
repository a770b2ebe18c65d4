"""Discounted returns, of one trajectory and of many at once.

Shape letters: T steps of a trajectory; N trajectories, S their steps, one trajectory's after the other's.
"""

from collections.abc import Iterator

import numpy as np

from spangrad.credit.groups import Floats, Ints
from spangrad.errors import CreditError


def discounted_returns(rewards_T: Floats, gamma: float) -> Floats:
    """Sum of what comes, discounted per step.

        G_t = r_t + gamma * G_{t+1},   G_T = 0

    The discount is per step (one model call), never per token: a wordy step costs no more than a terse one.

    Args:
        rewards_T: Reward of each step, reward units, finite.
        gamma: Discount per step, 0 to 1.

    Returns:
        Returns, shape (T,), float64, reward units.

    Raises:
        CreditError: A reward is not finite, or gamma is outside 0 to 1.
    """
    if not 0.0 <= gamma <= 1.0:
        raise CreditError(f"gamma is {gamma!r}; expected 0 to 1")
    if not np.isfinite(rewards_T).all():
        raise CreditError(f"step rewards {rewards_T.tolist()!r} are not all finite; leave the trajectory out")
    returns_T = np.empty(len(rewards_T), dtype=np.float64)
    following = 0.0
    for t in range(len(rewards_T) - 1, -1, -1):
        following = float(rewards_T[t]) + gamma * following
        returns_T[t] = following
    return returns_T


def returns_to_go(rewards_S: Floats, lengths_N: Ints, gamma: float) -> Floats:
    """`discounted_returns` of every trajectory, shape (S,): one pass per step of the longest.

    Args:
        rewards_S: Reward of each step, reward units, finite.
        lengths_N: Steps of each trajectory; they add up to S.
        gamma: Discount per step, 0 to 1.
    """
    returns_S = np.empty(len(rewards_S), dtype=np.float64)
    following_N = np.zeros(len(lengths_N))
    for places in _from_the_end(lengths_N):
        following_N = rewards_S[places] + gamma * following_N[: len(places)]
        returns_S[places] = following_N
    return returns_S


def sums_to_go(rewards_S: Floats, lengths_N: Ints) -> Floats:
    """`returns_to_go` without a discount, in twice the precision: equal rewards in another order are equal.

    What an addition rounds away is kept beside the sum (TwoSum, Knuth) and added at the end.
    """
    sums_S = np.empty(len(rewards_S), dtype=np.float64)
    sum_N, rest_N = np.zeros(len(lengths_N)), np.zeros(len(lengths_N))
    for places in _from_the_end(lengths_N):
        before_N, added_N = sum_N[: len(places)], rewards_S[places]
        sum_N = before_N + added_N
        taken_N = sum_N - before_N
        rest_N = rest_N[: len(places)] + ((before_N - (sum_N - taken_N)) + (added_N - taken_N))
        sums_S[places] = sum_N + rest_N
    return sums_S


def _from_the_end(lengths_N: Ints) -> Iterator[Ints]:
    """Places of the last steps of all trajectories, the longest first, then of the last but one, ..."""
    order_N = np.argsort(-lengths_N, kind="stable")
    ends_N = np.cumsum(lengths_N)[order_N]
    alive = len(lengths_N) - np.cumsum(np.bincount(lengths_N))
    for back, count in enumerate(alive[:-1].tolist()):
        yield ends_N[:count] - 1 - back
