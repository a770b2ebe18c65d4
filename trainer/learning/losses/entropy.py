"""Entropy of the next-token distribution, and the bonus for it."""

from torch import Tensor

from spangrad.trainer.learning.losses.masking import weighted_sum


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
