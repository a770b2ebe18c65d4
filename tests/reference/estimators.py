"""Slow float64 versions, written from the papers' formulas with plain loops and no shared code."""

import math
from collections.abc import Sequence


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def std(values: Sequence[float], ddof: int) -> float:
    if len(values) <= ddof:
        return 0.0
    middle = mean(values)
    return math.sqrt(math.fsum((value - middle) ** 2 for value in values) / (len(values) - ddof))


def group_advantages(
    returns: Sequence[float], groups: Sequence[object], *, scale_by_std: bool, ddof: int, eps: float
) -> list[float]:
    """arXiv:2402.03300, outcome supervision; without the division arXiv:2503.20783."""
    advantages = []
    for value, group in zip(returns, groups, strict=True):
        pool = [other for other, its_group in zip(returns, groups, strict=True) if its_group == group]
        if max(pool) == min(pool):
            advantages.append(0.0)
        else:
            advantages.append((value - mean(pool)) / (std(pool, ddof) + eps if scale_by_std else 1.0))
    return advantages


def rloo(returns: Sequence[float], groups: Sequence[object]) -> list[float]:
    """arXiv:2402.14740: the baseline is the mean of the others."""
    advantages = []
    for i, value in enumerate(returns):
        others = [returns[j] for j in range(len(returns)) if j != i and groups[j] == groups[i]]
        advantages.append(value - mean(others) if others else 0.0)
    return advantages


def discounted_returns(rewards: Sequence[float], gamma: float) -> list[float]:
    """G_t = sum over u >= t of gamma^(u - t) r_u, each sum on its own."""
    return [
        math.fsum(gamma ** (u - t) * rewards[u] for u in range(t, len(rewards))) for t in range(len(rewards))
    ]


def gigpo(
    rewards: Sequence[Sequence[float]],
    anchors: Sequence[Sequence[str | None]],
    groups: Sequence[object],
    *,
    gamma: float,
    step_weight: float,
    scale_by_std: bool,
    ddof: int,
    eps: float,
) -> list[list[float]]:
    """arXiv:2505.10978: rewards[i][t], anchors[i][t] -> A[i][t]; statistics over rollouts."""
    episode = group_advantages(
        [math.fsum(r) for r in rewards], groups, scale_by_std=scale_by_std, ddof=ddof, eps=eps
    )
    steps = [
        (i, t, value, anchors[i][t])
        for i, r in enumerate(rewards)
        for t, value in enumerate(discounted_returns(r, gamma))
    ]
    result = [[0.0] * len(r) for r in rewards]
    for i, t, value, anchor in steps:
        pool = [v for j, _, v, a in steps if anchor is not None and a == anchor and groups[j] == groups[i]]
        step = 0.0
        if len(pool) > 1 and max(pool) != min(pool):
            step = (value - mean(pool)) / (std(pool, ddof) + eps if scale_by_std else 1.0)
        result[i][t] = episode[i] + step_weight * step
    return result


def continued(prompt: Sequence[int], earlier: Sequence[Sequence[int]]) -> int | None:
    """First of the longest earlier sequences that begin the prompt."""
    best = None
    for index, sequence in enumerate(earlier):
        is_prefix = list(prompt[: len(sequence)]) == list(sequence)
        if is_prefix and (best is None or len(sequence) > len(earlier[best])):
            best = index
    return best


def longest_common_beginning(sequence: Sequence[int], earlier: Sequence[Sequence[int]]) -> int:
    """Most tokens that the sequence shares with the beginning of any earlier one."""
    longest = 0
    for other in earlier:
        length = 0
        while length < min(len(sequence), len(other)) and sequence[length] == other[length]:
            length += 1
        longest = max(longest, length)
    return longest
