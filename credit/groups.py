"""Means, standard deviations and counts of numbers that share a label.

Shape letters: X numbers, each with a label.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from spangrad.errors import CreditError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
LARGEST: Final = 1e100
"""Size of the largest reward that is taken: squares of sums of it are numbers yet."""

ROUNDING: Final = 8 * float(np.finfo(np.float64).eps)
"""Numbers that differ by so much of their size are equal: .1 + .2 and .3."""


@dataclass(frozen=True, slots=True, eq=False)
class PoolStatistics:
    """Statistics of each number's own pool, all of shape (X,)."""

    mean_X: Floats
    std_X: Floats
    """0 in a pool with at most `ddof` members."""
    count_X: Ints


def pool_statistics(values_X: Floats, labels_X: Ints, *, ddof: int) -> PoolStatistics:
    """Mean, standard deviation and size of the pool that each number belongs to.

        mean = sum(x) / n,   std = sqrt(sum((x - mean)^2) / (n - ddof))

    Args:
        values_X: Finite numbers, not above `LARGEST` in size.
        labels_X: Equal label = same pool.
        ddof: 0: population, 1: sample standard deviation.

    Raises:
        CreditError: Shapes differ, a number is not finite or too large, or labels are no whole numbers.

    Where all numbers of a pool are equal, up to a few units in the last place, the standard deviation is
    exactly 0 and the mean exactly the first one: no rounding makes a signal of nothing.
    """
    if values_X.shape != labels_X.shape or values_X.ndim != 1:
        raise CreditError(
            f"values have shape {values_X.shape}, labels {labels_X.shape}; both must be the same line"
        )
    check_labels(labels_X)
    values_X = np.asarray(values_X, dtype=np.float64)  # differences of uint8 would wrap around
    if not (is_fit_X := np.abs(values_X) <= LARGEST).all():
        where = int(np.flatnonzero(~is_fit_X)[0])
        raise CreditError(
            f"value {where} is {float(values_X[where])!r}; expected a finite number of size"
            f" {LARGEST:g} at most"
        )
    first, pool_X = _pools(labels_X)
    counts = np.bincount(pool_X, minlength=len(first))
    # Around the pool's first member, so that equal numbers give exact zeros.
    first_X = values_X[first][pool_X]
    offset_X = values_X - first_X
    offset_X[np.abs(offset_X) <= ROUNDING * np.abs(first_X)] = 0.0
    mean_offset = np.bincount(pool_X, weights=offset_X, minlength=len(first)) / np.maximum(counts, 1)
    squares_X = (offset_X - mean_offset[pool_X]) ** 2
    free = counts - ddof
    sums = np.bincount(pool_X, weights=squares_X, minlength=len(first))
    std = np.sqrt(np.divide(sums, free, out=np.zeros(len(first)), where=free > 0))
    mean = values_X[first] + mean_offset
    return PoolStatistics(mean[pool_X], std[pool_X], counts[pool_X])


def check_labels(labels_X: Ints) -> None:
    """Refuse labels that are no whole numbers.

    Raises:
        CreditError: They are names, bools or fractions; says how to number them.
    """
    if labels_X.size and labels_X.dtype.kind not in "iu":
        raise CreditError(
            f"labels have type {labels_X.dtype}; expected whole numbers, such as"
            " np.unique(names, return_inverse=True)[1]"
        )


def check_rollouts(rollout_index_S: Ints, rollouts: int) -> None:
    """Refuse steps of rollouts that are not there: numpy would take -1 for the last one.

    Raises:
        CreditError: Names the first such step.
    """
    if not (is_known_S := (rollout_index_S >= 0) & (rollout_index_S < rollouts)).all():
        step = int(np.flatnonzero(~is_known_S)[0])
        raise CreditError(
            f"step {step} is of rollout {int(rollout_index_S[step])}; expected 0 to {rollouts - 1}, of"
            f" {rollouts} rollouts"
        )


def _pools(labels_X: Ints) -> tuple[Ints, Ints]:
    """First member of each pool and pool of each label; without sorting where labels count from about 0."""
    size = len(labels_X)
    if size and labels_X.min() >= 0 and labels_X.max() < 2 * size:
        first = np.full(int(labels_X.max()) + 1, size - 1)
        np.minimum.at(first, labels_X, np.arange(size))
        return first, labels_X
    _, first, pool_X = np.unique(labels_X, return_index=True, return_inverse=True)
    return first, pool_X


def centred(
    values_X: Floats, labels_X: Ints, *, scale_by_std: bool, ddof: int, eps: float
) -> tuple[Floats, PoolStatistics]:
    """(x - mean of x's pool) [/ (std of the pool + eps)]; 0 in a pool whose numbers are all equal."""
    pools = pool_statistics(values_X, labels_X, ddof=ddof)
    differences_X = np.where(pools.std_X > 0, values_X - pools.mean_X, 0.0)
    if not scale_by_std:
        # A sample standard deviation is 0 for a lone number only; differences are 0 there anyway.
        return differences_X, pools
    scale_X = pools.std_X + eps
    return np.divide(differences_X, scale_X, out=np.zeros_like(differences_X), where=pools.std_X > 0), pools


def labels(names: list[str]) -> Ints:
    """Names -> integers, equal for equal names."""
    known = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return np.fromiter(map(known.__getitem__, names), dtype=np.int64, count=len(names))
