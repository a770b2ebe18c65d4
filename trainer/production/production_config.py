"""Training on what live agents do: section `[production]`.

Knows settings, and which others have no effect beside them. Does not know: stores, learners.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from spangrad.credit.credit_config import CreditConfig
from spangrad.credit.settings import check_values
from spangrad.errors import ConfigError
from spangrad.trainer.learning.learner_config import LearnerConfig, require
from spangrad.trainer.learning.objectives import OBJECTIVES
from spangrad.trainer.lone_rollouts import check_lone
from spangrad.trainer.production.eligibility import PARTS
from spangrad.trainer.unused import refuse_unused

USED_OF_ROLLOUT = frozenset({"max_staleness", "aggregation", "aggregation_tokens", "reward_authors"})
"""Settings of `[rollout]` that have an effect beside `[production]`."""


@dataclass(frozen=True, slots=True)
class ProductionConfig:
    """What an update takes of recorded sessions: those that have ended and have a reward, oldest first."""

    rollouts_per_update: int = 64
    """Sessions of an update; 1 or more."""
    idle_s: float = 600.0
    """A session has ended when its last span is so old, its tracer's root span has come, or its agent has
    told the gateway (`POST .../v1/end`); more than 0."""
    reward_wait_s: float = 0.0
    """So long after its end a session without a reward holds up those that ended after it, so that what is
    judged quickly is not preferred; its reward counts later, too. 0 or more, 0: it holds up none."""
    held_out: float = 0.1
    """Share of sessions, by a hash of their ids, that no update ever takes: their mean reward is the
    evaluation. 0: there is none; else from one in a million to all but as many."""

    def __post_init__(self) -> None:
        """Check ranges."""
        check_values(self, "production.")
        name = "production.rollouts_per_update"
        require(self.rollouts_per_update >= 1, name, self.rollouts_per_update, "1 or more")
        require(self.idle_s > 0, "production.idle_s", self.idle_s, "more than 0")
        require(self.reward_wait_s >= 0, "production.reward_wait_s", self.reward_wait_s, "0 or more")
        is_share = self.held_out == 0 or 1 <= self.held_out * PARTS <= PARTS - 1
        require(is_share, "production.held_out", self.held_out, f"0, or {1 / PARTS:f} to {1 - 1 / PARTS:f}")


def check_beside(
    learner: LearnerConfig, credit: CreditConfig, sections: Mapping[str, tuple[Any, Collection[str]]]
) -> None:
    """Refuse what a run on live sessions can't do, or has no use for.

    Args:
        learner: Its objective.
        credit: Estimators; sessions have no group and no task.
        sections: Name of another section -> its settings, and which of them are used.

    Raises:
        ConfigError: Rollouts of a task would be compared, or a setting has no effect.
    """
    refuse_unused(
        sections,
        "with [production], where live agents make the rollouts and feedback their rewards; leave one out",
    )
    check_lone(
        learner.objective,
        credit,
        because="with [production] there are no tasks, and every rollout is alone in its group",
        instead=(
            "credit.episode 'running_baseline' with credit.baseline_key 'all', or 'value_baseline', or"
            " learner.objective 'kto' or 'bc'"
        ),
    )
    needs_credit = OBJECTIVES[learner.objective].needs_credit
    if needs_credit and credit.episode == "running_baseline" and credit.baseline_key != "all":
        raise ConfigError(
            f"credit.baseline_key is {credit.baseline_key!r}, and with [production] there are no tasks, so"
            " none would have a baseline; expected 'all'"
        )
