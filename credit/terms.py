"""What a term is: what it sees, what it gives, and which settings of `CreditConfig` change it.

Knows arrays and the names of settings; the terms themselves are in `estimators`.

Shape letters: N rollouts with a reward, S their steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from spangrad.credit.groups import Floats, Ints
from spangrad.credit.types import Trajectory

if TYPE_CHECKING:
    from spangrad.credit.credit_config import CreditConfig


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """What estimators see."""

    trajectories: Sequence[Trajectory]
    """The rollouts themselves, for terms that need more than what is below."""
    returns_N: Floats
    """Undiscounted return."""
    group_ids_N: Ints
    tokens_N: Ints
    """Sampled tokens; -1 where a step does not know its own."""
    step_returns_S: Floats
    """Return from the step on, discounted."""
    undiscounted_S: Floats
    """The same without a discount."""
    rollout_index_S: Ints
    """Rollout of the step; a rollout's steps stand together, in order."""
    step_index_S: Ints
    """0, 1, 2, ... in its rollout."""
    anchor_ids_S: Ints
    """State that the step began in; `NO_ANCHOR`: not known."""
    exact_anchor_ids_S: Ints
    """The same where only equal observations are one state."""
    rewards_S: Floats
    """Reward of the step, in the last one with the outcome."""
    baselines_N: Floats
    """Return that was to be expected; NaN: not known."""
    values_S: Floats
    """What a critic expected before the step; NaN: not known."""
    bootstraps_N: Floats
    """What it expected behind the last step of a rollout that was cut off; 0 where it ended."""

    @property
    def group_ids_S(self) -> Ints:
        """Group of each step's rollout."""
        return self.group_ids_N[self.rollout_index_S]

    @property
    def lengths_N(self) -> Ints:
        """Steps of each rollout."""
        return np.bincount(self.rollout_index_S, minlength=len(self.returns_N)).astype(np.int64)


@dataclass(frozen=True, slots=True)
class EpisodeTerm:
    """A term for whole rollouts."""

    estimate: Callable[[Batch, "CreditConfig"], Floats]
    """-> advantages, shape (N,), or (S,) if it says something about each step."""
    settings: frozenset[str] = frozenset()
    """Settings of `CreditConfig` that change it."""
    is_per_step: bool = False
    counts_lone: bool = False
    """As in `StepTerm`; `grpo` does where `singleton` is 'raw'."""


@dataclass(frozen=True, slots=True)
class StepTerm:
    """A term for steps."""

    estimate: Callable[[Batch, "CreditConfig"], Floats]
    """-> advantages, shape (S,)."""
    pool: Callable[[Batch], Ints] | None
    """Which steps are compared with each other, shape (S,); `NO_ANCHOR`: with none. None: what is not 0 says
    something: nothing is discounted, so that equal rewards give zeros, or it is no comparison of rewards.
    `igpo` also compares steps of one rollout, which says nothing where rollouts do not differ: by number."""
    settings: frozenset[str] = frozenset()
    """Settings of `CreditConfig` that change it, beside `step_weight`."""
    counts_lone: bool = False
    """Whether a rollout alone in its group says something: it branches, the whole batch is compared, or it is
    held against a critic or scores."""
    counts_rewards: bool = True
    """Whether it counts rewards; else scores alone."""


@dataclass(frozen=True, slots=True)
class BothTerms:
    """A step term that comes with its own episode term and needs episode `grpo` to stand for it."""

    estimate: Callable[[Batch, "CreditConfig", float], Floats]
    """(batch, config, step weight) -> advantages, shape (S,)."""
    pool: Callable[[Batch], Ints] | None
    """As in `StepTerm`."""
    settings: frozenset[str]
    """Settings of `CreditConfig` that change it."""
    counts_lone: bool = False
