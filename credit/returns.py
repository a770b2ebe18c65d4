"""Discounted returns of one trajectory.

Shape letters: T steps of a trajectory.
"""

import numpy as np

from spangrad.credit.groups import Floats
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
