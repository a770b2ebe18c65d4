"""What a critic minimises: squared errors of values."""

import torch
from torch import Tensor


def value_loss(values_S: Tensor, targets_S: Tensor, old_values_S: Tensor, *, clip: float | None) -> Tensor:
    """Mean squared error of values, over states.

        mean of (V - G)^2;   with a clip c: mean of max((V - G)^2, (V_old + clamp(V - V_old, -c, c) - G)^2)

    Source: PPO's value loss as in its code (openai/baselines, ppo2; verl: 0.5). Differs: no factor 1/2.

    Args:
        values_S: Values now, with gradient.
        targets_S: What is to be learnt, reward units.
        old_values_S: Values before the update; NaN: not known, that state has no clip.
        clip: How far a value may go from the old one and still gain by it, above 0; None: as far as it likes.

    Returns:
        A scalar.
    """
    errors_S = (values_S - targets_S).square()
    if clip is not None:
        near_S = old_values_S + (values_S - old_values_S).clamp(-clip, clip)
        near_S = torch.where(torch.isnan(old_values_S), values_S, near_S)
        errors_S = torch.maximum(errors_S, (near_S - targets_S).square())
    return errors_S.mean()
