"""When a candidate takes the promoted version's place: a paired comparison on the same held-out tasks.

Knows numbers. Does not know rollouts, stores or weights.

    gained   tasks that the candidate solved and the promoted version did not
    lost     the other way round
    p_value  P(X >= gained), X ~ Binomial(gained + lost, 1/2)

    better   gained > lost, (gained - lost) / tasks >= margin, p_value <= 1 - confidence
    worse    lost > gained
    undecided  all else

Tasks that both solve, or neither, say nothing of the difference: the exact sign test (McNemar's, one-sided)
leaves them out. It holds for any number of tasks and assumes that tasks are independent of each other.
"""

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from spangrad.credit.settings import check_values
from spangrad.errors import CreditError
from spangrad.trainer.learning.learner_config import require

Task = TypeVar("Task", bound=Hashable)


class Verdict(StrEnum):
    """What a comparison says of a candidate."""

    BETTER = "better"
    UNDECIDED = "undecided"
    WORSE = "worse"


@dataclass(frozen=True, slots=True)
class PromotionConfig:
    """Which versions are promoted, and when training goes back to the promoted one."""

    every: int = 0
    """Evaluate after every so many updates; 0: no version is promoted but by hand."""
    tasks: int = 64
    """Held-out tasks, one rollout each; chosen by `eval.seed`. Training never gets one of them. With fewer
    than log2(1 / (1 - confidence)) no version could ever be promoted."""
    temperature: float = 0.0
    """Sampling temperature of these rollouts; 0 is greedy."""
    margin: float = 0.0
    """Share of the tasks by which a candidate must succeed more often; 0, or more than `confidence` asks for
    by itself, and below 1."""
    confidence: float = 0.95
    """Of the one-sided paired test that it is better; 0.5 or more, below 1."""
    rollback_after: int = 0
    """Go back to the promoted version after so many evaluations in a row that found the candidate worse;
    0: never."""
    rollback_drop: float | None = None
    """Go back at once if a candidate succeeds on so much smaller a share of the tasks, or more; above 0, at
    most 1. None: never."""

    engine_url: str | None = None
    """vLLM's own address of an engine that gets promoted versions and no others, beside the one that the run
    publishes to. None: promoted versions get none of their own."""

    def __post_init__(self) -> None:
        """Check ranges."""
        check_values(self, "promotion.")
        require(self.every >= 0, "promotion.every", self.every, "0 or more")
        require(self.temperature >= 0, "promotion.temperature", self.temperature, "0 or more")
        require(0 <= self.margin < 1, "promotion.margin", self.margin, "0 or more, below 1")
        confidence = self.confidence
        require(0.5 <= confidence < 1, "promotion.confidence", confidence, "0.5 or more, below 1")
        least = max(1, math.ceil(-math.log2(1 - confidence)))
        require(self.tasks >= least, "promotion.tasks", self.tasks,
                f"{least} or more: fewer can't show anything with confidence {confidence:g}")  # fmt: skip
        require(self.rollback_after >= 0, "promotion.rollback_after", self.rollback_after, "0 or more")
        drop = self.rollback_drop
        require(drop is None or 0 < drop <= 1, "promotion.rollback_drop", drop, "above 0, at most 1")
        require(drop is None or self.rollback_after != 1, "promotion.rollback_drop", drop,
                "none: with rollback_after 1 whatever is worse is given up at once")  # fmt: skip
        idle = [name for name, field in self.__dataclass_fields__.items()
                if name != "every" and getattr(self, name) != field.default]  # fmt: skip
        require(bool(self.every) or not idle, "promotion.every", self.every,
                f"1 or more: without it promotion.{', promotion.'.join(idle)} has no effect")  # fmt: skip
        require(self.margin == 0 or self.margin * self.tasks > least, "promotion.margin", self.margin,
                f"0, or more than {least / self.tasks:g}: with confidence {confidence:g} a candidate that is"
                f" better is ahead by {least} of {self.tasks} tasks at least")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Comparison:
    """A candidate beside the promoted version, on the tasks that both were asked."""

    tasks: int
    gained: int
    lost: int
    success: float
    """Share of the tasks that the candidate solved."""
    promoted_success: float
    """The same of the promoted version."""

    @property
    def p_value(self) -> float:
        """Chance of so many gains or more if the two were equally good."""
        return sign_test(self.gained, self.lost)

    @property
    def drop(self) -> float:
        """By how much smaller a share of the tasks the candidate solves; negative if it solves more."""
        return (self.lost - self.gained) / self.tasks

    def verdict(self, rule: PromotionConfig) -> Verdict:
        """Whether the candidate is better, by this rule."""
        if self.lost > self.gained:
            return Verdict.WORSE
        is_far = self.gained > self.lost and -self.drop >= rule.margin
        return Verdict.BETTER if is_far and self.p_value <= 1 - rule.confidence else Verdict.UNDECIDED


def compare(candidate: Mapping[Task, bool], promoted: Mapping[Task, bool]) -> Comparison | None:
    """Compare success on the tasks that both have; None if there is no such task."""
    both = [task for task in candidate if task in promoted]
    if not both:
        return None
    return Comparison(
        tasks=len(both),
        gained=sum(candidate[task] and not promoted[task] for task in both),
        lost=sum(promoted[task] and not candidate[task] for task in both),
        success=sum(candidate[task] for task in both) / len(both),
        promoted_success=sum(promoted[task] for task in both) / len(both),
    )


def sign_test(gained: int, lost: int) -> float:
    """Chance of `gained` heads or more in `gained + lost` throws of a fair coin.

        P(X >= g) = sum_{i=g}^{n} C(n, i) / 2^n,   n = g + l

    Source: McNemar, 1947 (Psychometrika 12), in its exact form; one-sided.

    Args:
        gained: Pairs that speak for the candidate, 0 or more.
        lost: Pairs that speak against it, 0 or more.

    Raises:
        CreditError: A count is negative.

    Without a pair that differs it is 1.
    """
    if gained < 0 or lost < 0:
        raise CreditError(f"{gained!r} pairs gained and {lost!r} lost; expected 0 or more of each")
    n = gained + lost
    ways = sum(math.comb(n, i) for i in range(gained, n + 1))
    return ways / (1 << n)
