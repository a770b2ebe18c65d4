"""What a run's config makes of rollouts: arguments of `credited_rows`.

Knows the config. Does not know: stores, model folders; needs neither torch nor transformers, so that commands
show the rows of a run where only the light install is.
"""

from collections.abc import Mapping, Sequence
from typing import TypedDict

from spangrad.adapters.model_call import Grade
from spangrad.credit.aggregation import Aggregation
from spangrad.credit.credit_config import CreditConfig
from spangrad.credit.pipeline import Prefer, Target
from spangrad.trainer.config import TrainConfig
from spangrad.trainer.learning.objectives import OBJECTIVES


class RowSettings(TypedDict):
    """Arguments of `credited_rows`; their meaning is there."""

    config: CreditConfig | None
    min_grade: Grade | str
    reward_weights: Mapping[str, float] | None
    authors: Sequence[str]
    aggregation: Aggregation
    constant: float | None
    target: Target
    prefer: Prefer | None
    base_dir: str


def row_settings(config: TrainConfig) -> RowSettings:
    """Credit, or preferences, as the objective needs, and the worst grade that it can train."""
    objective = OBJECTIVES[config.learner.objective]
    return {
        "config": config.credit if objective.needs_credit else None,
        "min_grade": objective.min_grade,
        "reward_weights": config.credit.reward_weights,
        "authors": config.rollout.reward_authors,
        "aggregation": config.rollout.aggregation,
        "constant": config.rollout.aggregation_tokens,
        "target": config.preference.target,
        "prefer": config.preference.prefer(config.learner.objective),
        "base_dir": config.base_dir,
    }
