"""The monitors by name, and the metrics without which each of them sees nothing."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from spangrad.trainer.monitoring import collapse, hacking, mismatch
from spangrad.trainer.monitoring.finding import Finding
from spangrad.trainer.monitoring.history import History
from spangrad.trainer.monitoring.monitor_config import MonitorConfig


@dataclass(frozen=True, slots=True)
class Monitor:
    """A function of the history, and what it needs."""

    find: Callable[[History, MonitorConfig], Finding | None]
    metrics: tuple[str, ...]
    """Where one of them never comes, it sees nothing."""


MONITORS: Final[Mapping[str, Monitor]] = {
    "spread": Monitor(collapse.spread, ("reward/spread", "reward/mean")),
    "entropy": Monitor(collapse.entropy, ("policy/entropy",)),
    "entropy_rise": Monitor(collapse.entropy_rise, ("policy/entropy",)),
    "gradient": Monitor(collapse.gradient, ("grad/norm",)),
    "first_steps": Monitor(collapse.first_steps, ("behavior/first_step_alike",)),
    "gap": Monitor(mismatch.gap, ("gap/mean",)),
    "sample_share": Monitor(mismatch.sample_share, ("policy/sample_share",)),
    "clip": Monitor(mismatch.clip, ("policy/clip_low", "policy/clip_high")),
    "drift": Monitor(hacking.drift, ("reward/mean",)),
    "steps": Monitor(hacking.steps, ("behavior/steps_mean",)),
    "early_exits": Monitor(
        hacking.early_exits, ("behavior/steps_low", "behavior/steps_median", "reward/mean")
    ),
    "test_edits": Monitor(hacking.edited_tests, ("behavior/test_edits",)),
}
"""All but `flattery`, which reads outputs and no metrics."""


def metrics_of(name: str, config: MonitorConfig) -> tuple[str, ...]:
    """The metrics that a monitor compares."""
    held_out = (hacking.held_out(config),) if name == "drift" else ()
    return MONITORS[name].metrics + held_out
