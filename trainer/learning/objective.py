"""What a learner minimises on one microbatch, and the numbers read off the same forward pass.

Knows: the terms of the objective and their names. Does not know: models, optimizers, how a batch was made.

Shape letters: B rows, T positions, M trained tokens of a batch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from spangrad.trainer.learning import losses
from spangrad.trainer.learning.learner_config import LearnerConfig
from spangrad.trainer.learning.model import TargetStats
from spangrad.trainer.learning.monitors import Totals
from spangrad.trainer.learning.packing import Batch


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """The trained tokens of a microbatch, flat, in mask order."""

    policy_M: Tensor
    """Log-probability under the weights being trained, nats, with gradient."""
    behavior_M: Tensor
    """Of the distribution that was sampled, nats; NaN where not known."""
    advantages_M: Tensor
    mask_M: Tensor
    """True everywhere."""
    weights_M: Tensor


Loss = Callable[[Tokens, LearnerConfig], tuple[Tensor, dict[str, Tensor]]]
"""-> the scalar loss, and means over tokens to report as `policy/*` (`ratio_max`: a maximum)."""


def _ppo(tokens: Tokens, config: LearnerConfig) -> tuple[Tensor, dict[str, Tensor]]:
    return losses.ppo_clip_loss(
        tokens.policy_M,
        tokens.behavior_M,
        tokens.advantages_M,
        tokens.mask_M,
        tokens.weights_M,
        **_bounds(config),
        dual_clip=config.dual_clip,
    )


def _bc(tokens: Tokens, config: LearnerConfig) -> tuple[Tensor, dict[str, Tensor]]:
    return losses.bc_loss(tokens.policy_M, tokens.mask_M, tokens.weights_M), {}


def _bounds(config: LearnerConfig) -> dict[str, float]:
    assert config.clip_low is not None and config.clip_high is not None  # filled in when it was made
    return {"clip_low": config.clip_low, "clip_high": config.clip_high}


LOSSES: Final[Mapping[str, Loss]] = {"ppo": _ppo, "bc": _bc}
"""One for every name in `objectives.OBJECTIVES`."""


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
    tokens = Tokens(
        policy_M=stats.logprobs_M,
        behavior_M=batch.behavior_logprobs_BT[mask_BT],
        advantages_M=batch.advantages_BT[mask_BT],
        mask_M=mask_BT[mask_BT],
        weights_M=batch.weights_BT[mask_BT],
    )
    mask_M, weights_M = tokens.mask_M, tokens.weights_M
    part = "loss/policy" if config.uses_ratio else f"loss/{config.objective}"
    loss, monitors = LOSSES[config.objective](tokens, config)
    parts: dict[str, Tensor] = {part: loss}
    if "ratio_max" in monitors:
        totals.maximum("policy/ratio_max", monitors.pop("ratio_max"))
    for name, value in monitors.items():
        totals.add_mean(f"policy/{name}", value, mask_M.numel())
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
    if not config.uses_ratio:
        return
    gap_M = (policy_M - batch.behavior_logprobs_BT[mask_BT]).abs()
    if policy_version is not None:
        gap_M = gap_M[batch.versions_BT[mask_BT] == policy_version]
    totals.add_sum("gap/tokens", gap_M.numel())
    if gap_M.numel():
        totals.add_mean("gap/mean", gap_M.mean(), gap_M.numel())
        totals.maximum("gap/max", gap_M.max())
