"""Which tasks to draw, from how often each succeeded: pure functions of counts.

    p_i ~ Beta(1 + s_i, 1 + f_i)           what is believed of task i's rate of success
    w_i = P(low <= p_i <= high)            how likely it is one from which something is learned
    q_i = e / N + (1 - e) w_i^a / sum w^a  the chance to be drawn, never below e / N

Shape letters: N tasks; K cells of a grid.
"""

import numpy as np
from numpy.typing import NDArray

from spangrad.errors import CreditError

Floats = NDArray[np.float64]
CELLS = 1024
"""Of the grid on which a belief is summed up; bands are read off between its edges."""
_AT_ONCE = 1024
"""Tasks whose grids are in memory at a time."""


def success_means(successes_N: Floats, failures_N: Floats) -> Floats:
    """Mean of what is believed of each task's rate of success; 0.5 where nothing is known."""
    return (1.0 + successes_N) / (2.0 + successes_N + failures_N)


def chance_in_band(successes_N: Floats, failures_N: Floats, band: tuple[float, float]) -> Floats:
    """How likely each task's rate of success is inside a band.

        w_i = P(low <= p <= high),   p ~ Beta(1 + s_i, 1 + f_i)

    Args:
        successes_N: How many rollouts succeeded, 0 or more; older ones may count as parts of one.
        failures_N: How many did not, likewise.
        band: Lowest and highest rate, 0 to 1.

    Returns:
        Probabilities, shape (N,), float64; `high - low` where nothing is known. Exact to about 1e-5.

    Raises:
        CreditError: Shapes differ, or a count is negative or not finite.
    """
    if successes_N.shape != failures_N.shape:
        shapes = (successes_N.shape, failures_N.shape)
        raise CreditError(f"successes and failures have shapes {shapes}; they must be equal")
    counts_N2 = np.stack([successes_N, failures_N], axis=1)
    if not np.isfinite(counts_N2).all() or (counts_N2 < 0).any():
        raise CreditError("a count of successes or failures is negative or not finite; expected 0 or more")
    known, place_N = np.unique(counts_N2, axis=0, return_inverse=True)
    parts = [_in_band(known[at : at + _AT_ONCE], band) for at in range(0, len(known), _AT_ONCE)]
    chance_N: Floats = np.concatenate([np.zeros(0), *parts])[place_N.reshape(-1)]
    return chance_N


def _in_band(counts_N2: Floats, band: tuple[float, float]) -> Floats:
    middles_K = (np.arange(CELLS) + 0.5) / CELLS
    log_density_NK = counts_N2[:, :1] * np.log(middles_K) + counts_N2[:, 1:] * np.log1p(-middles_K)
    mass_NK = np.exp(log_density_NK - log_density_NK.max(axis=1, keepdims=True))
    below_NK = np.cumsum(mass_NK, axis=1) / mass_NK.sum(axis=1, keepdims=True)
    edges_K = np.arange(CELLS + 1) / CELLS
    shares = [np.diff(np.interp(band, edges_K, [0.0, *below_K]))[0] for below_K in below_NK]
    return np.clip(np.array(shares), 0.0, 1.0)


def drawing_chances(chance_N: Floats, *, exploration: float, focus: float) -> Floats:
    """The chance of each task to be drawn first.

        q_i = e / N + (1 - e) w_i^a / sum_j w_j^a

    Args:
        chance_N: Weights w, 0 to 1.
        exploration: e, the share that every task has a part in; 0 to 1.
        focus: a, how much more likely tasks are drawn for a larger weight; above 0.

    Returns:
        Probabilities that sum to 1, none below `e / N`; all alike where all weights are 0.
    """
    if not len(chance_N):
        return np.zeros(0)
    uniform, powers_N = 1.0 / len(chance_N), chance_N**focus
    total = float(powers_N.sum())
    preferred_N = powers_N / total if total > 0 else np.full(len(chance_N), uniform)
    return exploration * uniform + (1.0 - exploration) * preferred_N


def draw(chances_N: Floats, count: int, rng: np.random.Generator) -> list[int]:
    """Draw without putting back: the first by its chance, each further one by those of what is left.

        the `count` largest of  log q_i + g_i,   g_i ~ Gumbel(0, 1)

    Source: Gumbel top-k, arXiv:1903.06059. The same generator draws the same. Tasks of chance 0 come last.
    """
    with np.errstate(divide="ignore"):
        keys_N = np.log(chances_N) + rng.gumbel(size=len(chances_N))
    return [int(n) for n in np.argsort(-keys_N, kind="stable")[:count]]


def relative_entropy(chances_N: Floats) -> float:
    """Entropy of the drawing over its largest value, log N: 1 for all alike, 0 for one task only."""
    if len(chances_N) < 2:
        return 1.0
    used = chances_N[chances_N > 0]
    return float(-(used * np.log(used)).sum() / np.log(len(chances_N)))
