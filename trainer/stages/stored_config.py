"""Training on rollouts that are in the store: section `[stored]`, in the place of `[agent]`.

Knows settings, and which others have no effect beside them. Does not know: stores, learners.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from spangrad.credit.settings import check_values
from spangrad.errors import ConfigError
from spangrad.trainer.learning.learner_config import LearnerConfig, require
from spangrad.trainer.learning.objectives import OBJECTIVES
from spangrad.trainer.unused import refuse_unused

MEASURED: Final = "eval"
"""Splits of rollouts that only measure begin so: nothing trains them."""
OWN: Final = "own_"
"""Beginning of the names of our own parameters."""
USED_OF_ROLLOUT: Final = frozenset(
    {"groups_per_update", "aggregation", "aggregation_tokens", "reward_authors"}
)
"""Settings of `[rollout]` that have an effect beside `[stored]`."""
USED_OF_SERVING: Final = frozenset({"model"})


@dataclass(frozen=True, slots=True)
class StoredConfig:
    """Which stored rollouts a run trains: those that succeeded and fit all that is said here.

    They are chosen when the run begins, and read, not consumed: any number of runs may train them.
    """

    splits: tuple[str, ...] = ()
    """Of these splits (`train`, `expert`, `recorded`, ...); empty: of all but those that measure
    (`eval...`)."""
    runs: tuple[str, ...] = ()
    """Made by these training runs; empty: by any run, or by none."""
    min_reward: float | None = None
    """With at least this reward, summed as `credit.reward_weights` says; none: whatever they got, if they
    got any."""
    min_grade: Literal["exact", "ids", "text", "any"] = "any"
    """In which all calls of the agent are of this grade, or a better one; `any`: calls that the objective
    can't train are refused one by one."""
    where: str = ""
    """Of which this SQL condition holds, over the columns of the view `outcomes`, such as
    `calls < $most AND task_id LIKE $tasks`; empty: of all."""
    parameters: Mapping[str, str | bool | int | float] = field(default_factory=dict)
    """Values of the `$names` in `where`."""
    passes: int | None = None
    """The run ends when it has taken all of them so often, each time in another order; 1 or more, none: it
    goes on until something else ends it."""

    def __post_init__(self) -> None:
        """Check ranges."""
        check_values(self, "stored.")
        require(self.passes is None or self.passes >= 1, "stored.passes", self.passes, "1 or more, or none")
        for split in self.splits:
            if split.startswith(MEASURED):
                raise ConfigError(
                    f"stored.splits has {split!r}, whose rollouts measure policies and train none; name"
                    " others"
                )
        if self.parameters and not self.where:
            raise ConfigError("stored.parameters has no effect without stored.where; leave it out")
        for name in self.parameters:
            require(
                not name.startswith(OWN),
                "stored.parameters",
                name,
                f"a name that does not begin with {OWN!r}",
            )


def check_stored(learner: LearnerConfig, sections: Mapping[str, tuple[Any, Collection[str]]]) -> None:
    """Refuse what can't be trained on rollouts that another policy sampled, or has no use there.

    Args:
        learner: Its objective.
        sections: Name of another section -> its settings, and which of them are used.

    Raises:
        ConfigError: The objective compares the policy with the one that sampled, or a setting has no effect.
    """
    refuse_unused(sections, "with [stored], where rollouts are in the store already; leave one out")
    if OBJECTIVES[learner.objective].uses_ratio:
        others = ", ".join(repr(name) for name, one in OBJECTIVES.items() if not one.uses_ratio)
        raise ConfigError(
            f"learner.objective {learner.objective!r} compares the policy with the one that sampled, and with"
            f" [stored] that is another one; choose one of {others}, or let the run make rollouts ([agent])"
        )


def stored_settings(config: StoredConfig) -> dict[str, Any]:
    """What says which rollouts are chosen: it can't change in the middle of a run; `passes` can."""
    return {
        "splits": list(config.splits),
        "runs": list(config.runs),
        "min_reward": config.min_reward,
        "min_grade": config.min_grade,
        "where": config.where,
        "parameters": dict(config.parameters),
    }
