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
    weighs_by_advantage: bool = False
    """Whether it needs advantages although it has no ratio."""
    compares_sequences: bool = False
    """Whether it compares judged sequences with the starting policy: `spangrad.credit.paired`, `labelled`."""

    @property
    def needs_credit(self) -> bool:
        """Whether advantages change it."""
        return self.uses_ratio or self.weighs_by_advantage

    @property
    def min_grade(self) -> Literal["exact", "text"]:
        """The worst grade of calls that it can train: what a grade is good for is in `adapters/README.md`."""
        return "exact" if self.uses_ratio else "text"

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
    "awr": Objective(frozenset({"awr_beta", "awr_max_weight"}), uses_ratio=False, weighs_by_advantage=True),
    "dpo": Objective(
        frozenset({"preference_beta", "label_smoothing"}), uses_ratio=False, compares_sequences=True
    ),
    "kto": Objective(
        frozenset({"preference_beta", "good_weight", "bad_weight"}), uses_ratio=False, compares_sequences=True
    ),
}
