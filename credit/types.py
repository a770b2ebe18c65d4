"""What an estimator sees of the world: numbers, groups and anchors. No tokens, no text."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Step:
    """One call of the trained policy and what followed it, up to the next call."""

    call_id: str
    step_index: int
    """Its place in the rollout, for people: what counts is the order of `Trajectory.steps`."""
    anchor: str | None = None
    """Hash of the state that the policy saw; equal anchors in a group are the same state. None: not known."""
    reward: float | None = None
    """Given for this step alone, on top of the rollout's; None: nothing was given."""
    tokens: int | None = None
    """Tokens that were sampled in it; None: not known."""
    observation: str | None = None
    """Text that the policy saw, where nearly equal ones are one state; None: only an equal anchor is."""
    role: str | None = None
    """Agent that acted; None: nobody named it."""
    action: str | None = None
    """Hash of what was done; equal actions of one state lead on alike. None: not known."""
    parent: str | None = None
    """call_id of the step that it goes on from, in any rollout of the group; None: the one before it."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The steps of one rollout, in order."""

    rollout_id: str
    group_id: str | None
    """Rollouts of one group are compared with each other; None: a group of its own."""
    reward: float | None
    """Of the outcome, given when the last step is over. None: nobody gave one, which is not 0."""
    steps: Sequence[Step]
    components: Mapping[str, float | None] = field(default_factory=dict)
    """The outcome's parts by name, without their weights; `reward` is their weighted sum."""
    baseline: float | None = None
    """Return that was to be expected before it ran, for a comparison without a group; None: not known."""
    is_truncated: bool = False
    """Whether it was cut off (tokens, turns, time) rather than ended by itself."""
    scores: Sequence[float | None] | None = None
    """Of the state before each step and behind the last one, or a term for each step (`scoring`); None:
    nobody gave any."""
    values: Sequence[float | None] | None = None
    """What a critic expected to be still to come, before each step and behind the last one, which counts
    only where the rollout was cut off; reward units. None: nobody was asked."""

    @property
    def total_reward(self) -> float | None:
        """Outcome and step rewards together.

        None where the reward is missing: no outcome was scored, and not every step was either.
        """
        given = [step.reward for step in self.steps if step.reward is not None]
        if self.reward is not None:
            return math.fsum([self.reward, *given])
        return math.fsum(given) if given and len(given) == len(self.steps) else None
