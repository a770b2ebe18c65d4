"""What a learner minimises on one microbatch, and the numbers read off the same forward pass.

Knows: the terms of the objective and their names. Does not know: models, optimizers, how a batch was made.

Shape letters: B rows, T positions, M trained tokens of a batch.
"""

import torch
from torch import Tensor

from spangrad.trainer.learning import losses
from spangrad.trainer.learning.learner_config import LearnerConfig
from spangrad.trainer.learning.model import TargetStats
from spangrad.trainer.learning.monitors import Totals
from spangrad.trainer.learning.packing import Batch


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
    mask_BT = batch.target_mask_BT
    mask_M, weights_M = mask_BT[mask_BT], batch.weights_BT[mask_BT]
    count = mask_M.numel()
    parts: dict[str, Tensor] = {}
    if config.objective == "bc":
        parts["loss/bc"] = losses.bc_loss(stats.logprobs_M, mask_M, weights_M)
    else:
        parts["loss/policy"], monitors = losses.ppo_clip_loss(
            stats.logprobs_M,
            batch.behavior_logprobs_BT[mask_BT],
            batch.advantages_BT[mask_BT],
            mask_M,
            weights_M,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            dual_clip=config.dual_clip,
        )
        totals.maximum("policy/ratio_max", monitors.pop("ratio_max"))
        for name, value in monitors.items():
            totals.add_mean(f"policy/{name}", value, count)
    if config.entropy_coef > 0 and stats.entropy_M is not None:
        parts["loss/entropy"] = losses.entropy_bonus(stats.entropy_M, mask_M, weights_M, config.entropy_coef)
    if config.kl_coef > 0 and reference_M is not None:
        parts["loss/kl"] = losses.kl_penalty(stats.logprobs_M, reference_M, mask_M, weights_M, config.kl_coef)
    loss = torch.stack(list(parts.values())).sum()
    for name, value in (parts | {"loss/total": loss}).items():
        totals.add_sum(name, value.detach())
    return loss


def monitor(
    config: LearnerConfig,
    batch: Batch,
    stats: TargetStats,
    reference_M: Tensor | None,
    policy_version: int | None,
    totals: Totals,
) -> None:
    """Add entropy, distance to the start and the engine-to-learner gap of a microbatch to `totals`.

    `stats` must come from the weights that served the batch: before the first step of an update. The
    gap covers tokens of `policy_version` alone, or all of them if that is None.
    """
    mask_BT = batch.target_mask_BT
    policy_M = stats.logprobs_M.detach()
    if stats.entropy_M is not None:
        totals.add_mean("policy/entropy", stats.entropy_M.detach().mean(), policy_M.numel())
    if reference_M is not None:
        totals.add_mean("policy/kl_to_start", losses.kl_k3(policy_M, reference_M).mean(), policy_M.numel())
    if config.objective != "ppo":
        return
    gap_M = (policy_M - batch.behavior_logprobs_BT[mask_BT]).abs()
    if policy_version is not None:
        gap_M = gap_M[batch.versions_BT[mask_BT] == policy_version]
    totals.add_sum("gap/tokens", gap_M.numel())
    if gap_M.numel():
        totals.add_mean("gap/mean", gap_M.mean(), gap_M.numel())
        totals.maximum("gap/max", gap_M.max())
