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


def maxrl(returns: Sequence[float], groups: Sequence[object]) -> list[float]:
    """arXiv:2602.02710: centred, relative to the group's mean."""
    advantages = []
    for value, group in zip(returns, groups, strict=True):
        pool = [other for other, its_group in zip(returns, groups, strict=True) if its_group == group]
        advantages.append(0.0 if max(pool) == min(pool) else (value - mean(pool)) / mean(pool))
    return advantages


def opo(returns: Sequence[float], groups: Sequence[object], lengths: Sequence[int]) -> list[float]:
    """arXiv:2505.23585: the baseline is weighted by length."""
    advantages = []
    for value, group in zip(returns, groups, strict=True):
        pool = [(r, n) for r, n, g in zip(returns, lengths, groups, strict=True) if g == group]
        baseline = math.fsum(r * n for r, n in pool) / sum(n for _, n in pool)
        advantages.append(0.0 if len({r for r, _ in pool}) == 1 else value - baseline)
    return advantages


def over_tokens(values: Sequence[float], tokens: Sequence[int], *, ddof: int) -> list[float]:
    """Whitened, every value written down once per token."""
    written = [value for value, count in zip(values, tokens, strict=True) for _ in range(count)]
    scale = std(written, ddof)
    if len(set(values)) == 1 or scale == 0:
        return [0.0] * len(values)
    return [(value - mean(written)) / scale for value in values]


def gae(rewards: Sequence[float], values: Sequence[float], gamma: float, lam: float) -> list[float]:
    """arXiv:1506.02438: the sum over what comes, each on its own."""
    following = [*values[1:], 0.0]
    deltas = [r + gamma * n - v for r, n, v in zip(rewards, following, values, strict=True)]
    return [
        math.fsum((gamma * lam) ** (u - t) * deltas[u] for u in range(t, len(deltas)))
        for t in range(len(deltas))
    ]


def hgpo(
    returns: Sequence[Sequence[float]],
    anchors: Sequence[Sequence[str | None]],
    groups: Sequence[object],
    *,
    history: int,
    alpha: float,
    eps: float,
    only_non_zero: bool,
) -> list[list[float]]:
    """arXiv:2602.22817: returns[i][t], anchors[i][t] -> A[i][t]."""
    result = [[0.0] * len(steps) for steps in returns]
    for i, steps in enumerate(returns):
        for t, value in enumerate(steps):
            parts = []
            for k in range(1, history + 2):
                mine = tuple(anchors[i][max(0, t + 1 - k) : t + 1])
                pool = [
                    returns[j][u]
                    for j in range(len(returns))
                    for u in range(len(returns[j]))
                    if groups[j] == groups[i] and tuple(anchors[j][max(0, u + 1 - k) : u + 1]) == mine
                ]
                if None in mine or len(pool) < 2:
                    continue
                equal = max(pool) == min(pool)
                advantage = 0.0 if equal else (value - mean(pool)) / (std(pool, 0) + eps)
                if advantage != 0.0 or not only_non_zero:
                    parts.append(((k + 1) ** alpha, advantage))
            if parts:
                result[i][t] = math.fsum(w * a for w, a in parts) / math.fsum(w for w, _ in parts)
    return result


def leave_one_out_to_go(returns: Sequence[Sequence[float]], groups: Sequence[object]) -> list[list[float]]:
    """Return from step t on, minus the mean of the others', 0 for those that have ended."""
    result = []
    for i, steps in enumerate(returns):
        others = [returns[j] for j in range(len(returns)) if j != i and groups[j] == groups[i]]
        result.append(
            [
                value - mean([other[t] if t < len(other) else 0.0 for other in others]) if others else 0.0
                for t, value in enumerate(steps)
            ]
        )
    return result


def igpo(
    rewards: Sequence[Sequence[float]],
    groups: Sequence[object],
    *,
    gamma: float,
    outcomes_apart: bool,
    ddof: int,
    eps: float,
) -> list[list[float]]:
    """arXiv:2510.14967: A_t = sum over u >= t of gamma^(u - t) r~_u, r~ normalised over all of the group."""
    normalized: list[list[float]] = []
    for row, group in zip(rewards, groups, strict=True):
        own = [other for other, its_group in zip(rewards, groups, strict=True) if its_group == group]
        normalized.append([])
        for t, reward in enumerate(row):
            pool = [
                value
                for other in own
                for u, value in enumerate(other)
                if not outcomes_apart or (u == len(other) - 1) == (t == len(row) - 1)
            ]
            is_equal = max(pool) == min(pool)
            normalized[-1].append(0.0 if is_equal else (reward - mean(pool)) / (std(pool, ddof) + eps))
    return [discounted_returns(row, gamma) for row in normalized]


def igpo_as_published(
    rewards: Sequence[Sequence[float]], groups: Sequence[object], *, gamma: float, outcomes_apart: bool
) -> list[list[float]]:
    """The loops of its code: turns are found by rewards that are not 0, and paint the tokens before them."""
    advantages = []
    for row, group in zip(rewards, groups, strict=True):
        own = [other for other, its_group in zip(rewards, groups, strict=True) if its_group == group]
        gains = [value for other in own for value in other[:-1] if value != 0]
        outcomes = [other[-1] for other in own]
        painted = [0.0] * len(row)
        following = 0.0
        for t in reversed(range(len(row))):
            is_outcome = t == len(row) - 1
            if row[t] == 0 and not is_outcome:
                painted[t] = following
                continue
            pool = (outcomes if is_outcome else gains) if outcomes_apart else gains + outcomes
            deviation = math.sqrt(std(pool, 0) ** 2 + 1e-8) if len(pool) > 1 else 1.0
            following = (row[t] - mean(pool)) / (deviation + 1e-6) + gamma * following
            painted[t] = following
        advantages.append(painted)
    return advantages


def turn_credit(scores: Sequence[float], gamma: float, before: float | None = None) -> list[float]:
    """Every change spread over its turn and the ones before."""
    credit = [0.0] * len(scores)
    earlier = [scores[0] if before is None else before, *scores]
    for t in range(len(scores)):
        weights = [gamma ** (t - u) for u in range(t + 1)]
        for u in range(t + 1):
            credit[u] += (scores[t] - earlier[t]) * weights[u] / math.fsum(weights)
    return credit


def tree_grpo_as_published(
    returns: Sequence[float], trees: Sequence[object], groups: Sequence[object], form: str
) -> list[float]:
    """Its code: ddof 1, eps 1e-6, and mean 0 and standard deviation 1 for a single leaf."""

    def normalized(values: Sequence[float], labels: Sequence[object]) -> list[float]:
        result = []
        for value, label in zip(values, labels, strict=True):
            pool = [other for other, its_label in zip(values, labels, strict=True) if its_label == label]
            middle, deviation = (mean(pool), std(pool, 1)) if len(pool) > 1 else (0.0, 1.0)
            result.append((value - middle) / (deviation + 1e-6))
        return result

    inner, inter = normalized(returns, trees), normalized(returns, groups)
    if form == "nested":
        return normalized(inter, trees)
    return inner if form == "inner" else [a + b for a, b in zip(inner, inter, strict=True)]


def leaves_below(parents: Sequence[int], node: int) -> list[int]:
    """Leaves below a node, itself if it is one."""
    children = [child for child, parent in enumerate(parents) if parent == node]
    return [leaf for child in children for leaf in leaves_below(parents, child)] if children else [node]


def state_action_advantages(steps, *, prior, no_anchor, no_action):
    """RTMC by counting, step by step: (return, group, anchor, action) each."""
    found = []
    for g, group, anchor, action in steps:
        here = [s for s in steps if s[1:3] == (group, anchor)]
        alike = [s[0] for s in here if s[3] == action] if action != no_action else [g]
        if anchor == no_anchor:
            found.append(0.0)
            continue
        v = sum(s[0] for s in here) / len(here)
        q = (sum(alike) + prior * v) / (len(alike) + prior)
        found.append(q - v)
    return found
