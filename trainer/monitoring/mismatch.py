"""Mismatch: the policy that learns is not the one that sampled.

Each monitor is a function of the history and the settings; None: nothing to see, or too little is known. They
need no history.
"""

from spangrad.trainer.monitoring.finding import Finding
from spangrad.trainer.monitoring.history import History
from spangrad.trainer.monitoring.monitor_config import MonitorConfig


def gap(history: History, config: MonitorConfig) -> Finding | None:
    """Engine and learner compute different logprobs under the same weights: gap/mean > threshold."""
    now = history.now("gap/mean")
    if config.gap is None or now is None or not now > config.gap:
        return None
    return Finding(now, f"logprobs of engine and learner differ by {now:.3g} nats under the same weights")


def sample_share(history: History, config: MonitorConfig) -> Finding | None:
    """Few tokens carry the weight of all: policy/sample_share < threshold."""
    now = history.now("policy/sample_share")
    if config.sample_share is None or now is None or not now < config.sample_share:
        return None
    return Finding(now, f"tokens are worth {now:.0%} of as many that the present policy had sampled")


def clip(history: History, config: MonitorConfig) -> Finding | None:
    """Bounds hold many tokens: policy/clip_low + policy/clip_high > threshold."""
    known = [history.now(f"policy/clip_{side}") for side in ("low", "high")]
    shares = [share for share in known if share is not None]
    if config.clip is None or not shares or not sum(shares) > config.clip:
        return None
    return Finding(sum(shares), f"bounds of the objective hold {sum(shares):.0%} of the tokens")
