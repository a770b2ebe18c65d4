"""Divergence from another policy: estimates of it, and penalties for it."""

from torch import Tensor

from spangrad.trainer.learning.losses.masking import MAX_LOG_RATIO, log_ratio, masked, weighted_sum
from spangrad.trainer.learning.objectives import KlEstimator


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
    *,
    estimator: KlEstimator = "k2",
    behavior_logprobs_BT: Tensor | None = None,
) -> Tensor:
    """Loss term that holds the policy to a reference: `coef * sum_k m_k w_k k_k`.

        d = log pi_ref - log pi                           gradient by log pi
        k1 = -d                                           1
        k2 = d^2 / 2                                      -d
        k3 = exp(d) - 1 - d                               1 - exp(d)
        k3_straight_through = k2 + sg(k3 - k2)            -d
        k3_unbiased = sg(pi / mu) k3_straight_through     -d pi / mu

    What each pulls to, on tokens of the policy itself: k2 and k3_straight_through have the expected gradient
    of KL(pi, pi_ref); k3 (GRPO, arXiv:2402.03300, beta 0.04) has that of KL(pi_ref, pi), with outliers that
    are exponential where k2's are linear; k1's is 0, it only adds noise. On tokens of another policy mu only
    k3_unbiased has that of KL(pi, pi_ref). Near d = 0 all but k1 agree.

    Sources: Schulman, "Approximating KL divergence", 2020; k3_unbiased: DeepSeek-V3.2, whose estimate is
    (pi / mu) k3. Its gradient through both factors is -d pi / mu, as here; with the ratio held fixed, as
    some code has it, it would be that of KL(pi_ref, pi). The reference carries no gradient.

    Args:
        policy_logprobs_BT: Under the weights being trained, nats, with gradient.
        reference_logprobs_BT: Under the reference, nats.
        mask_BT: True on trained tokens; elsewhere values may be anything, NaN too.
        weights_BT: Weight of every token.
        coef: 0 or more.
        estimator: One of those above.
        behavior_logprobs_BT: Of the distribution that was sampled, nats; k3_unbiased needs it.

    Returns:
        A scalar.

    Raises:
        EmptyBatchError: The mask is False everywhere.
    """
    policy_BT = masked(policy_logprobs_BT, mask_BT)
    reference_BT = masked(reference_logprobs_BT.detach(), mask_BT)
    if estimator == "k1":
        values_BT = policy_BT - reference_BT
    elif estimator == "k2":
        values_BT = (reference_BT - policy_BT).square() / 2
    elif estimator == "k3":
        values_BT = kl_k3(policy_BT, reference_BT)
    else:
        k2_BT = (reference_BT - policy_BT).square() / 2
        values_BT = k2_BT + (kl_k3(policy_BT, reference_BT) - k2_BT).detach()
        if estimator == "k3_unbiased":
            assert behavior_logprobs_BT is not None  # only objectives with a ratio may choose it
            values_BT = log_ratio(policy_BT.detach(), behavior_logprobs_BT, mask_BT).exp() * values_BT
    return coef * weighted_sum(values_BT, mask_BT, weights_BT)


def log_ratio_penalty(
    policy_logprobs_BT: Tensor, behavior_logprobs_BT: Tensor, mask_BT: Tensor, weights_BT: Tensor, coef: float
) -> Tensor:
    """Loss term that holds the policy to the one that sampled: `coef * sum_k m_k w_k log(pi / mu)^2`.

    Source: Kimi K2.5, arXiv:2602.02276; prime-rl adds it to DPPO with 1e-3.

    Args:
        policy_logprobs_BT: Under the weights being trained, nats, with gradient.
        behavior_logprobs_BT: Of the distribution that was sampled, nats; finite inside the mask.
        mask_BT: True on trained tokens.
        weights_BT: Weight of every token.
        coef: 0 or more.

    Returns:
        A scalar.

    Raises:
        EmptyBatchError: The mask is False everywhere.
    """
    differences_BT = log_ratio(policy_logprobs_BT, behavior_logprobs_BT, mask_BT)
    return coef * weighted_sum(differences_BT.square(), mask_BT, weights_BT)
