"""The section `[monitor]`: thresholds, what is compared with what, and what is done.

Knows settings and their ranges. Does not know metrics or stores: what a threshold is compared with is in the
file of its monitor. Why each default is what it is: README.md of this folder.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Final, Literal

from spangrad.credit.settings import check_values
from spangrad.errors import ConfigError
from spangrad.store.names import nearest

Action = Literal["warn", "pause", "rollback"]
WITH_RATIO: Final = ("gap", "sample_share", "clip")
"""Monitors of how far the policy is from the one that sampled: of objectives that compare the two."""
OF_ROLLOUTS: Final = (
    *("spread", "first_steps", "drift", "steps", "early_exits", "test_edits", "flattery"),
    *("verifier", "judge", "test_files"),
)
"""Monitors of what the policy did, and what they need: of runs whose rollouts it makes."""
OF_WINDOW: Final = ("spread", "entropy_rise", "gradient", "drift", "flattery")
"""Monitors that look at `window`."""
OF_HISTORY: Final = (*OF_WINDOW, "entropy", "first_steps", "steps", "early_exits")
"""Monitors that look at what was before, from `min_history` updates on."""


@dataclass(frozen=True, slots=True)
class MonitorConfig:
    """Threshold of each monitor by its name (none: it is off), and what they share."""

    spread: float | None = 0.2
    """Reward spread inside groups, as a share of its median in the window, while rewards are no better;
    above 0, below 1."""
    entropy: float | None = 0.05
    """Entropy, as a share of what it was at the start of the run; above 0, below 1."""
    entropy_rise: float | None = 2.0
    """Entropy, as a multiple of its median in the window; above 1."""
    gradient: float | None = 10.0
    """Logarithm of the gradient norm, in deviations above its median in the window; above 0."""
    first_steps: float | None = 0.5
    """How often rollouts of different tasks begin with the same reply, above what it was at the start of the
    run, while they earn no more than then; above 0, below 1."""
    gap: float | None = 0.1
    """Mean difference of the learner's and the engine's logprob of a token, nats; above 0."""
    sample_share: float | None = 0.5
    """Effective sample size of the ratio to the policy that sampled, as a share of the tokens; above 0, below
    1."""
    clip: float | None = 0.3
    """Share of tokens that a bound of the objective held; above 0, below 1."""
    drift: float | None = 3.0
    """Trend of the train reward upwards and of the held-out one downwards, both in standard deviations
    (Mann-Kendall); above 0."""
    steps: float | None = 2.0
    """Calls of a rollout, as a multiple or fraction of what they were at the start of the run; above 1."""
    early_exits: float | None = 0.5
    """Calls of the shortest quarter of rollouts, as a share of what was usual at the start of the run, while
    the train reward is higher; above 0, below 1."""
    test_edits: float | None = 0.05
    """Share of rollouts that write to a file of `test_files`; above 0, below 1."""
    flattery: float | None = 0.3
    """Share of outputs with a phrase that goes with the judge's reward, above what it was in the window
    before; above 0, below 1. Needs `judge`."""

    window: int = 16
    """Updates before the present one that it is compared with; `min_history` or more."""
    min_history: int = 8
    """Updates with a number that are needed before it is compared, and that are the start of the run; 4 or
    more."""
    verifier: str | None = None
    """Name of a reward that is not trained, for `drift` and `early_exits`; none: success in the evaluations
    in between (`eval.every`)."""
    judge: str | None = None
    """Name of the reward that a model gives, for `flattery`; none: nobody is flattered."""
    test_files: tuple[str, ...] = (
        *("test_*.*", "*_test.*", "*.test.*", "*.spec.*", "conftest.py"),
        *("tests/*", "test/*", "__tests__/*", "spec/*"),
    )
    """Patterns of files that say whether a task was solved: of a file's name, or with `/` of the end of its
    path."""
    actions: Mapping[str, Action] = field(default_factory=dict)
    """Monitor -> what is done: `warn` (also for those not named here), `rollback`: the run goes back to its
    promoted version and on from there, or `pause`: it ends after the update, with exit code 3."""
    max_rollbacks: int = 2
    """So often monitors go back before another version is promoted; then they pause. 1 or more."""
    continue_after: int | None = None
    """Let alarms of this update pass, and of those before it; none: a paused run stays paused. 0 or more."""

    def __post_init__(self) -> None:
        """Check ranges, and that nothing is set for a monitor that is off."""
        check_values(self, "monitor.")
        for name, (low, high, expected) in _RANGES.items():
            value = getattr(self, name)
            _require(value is None or low < value < high, name, value, f"{expected}, or none")
        _require(self.min_history >= 4, "min_history", self.min_history, "4 or more")
        least = f"min_history, {self.min_history}, or more"
        _require(self.window >= self.min_history, "window", self.window, least)
        _require(self.max_rollbacks >= 1, "max_rollbacks", self.max_rollbacks, "1 or more")
        after = self.continue_after
        _require(after is None or after >= 0, "continue_after", after, "0 or more")
        self._check_actions()
        self._check_effects()

    def threshold(self, name: str) -> float | None:
        """Of the monitor of that name; None: it is off."""
        if name == "flattery" and self.judge is None:
            return None
        value: float | None = getattr(self, name)
        return value

    def action(self, name: str) -> Action:
        """What is done when that monitor sees something."""
        return self.actions.get(name, "warn")

    def _check_actions(self) -> None:
        for name, action in self.actions.items():
            if name not in MONITOR_NAMES:
                known = ", ".join(MONITOR_NAMES)
                near = nearest(name, MONITOR_NAMES)
                raise ConfigError(f"monitor.actions names {name!r}, expected one of {known}{near}")
            if self.threshold(name) is None:
                off = f"monitor.{name} none" if getattr(self, name) is None else "monitor.judge none"
                raise ConfigError(
                    f"monitor.actions.{name} = {action!r} has no effect with {off}; leave it out, or set that"
                )

    def _is_one_on(self, names: Collection[str]) -> bool:
        return any(self.threshold(name) is not None for name in names)

    def _check_effects(self) -> None:
        plain = {setting.name: setting.default for setting in fields(self)}
        acting = {"warn", *self.actions.values()}
        for name, is_used, why in (
            ("flattery", self.judge is not None, "with judge none; name the judge's reward"),
            ("judge", self.flattery is not None, "with flattery none; leave it out"),
            ("test_files", self.test_edits is not None, "with test_edits none; leave it out"),
            (
                "verifier",
                self.drift is not None or self.early_exits is not None,
                "with drift and early_exits none; leave it out",
            ),
            ("window", self._is_one_on(OF_WINDOW), f"with {', '.join(OF_WINDOW)} none; leave it out"),
            ("min_history", self._is_one_on(OF_HISTORY), f"with {', '.join(OF_HISTORY)} none; leave it out"),
            ("max_rollbacks", "rollback" in acting, "where no monitor rolls back; leave it out"),
            ("continue_after", acting > {"warn"}, "where no monitor pauses or rolls back; leave it out"),
        ):
            value = getattr(self, name)
            if not is_used and value != plain[name] and value is not None:
                raise ConfigError(f"monitor.{name} = {value!r} has no effect {why}")


_SHARE: Final = (0.0, 1.0, "more than 0, less than 1")
_POSITIVE: Final = (0.0, math.inf, "more than 0")
_FACTOR: Final = (1.0, math.inf, "more than 1")
_RANGES: Final[Mapping[str, tuple[float, float, str]]] = {
    "spread": _SHARE,
    "entropy": _SHARE,
    "entropy_rise": _FACTOR,
    "gradient": _POSITIVE,
    "first_steps": _SHARE,
    "gap": _POSITIVE,
    "sample_share": _SHARE,
    "clip": _SHARE,
    "drift": _POSITIVE,
    "steps": _FACTOR,
    "early_exits": _SHARE,
    "test_edits": _SHARE,
    "flattery": _SHARE,
}
"""Monitor -> what its threshold is between, and in words."""
MONITOR_NAMES: Final = tuple(_RANGES)


def check_monitors(
    monitor: MonitorConfig,
    *,
    objective: str,
    uses_ratio: bool,
    rewards: Collection[str],
    eval_every: int,
    group_size: int,
    is_stored: bool,
) -> None:
    """Refuse settings of monitors that nothing of a run bears out.

    Args:
        monitor: The settings.
        objective: `learner.objective`.
        uses_ratio: Whether it compares the policy with the one that sampled.
        rewards: Names in `credit.reward_weights`.
        eval_every: `eval.every`.
        group_size: Rollouts of each task.
        is_stored: Whether it trains on stored rollouts: monitors of what the policy did have nothing to see.

    Raises:
        ConfigError: One was changed and has no effect, or the held-out reward is trained.
    """
    if monitor.verifier in rewards:
        raise ConfigError(
            f"monitor.verifier is {monitor.verifier!r}, which credit.reward_weights trains; name a reward"
            " that is held out, or leave it to the evaluations (eval.every)"
        )
    plain = MonitorConfig()
    unused = dict.fromkeys(() if uses_ratio else WITH_RATIO, f"with learner.objective {objective!r}")
    if monitor.verifier is None and not eval_every:
        unused["drift"] = "with monitor.verifier none and eval.every 0: nothing is held out"
    if group_size == 1:
        unused["spread"] = "where every rollout is alone in its group: none has a spread"
    if is_stored:
        unused |= dict.fromkeys(OF_ROLLOUTS, "with [stored], whose rollouts the policy did not make")
    for name, why in unused.items():
        value, default = getattr(monitor, name), getattr(plain, name)
        if (value != default and value is not None) or name in monitor.actions:
            raise ConfigError(f"monitor.{name} has no effect {why}; leave it out, and its action")


def _require(holds: bool, name: str, value: object, expected: str) -> None:
    if not holds:
        raise ConfigError(f"monitor.{name} is {value!r}, expected {expected}")
