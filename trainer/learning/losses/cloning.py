"""Behaviour cloning."""

from torch import Tensor

from spangrad.trainer.learning.losses.masking import weighted_sum


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
