"""Terms -> advantages of one batch: which groups say anything, and the sum of what both terms give.

Shape letters: N rollouts with a reward, S their steps.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from spangrad.credit.batch import batch_of
from spangrad.credit.estimators import BOTH_TERMS, EPISODE_TERMS, OF_BRANCHES, STEP_TERMS, components
from spangrad.credit.filters import Bools
from spangrad.credit.gigpo import NO_ANCHOR
from spangrad.credit.groups import Floats, pool_statistics
from spangrad.credit.scoring import with_potentials
from spangrad.credit.terms import Batch
from spangrad.credit.types import Trajectory

if TYPE_CHECKING:
    from spangrad.credit.credit_config import CreditConfig


def scored_batch(scored: Sequence[Trajectory], config: "CreditConfig") -> Batch:
    """Arrays of rollouts whose returns are known."""
    found = batch_of(
        scored,
        returns_of(scored, config).tolist(),
        gamma=config.gamma,
        similarity=config.similarity if config.anchors == "similar" else None,
    )
    return with_potentials(found, config)


def returns_of(scored: Sequence[Trajectory], config: "CreditConfig") -> Floats:
    """Returns that are known, shape (N,)."""
    totals = [total_of(each, config) for each in scored]
    return np.array([total for total in totals if total is not None], dtype=np.float64)


def total_of(trajectory: Trajectory, config: "CreditConfig") -> float | None:
    """The return; None where something that the terms count is missing."""
    if config.episode == "gdpo" and None in map(trajectory.components.get, config.reward_weights):
        return None
    return trajectory.total_reward


def step_term(batch: Batch, config: "CreditConfig") -> Floats:
    """What the step term alone gives, shape (S,); with a term that comes with its episode term: both."""
    if (both := BOTH_TERMS.get(config.step)) is not None:
        return both.estimate(batch, config, config.step_weight)
    if config.step == "none":
        return np.zeros_like(batch.step_returns_S)
    return STEP_TERMS[config.step].estimate(batch, config)


def is_informative(batch: Batch, config: "CreditConfig", step_S: Floats) -> Bools:
    """Whether the rewards of each rollout's group differ: of the rollouts, or of the steps that are compared.

    The latter where a step term is asked for: rollouts of equal return can earn it in different steps.
    """
    pools = pool_statistics(batch.returns_N, batch.group_ids_N, ddof=0)
    differs_N = pools.std_X > 0
    if config.episode == "gdpo":
        for returns_N in components(batch, config):
            differs_N |= pool_statistics(returns_N, batch.group_ids_N, ddof=0).std_X > 0
    if config.episode in OF_BRANCHES:  # of rollouts whose returns are equal, or of a single one
        leaves_S = EPISODE_TERMS["tree_grpo"].estimate(batch, config) != 0.0
        differs_N |= np.isin(batch.group_ids_N, batch.group_ids_S[leaves_S])
    if config.step == "none" or not config.step_weight:
        return differs_N
    term = BOTH_TERMS[config.step] if config.step in BOTH_TERMS else STEP_TERMS[config.step]
    if term.pool is None:
        differs_S = step_S != 0.0
    else:
        pool_S = term.pool(batch)
        differs_S = (pool_statistics(batch.undiscounted_S, pool_S, ddof=0).std_X > 0) & (pool_S != NO_ANCHOR)
    is_compared_N = (pools.count_X > 1) | term.counts_lone
    return differs_N | (is_compared_N & np.isin(batch.group_ids_N, batch.group_ids_S[differs_S]))


def composed(batch: Batch, config: "CreditConfig", step_S: Floats, is_informative_S: Bools) -> Floats:
    """Both terms together, shape (S,); without what the step term gives to groups that say nothing."""
    counts_N = pool_statistics(batch.returns_N, batch.group_ids_N, ddof=0).count_X
    is_lone_S = counts_N[batch.rollout_index_S] == 1
    if (both := BOTH_TERMS.get(config.step)) is not None:
        alone_S = np.where(is_lone_S, both.estimate(batch, config, 0.0), 0.0)
        return np.where(is_informative_S, step_S, alone_S)
    term = EPISODE_TERMS[config.episode]
    episode = term.estimate(batch, config)
    episode_S = episode if term.is_per_step else episode[batch.rollout_index_S]
    if config.step == "none":
        return episode_S
    is_counted_S = is_informative_S & (STEP_TERMS[config.step].counts_lone | ~is_lone_S)
    return episode_S + config.step_weight * np.where(is_counted_S, step_S, 0.0)
