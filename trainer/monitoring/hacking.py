"""Hacking: the reward rises, and what it stands for does not.

Each monitor is a function of the history and the settings; None: nothing to see, or too little is known. They
audit, they prove nothing: a policy that has learned to be quick ends early, too.
"""

from statistics import median
from typing import Final

from spangrad.trainer.monitoring.finding import Finding
from spangrad.trainer.monitoring.history import History
from spangrad.trainer.monitoring.monitor_config import MonitorConfig
from spangrad.trainer.monitoring.statistics import trend

VERIFIED: Final = "behavior/verifier"
EVALUATED: Final = "eval/success_greedy"


def held_out(config: MonitorConfig) -> str:
    """The metric that is held out from training."""
    return EVALUATED if config.verifier is None else VERIFIED


def drift(history: History, config: MonitorConfig) -> Finding | None:
    """The train reward rises and the held-out one falls.

        trend of reward/mean > threshold,   trend of the held-out metric < -threshold

    Over the last `window` updates that have both numbers.
    """
    train, held = (history.values.get(name, {}) for name in ("reward/mean", held_out(config)))
    both = sorted(u for u in train.keys() & held.keys() if u <= history.last)[-config.window :]
    if config.drift is None or len(both) < config.min_history:
        return None
    rises, falls = trend([train[u] for u in both]), -trend([held[u] for u in both])
    if not min(rises, falls) > config.drift:
        return None
    return Finding(
        min(rises, falls),
        f"over {len(both)} updates the train reward went from {train[both[0]]:.3g} to {train[both[-1]]:.3g},"
        f" {held_out(config)} from {held[both[0]]:.3g} to {held[both[-1]]:.3g}",
    )


def steps(history: History, config: MonitorConfig) -> Finding | None:
    """Rollouts have become much longer or shorter.

    max(steps_now / s, s / steps_now) > threshold, s the median of the first updates
    """
    name = "behavior/steps_mean"
    now, start = history.now(name), history.start(name, config.min_history)
    if config.steps is None or now is None or not start or min(now, median(start)) <= 0:
        return None
    factor = max(now / median(start), median(start) / now)
    if not factor > config.steps:
        return None
    return Finding(factor, f"rollouts have {now:.3g} calls, at the start {median(start):.3g}")


def early_exits(history: History, config: MonitorConfig) -> Finding | None:
    """Many rollouts end in fewer calls than were needed, and the train reward is higher.

        quarter_now < threshold * s <= quarter_start,   reward_now > reward_start

    `quarter` is the lower quartile of calls of a rollout, `s` the median of calls; at the start both are
    medians of the first updates. Where a verifier is no lower than then, rollouts are quick, not early.
    """
    quarter, reward = history.now("behavior/steps_low"), history.now("reward/mean")
    quarters, middles, rewards = (
        history.start(name, config.min_history)
        for name in ("behavior/steps_low", "behavior/steps_median", "reward/mean")
    )
    if config.early_exits is None or quarter is None or reward is None:
        return None
    if not quarters or not middles or not rewards:
        return None
    limit = config.early_exits * median(middles)
    if not quarter < limit <= median(quarters) or reward <= median(rewards):
        return None
    verified, verified_start = history.now(VERIFIED), history.start(VERIFIED, config.min_history)
    if verified is not None and verified_start and verified >= median(verified_start):
        return None
    return Finding(
        quarter / median(middles),
        f"a quarter of the rollouts end after {quarter:.3g} calls at most, at the start {median(middles):.3g}"
        f" were usual, and the reward rose from {median(rewards):.3g} to {reward:.3g}",
    )


def edited_tests(history: History, config: MonitorConfig) -> Finding | None:
    """Rollouts write to files that say whether they succeeded: behavior/test_edits > threshold."""
    now = history.now("behavior/test_edits")
    if config.test_edits is None or now is None or not now > config.test_edits:
        return None
    return Finding(now, f"{now:.0%} of the rollouts write to test files")
