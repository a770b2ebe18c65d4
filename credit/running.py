"""Rollouts without a group: compared with what rollouts of their kind have earned before.

Where a task is never run twice, as in production, there is no group to compare with.

Shape letters: M rollouts in order of time; N rollouts.
"""

import math
from typing import Final

import numpy as np

from spangrad.credit.groups import Floats, Ints
from spangrad.errors import CreditError

FORGOTTEN: Final = 1e-6
"""What older rollouts, which are not looked at, may weigh together, of all."""


def baseline_advantages(returns_N: Floats, baselines_N: Floats) -> Floats:
    """Compare every rollout with what was to be expected of it.

        A_n = R_n - b_n

    Args:
        returns_N: Undiscounted return of each rollout, reward units, finite.
        baselines_N: What was expected before it ran, by a running mean or a model of values; it must not
            depend on what the rollout did, or the gradient is biased. NaN: nothing is known.

    Returns:
        Advantages, shape (N,), float64, reward units; 0 where nothing is known. They sum to 0 over no group.

    Raises:
        CreditError: Shapes differ, or a return is not finite.
    """
    if returns_N.shape != baselines_N.shape:
        shapes = (returns_N.shape, baselines_N.shape)
        raise CreditError(f"returns and baselines have shapes {shapes}; they must be equal")
    _check_finite(returns_N)
    return np.where(np.isnan(baselines_N), 0.0, returns_N - baselines_N)


def running_baselines(returns_M: Floats, kinds_M: Ints, *, decay: float = 0.95) -> Floats:
    """Running mean of the returns of earlier rollouts of the same kind.

        b_m = sum_{j<m} decay^(m-1-j) R_j / sum_{j<m} decay^(m-1-j)
        as a recurrence from w = 0: b_m = b, then w <- decay w + 1, b <- b + (R_m - b) / w

    Source: RAE, SPIRAL, arXiv:2506.24119 (decay 0.95, per role and game). Differs: a rollout's baseline is
    that before it, so it does not depend on what the rollout did (RAE updates first, which scales the
    advantage by the decay); and it begins as the mean of what there is instead of at 0, so that the first
    rollouts are not held against nothing.

    Args:
        returns_M: Return of each rollout, in order of time, reward units, finite.
        kinds_M: Equal number = compared with each other.
        decay: What a rollout weighs less when one more has come; 0 to below 1.

    Returns:
        Baselines, shape (M,), float64, reward units; NaN for the first of a kind.

    Raises:
        CreditError: Shapes differ, a return is not finite, or the decay is out of range.

    Where all returns of a kind are equal, the baseline is exactly that number.
    """
    if returns_M.shape != kinds_M.shape:
        raise CreditError(f"returns have shape {returns_M.shape}, kinds {kinds_M.shape}; they must be equal")
    _check_finite(returns_M)
    if not 0.0 <= decay < 1.0:
        raise CreditError(f"decay is {decay!r}; expected 0 to below 1")
    baselines_M = np.full(len(returns_M), np.nan)
    state: dict[int, tuple[float, float]] = {}  # kind -> b, w
    for m, (value, kind) in enumerate(zip(returns_M.tolist(), kinds_M.tolist(), strict=True)):
        if kind not in state:
            state[kind] = (value, 1.0)
            continue
        baselines_M[m], weight = state[kind]
        weight = decay * weight + 1.0
        state[kind] = (float(baselines_M[m]) + (value - float(baselines_M[m])) / weight, weight)
    return baselines_M


def rollouts_remembered(decay: float) -> int:
    """How many rollouts of a kind make up its baseline, but for FORGOTTEN of the weight."""
    return 1 if decay == 0.0 else math.ceil(math.log(FORGOTTEN) / math.log(decay))


def _check_finite(returns_X: Floats) -> None:
    if not np.isfinite(returns_X).all():
        where = int(np.flatnonzero(~np.isfinite(returns_X))[0])
        raise CreditError(f"return {where} is {float(returns_X[where])!r}; expected a finite number")
