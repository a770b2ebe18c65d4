"""CISPO and plain importance sampling: the ratio as a weight of the log-likelihood's gradient."""

from torch import Tensor

from spangrad.trainer.learning.losses.masking import (
    log_ratio,
    masked,
    ratio_monitors,
    require_tokens,
    weighted_sum,
)


def cispo_loss(
    policy_logprobs_BT: Tensor,
    behavior_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    weights_BT: Tensor,
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """REINFORCE whose importance weight is clipped, and whose gradient never is.

        r   = pi / mu
        l_k = -sg(clip(r_k, 1 - clip_low, 1 + clip_high)) A_k log pi_k
        L   = sum_k m_k w_k l_k

    Source: MiniMax-M1, arXiv:2506.13585. Its bounds are not published; the defaults are OpenPipe ART's (ratio
    in [0, 5]: no lower bound); ScaleRL, arXiv:2510.13786, has about 5 above. With both bounds out of reach it
    is importance-weighted REINFORCE. Truncation adds bias where the ratio is above the bound.

    Args:
        policy_logprobs_BT: Under the weights being trained, nats, with gradient.
        behavior_logprobs_BT: Of the distribution that was sampled, nats; finite inside the mask.
        advantages_BT: Finite inside the mask.
        mask_BT: True on trained tokens.
        weights_BT: Weight of every token.
        clip_low: Weights are at least `1 - clip_low`.
        clip_high: Weights are at most `1 + clip_high`.

    Returns:
        The scalar loss (its gradient means something, its value does not), and the detached scalars of
        `ratio_monitors`; `clip_*` are the shares of tokens whose weight a bound replaced.

    Raises:
        EmptyBatchError: The mask is False everywhere.
    """
    require_tokens(mask_BT)
    log_ratio_BT = log_ratio(policy_logprobs_BT, behavior_logprobs_BT, mask_BT)
    ratio_BT = log_ratio_BT.detach().exp()  # r
    lower, upper = 1.0 - clip_low, 1.0 + clip_high
    advantages_BT = masked(advantages_BT, mask_BT).to(ratio_BT.dtype)  # A
    losses_BT = -ratio_BT.clamp(lower, upper) * advantages_BT * masked(policy_logprobs_BT, mask_BT)
    loss = weighted_sum(losses_BT, mask_BT, weights_BT)
    monitors = ratio_monitors(log_ratio_BT, mask_BT, is_low_BT=ratio_BT < lower, is_high_BT=ratio_BT > upper)
    return loss, monitors


def importance_sampling_loss(
    policy_logprobs_BT: Tensor,
    behavior_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    weights_BT: Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Importance-weighted policy gradient without any bound.

        l_k = -(pi_k / mu_k) A_k;   L = sum_k m_k w_k l_k

    Per token, so it corrects the choice of a token and not the history that led to it. On-policy its
    gradient is REINFORCE's. Nothing holds an outlier but `MAX_LOG_RATIO`: public runs diverged at three
    updates of staleness (tinker-cookbook, pull request 822).

    Args:
        policy_logprobs_BT: Under the weights being trained, nats, with gradient.
        behavior_logprobs_BT: Of the distribution that was sampled, nats; finite inside the mask.
        advantages_BT: Finite inside the mask.
        mask_BT: True on trained tokens.
        weights_BT: Weight of every token.

    Returns:
        The scalar loss, and the detached scalars of `ratio_monitors`.

    Raises:
        EmptyBatchError: The mask is False everywhere.
    """
    log_ratio_BT = log_ratio(policy_logprobs_BT, behavior_logprobs_BT, mask_BT)
    advantages_BT = masked(advantages_BT, mask_BT).to(log_ratio_BT.dtype)  # A
    loss = weighted_sum(-log_ratio_BT.exp() * advantages_BT, mask_BT, weights_BT)
    return loss, ratio_monitors(log_ratio_BT, mask_BT)
