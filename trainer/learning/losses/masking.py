"""Masks, weights and ratios: what every loss is made of.

A loss is `sum_k m_k w_k l_k`: see the invariants in `spangrad.trainer.learning.losses`.
"""

import torch
from torch import Tensor

from spangrad.errors import EmptyBatchError

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this many nats before `exp`: beyond it float32 gradients turn into NaN."""


def require_tokens(mask_BT: Tensor) -> None:
    """Refuse a mask that is False everywhere.

    Raises:
        EmptyBatchError: It is.
    """
    if not bool(mask_BT.any()):
        raise EmptyBatchError(
            f"the mask of shape {tuple(mask_BT.shape)} is False everywhere; a loss needs at least one "
            "trained token"
        )


def masked(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Zero outside the mask, also where the value is NaN."""
    return torch.where(mask_BT, values_BT, torch.zeros((), dtype=values_BT.dtype, device=values_BT.device))


def masked_mean(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Mean of the values inside the mask; the mask must not be empty."""
    return masked(values_BT, mask_BT).sum() / mask_BT.sum()


def weighted_sum(values_BT: Tensor, mask_BT: Tensor, weights_BT: Tensor) -> Tensor:
    """Aggregate token values the way every loss here does.

        L = sum_k m_k w_k l_k

    Source: the per-rollout form of Dr.GRPO, arXiv:2503.20783: with `w` = 1 / (N Z_i), where `Z_i` is the
    constant of rollout i, this is `(1/N) sum_i (1/Z_i) sum_rows sum_k m l`.

    Args:
        values_BT: Token losses or penalties.
        mask_BT: True where the token counts.
        weights_BT: Weight of every token.

    Returns:
        A scalar that carries the gradient of `values_BT`.

    Raises:
        EmptyBatchError: The mask is False everywhere.
    """
    require_tokens(mask_BT)
    return (masked(values_BT, mask_BT) * masked(weights_BT, mask_BT)).sum()


def log_ratio(policy_logprobs_BT: Tensor, behavior_logprobs_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Log of the token ratio, `log pi - log mu`.

    Args:
        policy_logprobs_BT: Under the weights being trained, nats.
        behavior_logprobs_BT: Of the distribution that was sampled, nats.
        mask_BT: True on trained tokens.

    Returns:
        Nats, in the arguments' shape: 0 outside the mask, clamped to +-`MAX_LOG_RATIO`.
    """
    difference_BT = masked(policy_logprobs_BT - behavior_logprobs_BT, mask_BT)
    return difference_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def ratio_monitors(
    log_ratio_BT: Tensor,
    mask_BT: Tensor,
    *,
    is_low_BT: Tensor | None = None,
    is_high_BT: Tensor | None = None,
) -> dict[str, Tensor]:
    """Detached scalars that every loss with a ratio reports.

    Args:
        log_ratio_BT: As `log_ratio` gives it.
        mask_BT: True on trained tokens, somewhere.
        is_low_BT: Where the lower bound held a token.
        is_high_BT: Where the upper bound did.

    Returns:
        `kl_behavior` (mean k3 estimate of KL(mu, pi)), `ratio_mean`, `ratio_max`, and with bounds `clip_low`
        and `clip_high`: the shares of trained tokens that they held.
    """
    with torch.no_grad():
        log_ratio_BT = log_ratio_BT.detach()
        ratio_BT = log_ratio_BT.exp()
        monitors = {
            "kl_behavior": masked_mean(ratio_BT - 1.0 - log_ratio_BT, mask_BT),
            "ratio_mean": masked_mean(ratio_BT, mask_BT),
            "ratio_max": masked(ratio_BT, mask_BT).max(),
        }
        for name, held_BT in (("clip_low", is_low_BT), ("clip_high", is_high_BT)):
            if held_BT is not None:
                monitors[name] = masked_mean(held_BT.to(ratio_BT.dtype), mask_BT)
    return monitors
