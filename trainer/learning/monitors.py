"""Numbers that the training loop shows: totals over microbatches, rewards, success rates.

Knows: plain numpy arrays. Does not know: models, stores or rollouts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import SupportsFloat

import numpy as np
from numpy.typing import ArrayLike

from spangrad.errors import CreditError


@dataclass(frozen=True, slots=True)
class GroupSpread:
    """How much the rewards of a batch's groups can teach."""

    groups: int
    """Groups with at least one known reward."""
    mean_std: float
    """Mean over groups of the population standard deviation inside the group; reward units."""
    equal_share: float
    """Share of groups whose rewards are all equal (lone rollouts included): they teach nothing."""


def group_spread(rewards_N: ArrayLike, group_ids_N: Sequence[str]) -> GroupSpread:
    """Spread of the rewards inside each group, averaged over groups.

    Args:
        rewards_N: One reward per rollout; NaN = no reward, left out (it is not 0).
        group_ids_N: Group of each rollout.

    Raises:
        CreditError: The two have different lengths.

    Without any known reward the group count is 0 and the other two are NaN.
    """
    rewards = np.asarray(rewards_N, dtype=np.float64)
    if rewards.shape != (len(group_ids_N),):
        raise CreditError(
            f"rewards have shape {rewards.shape}, group ids {len(group_ids_N)}; give one group id per reward"
        )
    by_group: dict[str, list[float]] = {}
    for reward, group_id in zip(rewards.tolist(), group_ids_N, strict=True):
        if not np.isnan(reward):
            by_group.setdefault(group_id, []).append(reward)
    if not by_group:
        return GroupSpread(groups=0, mean_std=float("nan"), equal_share=float("nan"))
    stds = [float(np.std(values)) for values in by_group.values()]
    equal = sum(min(values) == max(values) for values in by_group.values())
    return GroupSpread(groups=len(by_group), mean_std=float(np.mean(stds)), equal_share=equal / len(by_group))


def wilson_interval(successes: int, n: int, *, confidence: float = 0.95) -> tuple[float, float]:
    """Interval of a success rate from independent trials (one trial per task).

        centre = (p + z^2 / 2n) / (1 + z^2 / n)
        half   = z sqrt(p (1 - p) / n + z^2 / 4n^2) / (1 + z^2 / n)

    Source: Wilson, 1927 (JASA 22).

    Args:
        successes: Trials that succeeded, 0..n.
        n: Trials.
        confidence: Coverage, between 0 and 1.

    Raises:
        CreditError: `successes` is not within 0..n, or n is 0.
    """
    if n <= 0 or not 0 <= successes <= n:
        raise CreditError(f"{successes!r} successes of {n!r} trials; expected 0 <= successes <= n and n > 0")
    z = NormalDist().inv_cdf(0.5 + confidence / 2.0)
    p = successes / n
    scale = 1.0 + z * z / n
    centre = (p + z * z / (2.0 * n)) / scale
    half = z * float(np.sqrt(p * (1.0 - p) / n + z * z / (4.0 * n * n))) / scale
    return max(0.0, centre - half), min(1.0, centre + half)


def bootstrap_interval(
    values_N: ArrayLike, *, seed: int, confidence: float = 0.95, resamples: int = 2000
) -> tuple[float, float]:
    """Percentile-bootstrap interval of a mean; resample tasks, not rollouts.

    Args:
        values_N: One value per task (its mean over rollouts); finite.
        seed: Seed of the resampling: equal seed and values give equal intervals.
        confidence: Coverage, between 0 and 1.
        resamples: Number of resampled means.

    Raises:
        CreditError: No values, or one that is not finite.
    """
    values = np.asarray(values_N, dtype=np.float64)
    if values.ndim != 1 or values.size == 0 or not np.isfinite(values).all():
        raise CreditError(
            f"values have shape {values.shape}; expected one finite number per task, at least one"
        )
    indices = np.random.default_rng(seed).integers(0, values.size, size=(resamples, values.size))
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(values[indices].mean(axis=1), [tail, 1.0 - tail])
    return float(low), float(high)


class Totals:
    """Collects the numbers of many microbatches into one dict of metrics."""

    def __init__(self) -> None:
        """Start empty."""
        self._sums: dict[str, float] = {}
        self._weighted: dict[str, tuple[float, float]] = {}
        self._maxima: dict[str, float] = {}

    def add_sum(self, name: str, value: SupportsFloat) -> None:
        """Add to a sum."""
        self._sums[name] = self._sums.get(name, 0.0) + float(value)

    def add_mean(self, name: str, mean: SupportsFloat, count: float) -> None:
        """Fold in a mean over `count` items."""
        total, items = self._weighted.get(name, (0.0, 0.0))
        self._weighted[name] = (total + float(mean) * count, items + count)

    def maximum(self, name: str, value: SupportsFloat) -> None:
        """Fold in a value of which the largest counts."""
        self._maxima[name] = max(self._maxima.get(name, -math.inf), float(value))

    def metrics(self) -> dict[str, float]:
        """All sums, means over at least one item, and maxima."""
        means = {name: total / items for name, (total, items) in self._weighted.items() if items}
        return self._sums | means | self._maxima
