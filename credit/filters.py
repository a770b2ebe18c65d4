"""Which groups are worth an update, and what an overlong rollout costs.

A filter says which rollouts stay; what it takes out is counted by whoever calls it.

Shape letters: N rollouts.
"""

import math

import numpy as np
from numpy.typing import NDArray

from spangrad.credit.groups import Floats, Ints, pool_statistics
from spangrad.errors import CreditError

Bools = NDArray[np.bool_]


def with_spread(returns_N: Floats, group_ids_N: Ints) -> Bools:
    """Rollouts of groups whose returns differ: DAPO's dynamic sampling, arXiv:2503.14476.

    Over rollouts, never over rows: a rollout in three rows is one. Returns shape (N,).
    """
    return pool_statistics(returns_N, group_ids_N, ddof=0).std_X > 0


def top_share_by_spread(returns_N: Floats, group_ids_N: Ints, share: float) -> Bools:
    """Rollouts of the groups with the largest spread: StarPO-S, arXiv:2504.20073 (share 0.25 there).

    Args:
        returns_N: Return of each rollout, finite.
        group_ids_N: Its group.
        share: Part of the groups that stays, above 0, at most 1; rounded up, so at least one does.

    Raises:
        CreditError: The share is outside its range, shapes differ, or a return is not finite.

    Groups without spread never stay. Of groups of equal spread those of lower ids do.
    """
    if not 0.0 < share <= 1.0:
        raise CreditError(f"share is {share!r}; expected above 0, at most 1")
    names, stds = _spreads(returns_N, group_ids_N)
    order = np.argsort(-stds, kind="stable")[: math.ceil(share * len(names) - 1e-9)]
    return np.isin(group_ids_N, names[order[stds[order] > 0]])


def top_p_by_spread(returns_N: Floats, group_ids_N: Ints, p: float) -> Bools:
    """Rollouts of the fewest groups that have the share p of all spread: RAGEN-2, arXiv:2604.06268 (p 0.9).

    Args:
        returns_N: Return of each rollout, finite.
        group_ids_N: Its group.
        p: Share of the sum of standard deviations that stays, above 0, at most 1.

    Raises:
        CreditError: p is outside its range, shapes differ, or a return is not finite.

    Groups without spread never stay. Of groups of equal spread those of lower ids do.
    """
    if not 0.0 < p <= 1.0:
        raise CreditError(f"p is {p!r}; expected above 0, at most 1")
    names, stds = _spreads(returns_N, group_ids_N)
    order = np.argsort(-stds, kind="stable")
    total = np.cumsum(stds[order])
    if not len(total) or total[-1] == 0.0:
        return np.zeros(len(returns_N), dtype=np.bool_)
    needed = int(np.searchsorted(total, p * total[-1] * (1.0 - 1e-12))) + 1
    kept = order[:needed]
    return np.isin(group_ids_N, names[kept[stds[kept] > 0]])


def overlong_penalty(lengths_N: Ints, *, limit: int, buffer: int, factor: float = 1.0) -> Floats:
    """What is added to the reward of a rollout that comes near the length limit: DAPO, arXiv:2503.14476.

        P(L) = min(-(L - (limit - buffer)) / buffer * factor, 0)

    Args:
        lengths_N: Sampled tokens of each rollout.
        limit: Longest length (20480 in the paper), in tokens.
        buffer: How far below it the penalty begins (4096 in the paper); 1 to limit.
        factor: Penalty at the limit; 0 or more.

    Returns:
        Penalties, shape (N,), float64, reward units, 0 or below.

    Raises:
        CreditError: buffer or factor is outside its range.
    """
    if not 1 <= buffer <= limit or not factor >= 0:
        raise CreditError(
            f"buffer is {buffer!r}, factor {factor!r}; "
            f"expected a buffer of 1 to {limit} and a factor of 0 or more"
        )
    return np.minimum(-(lengths_N - (limit - buffer)) / buffer * factor, 0.0)


def _spreads(returns_N: Floats, group_ids_N: Ints) -> tuple[Ints, Floats]:
    """Groups in order of their ids, and their standard deviations, equal ones without a rounding apart."""
    pools = pool_statistics(returns_N, group_ids_N, ddof=0)
    names, first = np.unique(group_ids_N, return_index=True)
    stds = pools.std_X[first]
    scale = float(stds.max(initial=0.0)) or 1.0
    return names, np.round(stds / scale, 12) * scale
