"""How rewards become advantages: the settings, their ranges, and which of them have an effect together."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Final, Literal

from spangrad.credit.estimators import BOTH_TERMS, EPISODE_TERMS, OF_BRANCHES, STEP_TERMS
from spangrad.credit.filtering import (
    MISSING_SCORE,
    MISSING_VALUE,
    OVERLONG,
    OVERLONG_SETTINGS,
    leaves_out_lone,
)
from spangrad.credit.grpo import Singleton
from spangrad.credit.lone import needs_groups
from spangrad.credit.rewards import DEFAULT_WEIGHTS
from spangrad.credit.scoring import check_shaping
from spangrad.credit.settings import check_values
from spangrad.errors import ConfigError

Episode = Literal[
    "grpo",
    "rloo",
    "maxrl",
    "opo",
    "reinforce_pp_baseline",
    "reinforce_pp_baseline_as_published",
    "best_of_group",
    "gdpo",
    "grpo_per_role",
    "tree_grpo",
    "tree_grpo_as_published",
    "running_baseline",
    "value_baseline",
    "none",
]
StepName = Literal[
    "none",
    "gigpo",
    "gigpo_as_published",
    "hgpo",
    "hgpo_as_published",
    "rtmc",
    "leave_one_out_to_go",
    "gae",
    "mt_grpo",
    "per_turn_index_biased",
    "igpo",
    "igpo_as_published",
    "reinforce_pp",
    "turn_credit",
    "tree_edges",
    "treerl",
]

_UNGROUPED: Final = ("running_baseline", "value_baseline")
"""Episode terms that compare no groups."""
MOST_HISTORY: Final = 1000
"""Each state more costs a pass over all steps."""
_SWITCHES: Final = ("step_weight", "scale_by_std", "history", "gamma")
"""Settings that leave others without an effect where they are 0."""


@dataclass(frozen=True, slots=True)
class CreditConfig:
    """How rewards become advantages. A setting that the chosen terms do not use is refused."""

    episode: Episode = "grpo"
    """Term that compares whole rollouts of a group. `opo` and `reinforce_pp_baseline_as_published` need to
    know how many tokens each call sampled, `grpo_per_role` the agents' names, `tree_grpo` rollouts that
    branch (`tree_grpo_as_published` keeps raw returns of single leaves, as its code does); `gdpo` scales each
    reward of `reward_weights` in its group before they are added; `running_baseline` compares with earlier
    rollouts of the same kind, `value_baseline` with what a critic expected (`learner.critic`), for tasks that
    are run once, as in production."""
    step: StepName = "none"
    """Term that compares steps: from the same state (`gigpo`), from the same last states (`hgpo`), or with
    what the others still earn from that step on (`leave_one_out_to_go`). `gigpo_as_published` also takes the
    episode term's statistics over steps, keeps raw singletons and uses ddof 1, as the published code does; it
    needs episode `grpo`, and so does `mt_grpo` (one intermediate reward a rollout, apart from the outcome).
    `rtmc` compares actions of a state; `tree_edges` and `treerl` need rollouts that branch; `turn_credit`
    spreads changes of `scores` over the steps before; `reinforce_pp` whitens over the tokens of the batch,
    whatever the groups; `gae` compares a step with what a critic expected before and behind it
    (`learner.critic`), with episode `none` it is PPO over steps; `igpo` puts the rewards of all steps of a
    group on one scale and sums what follows: with `shaping` `score_gain` and episode `none` it is IGPO, and
    `igpo_as_published` passes over rewards of 0 as its code does; `per_turn_index_biased` is there to compare
    with. A group of equal rewards gets zero from all of them, but for what scores and values say."""
    step_weight: float = 1.0
    """lambda: weight of the step term; 0 or more."""
    gamma: float = 0.95
    """Discount of step returns, per step; 0 to 1."""
    gae_lambda: float = 0.9
    """lambda of `gae`: 1 trusts returns alone, 0 the critic's next value alone; 0 to 1."""
    scale_by_std: bool = True
    """Divide by the standard deviation of the group (`grpo`, `best_of_group`) and of the pool (`gigpo`). Off
    with `grpo`: Dr.GRPO."""
    ddof: int = 0
    """0: population, 1: sample standard deviation."""
    eps: float = 1e-6
    """Added to standard deviations (`maxrl`: to the mean); keeps rounding in equal rewards from being blown
    up. 0 or more."""
    singleton: Singleton = "zero"
    """What a lone rollout of a group gets in `grpo`: `zero`, or its `raw` return as published code does."""
    history: int = 2
    """How many earlier states `hgpo` looks at beyond the present one; 0 to 1000."""
    history_weight: float = 1.0
    """alpha of `hgpo`: how much more a longer shared history counts; 0 or more."""
    anchors: Literal["exact", "similar"] = "exact"
    """When steps of a group are in the same state (`gigpo`, `hgpo`): when they saw the same, or something
    `similar`. States that the agent named (`spangrad.state`) are always compared exactly."""
    similarity: float = 0.95
    """With `similar` anchors: how much of its text, in runs of four characters, an observation has in common
    with the leader of its pool; 0.5 to 1."""
    evidence_prior: float = 0.0
    """k of `gigpo` and `hgpo`: the advantage in a state that n rollouts came through counts n / (n + k). 0
    or more."""
    value_prior: float = 1.0
    """How many steps (`rtmc`) or leaves (`tree_edges`) the value of the state before counts for, in that of
    an action in it; 0 or more."""
    reward_weights: Mapping[str, float] = field(default_factory=lambda: dict(DEFAULT_WEIGHTS))
    """Rewards that count, by name, with their weights: the outcome is their weighted sum, and all must be
    there. `gdpo` keeps them apart."""
    baseline_decay: float = 0.95
    """What a rollout weighs less in the `running_baseline` when one more has come; 0 to below 1."""
    baseline_key: str = "task_id"
    """Which rollouts the `running_baseline` takes to be of one kind: of the same `task_id`, `all`, or of the
    same `task.NAME`, a value in the task (`task.a.b`: inside another)."""
    filters: tuple[Literal["zero_spread", "top_share", "top_p"], ...] = ()
    """What leaves groups out, one after the other: those in which nothing differs, all but the `top_share` of
    groups, or all but the fewest that have `top_p` of the spread. What is left out is counted."""
    top_share: float = 0.25
    """Part of the groups that filter `top_share` keeps, those of the largest spread; above 0, at most 1."""
    top_p: float = 0.9
    """Part of the sum of standard deviations that filter `top_p` keeps; above 0, at most 1."""
    overlong: Literal["keep", "mask", "penalize"] = "keep"
    """What becomes of rollouts that are too long: kept as they were scored; `mask`: left out if they were cut
    off or sampled more than `overlong_limit` tokens; `penalize`: their outcome is lowered from
    `overlong_buffer` tokens below the limit on, by `overlong_factor` at the limit."""
    overlong_limit: int = 0
    """Longest rollout, in sampled tokens; 0: no limit."""
    overlong_buffer: int = 0
    """How far below the limit the penalty begins, in tokens; 0 or more, 1 to the limit with `penalize`."""
    overlong_factor: float = 1.0
    """Penalty at the limit, in reward units; above 0."""
    scores: str | None = None
    """Where numbers about states come from, for step `turn_credit` and for `shaping`: `path/to/file.py:name`
    or `package.module:name`, called as `function(task, calls) -> numbers` with the calls that are steps, one
    number before each and one behind the last; or `reward:NAME`, rewards of steps, for the states behind them
    (before the first it is 0)."""
    shaping: Literal["none", "potential", "score_gain", "terms"] = "none"
    """What scores add. `potential`: gamma p' - p, with 0 at the end of a rollout that was not cut off, to
    returns of steps alone; it leaves the best policy alone. `score_gain` (p' - p) and `terms` (the numbers
    themselves, one a step) are added to the rewards of steps, a new objective: `shaping/passes` says whether
    going in circles pays."""
    shaping_weight: float = 1.0
    """Factor of what shaping adds; above 0."""

    def __post_init__(self) -> None:
        """Check names, ranges, and that every setting that was changed has an effect."""
        check_values(self)
        if self.episode == "none" and (self.step == "none" or self.step_weight == 0):
            what = "step are both 'none'" if self.step == "none" else "step_weight are 'none' and 0"
            raise ConfigError(f"episode and {what}, so nothing gets credit; choose at least one")
        if self.step in BOTH_TERMS and self.episode != "grpo":
            raise ConfigError(f"step {self.step!r} needs episode 'grpo', not {self.episode!r}")
        for name in ("gamma", "gae_lambda"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; expected 0 to 1")
        if not 0.5 <= self.similarity <= 1.0:
            raise ConfigError(f"similarity is {self.similarity!r}; expected 0.5 to 1")
        if not 0.0 <= self.baseline_decay < 1.0:
            raise ConfigError(f"baseline_decay is {self.baseline_decay!r}; expected 0 to below 1")
        if not re.fullmatch(r'task_id|all|task(\.[^."]+)+', self.baseline_key):
            raise ConfigError(f"baseline_key is {self.baseline_key!r}; expected task_id, all or task.NAME")
        if self.ddof not in (0, 1):
            raise ConfigError(f"ddof is {self.ddof!r}; expected 0 or 1")
        for name in (
            "step_weight",
            "eps",
            "history_weight",
            "evidence_prior",
            "value_prior",
            "overlong_limit",
            "overlong_buffer",
        ):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; expected 0 or more")
        if not 0 <= self.history <= MOST_HISTORY:
            raise ConfigError(f"history is {self.history!r}; expected 0 to {MOST_HISTORY}")
        if not any(self.reward_weights.values()):
            raise ConfigError(f"reward_weights is {dict(self.reward_weights)!r}; expected weights, not all 0")
        for name in ("overlong_factor", "shaping_weight"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; expected above 0")
        for name in ("top_share", "top_p"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; expected above 0, at most 1")
        if len(set(self.filters)) < len(self.filters):
            raise ConfigError(f"filters is {self.filters!r}; expected each one once")
        if "zero_spread" in self.filters and self.step in ("reinforce_pp", "gae"):
            raise ConfigError(
                f"filter 'zero_spread' has no effect with step {self.step!r}: it compares no groups"
            )
        self._check_overlong()
        check_shaping(self, self.settings_used())
        self._check_effects()

    def _check_overlong(self) -> None:
        if self.overlong != "penalize":
            return
        if not 1 <= self.overlong_buffer <= self.overlong_limit:
            raise ConfigError(
                f"overlong 'penalize' has limit {self.overlong_limit!r} and buffer {self.overlong_buffer!r};"
                " expected a buffer of 1 to the limit"
            )
        if self.episode == "gdpo":
            raise ConfigError("overlong 'penalize' is no component of episode 'gdpo'; choose 'mask'")
        if not self.counts_step_rewards:
            raise ConfigError(
                f"overlong 'penalize' lowers outcomes, which episode {self.episode!r} with step {self.step!r}"
                " does not count; choose 'mask', or a term that counts them"
            )
        if self.episode == "maxrl":
            raise ConfigError(
                "overlong 'penalize' can take a rollout below 0, where episode 'maxrl' has no meaning;"
                " choose 'mask'"
            )

    def _check_effects(self) -> None:
        used = self.settings_used()
        for setting in fields(self):
            value = getattr(self, setting.name)
            if setting.name not in used and value != setting.default:
                off = [f"{name} {at!r}, " for name in _SWITCHES if not (at := getattr(self, name))]
                raise ConfigError(
                    f"{setting.name} = {value!r} has no effect with episode {self.episode!r}, step "
                    f"{self.step!r}, anchors {self.anchors!r}, {''.join(off)}filters {list(self.filters)!r} "
                    f"and overlong {self.overlong!r}; leave it out, or choose what uses it"
                )

    def settings_used(self) -> frozenset[str]:
        """Names of the settings that change what the chosen terms give."""
        used = frozenset({"episode", "step", "reward_weights", "overlong", "shaping", *self.filters})
        used |= OVERLONG_SETTINGS[self.overlong]
        if self.episode not in _UNGROUPED:
            used |= {"filters"}
        if self.shaping != "none":
            used |= {"scores", "shaping_weight"}
        if self.step in BOTH_TERMS:
            used |= self._of(BOTH_TERMS[self.step].settings)
            return used if self.step_weight else used - {"gamma"}
        used |= self._of(EPISODE_TERMS[self.episode].settings)
        if self.step != "none":
            own = self._of(STEP_TERMS[self.step].settings)
            used |= {"step_weight"} | (own if self.step_weight else own & {"scores"})
        if leaves_out_lone(self.filters, counts_lone=self._steps_count_lone):
            used -= {"singleton"}
        return used

    def _of(self, settings: frozenset[str]) -> frozenset[str]:
        """What is left of a term's settings where one of them switches others off."""
        if "scale_by_std" in settings and not self.scale_by_std:
            settings -= {"ddof", "eps"}
        if self.history == 0:
            settings -= {"history_weight"}
        if self.gamma == 0:
            settings -= {"gae_lambda"}
        return settings - {"similarity"} if self.anchors == "exact" else settings

    @property
    def counts_step_rewards(self) -> bool:
        """Whether a term counts what steps are given; `gdpo` counts outcomes alone."""
        if self.episode not in ("none", "gdpo"):
            return True
        return self.step in STEP_TERMS and STEP_TERMS[self.step].counts_rewards and self.step_weight > 0

    @property
    def _steps_count_lone(self) -> bool:
        return self.step in STEP_TERMS and STEP_TERMS[self.step].counts_lone and self.step_weight > 0

    @property
    def lone_terms(self) -> tuple[str, ...]:
        """Terms that give credit to a rollout that is alone in its group."""
        episode = EPISODE_TERMS[self.episode].counts_lone or self.singleton == "raw"
        return (*((self.episode,) if episode else ()), *((self.step,) if self._steps_count_lone else ()))

    @property
    def counts_lone(self) -> bool:
        """Whether a rollout that is alone in its group can get credit."""
        return bool(self.lone_terms)

    @property
    def needs_groups(self) -> tuple[str, ...]:
        """Settings that were changed and say nothing of a rollout that is alone in its group."""
        return needs_groups(self)

    @property
    def is_per_step(self) -> bool:
        """Whether the steps of a rollout can get different credit."""
        return EPISODE_TERMS[self.episode].is_per_step or (self.step != "none" and self.step_weight > 0)

    @property
    def drops(self) -> tuple[str, ...]:
        """Names of what may leave rollouts out that have a reward."""
        overlong = (OVERLONG,) if self.overlong == "mask" else ()
        scores = (MISSING_SCORE,) if self.scores is not None else ()
        return (*overlong, *scores, *((MISSING_VALUE,) if self.needs_values else ()), *self.filters)

    @property
    def needs_actions(self) -> bool:
        """Whether a term wants to know what was done in each step."""
        return self.step == "rtmc"

    @property
    def needs_values(self) -> bool:
        """Whether a term wants to know what a critic expected."""
        return self.episode == "value_baseline" or self.step == "gae"

    @property
    def needs_branches(self) -> bool:
        """Whether a term wants to know which rollouts go on from calls of others."""
        return self.episode in OF_BRANCHES or self.step in ("tree_edges", "treerl")
