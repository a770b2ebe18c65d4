"""How much a comparison with few rollouts is believed.

Shape letters: S steps.
"""

import numpy as np

from spangrad.credit.gigpo import NO_ANCHOR, pool_ids
from spangrad.credit.groups import Floats, Ints
from spangrad.errors import CreditError


def evidence_weights(pools_S: Ints, rollout_index_S: Ints, *, prior: float) -> Floats:
    """Weight of each step's advantage by how many rollouts came through its pool.

        w = n / (n + k),   n = different rollouts in the pool, k = `prior`

    Derived here; the idea, that rare states and lucky actions are over-credited, is ECPO's, arXiv:2606.05885,
    whose own function of the counts is another. Divided by its standard deviation, the advantage of a pool of
    two is 1 whatever the returns are, as large as any in a pool of a hundred. w is the weight that the mean
    of n observations has against a prior mean of 0 (this state tells no more than the rollout as a whole)
    that is worth k observations. A rollout that comes back to a state does not vouch for itself: n counts
    rollouts, not steps.

    Args:
        pools_S: Pool of each step; `NO_ANCHOR`: none.
        rollout_index_S: Rollout of each step.
        prior: k, in rollouts; 0 or more. 0 gives 1 everywhere.

    Returns:
        Weights, shape (S,), float64, in (0, 1]; equal in a pool, so advantages that sum to 0 there still do.

    Raises:
        CreditError: Shapes differ, or the prior is negative.
    """
    if pools_S.shape != rollout_index_S.shape:
        shapes = (pools_S.shape, rollout_index_S.shape)
        raise CreditError(f"pools and rollouts of steps have shapes {shapes}; they must be equal")
    if not prior >= 0:
        raise CreditError(f"prior is {prior!r}; expected 0 or more")
    if not prior or not len(pools_S):
        return np.ones(len(pools_S))
    pairs = pool_ids(pools_S, rollout_index_S)
    _, first = np.unique(pairs, return_index=True)
    _, pool_S = np.unique(pools_S, return_inverse=True)
    rollouts = np.bincount(pool_S[first])[pool_S].astype(np.float64)
    return np.where(pools_S == NO_ANCHOR, 1.0, rollouts / (rollouts + prior))
