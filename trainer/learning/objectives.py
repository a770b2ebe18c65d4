"""The objectives that a learner can minimise, by name, and which of its settings each of them uses.

Knows: names, defaults, what a row must have. Does not know: torch; the functions are in `objective.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

KlEstimator = Literal["k1", "k2", "k3", "k3_straight_through", "k3_unbiased"]
SequenceUnit = Literal["call", "row"]


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

    @property
    def names(self) -> frozenset[str]:
        """Its settings, clip bounds included."""
        return self.settings | ({"clip_low", "clip_high"} if self.clip is not None else frozenset())


OBJECTIVES: Final[Mapping[str, Objective]] = {
    "ppo": Objective(frozenset({"dual_clip"}), clip=(0.2, 0.28)),
    "dapo": Objective(clip=(0.2, 0.28)),
    "gspo": Objective(frozenset({"sequence"}), clip=(3e-4, 4e-4)),
    "gspo_token": Objective(frozenset({"sequence"}), clip=(3e-4, 4e-4)),
    "cispo": Objective(clip=(1.0, 4.0)),
    "sapo": Objective(frozenset({"tau_positive", "tau_negative"})),
    "dppo_tv": Objective(frozenset({"max_ratio"}), clip=(0.2, 0.2)),
    "dppo_kl": Objective(frozenset({"max_ratio"}), clip=(0.05, 0.05)),
    "importance_sampling": Objective(),
    "bc": Objective(uses_ratio=False),
}
