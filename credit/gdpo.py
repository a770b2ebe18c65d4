"""GDPO: several reward components, each on a scale of its own before they are added.

Shape letters: C components, N rollouts.
"""

import numpy as np

from spangrad.credit.groups import Floats, Ints
from spangrad.credit.grpo import group_advantages
from spangrad.errors import CreditError


def gdpo(
    components_CN: Floats,
    group_ids_N: Ints,
    weights_C: Floats,
    *,
    ddof: int = 0,
    eps: float = 1e-6,
) -> Floats:
    """Normalise every component in its group, add them up, whiten over the batch.

        Z_{c,i} = (R_{c,i} - mean_g R_c) / (std_g R_c + eps)
        B_i = sum_c w_c Z_{c,i};   A_i = (B_i - mean B) / (std B + eps)   over the batch's rollouts

    Source: arXiv:2601.05242. A component's scale can't hide another one: what it counts is `weights_C` alone.
    Give a component once per rollout: summing its score over turns rewards retries.

    Args:
        components_CN: Return of each component of each rollout, finite.
        group_ids_N: Group of each rollout; equal number = same task.
        weights_C: Weight of each component, finite.
        ddof: 0: population, 1: sample standard deviation; of groups and of the batch.
        eps: Added to every standard deviation.

    Returns:
        Advantages, shape (N,), float64, no unit. Sums to 0 in every group: groups are centred, so the batch's
        mean is 0.

    Raises:
        CreditError: Shapes differ, or a number is not finite.

    A component whose returns are equal in a group adds nothing there; groups of one get zeros.
    """
    if components_CN.ndim != 2 or components_CN.shape != (len(weights_C), len(group_ids_N)):
        raise CreditError(
            f"components have shape {components_CN.shape}; "
            f"expected {(len(weights_C), len(group_ids_N))}: weights by rollouts"
        )
    if not np.isfinite(weights_C).all():
        raise CreditError(f"weights are {weights_C.tolist()!r}; expected finite numbers")
    summed_N = np.zeros(len(group_ids_N))
    for weight, returns_N in zip(weights_C, components_CN, strict=True):
        summed_N += weight * group_advantages(returns_N, group_ids_N, scale_by_std=True, ddof=ddof, eps=eps)
    if len(summed_N) <= ddof or not summed_N.any():
        return np.zeros(len(summed_N))
    return summed_N / (float(summed_N.std(ddof=ddof)) + eps)
