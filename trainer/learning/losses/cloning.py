"""Behaviour cloning, plain and weighted by advantages."""

import math

from torch import Tensor

from spangrad.trainer.learning.losses.masking import masked, masked_mean, require_tokens, weighted_sum


def bc_loss(policy_logprobs_BT: Tensor, mask_BT: Tensor, weights_BT: Tensor) -> Tensor:
    """Behaviour cloning: weighted negative log-likelihood of the recorded tokens.

        L = -sum_k m_k w_k log pi_k

    Args:
        policy_logprobs_BT: Log-probability of each recorded token, nats.
        mask_BT: True on tokens to clone.
        weights_BT: Weight of every token.

    Returns:
        The scalar loss.

    Raises:
        EmptyBatchError: The mask is False everywhere.
    """
    return weighted_sum(-policy_logprobs_BT, mask_BT, weights_BT)


def awr_loss(
    policy_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    weights_BT: Tensor,
    *,
    awr_beta: float = 1.0,
    awr_max_weight: float = 20.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Advantage-weighted regression: cloning that prefers what turned out well.

        L = -sum_k m_k w_k min(exp(A_k / beta), largest) log pi_k

    Source: arXiv:1910.00177, whose weights are clipped at 20. Differs: A comes from the configured
    estimators, not from a value function. It needs no behaviour logprobs: nothing corrects for who sampled.

    Args:
        policy_logprobs_BT: Log-probability of each recorded token, nats.
        advantages_BT: Finite inside the mask, anything outside; no gradient.
        mask_BT: True on tokens to clone.
        weights_BT: Weight of every token.
        awr_beta: beta, a temperature in units of the advantage; above 0. Small: only the best is cloned.
        awr_max_weight: Largest factor; above 0.

    Returns:
        The scalar loss, and detached scalars: `awr_weight` (mean factor) and `awr_clipped` (share of tokens
        whose factor is the largest).

    Raises:
        EmptyBatchError: The mask is False everywhere.

    Where all advantages are 0 it is cloning.
    """
    require_tokens(mask_BT)
    exponent_BT = masked(advantages_BT.detach(), mask_BT).to(policy_logprobs_BT.dtype) / awr_beta
    highest = math.log(awr_max_weight)
    factors_BT = exponent_BT.clamp(max=highest).exp()
    loss = weighted_sum(-policy_logprobs_BT * factors_BT, mask_BT, weights_BT)
    return loss, {
        "awr_weight": masked_mean(factors_BT, mask_BT),
        "awr_clipped": masked_mean((exponent_BT >= highest).to(factors_BT.dtype), mask_BT),
    }
