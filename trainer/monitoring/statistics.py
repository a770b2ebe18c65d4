"""Robust comparisons of a number with those before it.

Shape letters: W numbers of a window, oldest first.
"""

import math
from collections.abc import Sequence
from statistics import median
from typing import Final

NORMAL_MAD: Final = 1.4826
"""Standard deviation of a normal distribution, in its median absolute deviations: 1 / 0.6745."""


def deviation(value: float, before_W: Sequence[float], *, floor: float) -> float:
    """How far a number is from those before it, in their robust standard deviations.

        z = (x - median) / max(1.4826 * median |x_w - median|, floor)

    Args:
        value: The number.
        before_W: Those before it, at least one.
        floor: The least that counts as a deviation, in the unit of the numbers, above 0: numbers that were
            all equal make nothing of a small change.

    Half of the numbers before may be anything without moving it far.
    """
    center = median(before_W)
    spread = NORMAL_MAD * median(abs(x - center) for x in before_W)
    return (value - center) / max(spread, floor)


def trend(values_W: Sequence[float]) -> float:
    """Whether numbers rise (above 0) or fall, in standard deviations of what chance makes of any order.

        S = sum_{i<j} sign(x_j - x_i),   z = (S - sign S) / sqrt(n (n - 1) (2n + 5) / 18)

    Source: Mann, 1945, and Kendall's variance, without the correction for ties, so ties make z smaller.

    Args:
        values_W: At least two numbers.
    """
    n = len(values_W)
    pairs = ((values_W[i], values_W[j]) for i in range(n) for j in range(i + 1, n))
    s = sum((later > earlier) - (later < earlier) for earlier, later in pairs)
    variance = n * (n - 1) * (2 * n + 5) / 18
    return (s - (s > 0) + (s < 0)) / math.sqrt(variance)
