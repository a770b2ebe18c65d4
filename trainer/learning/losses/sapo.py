"""SAPO: a soft gate in place of a clip."""

import torch
from torch import Tensor

from spangrad.trainer.learning.losses.masking import (
    log_ratio,
    masked,
    masked_mean,
    ratio_monitors,
    require_tokens,
    weighted_sum,
)


def sapo_loss(
    policy_logprobs_BT: Tensor,
    behavior_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    weights_BT: Tensor,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy gradient whose ratio goes through a sigmoid that is flat far from 1.

        r   = pi / mu;   tau = tau_positive where A > 0, else tau_negative
        f   = (4 / tau) sigmoid(tau (r - 1))         df/dr = 1 at r = 1, to 0 on both sides
        l_k = -f(r_k) A_k;   L = sum_k m_k w_k l_k

    Source: arXiv:2511.20347.

    Args:
        policy_logprobs_BT: Under the weights being trained, nats, with gradient.
        behavior_logprobs_BT: Of the distribution that was sampled, nats; finite inside the mask.
        advantages_BT: Finite inside the mask.
        mask_BT: True on trained tokens.
        weights_BT: Weight of every token.
        tau_positive: Steepness for good tokens, above 0; higher: closed sooner.
        tau_negative: Steepness for bad ones.

    Returns:
        The scalar loss, and the detached scalars of `ratio_monitors` with `gate_mean`: mean df/dr, the
        part of the gradient that the gate lets through.

    Raises:
        EmptyBatchError: The mask is False everywhere.
    """
    require_tokens(mask_BT)
    log_ratio_BT = log_ratio(policy_logprobs_BT, behavior_logprobs_BT, mask_BT)
    ratio_BT = log_ratio_BT.exp()  # r
    advantages_BT = masked(advantages_BT, mask_BT).to(ratio_BT.dtype)  # A
    tau_BT = torch.full_like(ratio_BT, tau_negative).masked_fill(advantages_BT > 0, tau_positive)
    sigmoid_BT = torch.sigmoid(tau_BT * (ratio_BT - 1.0))
    loss = weighted_sum(-4.0 / tau_BT * sigmoid_BT * advantages_BT, mask_BT, weights_BT)
    slope_BT = (4.0 * sigmoid_BT * (1.0 - sigmoid_BT)).detach()
    return loss, ratio_monitors(log_ratio_BT, mask_BT) | {"gate_mean": masked_mean(slope_BT, mask_BT)}
