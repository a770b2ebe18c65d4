"""The estimators that `assign` can compose, by name, and which settings each of them uses.

An episode term compares whole rollouts, a step term steps. Knows arrays only.

Shape letters: N rollouts with a reward, S their steps.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from spangrad.credit.evidence import evidence_weights
from spangrad.credit.gigpo import NO_ANCHOR, gigpo_as_published, pool_ids, step_advantages
from spangrad.credit.groups import Floats, Ints
from spangrad.credit.grpo import group_advantages
from spangrad.credit.hgpo import hgpo, hgpo_as_published
from spangrad.credit.maxrl import maxrl
from spangrad.credit.opo import opo
from spangrad.credit.pass_at_k import best_of_group
from spangrad.credit.reinforce_pp import reinforce_pp_baseline, reinforce_pp_baseline_as_published
from spangrad.credit.rloo import rloo
from spangrad.credit.turns import leave_one_out_to_go
from spangrad.errors import CreditError

if TYPE_CHECKING:
    from spangrad.credit.assign import CreditConfig


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """What estimators see."""

    returns_N: Floats
    """Undiscounted return."""
    group_ids_N: Ints
    tokens_N: Ints
    """Sampled tokens; -1 where a step does not know its own."""
    step_returns_S: Floats
    """Return from the step on, discounted."""
    undiscounted_S: Floats
    """The same without a discount."""
    rollout_index_S: Ints
    """Rollout of the step; a rollout's steps stand together, in order."""
    step_index_S: Ints
    """0, 1, 2, ... in its rollout."""
    anchor_ids_S: Ints
    """State that the step began in; `NO_ANCHOR`: not known."""
    exact_anchor_ids_S: Ints
    """The same where only equal observations are one state."""

    @property
    def group_ids_S(self) -> Ints:
        """Group of each step's rollout."""
        return self.group_ids_N[self.rollout_index_S]


@dataclass(frozen=True, slots=True)
class EpisodeTerm:
    """A term for whole rollouts."""

    estimate: Callable[[Batch, "CreditConfig"], Floats]
    """-> advantages, shape (N,)."""
    settings: frozenset[str] = frozenset()
    """Settings of `CreditConfig` that change it."""


@dataclass(frozen=True, slots=True)
class StepTerm:
    """A term for steps."""

    estimate: Callable[[Batch, "CreditConfig"], Floats]
    """-> advantages, shape (S,)."""
    pool: Callable[[Batch], Ints]
    """Which steps are compared with each other, shape (S,); `NO_ANCHOR`: with none."""
    settings: frozenset[str] = frozenset()
    """Settings of `CreditConfig` that change it, beside `gamma` and `step_weight`."""


def _by_anchor(batch: Batch) -> Ints:
    pools_S = pool_ids(batch.group_ids_S, batch.anchor_ids_S)
    return np.where(batch.anchor_ids_S == NO_ANCHOR, NO_ANCHOR, pools_S)


def _by_index(batch: Batch) -> Ints:
    return pool_ids(batch.group_ids_S, batch.step_index_S)


def _tokens(batch: Batch) -> Ints:
    if (batch.tokens_N < 0).any():
        raise CreditError(
            "a call has no token ids, so its rollout has no length; choose an episode term that needs none"
        )
    return np.maximum(batch.tokens_N, 1)


def _gigpo(batch: Batch, config: "CreditConfig") -> Floats:
    advantages_S = step_advantages(
        batch.step_returns_S,
        batch.group_ids_S,
        batch.anchor_ids_S,
        scale_by_std=config.scale_by_std,
        ddof=config.ddof,
        eps=config.eps,
    )
    if not config.evidence_prior:
        return advantages_S
    return advantages_S * evidence_weights(
        _by_anchor(batch), batch.rollout_index_S, prior=config.evidence_prior
    )


def _hgpo(estimate: Callable[..., Floats], *passed_on: str) -> Callable[[Batch, "CreditConfig"], Floats]:
    def apply(batch: Batch, config: "CreditConfig") -> Floats:
        return estimate(
            batch.step_returns_S,
            batch.group_ids_S,
            batch.rollout_index_S,
            batch.anchor_ids_S,
            history=config.history,
            alpha=config.history_weight,
            eps=config.eps,
            **{name: getattr(config, name) for name in passed_on},
        )

    return apply


EPISODE_TERMS: Final[Mapping[str, EpisodeTerm]] = {
    "none": EpisodeTerm(lambda batch, _: np.zeros_like(batch.returns_N)),
    "grpo": EpisodeTerm(
        lambda batch, config: group_advantages(
            batch.returns_N,
            batch.group_ids_N,
            scale_by_std=config.scale_by_std,
            ddof=config.ddof,
            eps=config.eps,
            singleton=config.singleton,
        ),
        frozenset({"scale_by_std", "ddof", "eps", "singleton"}),
    ),
    "rloo": EpisodeTerm(lambda batch, _: rloo(batch.returns_N, batch.group_ids_N)),
    "maxrl": EpisodeTerm(
        lambda batch, config: maxrl(batch.returns_N, batch.group_ids_N, eps=config.eps), frozenset({"eps"})
    ),
    "opo": EpisodeTerm(lambda batch, _: opo(batch.returns_N, batch.group_ids_N, _tokens(batch))),
    "reinforce_pp_baseline": EpisodeTerm(
        lambda batch, config: reinforce_pp_baseline(
            batch.returns_N, batch.group_ids_N, ddof=config.ddof, eps=config.eps
        ),
        frozenset({"ddof", "eps"}),
    ),
    "reinforce_pp_baseline_as_published": EpisodeTerm(
        lambda batch, config: reinforce_pp_baseline_as_published(
            batch.returns_N, batch.group_ids_N, _tokens(batch), eps=config.eps
        ),
        frozenset({"eps"}),
    ),
    "best_of_group": EpisodeTerm(
        lambda batch, config: best_of_group(
            batch.returns_N,
            batch.group_ids_N,
            scale_by_std=config.scale_by_std,
            ddof=config.ddof,
            eps=config.eps,
        ),
        frozenset({"scale_by_std", "ddof", "eps"}),
    ),
}

_ANCHORS: Final = frozenset({"anchors", "similarity", "evidence_prior"})

STEP_TERMS: Final[Mapping[str, StepTerm]] = {
    "gigpo": StepTerm(_gigpo, _by_anchor, _ANCHORS | {"scale_by_std", "ddof", "eps"}),
    "hgpo": StepTerm(
        _hgpo(hgpo, "evidence_prior"), _by_anchor, _ANCHORS | {"history", "history_weight", "eps"}
    ),
    "hgpo_as_published": StepTerm(
        _hgpo(hgpo_as_published), _by_anchor, frozenset({"history", "history_weight", "eps"})
    ),
    "leave_one_out_to_go": StepTerm(
        lambda batch, _: leave_one_out_to_go(
            batch.step_returns_S, batch.rollout_index_S, batch.step_index_S, batch.group_ids_N
        ),
        _by_index,
    ),
}

AS_PUBLISHED: Final = "gigpo_as_published"
"""Both terms at once: its episode term is over steps."""
AS_PUBLISHED_SETTINGS: Final = frozenset({"scale_by_std", "eps"})


def both_as_published(batch: Batch, config: "CreditConfig", step_weight: float) -> Floats:
    """GiGPO as its code computes it, shape (S,)."""
    return gigpo_as_published(
        batch.returns_N,
        batch.group_ids_N,
        batch.step_returns_S,
        batch.rollout_index_S,
        batch.anchor_ids_S,
        step_weight=step_weight,
        scale_by_std=config.scale_by_std,
        eps=config.eps,
    )
