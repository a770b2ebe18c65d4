"""Values of states: what is compared with what a critic expected, and what the critic should learn.

A value is of the state before a step, read before its first token was sampled: it depends on nothing that the
step did. Knows arrays and trajectories; not where values come from.

Invariants:
* a rollout that was cut off goes on with the value behind its last step, one that ended with 0;
* a rollout that lacks a value gets no advantage (None, not 0) and is counted.

Shape letters: N rollouts, S their steps.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from spangrad.credit.gae import gae_trajectories
from spangrad.credit.groups import Floats
from spangrad.credit.running import baseline_advantages
from spangrad.credit.types import Trajectory
from spangrad.errors import CreditError

if TYPE_CHECKING:
    from spangrad.credit.credit_config import CreditConfig
    from spangrad.credit.terms import Batch


def require_values(trajectories: Sequence[Trajectory], config: "CreditConfig") -> None:
    """Refuse a batch that no critic saw, if a term needs one.

    Raises:
        CreditError: No rollout has values, or one has more or fewer than states, or one that is not finite.
    """
    if not config.needs_values:
        return
    if trajectories and all(each.values is None for each in trajectories):
        raise CreditError(
            f"no rollout has values of its states, which episode {config.episode!r} with step"
            f" {config.step!r} needs; a training run's critic gives them; choose other terms elsewhere"
        )
    for each in trajectories:
        values = each.values
        if values is not None and (
            len(values) != len(each.steps) + 1
            or not all(value is None or math.isfinite(value) for value in values)
        ):
            raise CreditError(
                f"rollout {each.rollout_id!r} has values {list(values)!r}; expected"
                f" {len(each.steps) + 1} finite numbers or None, one before each step and one behind the last"
            )


def lacks_values(trajectory: Trajectory, config: "CreditConfig") -> bool:
    """Whether a value is missing that is needed; that behind the last step is where it was cut off."""
    if not config.needs_values:
        return False
    values = trajectory.values
    return values is None or None in (values if trajectory.is_truncated else values[:-1])


def value_baseline(batch: "Batch") -> Floats:
    """Compare every rollout with what was expected of it before its first step, shape (N,).

        A_n = R_n [+ V(s_T) if it was cut off] - V(s_0)

    Not biased, whatever the values are, where rollouts end by themselves. Without steps: 0.
    """
    lengths_N = batch.lengths_N
    expected_N = np.full(len(lengths_N), np.nan)
    has_steps_N = lengths_N > 0
    expected_N[has_steps_N] = batch.values_S[(np.cumsum(lengths_N) - lengths_N)[has_steps_N]]
    return baseline_advantages(batch.returns_N + batch.bootstraps_N, expected_N)


def gae(batch: "Batch", config: "CreditConfig") -> Floats:
    """`gae_steps` of every rollout, shape (S,)."""
    return _gae(batch, gamma=config.gamma, lam=config.gae_lambda)


def value_targets(batch: "Batch", config: "CreditConfig") -> Floats:
    """What the critic should have said before each step, shape (S,): its value and the step's advantage.

    With step `gae` the lambda-return; without it all that is still to come, since nothing else is discounted.
    """
    found_S = gae(batch, config) if config.step == "gae" else _gae(batch, gamma=1.0, lam=1.0)
    return batch.values_S + found_S


def _gae(batch: "Batch", *, gamma: float, lam: float) -> Floats:
    return gae_trajectories(
        batch.rewards_S, batch.values_S, batch.bootstraps_N, batch.lengths_N, gamma=gamma, lam=lam
    )
