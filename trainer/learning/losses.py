"""Losses and penalties of the trainer, as pure functions of tensors.

Knows: log-probabilities, masks, weights. Does not know: models, rows, rollouts or
how the weights came about.

Shape letters: B rows, T token positions, V vocabulary. A function that takes `_BT`
tensors takes any shape, as long as all arguments have the same one; the learner
passes the trained tokens alone, as one flat vector. Masks are bool. Everything else is float32 or
float64; results have the dtype of the log-probabilities (or values) that they are made of.

Invariants:
* positions outside the mask change neither value nor gradient, whatever they hold (NaN too);
* a loss is a plain sum of `weight * token loss`: the normalisation is in the weights, so
  splitting or merging rows or microbatches changes nothing;
* an empty mask is an error, never a division by a small number.
"""

import torch
from torch import Tensor

from spangrad.errors import EmptyBatchError

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this many nats before `exp`: beyond it float32 gradients turn into NaN."""


def _require_tokens(mask_BT: Tensor) -> None:
    if not bool(mask_BT.any()):
        raise EmptyBatchError(
            f"the mask of shape {tuple(mask_BT.shape)} is False everywhere; a loss needs at least one "
            "trained token"
        )


def _masked(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Zero outside the mask, also where the value is NaN."""
    return torch.where(mask_BT, values_BT, torch.zeros((), dtype=values_BT.dtype, device=values_BT.device))


def _masked_mean(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    return _masked(values_BT, mask_BT).sum() / mask_BT.sum()


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
    _require_tokens(mask_BT)
    return (_masked(values_BT, mask_BT) * _masked(weights_BT, mask_BT)).sum()


def bc_loss(policy_logprobs_BT: Tensor, mask_BT: Tensor, weights_BT: Tensor) -> Tensor:
    """Behaviour cloning: weighted negative log-likelihood of the recorded tokens.

        L = -sum_k m_k w_k log pi_k

    With w = exp(A / beta) it is advantage-weighted regression, arXiv:1910.00177.

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


def log_ratio(policy_logprobs_BT: Tensor, behavior_logprobs_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Log of the token ratio, `log pi - log mu`.

    Args:
        policy_logprobs_BT: Under the weights being trained, nats.
        behavior_logprobs_BT: Of the distribution that was sampled, nats.
        mask_BT: True on trained tokens.

    Returns:
        Nats, in the arguments' shape: 0 outside the mask, clamped to +-`MAX_LOG_RATIO`.
    """
    difference_BT = _masked(policy_logprobs_BT - behavior_logprobs_BT, mask_BT)
    return difference_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


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
    clip, arXiv:1912.09729. Differs: the ratio is taken to the behaviour policy (no proximal
    policy of its own), so the clip also covers the engine-to-learner mismatch.

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
    _require_tokens(mask_BT)
    log_ratio_BT = log_ratio(policy_logprobs_BT, behavior_logprobs_BT, mask_BT)
    ratio_BT = log_ratio_BT.exp()  # r
    advantages_BT = _masked(advantages_BT, mask_BT).to(ratio_BT.dtype)  # A
    lower, upper = 1.0 - clip_low, 1.0 + clip_high
    losses_BT = torch.maximum(-ratio_BT * advantages_BT, -ratio_BT.clamp(lower, upper) * advantages_BT)
    if dual_clip is not None:
        bounded_BT = torch.minimum(losses_BT, -dual_clip * advantages_BT)
        losses_BT = torch.where(advantages_BT < 0, bounded_BT, losses_BT)
    loss = weighted_sum(losses_BT, mask_BT, weights_BT)
    with torch.no_grad():
        is_low_BT = (ratio_BT < lower) & (advantages_BT < 0)
        is_high_BT = (ratio_BT > upper) & (advantages_BT > 0)
        monitors = {
            "clip_low": _masked_mean(is_low_BT.to(ratio_BT.dtype), mask_BT),
            "clip_high": _masked_mean(is_high_BT.to(ratio_BT.dtype), mask_BT),
            "kl_behavior": _masked_mean(ratio_BT - 1.0 - log_ratio_BT, mask_BT),
            "ratio_mean": _masked_mean(ratio_BT, mask_BT),
            "ratio_max": _masked(ratio_BT, mask_BT).max(),
        }
    return loss, monitors


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


def token_entropy(logits_BTV: Tensor) -> Tensor:
    """Entropy of every next-token distribution, in nats, shape (B, T).

        H = log Z - sum_v p_v z_v,   log Z = logsumexp(z)

    Args:
        logits_BTV: Logits over the vocabulary in the last dimension, temperature included; finite
            (a logit of -inf gives NaN).
    """
    log_z_BT = logits_BTV.logsumexp(-1)
    return log_z_BT - (logits_BTV.softmax(-1) * logits_BTV).sum(-1)


def entropy_bonus(entropy_BT: Tensor, mask_BT: Tensor, weights_BT: Tensor, coef: float) -> Tensor:
    """Loss term that rewards entropy: `-coef * sum_k m_k w_k H_k`.

    Args:
        entropy_BT: As `token_entropy` gives it, nats, with gradient.
        mask_BT: True on trained tokens.
        weights_BT: Weight of every token.
        coef: 0 or more.

    Returns:
        A scalar.

    Raises:
        EmptyBatchError: The mask is False everywhere.
    """
    return -coef * weighted_sum(entropy_BT, mask_BT, weights_BT)


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
    policy_BT = _masked(policy_logprobs_BT, mask_BT)
    reference_BT = _masked(reference_logprobs_BT.detach(), mask_BT)
    return coef * weighted_sum((reference_BT - policy_BT).square() / 2, mask_BT, weights_BT)
