"""State-action values by counting: what a state was worth on average, and what each action in it was.

Shape letters: S steps of all rollouts.
"""

import numpy as np

from spangrad.credit.gigpo import NO_ANCHOR, pool_ids
from spangrad.credit.groups import Floats, Ints, pool_statistics
from spangrad.errors import CreditError

NO_ACTION = -1
"""Action id of a step whose action is not known: an action of its own."""


def state_action_advantages(
    step_returns_S: Floats, group_ids_S: Ints, anchor_ids_S: Ints, action_ids_S: Ints, *, prior: float = 1.0
) -> Floats:
    """Compare what steps earned that did the same in the same state with all steps from that state.

        V(s) = mean of G over steps from s
        Q(s, a) = (sum of G over those of them that did a + prior V(s)) / (n_a + prior)
        A = Q(s, a) - V(s) = n_a / (n_a + prior) * (mean of G over those that did a - V(s))

    Source: RTMC, arXiv:2604.11037 (from a digest: a sketch): rollouts of a group form an implicit tree over
    state-action signatures, values of rare actions are smoothed toward the state's.

    Args:
        step_returns_S: Return from each step on, reward units, finite.
        group_ids_S: Group of each step's rollout.
        anchor_ids_S: State that each step began in; `NO_ANCHOR`: not known.
        action_ids_S: What each step did; `NO_ACTION`: not known, like nobody else.
        prior: How many steps the state's value counts for; 0 or more.

    Returns:
        Advantages, shape (S,), float64, reward units. With prior 0 they sum to 0 in every state of a group.

    Raises:
        CreditError: Shapes differ, a return is not finite, or the prior is negative.

    A state seen once, a state of equal returns, one in which all did the same, and a step whose state is not
    known give zeros.
    """
    if not step_returns_S.shape == group_ids_S.shape == anchor_ids_S.shape == action_ids_S.shape:
        shapes = (step_returns_S.shape, group_ids_S.shape, anchor_ids_S.shape, action_ids_S.shape)
        raise CreditError(f"step returns, groups, anchors and actions have shapes {shapes}; must be equal")
    if not prior >= 0:
        raise CreditError(f"prior is {prior!r}; expected 0 or more")
    states = pool_ids(group_ids_S, anchor_ids_S)
    alone_S = np.arange(len(action_ids_S)) + action_ids_S.max(initial=0) + 1
    action_S = np.where(action_ids_S == NO_ACTION, alone_S, action_ids_S)
    v = pool_statistics(step_returns_S, states, ddof=0)
    q = pool_statistics(step_returns_S, pool_ids(states, action_S), ddof=0)
    is_known_S = (anchor_ids_S != NO_ANCHOR) & (v.std_X > 0) & (q.count_X < v.count_X)
    return np.where(is_known_S, q.count_X / (q.count_X + prior) * (q.mean_X - v.mean_X), 0.0)
