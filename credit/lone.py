"""Which settings of credit need groups: what they do where every rollout is alone, as in production.

Knows the terms and `CreditConfig`; no rollouts.

Invariant: a batch of lone rollouts is credited as if the settings in `needs_groups` were left out, but for
filters among them, which leave it out as a whole; each other setting that was changed makes a difference.
"""

from dataclasses import fields
from typing import TYPE_CHECKING, Final

from spangrad.credit.estimators import EPISODE_TERMS, OF_BRANCHES, STEP_TERMS
from spangrad.credit.filtering import OVERLONG_SETTINGS, leaves_out_lone

if TYPE_CHECKING:
    from spangrad.credit.credit_config import CreditConfig

_NO_REWARDS: Final = tuple(name for name, term in STEP_TERMS.items() if not term.counts_rewards)
"""Terms that count scores alone."""
_NO_OUTCOMES: Final = (*_NO_REWARDS, "tree_grpo", "tree_edges", "treerl")
"""... and those that compare the branches of a rollout, which share its outcome."""


def needs_groups(config: "CreditConfig") -> tuple[str, ...]:
    """Settings that were changed and say nothing of a rollout that is alone in its group, in their order."""
    plain = config.__class__()
    changed = [one.name for one in fields(config) if getattr(config, one.name) != getattr(plain, one.name)]
    working = _working(config)
    return tuple(name for name in changed if name not in working)


def _working(config: "CreditConfig") -> frozenset[str]:
    """Settings that say something of a lone rollout if they are changed."""
    terms = config.lone_terms
    used = frozenset({"reward_weights", "singleton"})
    if config.episode in (*terms, "none"):
        used |= {"episode"}
    if config.episode in terms and config.singleton != "raw":  # which no mean and no scale touches
        used |= EPISODE_TERMS[config.episode].settings
    if config.step in STEP_TERMS and STEP_TERMS[config.step].counts_lone:
        used |= STEP_TERMS[config.step].settings | {"step", "step_weight"}
    if not leaves_out_lone(config.filters, counts_lone=bool({*OF_BRANCHES, config.step} & set(terms))):
        used |= {"filters"}
    if config.overlong == "mask" or not set(terms) <= set(_NO_OUTCOMES):
        used |= OVERLONG_SETTINGS[config.overlong] | {"overlong"}
    has_returns = config.step in terms and "gamma" in STEP_TERMS[config.step].settings
    if has_returns if config.shaping == "potential" else not set(terms) <= set(_NO_REWARDS):
        used |= {"shaping", "shaping_weight", "scores"}
    return used
