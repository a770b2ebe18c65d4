"""Losses that compare whole sequences: DPO and KTO.

A sequence is all trained tokens of a rollout (or of the part of it that is compared), in however many rows
they are; its log-probability is the sum over them. The losses depend on these sums alone: dL / dlog pi_k is
dL / dS for every token k of a sequence.

Shape letters: P pairs, N sequences.
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def dpo_loss(
    chosen_P: Tensor,
    rejected_P: Tensor,
    reference_chosen_P: Tensor,
    reference_rejected_P: Tensor,
    weights_P: Tensor,
    *,
    preference_beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Direct preference optimisation.

        h_p = beta [(S_w - S_w^ref) - (S_l - S_l^ref)]
        L = -sum_p w_p [(1 - e) log sigmoid(h_p) + e log sigmoid(-h_p)]

    Source: DPO, arXiv:2305.18290; on rollouts of agents ETO, arXiv:2403.02502; on steps IPR,
    arXiv:2406.11176; label smoothing e: cDPO, in the DPO authors' code.

    Args:
        chosen_P: S_w, summed log-probabilities under the weights being trained, nats.
        rejected_P: S_l.
        reference_chosen_P: S_w^ref, under the reference, nats.
        reference_rejected_P: S_l^ref.
        weights_P: Weight of every pair.
        preference_beta: beta, how fast a preference saturates, per nat; above 0.
        label_smoothing: e, the share of pairs that are the wrong way round; 0 to below 0.5.

    Returns:
        The scalar loss, and detached scalars: `preference_margin` (mean h) and `preference_accuracy` (share
        of pairs with h > 0).
    """
    margin_P = preference_beta * ((chosen_P - reference_chosen_P) - (rejected_P - reference_rejected_P))
    gain_P = (1.0 - label_smoothing) * logsigmoid(margin_P) + label_smoothing * logsigmoid(-margin_P)
    told = margin_P.detach()
    return -(weights_P * gain_P).sum(), {
        "preference_margin": told.mean(),
        "preference_accuracy": (told > 0).to(told.dtype).mean(),
    }


def kto_loss(
    policy_N: Tensor,
    reference_N: Tensor,
    is_good_N: Tensor,
    weights_N: Tensor,
    reference_point: Tensor,
    *,
    preference_beta: float = 0.1,
    good_weight: float = 1.0,
    bad_weight: float = 1.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Kahneman-Tversky optimisation: good and bad sequences without pairs.

        r = S - S^ref
        v = sigmoid(beta (r - z0)) where good, sigmoid(beta (z0 - r)) where bad
        L = sum_n w_n lambda_n (1 - v_n)

    Source: KTO, arXiv:2402.01306.

    Args:
        policy_N: S, summed log-probabilities under the weights being trained, nats.
        reference_N: S^ref, under the reference, nats.
        is_good_N: bool.
        weights_N: Weight of every sequence.
        reference_point: z0, scalar, nats, from `kto_reference_point`; carries no gradient.
        preference_beta: beta, how fast a gain saturates, per nat; above 0.
        good_weight: lambda of good sequences; above 0.
        bad_weight: lambda of bad sequences; above 0. The paper keeps good_weight * good / (bad_weight * bad)
            within 1 to 4 / 3.

    Returns:
        The scalar loss, and detached scalars: `kto_good` and `kto_bad` (mean beta (r - z0) of either; absent
        if there is none) and `kto_reference_point` (z0).
    """
    gain_N = preference_beta * (policy_N - reference_N - reference_point.detach())
    signs_N = torch.where(is_good_N, gain_N.new_tensor(1.0), gain_N.new_tensor(-1.0))
    lambda_N = torch.where(is_good_N, gain_N.new_tensor(good_weight), gain_N.new_tensor(bad_weight))
    told = gain_N.detach()
    monitors = {"kto_reference_point": reference_point.detach()}
    for name, which_N in (("kto_good", is_good_N), ("kto_bad", ~is_good_N)):
        if bool(which_N.any()):
            monitors[name] = told[which_N].mean()
    return (weights_N * lambda_N * (1.0 - torch.sigmoid(signs_N * gain_N))).sum(), monitors


def kto_reference_point(policy_N: Tensor, reference_N: Tensor) -> Tensor:
    """z0 = max(0, mean of S - S^ref over sequences that stand behind another task's prompt), nats.

    Source: KTO, arXiv:2402.01306: an estimate of KL(policy, reference), biased and cheap.

    Returns:
        A scalar; 0 where there is no sequence, as in a batch of one task.
    """
    if not policy_N.numel():
        return policy_N.new_zeros(())
    return (policy_N - reference_N).mean().clamp(min=0.0)
