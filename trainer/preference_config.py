"""Which rollouts are better than which, for objectives that take returns and not advantages.

    dpo   pairs of a better and a worse rollout of a task
    kto   good and bad rollouts
    bc    the good rollouts alone

Knows settings, and what they change. Does not know: stores, learners.
"""

import json
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Final, Literal

from spangrad.credit.credit_config import CreditConfig
from spangrad.credit.labels import best, labelled
from spangrad.credit.pairs import paired
from spangrad.credit.pipeline import Prefer, Target
from spangrad.credit.settings import check_values
from spangrad.errors import ConfigError
from spangrad.trainer.learning.learner_config import LearnerConfig, require
from spangrad.trainer.learning.objectives import OBJECTIVES
from spangrad.trainer.lone_rollouts import check_lone

_MAKES: Final[dict[str, tuple[Any, tuple[str, ...]]]] = {
    "dpo": (paired, ("level", "min_gap", "pairs_per_group")),
    "kto": (labelled, ("good_at",)),
    "bc": (best, ("good_at", "per_group", "target")),
}


@dataclass(frozen=True, slots=True)
class PreferenceConfig:
    """Which rollouts are better, for objectives that take no advantages. Returns are in reward units."""

    level: Literal["rollout", "tail", "step"] = "rollout"
    """`dpo`: what of two rollouts is compared: all calls, those from where they part after the same tokens,
    or the call alone in which they part."""
    min_gap: float = 0.0
    """`dpo`: returns of a pair differ by more than this; 0 or more."""
    pairs_per_group: int = 0
    """`dpo`: pairs of a group, those with the largest gaps; 0: all."""
    good_at: float | None = 1.0
    """`kto`, `bc`: a rollout is good if its return is at least this; none (`bc`): all are, scored or not."""
    target: Target = "actions"
    """`bc`: what is cloned: the policy's replies, or (an implicit world model) what they were answered."""
    per_group: int = 0
    """`bc`: good rollouts of a group that are cloned, the best first; 0: all."""

    def __post_init__(self) -> None:
        """Check ranges."""
        check_values(self, "preference.")
        for name in ("min_gap", "pairs_per_group", "per_group"):
            require(getattr(self, name) >= 0, f"preference.{name}", getattr(self, name), "0 or more")

    def prefer(self, objective: str) -> Prefer | None:
        """What makes rows of rollouts and returns; None: the objective takes advantages."""
        if objective not in _MAKES:
            return None
        make, names = _MAKES[objective]
        return partial(make, **{name: getattr(self, name) for name in names if name != "target"})


def check_effects(
    learner: LearnerConfig,
    credit: CreditConfig,
    preference: PreferenceConfig,
    *,
    is_weighed: bool,
    group_size: int | None,
) -> None:
    """Refuse settings of a run that its objective does not use, or that do not go together.

    Args:
        learner: Its objective.
        credit: Estimators; its `reward_weights` say what a return is, for every objective.
        preference: See there.
        is_weighed: Whether somebody chose how rollouts and tokens are weighed.
        group_size: Rollouts of each task; None: as many as there are.

    Raises:
        ConfigError: One was changed, or groups of one say nothing.
    """
    _check_comparisons(learner, credit, group_size)
    if preference.good_at is None and learner.objective == "kto":
        raise ConfigError(
            "preference.good_at is none, and learner.objective 'kto' learns from what is good and what is"
            " bad; say what is good"
        )
    if preference.target == "observations" and learner.echo_coef > 0:
        raise ConfigError(
            f"learner.echo_coef is {learner.echo_coef!r} and preference.target 'observations', which trains "
            "nothing but observations; leave one out"
        )
    if learner.critic is not None and not credit.needs_values:
        raise ConfigError(
            f"learner.critic has no effect with credit.episode {credit.episode!r} and credit.step"
            f" {credit.step!r}, which ask no critic; leave it out (--set learner.critic=none), or choose"
            " what uses it"
        )
    _check_most(learner.objective, preference, group_size)
    objective = OBJECTIVES[learner.objective]
    used = _MAKES[learner.objective][1] if learner.objective in _MAKES else ()
    changed = [
        f"preference.{field.name}"
        for field in fields(preference)
        if field.name not in used and getattr(preference, field.name) != field.default
    ]
    if not objective.needs_credit:
        plain = CreditConfig()
        changed += [
            f"credit.{field.name}"
            for field in fields(credit)
            if field.name != "reward_weights" and getattr(credit, field.name) != getattr(plain, field.name)
        ]
    weighs = learner.entropy_coef or learner.kl_coef or learner.echo_coef
    if objective.compares_sequences and is_weighed and not weighs:
        changed.append("rollout.aggregation")
    if changed:
        section = changed[0].partition(".")[0]
        weights = ", ".join(f"{json.dumps(name)} = {value}" for name, value in credit.reward_weights.items())
        is_told = section == "credit" and credit.reward_weights != CreditConfig().reward_weights
        kept = f"reward_weights = {{{weights}}}" if is_told else ""
        reset = "" if section == "rollout" else f" (--set '{section}={{{kept}}}' resets the section)"
        raise ConfigError(
            f"{changed[0]} has no effect with learner.objective {learner.objective!r}; leave it out{reset},"
            " or choose what uses it"
        )


def _check_most(objective: str, preference: PreferenceConfig, group_size: int | None) -> None:
    if group_size is None or objective not in _MAKES:
        return
    pairs = group_size * (group_size - 1) // 2
    for name, most, what in (("pairs_per_group", pairs, "pairs"), ("per_group", group_size, "rollouts")):
        value = getattr(preference, name)
        if name in _MAKES[objective][1] and value >= most > 0:
            raise ConfigError(
                f"preference.{name} = {value} has no effect: a group of {group_size}, rollout.group_size, has"
                f" {most} {what}; choose less, or leave it out"
            )


def _check_comparisons(learner: LearnerConfig, credit: CreditConfig, group_size: int | None) -> None:
    if group_size == 1:
        check_lone(
            learner.objective,
            credit,
            because="rollout.group_size is 1, expected 2 or more",
            instead="credit.episode 'running_baseline' or 'value_baseline' for tasks that are run once",
        )
    if learner.objective == "gspo" and learner.sequence == "row" and credit.is_per_step:
        raise ConfigError(
            "learner.objective 'gspo' takes one advantage of a sequence, and the calls of a row, which "
            "learner.sequence 'row' makes one, get different ones with credit.episode "
            f"{credit.episode!r} and credit.step {credit.step!r}; choose learner.sequence 'call', or "
            "learner.objective 'gspo_token'"
        )
