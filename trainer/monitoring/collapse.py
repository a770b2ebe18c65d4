"""Collapse: a policy that says one thing, nothing, or anything.

Each monitor is a function of the history and the settings; None: nothing to see, or too little is known.
"""

import math
from statistics import median
from typing import Final

from spangrad.trainer.monitoring.finding import Finding
from spangrad.trainer.monitoring.history import History
from spangrad.trainer.monitoring.monitor_config import MonitorConfig
from spangrad.trainer.monitoring.statistics import deviation

LOG_FLOOR: Final = 0.05
"""Least that counts as a deviation of a logarithm: a change by 5%."""


def spread(history: History, config: MonitorConfig) -> Finding | None:
    """Rewards inside groups hardly differ any more, in two updates running, and are no better than before.

        spread_now < threshold * median spread of the window,   reward_now <= median reward of the window

    Where rewards have become better, groups agree because their task is solved: no collapse. One such update
    alone is chance where few groups say anything.
    """
    found = _fallen_spread(history, config)
    return None if found is None or _fallen_spread(history.earlier(), config) is None else found


def _fallen_spread(history: History, config: MonitorConfig) -> Finding | None:
    now, reward = history.now("reward/spread"), history.now("reward/mean")
    spreads = history.before("reward/spread", config.window, least=config.min_history)
    rewards = history.before("reward/mean", config.window, least=config.min_history)
    if config.spread is None or now is None or reward is None or not spreads or not rewards:
        return None
    usual = median(spreads)
    if not now < config.spread * usual or reward > median(rewards):
        return None
    return Finding(
        now / usual,
        f"rewards inside groups differ by {now:.3g}, {usual:.3g} was usual, and rewards are no better:"
        f" {reward:.3g}, {median(rewards):.3g} was usual",
    )


def entropy(history: History, config: MonitorConfig) -> Finding | None:
    """The policy has hardly a choice left.

    entropy_now < threshold * median entropy of the first updates
    """
    now, start = history.now("policy/entropy"), history.start("policy/entropy", config.min_history)
    if config.entropy is None or now is None or not start or not now < config.entropy * median(start):
        return None
    return Finding(now / median(start), f"entropy is {now:.3g} nats, at the start it was {median(start):.3g}")


def entropy_rise(history: History, config: MonitorConfig) -> Finding | None:
    """The policy says anything.

    entropy_now > threshold * median entropy of the window
    """
    now = history.now("policy/entropy")
    before = history.before("policy/entropy", config.window, least=config.min_history)
    if config.entropy_rise is None or now is None or not before:
        return None
    usual = median(before)
    if usual <= 0 or not now > config.entropy_rise * usual:
        return None
    return Finding(now / usual, f"entropy is {now:.3g} nats, {usual:.3g} was usual")


def gradient(history: History, config: MonitorConfig) -> Finding | None:
    """A gradient far above those before it.

        z = deviation of log ||g|| from the window;   z > threshold

    Logarithms, because norms vary by factors.
    """
    now = history.now("grad/norm")
    before = [g for g in history.before("grad/norm", config.window, least=config.min_history) if g > 0]
    if config.gradient is None or now is None or now <= 0 or len(before) < config.min_history:
        return None
    z = deviation(math.log(now), [math.log(g) for g in before], floor=LOG_FLOOR)
    if not z > config.gradient:
        return None
    return Finding(z, f"gradient norm is {now:.3g}, {median(before):.3g} was usual, {z:.1f} deviations above")


def first_steps(history: History, config: MonitorConfig) -> Finding | None:
    """Rollouts begin with the same reply whatever they were asked, and are no better for it.

    alike_now - median alike of the first updates > threshold,   reward_now <= max reward of the first updates

    Where the reward has risen, to begin like that is what was learned: to look before every answer, for one.
    """
    name = "behavior/first_step_alike"
    now, start = history.now(name), history.start(name, config.min_history)
    if config.first_steps is None or now is None or not start:
        return None
    rise = now - median(start)
    reward, rewards = history.now("reward/mean"), history.start("reward/mean", config.min_history)
    is_better = reward is not None and bool(rewards) and reward > max(rewards)
    if is_better or not rise > config.first_steps:
        return None
    return Finding(
        rise,
        f"{now:.0%} of pairs of rollouts of different tasks begin alike, at the start {median(start):.0%}",
    )
