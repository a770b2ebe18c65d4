"""DPPO: tokens are held by how far their probability moved, not by their ratio."""

import torch
from torch import Tensor

from spangrad.trainer.learning.losses.masking import (
    log_ratio,
    masked,
    ratio_monitors,
    require_tokens,
    weighted_sum,
)


def dppo_loss(
    policy_logprobs_BT: Tensor,
    behavior_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    weights_BT: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    max_ratio: float = 20.0,
    by_kl: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Importance-weighted policy gradient without tokens that their advantage has pushed too far already.

        r   = pi / mu
        D   = |pi - mu|                     total variation of "this token or not"
            = mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi))       by KL: its divergence, nats
        l_k = 0         where A > 0, pi > mu, D > clip_high, or A < 0, pi < mu, D > clip_low
            = -sg(min(r, max_ratio)) A log pi        elsewhere
        L   = sum_k m_k w_k l_k

    Source: arXiv:2602.04879; the cap of the ratio is verl's. Rare tokens keep their gradient at a ratio that
    PPO would clip, common ones are held sooner. A token that comes back is never held.

    Args:
        policy_logprobs_BT: Under the weights being trained, nats, with gradient.
        behavior_logprobs_BT: Of the distribution that was sampled, nats; finite inside the mask.
        advantages_BT: Finite inside the mask.
        mask_BT: True on trained tokens.
        weights_BT: Weight of every token.
        clip_low: Largest D of a token that is pushed down.
        clip_high: Largest D of a token that is pushed up.
        max_ratio: Cap of the importance weight, above 1.
        by_kl: Measure D by divergence.

    Returns:
        The scalar loss (its gradient means something, its value does not), and the detached scalars of
        `ratio_monitors`; `clip_*` are the shares of tokens that were held.

    Raises:
        EmptyBatchError: The mask is False everywhere.
    """
    require_tokens(mask_BT)
    log_ratio_BT = log_ratio(policy_logprobs_BT, behavior_logprobs_BT, mask_BT)
    ratio_BT = log_ratio_BT.detach().exp()  # r
    policy_BT = masked(policy_logprobs_BT, mask_BT)
    advantages_BT = masked(advantages_BT, mask_BT).to(ratio_BT.dtype)  # A
    with torch.no_grad():
        behavior_BT = masked(behavior_logprobs_BT, mask_BT).to(ratio_BT.dtype)
        pi_BT, mu_BT = policy_BT.exp(), behavior_BT.exp()
        distance_BT = _binary_kl(behavior_BT, policy_BT) if by_kl else (pi_BT - mu_BT).abs()  # D
        is_high_BT = (advantages_BT > 0) & (pi_BT > mu_BT) & (distance_BT > clip_high)
        is_low_BT = (advantages_BT < 0) & (pi_BT < mu_BT) & (distance_BT > clip_low)
    losses_BT = -ratio_BT.clamp(max=max_ratio) * advantages_BT * policy_BT
    losses_BT = torch.where(is_high_BT | is_low_BT, 0.0, losses_BT)
    loss = weighted_sum(losses_BT, mask_BT, weights_BT)
    return loss, ratio_monitors(log_ratio_BT, mask_BT, is_low_BT=is_low_BT, is_high_BT=is_high_BT)


def _binary_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL of "this token or not", nats; infinite where only the first policy allows another token."""
    rest_p, rest_q = (torch.expm1(log).clamp(max=0.0).abs() for log in (log_p, log_q))  # never -0.0
    others = torch.where(rest_p > 0, rest_p * (rest_p / rest_q).log(), 0.0)
    return log_p.exp() * (log_p - log_q) + others
