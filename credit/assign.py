"""Trajectories -> one advantage per step: A = A_episode + lambda * A_step.

Composes the estimators; knows no tokens and no stores.

Invariants:
* a rollout without a reward is left out of its group's statistics, gets no advantage
  (None, not 0) and is counted;
* statistics of the episode term are over rollouts, however many steps each has;
* a group that says nothing gives zeros, whatever the discount, and is counted: rewards paid sooner or
  later are no different rewards.

Shape letters: N rollouts with a reward, S their steps.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from spangrad.credit.diagnostics import CreditDiagnostics, diagnose
from spangrad.credit.gigpo import NO_ANCHOR, gigpo_as_published, pool_ids, step_advantages
from spangrad.credit.groups import Floats, Ints, labels, pool_statistics
from spangrad.credit.grpo import Singleton, group_advantages
from spangrad.credit.returns import discounted_returns
from spangrad.credit.rloo import rloo
from spangrad.credit.types import Trajectory
from spangrad.errors import ConfigError, CreditError


@dataclass(frozen=True, slots=True)
class CreditConfig:
    """How rewards become advantages."""

    episode: Literal["grpo", "rloo", "none"] = "grpo"
    """Term that compares whole rollouts of a group."""
    step: Literal["none", "gigpo", "gigpo_as_published"] = "none"
    """Term that compares steps from the same state. `gigpo_as_published` also takes the episode term's
    statistics over steps, keeps raw singletons and uses ddof 1, as the published code does; it needs
    episode `grpo`. A group of equal rewards gets zero from all of them."""
    step_weight: float = 1.0
    """lambda: weight of the step term; 0 or more."""
    gamma: float = 0.95
    """Discount of step returns, per step; 0 to 1."""
    scale_by_std: bool = True
    """Divide by the standard deviation of the group (`grpo`) and of the pool (`gigpo`). Off: Dr.GRPO.
    `rloo` never does."""
    ddof: int = 0
    """0: population, 1: sample standard deviation."""
    eps: float = 1e-6
    """Added to standard deviations; keeps rounding in equal rewards from being blown up. 0 or more."""
    singleton: Singleton = "zero"
    """What a lone rollout of a group gets in `grpo`: `zero`, or its `raw` return as published code does."""

    def __post_init__(self) -> None:
        """Check ranges."""
        if self.episode == "none" and self.step == "none":
            raise ConfigError("episode and step are both 'none', so nothing gets credit; choose at least one")
        if self.step == "gigpo_as_published" and self.episode != "grpo":
            raise ConfigError(f"step 'gigpo_as_published' needs episode 'grpo', not {self.episode!r}")
        if not 0.0 <= self.gamma <= 1.0:
            raise ConfigError(f"gamma is {self.gamma!r}; expected 0 to 1")
        if self.ddof not in (0, 1):
            raise ConfigError(f"ddof is {self.ddof!r}; expected 0 or 1")
        for name in ("step_weight", "eps"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; expected 0 or more")


@dataclass(frozen=True, slots=True)
class CreditResult:
    """Advantages and what the batch looked like."""

    advantages: Mapping[tuple[str, str], float | None]
    """(rollout_id, call_id) -> advantage. None: not assigned, because the reward is missing."""
    diagnostics: CreditDiagnostics

    def of(self, rollout_id: str) -> dict[str, float]:
        """call_id -> advantage of one rollout, assigned ones only."""
        return {
            call: a
            for (rollout, call), a in self.advantages.items()
            if rollout == rollout_id and a is not None
        }


@dataclass(frozen=True, slots=True, eq=False)
class _Arrays:
    returns_N: Floats
    group_ids_N: Ints
    step_returns_S: Floats
    undiscounted_S: Floats
    rollout_index_S: Ints
    anchor_ids_S: Ints


def assign(trajectories: Sequence[Trajectory], config: CreditConfig) -> CreditResult:
    """Give every step of every rollout with a reward its advantage.

        A_{i,t} = A^E_i + lambda * A^S_{i,t}

    Args:
        trajectories: Rollouts, in any order; a rollout id occurs once.
        config: Which estimators, with which constants.

    Raises:
        CreditError: A rollout or call occurs twice, or a reward is not finite.

    Groups in which all rewards are equal, and lone rollouts, get zeros in both terms (a lone rollout's
    episode term: `config.singleton`). The paper's step term alone would train such a group for gamma < 1:
    the rewards differ by how far they are discounted, which says who was shorter and not who was better.
    """
    _check(trajectories)
    known = [trajectory for trajectory in trajectories if trajectory.total_reward is not None]
    arrays = _arrays(known, config.gamma)
    is_informative_N = _is_informative(arrays, config)
    advantages_S = _advantages(arrays, config, is_informative_N[arrays.rollout_index_S])
    advantages: dict[tuple[str, str], float | None] = {
        (trajectory.rollout_id, step.call_id): None
        for trajectory in trajectories
        for step in trajectory.steps
    }
    keys = [(trajectory.rollout_id, step.call_id) for trajectory in known for step in trajectory.steps]
    advantages.update(zip(keys, advantages_S.tolist(), strict=True))
    diagnostics = diagnose(
        returns_N=arrays.returns_N,
        group_ids_N=arrays.group_ids_N,
        is_informative_N=is_informative_N,
        group_ids_S=arrays.group_ids_N[arrays.rollout_index_S],
        anchor_ids_S=arrays.anchor_ids_S,
        advantages_S=advantages_S,
        rollouts=len(trajectories),
    )
    return CreditResult(advantages, diagnostics)


def group_of(trajectory: Trajectory) -> str:
    """The group's name; a rollout without one is a group of its own."""
    return (
        f"group {trajectory.group_id}"
        if trajectory.group_id is not None
        else f"rollout {trajectory.rollout_id}"
    )


def _check(trajectories: Sequence[Trajectory]) -> None:
    seen: set[str] = set()
    for trajectory in trajectories:
        if trajectory.rollout_id in seen:
            raise CreditError(
                f"rollout {trajectory.rollout_id!r} occurs twice; credit needs one attempt of each"
            )
        seen.add(trajectory.rollout_id)
        calls = [step.call_id for step in trajectory.steps]
        if len(set(calls)) < len(calls):
            twice = next(call for call in calls if calls.count(call) > 1)
            raise CreditError(
                f"rollout {trajectory.rollout_id!r} has call {twice!r} twice; expected one step per call"
            )
        rewards = [trajectory.reward, *(step.reward for step in trajectory.steps)]
        for reward in rewards:
            if reward is not None and not np.isfinite(reward):
                raise CreditError(
                    f"rollout {trajectory.rollout_id!r} has reward {reward!r}; expected a finite one or none"
                )


def _arrays(known: Sequence[Trajectory], gamma: float) -> _Arrays:
    step_returns: list[float] = []
    undiscounted: list[float] = []
    for trajectory in known:
        rewards_T = np.array([step.reward or 0.0 for step in trajectory.steps], dtype=np.float64)
        if len(rewards_T):
            rewards_T[-1] += trajectory.reward or 0.0
        step_returns.extend(discounted_returns(rewards_T, gamma).tolist())
        # Summed without rounding, so that equal rewards in another order are equal.
        undiscounted.extend(math.fsum(rewards_T[t:]) for t in range(len(rewards_T)))
    steps = [step for trajectory in known for step in trajectory.steps]
    anchor_ids_S = labels([step.anchor or "" for step in steps])
    is_anchored_S = np.array([step.anchor is not None for step in steps], dtype=np.bool_)
    return _Arrays(
        returns_N=np.array([trajectory.total_reward for trajectory in known], dtype=np.float64),
        group_ids_N=labels([group_of(trajectory) for trajectory in known]),
        step_returns_S=np.array(step_returns, dtype=np.float64),
        undiscounted_S=np.array(undiscounted, dtype=np.float64),
        rollout_index_S=np.repeat(np.arange(len(known)), [len(trajectory.steps) for trajectory in known]),
        anchor_ids_S=np.where(is_anchored_S, anchor_ids_S, NO_ANCHOR),
    )


def _is_informative(arrays: _Arrays, config: CreditConfig) -> NDArray[np.bool_]:
    """Whether the rewards of each rollout's group differ: of the rollouts, or of their steps from one state.

    The latter where a step term is asked for: rollouts of equal return can earn it in different steps.
    """
    pools = pool_statistics(arrays.returns_N, arrays.group_ids_N, ddof=0)
    if config.step == "none" or not config.step_weight:
        return pools.std_X > 0
    group_ids_S = arrays.group_ids_N[arrays.rollout_index_S]
    steps = pool_statistics(arrays.undiscounted_S, pool_ids(group_ids_S, arrays.anchor_ids_S), ddof=0)
    differs_S = (steps.std_X > 0) & (arrays.anchor_ids_S != NO_ANCHOR)
    return (pools.std_X > 0) | ((pools.count_X > 1) & np.isin(arrays.group_ids_N, group_ids_S[differs_S]))


def _advantages(arrays: _Arrays, config: CreditConfig, is_informative_S: NDArray[np.bool_]) -> Floats:
    if config.step == "gigpo_as_published":
        with_steps_S, without_S = (
            gigpo_as_published(
                arrays.returns_N,
                arrays.group_ids_N,
                arrays.step_returns_S,
                arrays.rollout_index_S,
                arrays.anchor_ids_S,
                step_weight=step_weight,
                scale_by_std=config.scale_by_std,
                eps=config.eps,
            )
            for step_weight in (config.step_weight, 0.0)
        )
        counts_N = pool_statistics(arrays.returns_N, arrays.group_ids_N, ddof=0).count_X
        is_lone_S = counts_N[arrays.rollout_index_S] == 1
        return np.where(is_informative_S, with_steps_S, np.where(is_lone_S, without_S, 0.0))
    episode_S = _episode(arrays, config)[arrays.rollout_index_S]
    if config.step == "none":
        return episode_S
    step_S = step_advantages(
        arrays.step_returns_S,
        arrays.group_ids_N[arrays.rollout_index_S],
        arrays.anchor_ids_S,
        scale_by_std=config.scale_by_std,
        ddof=config.ddof,
        eps=config.eps,
    )
    return episode_S + config.step_weight * np.where(is_informative_S, step_S, 0.0)


def _episode(arrays: _Arrays, config: CreditConfig) -> Floats:
    if config.episode == "none":
        return np.zeros_like(arrays.returns_N)
    if config.episode == "rloo":
        return rloo(arrays.returns_N, arrays.group_ids_N)
    return group_advantages(
        arrays.returns_N,
        arrays.group_ids_N,
        scale_by_std=config.scale_by_std,
        ddof=config.ddof,
        eps=config.eps,
        singleton=config.singleton,
    )
