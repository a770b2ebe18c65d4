"""Divergence from a reference policy: estimates of it, and the penalty for it."""

from torch import Tensor

from spangrad.trainer.learning.losses.masking import MAX_LOG_RATIO, masked, weighted_sum


def kl_k3(policy_logprobs_BT: Tensor, reference_logprobs_BT: Tensor) -> Tensor:
    """Low-variance estimate of KL(policy, reference) on tokens that the policy sampled.

        d = log pi_ref - log pi;  k3 = exp(d) - 1 - d

    Source: Schulman, "Approximating KL divergence", 2020. Never negative; unbiased where the tokens
    are the policy's own samples.

    Args:
        policy_logprobs_BT: Nats.
        reference_logprobs_BT: Nats.

    Returns:
        Nats, in the arguments' shape. `d` is clamped to +-`MAX_LOG_RATIO`, so two impossible tokens
        that differ more give a bounded value; NaN stays NaN: mask before.
    """
    d_BT = (reference_logprobs_BT - policy_logprobs_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return d_BT.exp() - 1.0 - d_BT


def kl_penalty(
    policy_logprobs_BT: Tensor,
    reference_logprobs_BT: Tensor,
    mask_BT: Tensor,
    weights_BT: Tensor,
    coef: float,
) -> Tensor:
    """Loss term that holds the policy to a reference: `coef * sum_k m_k w_k k2_k`.

        d = log pi_ref - log pi;  k2 = d^2 / 2;  dk2 / dlog pi = -d

    On the policy's own samples its expected gradient is that of KL(policy, reference), which GRPO's
    k3 (arXiv:2402.03300, beta = 0.04) does not have: dk3 / dlog pi = 1 - exp(d), whose outliers are
    exponential, where these are linear. Near d = 0 the two agree. Source: Schulman, "Approximating KL
    divergence", 2020. The reference carries no gradient.

    Args:
        policy_logprobs_BT: Under the weights being trained, nats, with gradient.
        reference_logprobs_BT: Under the reference, nats.
        mask_BT: True on trained tokens; elsewhere values may be anything, NaN too.
        weights_BT: Weight of every token.
        coef: 0 or more.

    Returns:
        A scalar.

    Raises:
        EmptyBatchError: The mask is False everywhere.
    """
    policy_BT = masked(policy_logprobs_BT, mask_BT)
    reference_BT = masked(reference_logprobs_BT.detach(), mask_BT)
    return coef * weighted_sum((reference_BT - policy_BT).square() / 2, mask_BT, weights_BT)
