"""The estimators that `assign` can compose, by name, and which settings each of them uses.

An episode term compares whole rollouts, a step term steps. Knows arrays only.

Shape letters: N rollouts with a reward, S their steps.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from spangrad.credit.evidence import evidence_weights
from spangrad.credit.gdpo import gdpo
from spangrad.credit.gigpo import NO_ANCHOR, gigpo_as_published, pool_ids, step_advantages
from spangrad.credit.groups import Floats, Ints, labels
from spangrad.credit.grpo import group_advantages
from spangrad.credit.hgpo import hgpo, hgpo_as_published
from spangrad.credit.igpo import igpo, igpo_as_published
from spangrad.credit.maxrl import maxrl
from spangrad.credit.opo import opo
from spangrad.credit.pass_at_k import best_of_group
from spangrad.credit.reinforce_pp import (
    reinforce_pp,
    reinforce_pp_baseline,
    reinforce_pp_baseline_as_published,
)
from spangrad.credit.returns import returns_to_go
from spangrad.credit.rloo import rloo
from spangrad.credit.roles import role_advantages
from spangrad.credit.running import baseline_advantages
from spangrad.credit.state_actions import NO_ACTION, state_action_advantages
from spangrad.credit.terms import Batch, BothTerms, EpisodeTerm, StepTerm
from spangrad.credit.tree_terms import tree_edges, tree_grpo, tree_grpo_as_published, tree_rl
from spangrad.credit.turns import leave_one_out_to_go, mt_grpo, per_turn_index, turn_credit
from spangrad.credit.values import gae, value_baseline
from spangrad.errors import CreditError

if TYPE_CHECKING:
    from spangrad.credit.credit_config import CreditConfig


def _by_anchor(batch: Batch) -> Ints:
    pools_S = pool_ids(batch.group_ids_S, batch.anchor_ids_S)
    return np.where(batch.anchor_ids_S == NO_ANCHOR, NO_ANCHOR, pools_S)


def _by_index(batch: Batch) -> Ints:
    return pool_ids(batch.group_ids_S, batch.step_index_S)


def _tokens(batch: Batch) -> Ints:
    if (batch.tokens_N < 0).any():
        raise CreditError(
            "a call has no token ids, so its rollout has no length; choose a term that needs none"
        )
    return np.maximum(batch.tokens_N, 1)


def _steps(batch: Batch, name: str) -> list[Any]:
    return [getattr(step, name) for each in batch.trajectories for step in each.steps]


def _roles(batch: Batch, config: "CreditConfig") -> Floats:
    return role_advantages(
        batch.returns_N,
        batch.group_ids_N,
        batch.rollout_index_S,
        labels([role or "" for role in _steps(batch, "role")]),
        scale_by_std=config.scale_by_std,
        ddof=config.ddof,
        eps=config.eps,
    )


def components(batch: Batch, config: "CreditConfig") -> Floats:
    """The outcome's parts, shape (C, N): those that have a weight, in that order."""
    if not config.counts_step_rewards and any(value is not None for value in _steps(batch, "reward")):
        raise CreditError(
            "a step has a reward, and episode 'gdpo' counts outcomes alone (summed over steps, retries would"
            " be rewarded); choose a step term that counts it, or leave it out"
        )
    named = [[each.components.get(name) for each in batch.trajectories] for name in config.reward_weights]
    return np.array(named, dtype=np.float64).reshape(len(named), len(batch.trajectories))


def _gdpo(batch: Batch, config: "CreditConfig") -> Floats:
    weights_C = np.array(list(config.reward_weights.values()), dtype=np.float64)
    return gdpo(components(batch, config), batch.group_ids_N, weights_C, ddof=config.ddof, eps=config.eps)


def _reinforce_pp(batch: Batch, config: "CreditConfig") -> Floats:
    _tokens(batch)
    tokens_S = np.array(_steps(batch, "tokens"), dtype=np.int64)
    return reinforce_pp(batch.step_returns_S, tokens_S, eps=config.eps)


def _rtmc(batch: Batch, config: "CreditConfig") -> Floats:
    actions = _steps(batch, "action")
    known_S = np.array([action is not None for action in actions], dtype=np.bool_)
    action_ids_S = np.where(known_S, labels([action or "" for action in actions]), NO_ACTION)
    return state_action_advantages(
        batch.step_returns_S, batch.group_ids_S, batch.anchor_ids_S, action_ids_S, prior=config.value_prior
    )


def _per_turn_index(batch: Batch, config: "CreditConfig") -> Floats:
    """Summed from each turn on, so that a turn has credit for what follows."""
    normalized_S = per_turn_index(
        batch.rewards_S,
        batch.rollout_index_S,
        batch.step_index_S,
        batch.group_ids_N,
        scale_by_std=config.scale_by_std,
        ddof=config.ddof,
        eps=config.eps,
    )
    return returns_to_go(normalized_S, batch.lengths_N, 1.0)


def _turn_credit(batch: Batch, config: "CreditConfig") -> Floats:
    known = [np.array(each.scores or [None], dtype=np.float64) for each in batch.trajectories]
    found = [turn_credit(scores[1:], gamma=config.gamma, before=float(scores[0])) for scores in known]
    return np.concatenate([np.zeros(0), *found])


def _mt_grpo(batch: Batch, config: "CreditConfig", step_weight: float) -> Floats:
    intermediate, last = [], []
    for each in batch.trajectories:
        given = [(t, step.reward) for t, step in enumerate(each.steps) if step.reward is not None]
        if len(given) != 1 or each.reward is None:
            raise CreditError(
                f"rollout {each.rollout_id!r} has {len(given)} step rewards and outcome {each.reward!r};"
                " step 'mt_grpo' is for one intermediate reward and an outcome;"
                " choose 'leave_one_out_to_go' for others"
            )
        last.append(given[0][0])
        intermediate.append(given[0][1])
    before_N, after_N = mt_grpo(
        np.array([each.reward for each in batch.trajectories], dtype=np.float64),
        np.array(intermediate, dtype=np.float64),
        batch.group_ids_N,
        turn_weight=step_weight,
        ddof=config.ddof,
        eps=config.eps,
    )
    rollout_S = batch.rollout_index_S
    is_before_S = batch.step_index_S <= np.array(last, dtype=np.int64)[rollout_S]
    return np.where(is_before_S, before_N[rollout_S], after_N[rollout_S])


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
    "running_baseline": EpisodeTerm(
        lambda batch, _: baseline_advantages(batch.returns_N, batch.baselines_N),
        frozenset({"baseline_decay", "baseline_key"}),
        counts_lone=True,
    ),
    "value_baseline": EpisodeTerm(lambda batch, _: value_baseline(batch), counts_lone=True),
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
    "gdpo": EpisodeTerm(_gdpo, frozenset({"ddof", "eps"})),
    "grpo_per_role": EpisodeTerm(_roles, frozenset({"scale_by_std", "ddof", "eps"}), is_per_step=True),
    "tree_grpo": EpisodeTerm(
        lambda batch, config: tree_grpo(
            batch.trajectories, batch.group_ids_N, ddof=config.ddof, eps=config.eps
        ),
        frozenset({"ddof", "eps"}),
        is_per_step=True,
        counts_lone=True,
    ),
    "tree_grpo_as_published": EpisodeTerm(
        lambda batch, config: tree_grpo_as_published(batch.trajectories, batch.group_ids_N, eps=config.eps),
        frozenset({"eps"}),
        is_per_step=True,
        counts_lone=True,
    ),
}

OF_BRANCHES: Final = ("tree_grpo", "tree_grpo_as_published")
"""Episode terms that compare the branches of rollouts."""

_ANCHORS: Final = frozenset({"anchors", "similarity", "evidence_prior"})

STEP_TERMS: Final[Mapping[str, StepTerm]] = {
    "gigpo": StepTerm(_gigpo, _by_anchor, _ANCHORS | {"gamma", "scale_by_std", "ddof", "eps"}),
    "hgpo": StepTerm(
        _hgpo(hgpo, "evidence_prior"), _by_anchor, _ANCHORS | {"gamma", "history", "history_weight", "eps"}
    ),
    "hgpo_as_published": StepTerm(
        _hgpo(hgpo_as_published), _by_anchor, frozenset({"gamma", "history", "history_weight", "eps"})
    ),
    "rtmc": StepTerm(_rtmc, _by_anchor, frozenset({"gamma", "value_prior", "anchors", "similarity"})),
    "leave_one_out_to_go": StepTerm(
        lambda batch, _: leave_one_out_to_go(
            batch.step_returns_S, batch.rollout_index_S, batch.step_index_S, batch.group_ids_N
        ),
        _by_index,
        frozenset({"gamma"}),
    ),
    "gae": StepTerm(gae, None, frozenset({"gamma", "gae_lambda"}), counts_lone=True),
    "per_turn_index_biased": StepTerm(
        _per_turn_index,
        _by_index,
        frozenset({"scale_by_std", "ddof", "eps"}),
    ),
    "igpo": StepTerm(
        lambda batch, config: igpo(
            batch.rewards_S,
            batch.lengths_N,
            batch.group_ids_N,
            gamma=config.gamma,
            ddof=config.ddof,
            eps=config.eps,
        ),
        _by_index,
        frozenset({"gamma", "ddof", "eps"}),
    ),
    "igpo_as_published": StepTerm(
        lambda batch, config: igpo_as_published(
            batch.rewards_S, batch.lengths_N, batch.group_ids_N, gamma=config.gamma
        ),
        _by_index,
        frozenset({"gamma"}),
    ),
    "turn_credit": StepTerm(
        _turn_credit, None, frozenset({"gamma", "scores"}), counts_lone=True, counts_rewards=False
    ),
    "reinforce_pp": StepTerm(
        _reinforce_pp,
        lambda batch: np.zeros(len(batch.step_returns_S), dtype=np.int64),
        frozenset({"gamma", "eps"}),
        counts_lone=True,
    ),
    "tree_edges": StepTerm(
        lambda batch, config: tree_edges(batch.trajectories, batch.group_ids_N, prior=config.value_prior),
        None,
        frozenset({"value_prior"}),
        counts_lone=True,
    ),
    "treerl": StepTerm(
        lambda batch, _: tree_rl(batch.trajectories, batch.group_ids_N), None, counts_lone=True
    ),
}


def _gigpo_as_published(batch: Batch, config: "CreditConfig", step_weight: float) -> Floats:
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


BOTH_TERMS: Final[Mapping[str, BothTerms]] = {
    "gigpo_as_published": BothTerms(
        _gigpo_as_published, _by_anchor, frozenset({"gamma", "step_weight", "scale_by_std", "eps"})
    ),
    "mt_grpo": BothTerms(_mt_grpo, None, frozenset({"step_weight", "ddof", "eps"})),
}
