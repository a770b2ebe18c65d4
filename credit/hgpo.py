"""HGPO: steps compared with steps that share more and more of their history.

Shape letters: S steps of all rollouts, in order inside each rollout.
"""

import numpy as np

from spangrad.credit.evidence import evidence_weights
from spangrad.credit.gigpo import NO_ANCHOR, pool_ids, step_advantages
from spangrad.credit.groups import Floats, Ints
from spangrad.errors import CreditError


def hgpo(
    step_returns_S: Floats,
    group_ids_S: Ints,
    rollout_index_S: Ints,
    anchor_ids_S: Ints,
    *,
    history: int = 2,
    alpha: float = 1.0,
    eps: float = 1e-6,
    evidence_prior: float = 0.0,
) -> Floats:
    """Mix step advantages of pools that agree in the last 1, 2, ..., history + 1 states.

        A_s = sum_k w_k A_{k,s} / sum_k w_k,   w_k = (k + 1)^alpha,   k = 1 .. history + 1
        A_k: as in `step_advantages` with pools of equal last k states; a step whose pool for k has no other
        member leaves that k out

    Source: HGPO, arXiv:2602.22817, with the weights of its code. A step with fewer than k states behind it is
    compared by all it has. Differs from the code, which also leaves out a k whose advantage is exactly 0, so
    that an average step is not averaged in: `hgpo_as_published`.

    Args:
        step_returns_S: Discounted return from each step on, reward units, finite.
        group_ids_S: Group of each step's rollout.
        rollout_index_S: Rollout of each step; a rollout's steps stand together and in order.
        anchor_ids_S: State that each step began in; `NO_ANCHOR` = not known.
        history: K, how many earlier states are looked at beyond the present one; 0 is the step term of GiGPO.
        alpha: How much more a longer shared history counts; 0 or more.
        eps: Added to standard deviations (population).
        evidence_prior: Shrinks each A_k as in `evidence_weights`; 0: not at all.

    Returns:
        Advantages, shape (S,), float64.

    Raises:
        CreditError: Shapes differ, a return is not finite, or history, alpha or the prior is negative.

    A step without an anchor, or with one among the states looked at, has no pool for that k.
    """
    steps = (step_returns_S, group_ids_S, rollout_index_S, anchor_ids_S)
    return _mixed(*steps, history, alpha, eps, evidence_prior, only_non_zero=False)


def hgpo_as_published(
    step_returns_S: Floats,
    group_ids_S: Ints,
    rollout_index_S: Ints,
    anchor_ids_S: Ints,
    *,
    history: int = 2,
    alpha: float = 1.0,
    eps: float = 1e-6,
) -> Floats:
    """HGPO as its code computes it: a pool in which a step is exactly average has no weight for it.

    Differs from the paper: the mix is biased away from 0. Arguments, result and errors as in `hgpo`.
    """
    steps = (step_returns_S, group_ids_S, rollout_index_S, anchor_ids_S)
    return _mixed(*steps, history, alpha, eps, 0.0, only_non_zero=True)


def _mixed(
    step_returns_S: Floats,
    group_ids_S: Ints,
    rollout_index_S: Ints,
    anchor_ids_S: Ints,
    history: int,
    alpha: float,
    eps: float,
    evidence_prior: float,
    *,
    only_non_zero: bool,
) -> Floats:
    shapes = (step_returns_S.shape, group_ids_S.shape, rollout_index_S.shape, anchor_ids_S.shape)
    if len(set(shapes)) != 1:
        raise CreditError(f"step returns, groups, rollouts and anchors have shapes {shapes}; must be equal")
    if history < 0 or not alpha >= 0:
        raise CreditError(f"history is {history!r}, alpha {alpha!r}; both must be 0 or more")
    count = len(step_returns_S)
    weighted_S, weights_S = np.zeros(count), np.zeros(count)
    states_S = anchor_ids_S
    for k in range(1, history + 2):
        advantages_S = step_advantages(step_returns_S, group_ids_S, states_S, eps=eps)
        pools_S = pool_ids(group_ids_S, states_S)
        if only_non_zero:
            takes_part_S = advantages_S != 0
        else:
            takes_part_S = (np.bincount(pools_S)[pools_S] > 1) & (states_S != NO_ANCHOR)
        advantages_S = advantages_S * evidence_weights(pools_S, rollout_index_S, prior=evidence_prior)
        weight = float(k + 1) ** alpha
        weighted_S += np.where(takes_part_S, weight * advantages_S, 0.0)
        weights_S += np.where(takes_part_S, weight, 0.0)
        states_S = _with_one_more(states_S, anchor_ids_S, rollout_index_S, k)
    return np.divide(weighted_S, weights_S, out=np.zeros(count), where=weights_S > 0)


def _with_one_more(states_S: Ints, anchor_ids_S: Ints, rollout_index_S: Ints, k: int) -> Ints:
    """Names for the last k states -> names for the last k + 1."""
    count = len(states_S)
    before = max(0, count - k)
    reaches_S = rollout_index_S[k:] == rollout_index_S[:before]
    earlier_S = np.full(count, -2, dtype=np.int64)  # nothing there: not the same as not known
    earlier_S[k:] = np.where(reaches_S, anchor_ids_S[:before], -2)
    is_unknown_S = (states_S == NO_ANCHOR) | (earlier_S == NO_ANCHOR)
    return np.where(is_unknown_S, NO_ANCHOR, pool_ids(states_S, earlier_S))
