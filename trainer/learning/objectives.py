"""The objectives that a learner can minimise, by name, and which of its settings each of them uses.

Knows: names, defaults, what a row must have. Does not know: torch; the functions are in `objective.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Objective:
    """What has to be known of an objective before there is anything to compute."""

    settings: frozenset[str] = frozenset()
    """Settings of `LearnerConfig` that change it, beside those that every objective has."""
    clip: tuple[float, float] | None = None
    """Its `clip_low` and `clip_high` where the config names none; None: it clips nothing."""
    uses_ratio: bool = True
    """Whether it weighs tokens by current / behaviour policy: then it needs rows of grade `exact` with
    advantages, sampled at a temperature above 0. Otherwise any row with token ids will do."""


OBJECTIVES: Final[Mapping[str, Objective]] = {
    "ppo": Objective(frozenset({"dual_clip"}), clip=(0.2, 0.28)),
    "bc": Objective(uses_ratio=False),
}
