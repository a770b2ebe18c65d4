"""When a run has gone far enough before its last update: section `[stop]`.

    [stop]
    metric = "loss/bc"
    patience = 20         # or reaches = 0.1

Knows settings and a list of numbers. Does not know: stores, learners, what a metric means.

Invariant: what is decided follows from the settings and the values alone, so a restart decides the same.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

from spangrad.credit.settings import check_values
from spangrad.errors import ConfigError
from spangrad.trainer.learning.learner_config import require


@dataclass(frozen=True, slots=True)
class StopConfig:
    """A metric of the updates that ends a run before `run.updates` does."""

    metric: str = ""
    """Metric of an update that is looked at; empty: none. Updates that lack it (`eval/*` between two
    evaluations) are passed over."""
    goal: Literal["lower", "higher"] = "lower"
    """What is better."""
    reaches: float | None = None
    """Enough: the run ends when the mean over `window` values is as good as this; none: never."""
    patience: int | None = None
    """A plateau: the run ends when so many values in a row have brought no better mean; 1 or more, none:
    never."""
    min_change: float = 0.0
    """What is better only by this, or less, is no better to `patience`; 0 or more, in the metric's unit."""
    window: int = 1
    """Values whose mean is compared, the last ones; 1 or more."""

    def __post_init__(self) -> None:
        """Check ranges, and that nothing is set without an effect."""
        check_values(self, "stop.")
        require(self.patience is None or self.patience >= 1, "stop.patience", self.patience, "1 or more")
        require(self.min_change >= 0, "stop.min_change", self.min_change, "0 or more")
        require(self.window >= 1, "stop.window", self.window, "1 or more")
        if not self.metric:
            for field in fields(self):
                if (value := getattr(self, field.name)) != field.default:
                    raise ConfigError(
                        f"stop.{field.name} = {value!r} has no effect without stop.metric; name the metric"
                    )
        elif self.reaches is None and self.patience is None:
            raise ConfigError(
                f"stop.metric = {self.metric!r} ends nothing by itself; say what is enough (stop.reaches), or"
                " how long to wait for something better (stop.patience)"
            )
        if self.patience is None and self.min_change:
            raise ConfigError(
                f"stop.min_change = {self.min_change!r} has no effect without stop.patience; leave it out"
            )


def stops(config: StopConfig, values: Sequence[float]) -> str | None:
    """Why a run ends whose metric had these values, in their order; None: it goes on.

        m_i = mean(values[i - window + 1 .. i]);   better(a, b): a + min_change < b where lower is better

    It ends where m_last is at least as good as `reaches`, or where none of the last `patience` means is
    better than the best one before them. A NaN counts as no value.
    """
    window = config.window
    known = [value for value in values if not math.isnan(value)]
    means = [sum(known[end - window : end]) / window for end in range(window, len(known) + 1)]
    if not means:
        return None
    sign = 1.0 if config.goal == "lower" else -1.0
    costs = [sign * mean for mean in means]
    over = f", mean of {window}" if window > 1 else ""
    if config.reaches is not None and costs[-1] <= sign * config.reaches:
        return f"{config.metric} is {means[-1]:.4g}{over}, as good as stop.reaches, {config.reaches:g}"
    if config.patience is None or len(costs) <= config.patience:
        return None
    best = min(costs[: -config.patience])
    if min(costs[-config.patience :]) + config.min_change < best:
        return None
    return f"{config.metric} was no better than {sign * best:.4g}{over} for {config.patience} values"
