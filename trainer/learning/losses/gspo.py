"""GSPO: one ratio for a whole sequence, and the form of it for advantages that differ inside one."""

import torch
from torch import Tensor

from spangrad.errors import CreditError
from spangrad.trainer.learning.losses.masking import (
    log_ratio,
    masked,
    ratio_monitors,
    require_tokens,
    weighted_sum,
)


def sequence_mean(values_BT: Tensor, mask_BT: Tensor, sequence_ids_BT: Tensor) -> Tensor:
    """Mean over the masked tokens of each sequence, given to each of them; 0 outside the mask.

    Args:
        values_BT: One value a token; anything outside the mask.
        mask_BT: True on trained tokens.
        sequence_ids_BT: int64, 0 or more; tokens of one sequence have the same.
    """
    ids_M, values_M = sequence_ids_BT[mask_BT], values_BT[mask_BT]
    counts = torch.bincount(ids_M)
    sums = torch.zeros(len(counts), dtype=values_M.dtype, device=values_M.device).index_add(
        0, ids_M, values_M
    )
    means_BT = torch.zeros_like(values_BT)
    return means_BT.masked_scatter(mask_BT, (sums / counts.clamp(min=1))[ids_M])


def gspo_loss(
    policy_logprobs_BT: Tensor,
    behavior_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    weights_BT: Tensor,
    *,
    sequence_ids_BT: Tensor,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    by_token: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped policy gradient on the length-normalised ratio of a sequence.

        s   = exp(mean over the sequence of log(pi_k / mu_k))
        s_k = s                                      GSPO
            = sg(s) pi_k / sg(pi_k)                  by token
        l_k = max(-s_k A_k, -clip(s_k, 1 - clip_low, 1 + clip_high) A_k)
        L   = sum_k m_k w_k l_k

    Source: GSPO and GSPO-token, arXiv:2507.18071. Differs: the weights decide how sequences are
    averaged, where public code forces a mean of sequence means; the clip counts as in `ppo_clip_loss`.
    The two have the same value, and the same gradient where A and w are constant in a sequence: GSPO
    spreads the gradient over the whole sequence, by token each stays where its advantage is.

    Args:
        policy_logprobs_BT: Under the weights being trained, nats, with gradient.
        behavior_logprobs_BT: Of the distribution that was sampled, nats; finite inside the mask.
        advantages_BT: Finite inside the mask.
        mask_BT: True on trained tokens.
        weights_BT: Weight of every token.
        sequence_ids_BT: int64, 0 or more; tokens of one sequence have the same. All tokens of a sequence
            must be here: a part of one has another ratio.
        clip_low: Sequences with `s` below `1 - clip_low` get no gradient where A < 0.
        clip_high: Sequences with `s` above `1 + clip_high` get no gradient where A > 0.
        by_token: GSPO-token.

    Returns:
        The scalar loss, and the detached scalars of `ratio_monitors`; `clip_*` are of `s`, the others of
        the token ratio.

    Raises:
        EmptyBatchError: The mask is False everywhere.
        CreditError: Not `by_token`, and the advantage differs inside a sequence: GSPO would average it away.
    """
    require_tokens(mask_BT)
    log_ratio_BT = log_ratio(policy_logprobs_BT, behavior_logprobs_BT, mask_BT)
    advantages_BT = masked(advantages_BT, mask_BT).to(log_ratio_BT.dtype)  # A
    ratio_BT = sequence_mean(log_ratio_BT, mask_BT, sequence_ids_BT).exp()  # s
    if by_token:
        policy_BT = masked(policy_logprobs_BT, mask_BT)
        ratio_BT = ratio_BT.detach() * (policy_BT - policy_BT.detach()).exp()  # s_k
    else:
        _require_one_advantage(advantages_BT, mask_BT, sequence_ids_BT)
    lower, upper = 1.0 - clip_low, 1.0 + clip_high
    losses_BT = torch.maximum(-ratio_BT * advantages_BT, -ratio_BT.clamp(lower, upper) * advantages_BT)
    loss = weighted_sum(losses_BT, mask_BT, weights_BT)
    monitors = ratio_monitors(
        log_ratio_BT,
        mask_BT,
        is_low_BT=(ratio_BT < lower) & (advantages_BT < 0),
        is_high_BT=(ratio_BT > upper) & (advantages_BT > 0),
    )
    return loss, monitors


def _require_one_advantage(advantages_BT: Tensor, mask_BT: Tensor, sequence_ids_BT: Tensor) -> None:
    advantages_M, ids_M = advantages_BT[mask_BT], sequence_ids_BT[mask_BT]
    lowest = torch.full((int(ids_M.max()) + 1,), torch.inf, dtype=advantages_M.dtype, device=ids_M.device)
    highest = (-lowest).scatter_reduce(0, ids_M, advantages_M, "amax")
    lowest = lowest.scatter_reduce(0, ids_M, advantages_M, "amin")
    differs = torch.nonzero(highest > lowest)
    if len(differs):
        first = int(differs[0])
        raise CreditError(
            f"a sequence has advantages from {float(lowest[first])!r} to {float(highest[first])!r}, and gspo "
            "would average them away; expected one: choose objective 'gspo_token', or sequence 'call'"
        )
