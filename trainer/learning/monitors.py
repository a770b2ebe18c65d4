"""Numbers that the training loop shows: totals over microbatches, success rates.

Knows: plain numpy arrays. Does not know: models, stores or rollouts.
"""

import math
from statistics import NormalDist
from typing import SupportsFloat

import numpy as np
from numpy.typing import NDArray

from spangrad.errors import CreditError


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


class Totals:
    """Collects the numbers of many microbatches into one dict of metrics."""

    def __init__(self) -> None:
        """Start empty."""
        self._sums: dict[str, float] = {}
        self._weighted: dict[str, tuple[float, float]] = {}
        self._maxima: dict[str, float] = {}
        self._sampled: dict[str, tuple[float, float, int]] = {}

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

    def add_weights(self, name: str, weights: NDArray[np.float64]) -> None:
        """Fold in importance weights of samples, of which the effective sample size counts, as a share.

        (sum w)^2 / (n sum w^2)
        """
        total, squares, items = self._sampled.get(name, (0.0, 0.0, 0))
        self._sampled[name] = (
            total + float(weights.sum()),
            squares + float(weights @ weights),
            items + len(weights),
        )

    def add(self, other: "Totals") -> None:
        """Fold in what another one collected."""
        for name, value in other._sums.items():
            self.add_sum(name, value)
        for name, (total, items) in other._weighted.items():
            own_total, own_items = self._weighted.get(name, (0.0, 0.0))
            self._weighted[name] = (own_total + total, own_items + items)
        for name, (total, squares, count) in other._sampled.items():
            own_total, own_squares, own_count = self._sampled.get(name, (0.0, 0.0, 0))
            self._sampled[name] = (own_total + total, own_squares + squares, own_count + count)
        for name, value in other._maxima.items():
            self.maximum(name, value)

    def metrics(self) -> dict[str, float]:
        """All sums, means over at least one item, maxima, and shares of effective samples."""
        means = {name: total / items for name, (total, items) in self._weighted.items() if items}
        shares = {
            name: total**2 / (n * squares) for name, (total, squares, n) in self._sampled.items() if squares
        }
        return self._sums | means | self._maxima | shares
