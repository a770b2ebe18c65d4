"""What a learner minimises on one microbatch, and the numbers read off the same forward pass.

Knows: the terms of the objective and their names. Does not know: models, optimizers, how a batch was made.

Shape letters: B rows, T positions, M trained tokens of a batch.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from spangrad.trainer.learning import losses
from spangrad.trainer.learning.echo import is_observation, own_targets
from spangrad.trainer.learning.learner_config import LearnerConfig
from spangrad.trainer.learning.model import TargetStats
from spangrad.trainer.learning.monitors import Totals
from spangrad.trainer.learning.packing import Batch

RATIO_LOSSES: Final[Mapping[str, Callable[..., tuple[Tensor, dict[str, Tensor]]]]] = {
    "ppo": losses.ppo_clip_loss,
    "dapo": partial(losses.ppo_clip_loss, dual_clip=None),
    "gspo": losses.gspo_loss,
    "gspo_token": partial(losses.gspo_loss, by_token=True),
    "cispo": losses.cispo_loss,
    "sapo": losses.sapo_loss,
    "dppo_tv": losses.dppo_loss,
    "dppo_kl": partial(losses.dppo_loss, by_kl=True),
    "importance_sampling": losses.importance_sampling_loss,
}
"""The objectives that have a ratio. Called with what `objectives.OBJECTIVES` says that they use, by name;
they give the loss and means over tokens to report as `policy/*` (`ratio_max`: a maximum)."""


def batch_loss(
    config: LearnerConfig, batch: Batch, stats: TargetStats, reference_M: Tensor | None, totals: Totals
) -> Tensor:
    """Sum of the objective's terms over a microbatch, a scalar; every term is added to `totals`.

    Args:
        config: Objective and coefficients.
        batch: The microbatch.
        stats: Log-probabilities (and entropies) of its targets under the current weights, with gradient.
        reference_M: Log-probabilities under the starting policy; None: there is no KL term.
        totals: Takes `loss/*` and `policy/*`.
    """
    parts: dict[str, Tensor] = {}
    if config.echo_coef > 0:
        parts |= _echo(config, batch, stats, totals)
        batch, stats, reference_M = own_targets(batch, stats, reference_M)
    if batch.trained_tokens or not parts:
        parts |= _own_parts(config, batch, stats, reference_M, totals)
    loss = torch.stack(list(parts.values())).sum()
    for name, value in (parts | {"loss/total": loss}).items():
        totals.add_sum(name, value.detach())
    return loss


def _echo(config: LearnerConfig, batch: Batch, stats: TargetStats, totals: Totals) -> dict[str, Tensor]:
    shown_M, weights_M = is_observation(batch), batch.weights_BT[batch.target_mask_BT]
    count = int(shown_M.sum())
    totals.add_sum("data/observation_tokens", count)
    if not count:
        return {}
    totals.add_mean("policy/observation_logprob", stats.logprobs_M.detach()[shown_M].mean(), count)
    return {"loss/echo": config.echo_coef * losses.bc_loss(stats.logprobs_M, shown_M, weights_M)}


def _own_parts(
    config: LearnerConfig, batch: Batch, stats: TargetStats, reference_M: Tensor | None, totals: Totals
) -> dict[str, Tensor]:
    """The terms over what the policy sampled."""
    mask_BT = batch.target_mask_BT
    policy_M, behavior_M = stats.logprobs_M, batch.behavior_logprobs_BT[mask_BT]
    mask_M, weights_M = mask_BT[mask_BT], batch.weights_BT[mask_BT]
    parts: dict[str, Tensor] = {}
    if config.uses_ratio:
        parts["loss/policy"], monitors = RATIO_LOSSES[config.objective](
            policy_M, behavior_M, batch.advantages_BT[mask_BT], mask_M, weights_M, **_settings(config, batch)
        )
        totals.maximum("policy/ratio_max", monitors.pop("ratio_max"))
    else:
        parts[f"loss/{config.objective}"], monitors = _without_ratio(config, batch, policy_M)
    for name, value in monitors.items():
        totals.add_mean(f"policy/{name}", value, mask_M.numel())
    if config.entropy_coef > 0 and stats.entropy_M is not None:
        parts["loss/entropy"] = losses.entropy_bonus(stats.entropy_M, mask_M, weights_M, config.entropy_coef)
    if config.log_ratio_coef > 0:
        parts["loss/log_ratio"] = losses.log_ratio_penalty(
            policy_M, behavior_M, mask_M, weights_M, config.log_ratio_coef
        )
    if config.kl_coef > 0 and reference_M is not None:
        parts["loss/kl"] = losses.kl_penalty(
            policy_M,
            reference_M,
            mask_M,
            weights_M,
            config.kl_coef,
            estimator=config.kl_estimator,
            behavior_logprobs_BT=behavior_M,
        )
    return parts


def _without_ratio(config: LearnerConfig, batch: Batch, policy_M: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    mask_BT = batch.target_mask_BT
    mask_M, weights_M = mask_BT[mask_BT], batch.weights_BT[mask_BT]
    if config.objective == "bc":
        return losses.bc_loss(policy_M, mask_M, weights_M), {}
    advantages_M = batch.advantages_BT[mask_BT]
    if config.objective == "awr":
        return losses.awr_loss(policy_M, advantages_M, mask_M, weights_M, **_settings(config, batch))
    # A loss over sequences: `preference` made advantages of its slopes, and has told its value.
    share = losses.weighted_sum(-advantages_M * policy_M, mask_M, weights_M)
    return share - share.detach(), {}


def _settings(config: LearnerConfig, batch: Batch) -> dict[str, Any]:
    """What the objective's function takes beside the tokens."""
    settings = config.loss_settings()
    if sequence := settings.pop("sequence", None):
        ids_BT = batch.call_ids_BT if sequence == "call" else batch.row_ids_BT
        settings["sequence_ids_BT"] = ids_BT[batch.target_mask_BT]
    return settings


def measure_gap(
    policy_M: Tensor, behavior_M: Tensor, versions_M: Tensor, policy_version: int | None, totals: Totals
) -> None:
    """Add how far the engine's logprobs are from the learner's to `totals`.

    `policy_M` must come from the weights that served the batch. `gap/*` covers the tokens that
    `policy_version` sampled alone, or all of them if that is None; `policy/sample_share` covers all.
    """
    log_ratio_M = losses.log_ratio(policy_M, behavior_M, torch.ones_like(policy_M, dtype=torch.bool))
    totals.add_weights("policy/sample_share", log_ratio_M.double().exp().cpu().numpy())
    gap_M = (policy_M - behavior_M).abs()
    if policy_version is not None:
        gap_M = gap_M[versions_M == policy_version]
    totals.add_sum("gap/tokens", gap_M.numel())
    if gap_M.numel():
        totals.add_mean("gap/mean", gap_M.mean(), gap_M.numel())
        totals.maximum("gap/max", gap_M.max())


def monitor(
    config: LearnerConfig,
    batch: Batch,
    stats: TargetStats,
    reference_M: Tensor | None,
    policy_version: int | None,
    totals: Totals,
) -> None:
    """Add entropy, distance to the start and the engine-to-learner gap of a microbatch to `totals`.

    `stats` must come from the weights that served the batch: before the first step of an update. Where
    there are corrections the gap was measured with them, before they left anything out.
    """
    if config.echo_coef > 0:
        batch, stats, reference_M = own_targets(batch, stats, reference_M)
        if not batch.trained_tokens:
            return
    mask_BT = batch.target_mask_BT
    policy_M = stats.logprobs_M.detach()
    if stats.entropy_M is not None:
        totals.add_mean("policy/entropy", stats.entropy_M.detach().mean(), policy_M.numel())
    if reference_M is not None:
        totals.add_mean("policy/kl_to_start", losses.kl_k3(policy_M, reference_M).mean(), policy_M.numel())
    if config.uses_ratio and not config.correction.is_on:
        behavior_M, versions_M = batch.behavior_logprobs_BT[mask_BT], batch.versions_BT[mask_BT]
        measure_gap(policy_M, behavior_M, versions_M, policy_version, totals)
