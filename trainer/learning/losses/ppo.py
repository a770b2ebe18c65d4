"""PPO-clip with two bounds and dual clip; DAPO is the same without dual clip."""

import torch
from torch import Tensor

from spangrad.trainer.learning.losses.masking import (
    log_ratio,
    masked,
    ratio_monitors,
    require_tokens,
    weighted_sum,
)


def ppo_clip_loss(
    policy_logprobs_BT: Tensor,
    behavior_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    weights_BT: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = 3.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped policy-gradient loss with separate lower and upper bounds.

        r = pi / mu
        l = max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A)
        l = min(l, -dual_clip A)          where A < 0
        L = sum_k m_k w_k l_k

    Source: PPO, arXiv:1707.06347; the upper bound of its own, DAPO, arXiv:2503.14476; dual
    clip, arXiv:1912.09729. Differs: the learner takes the ratio to the behaviour policy unless
    `learner.correction.proximal` is on, so the clip also covers the engine-to-learner mismatch.

    Args:
        policy_logprobs_BT: Under the weights being trained, nats, with gradient.
        behavior_logprobs_BT: Of the distribution that was sampled, nats; finite inside the
            mask, anything outside.
        advantages_BT: Finite inside the mask, anything outside.
        mask_BT: True on trained tokens.
        weights_BT: Weight of every token.
        clip_low: Ratios below `1 - clip_low` get no gradient where A < 0.
        clip_high: Ratios above `1 + clip_high` get no gradient where A > 0.
        dual_clip: Largest loss per unit of negative advantage; None switches it off.

    Returns:
        The scalar loss, and detached scalars: `clip_low` and `clip_high` (share of trained
        tokens whose gradient that bound removed), `kl_behavior` (mean k3 estimate of
        KL(mu, pi)), `ratio_mean`, `ratio_max`.

    Raises:
        EmptyBatchError: The mask is False everywhere.
    """
    require_tokens(mask_BT)
    log_ratio_BT = log_ratio(policy_logprobs_BT, behavior_logprobs_BT, mask_BT)
    ratio_BT = log_ratio_BT.exp()  # r
    advantages_BT = masked(advantages_BT, mask_BT).to(ratio_BT.dtype)  # A
    lower, upper = 1.0 - clip_low, 1.0 + clip_high
    losses_BT = torch.maximum(-ratio_BT * advantages_BT, -ratio_BT.clamp(lower, upper) * advantages_BT)
    if dual_clip is not None:
        bounded_BT = torch.minimum(losses_BT, -dual_clip * advantages_BT)
        losses_BT = torch.where(advantages_BT < 0, bounded_BT, losses_BT)
    loss = weighted_sum(losses_BT, mask_BT, weights_BT)
    monitors = ratio_monitors(
        log_ratio_BT,
        mask_BT,
        is_low_BT=(ratio_BT < lower) & (advantages_BT < 0),
        is_high_BT=(ratio_BT > upper) & (advantages_BT > 0),
    )
    return loss, monitors
