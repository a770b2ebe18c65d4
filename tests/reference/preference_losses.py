"""Losses over sequences with plain floats, from the papers' formulas."""

import math
from collections.abc import Sequence


def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


def dpo(
    pairs: Sequence[tuple[float, float, float, float]], *, beta: float, label_smoothing: float
) -> list[float]:
    """arXiv:2305.18290; each pair: log pi and log pi_ref of what is chosen, then of what is rejected."""
    losses = []
    for chosen, chosen_ref, rejected, rejected_ref in pairs:
        h = beta * (chosen - chosen_ref) - beta * (rejected - rejected_ref)
        right, wrong = -math.log(sigmoid(h)), -math.log(sigmoid(-h))
        losses.append((1.0 - label_smoothing) * right + label_smoothing * wrong)
    return losses


def kto(
    sequences: Sequence[tuple[float, float, bool]],
    mismatched: Sequence[tuple[float, float]],
    *,
    beta: float,
    good_weight: float,
    bad_weight: float,
) -> list[float]:
    """arXiv:2402.01306; lambda - v for each sequence (log pi, log pi_ref, is it good)."""
    z0 = max(0.0, sum(pi - ref for pi, ref in mismatched) / len(mismatched)) if mismatched else 0.0
    losses = []
    for pi, ref, is_good in sequences:
        if is_good:
            losses.append(good_weight - good_weight * sigmoid(beta * ((pi - ref) - z0)))
        else:
            losses.append(bad_weight - bad_weight * sigmoid(beta * (z0 - (pi - ref))))
    return losses


def awr(tokens: Sequence[tuple[float, float, float]], *, beta: float, max_weight: float) -> float:
    """arXiv:1910.00177; tokens: log pi, A, weight."""
    return -sum(weight * min(math.exp(a / beta), max_weight) * logprob for logprob, a, weight in tokens)
