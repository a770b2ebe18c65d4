"""Terms added to rewards, and the test that tells whether they change what is best.

Only a difference of potentials leaves the best policy alone. Any other term is a new
objective, and `farming_gain` says how much an agent earns by going in circles for it.

Shape letters: T steps of one trajectory.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from spangrad.credit.groups import Floats
from spangrad.credit.returns import discounted_returns
from spangrad.errors import CreditError


def potential_based(potentials_T1: Floats, *, gamma: float, is_truncated: bool) -> Floats:
    """Shaping that changes credit and not the objective.

        F_t = gamma Phi(s_{t+1}) - Phi(s_t);   Phi = 0 at a terminal state
        sum_t gamma^t F_t = -Phi(s_0)   (ended)   or   gamma^T Phi(s_T) - Phi(s_0)   (cut off)

    Source: Ng, Harada, Russell 1999. Where a rollout was cut off its last state is no terminal one and keeps
    its potential, or else being cut off is punished.

    Args:
        potentials_T1: Potential of the state before each step and behind the last one: T + 1 numbers.
        gamma: Discount per step, 0 to 1: the one of the returns, or the objective changes.
        is_truncated: Whether the rollout was cut off (budget, turns), rather than ended by itself.

    Returns:
        Term for the reward of each step, shape (T,), float64, reward units.

    Raises:
        CreditError: There is no potential, one is not finite, or gamma is outside 0 to 1.
    """
    if not len(potentials_T1) or not np.isfinite(potentials_T1).all():
        raise CreditError(f"potentials {potentials_T1.tolist()!r}; expected at least one, all finite")
    if not 0.0 <= gamma <= 1.0:
        raise CreditError(f"gamma is {gamma!r}; expected 0 to 1")
    phi_T1 = potentials_T1.astype(np.float64)
    if not is_truncated:
        phi_T1[-1] = 0.0
    return gamma * phi_T1[1:] - phi_T1[:-1]


@dataclass(frozen=True, slots=True)
class CycleTest:
    """What going in circles earns from a shaping term alone."""

    gain: float
    """The largest discounted sum over a cycle that was seen; reward units. 0 or below: nothing to farm."""
    cycles: int
    """Cycles that were looked at."""
    first: int | None
    """Step at which the best one begins; None without cycles."""
    last: int | None
    """Step behind it: the same state again."""

    @property
    def passes(self) -> bool:
        """Whether no cycle that was seen pays, up to rounding."""
        return self.gain <= 1e-9


def farming_gain(states_T1: Sequence[Hashable], terms_T: Floats, *, gamma: float = 1.0) -> CycleTest:
    """Look for a way back to a state that a shaping term pays for.

        gain = max over visits i < j of one state, none between, of  sum_{i <= t < j} gamma^{t-i} F_t

    A difference of potentials sums to 0 over a cycle for gamma 1, and to (gamma^{j-i} - 1) Phi(s_i) below,
    which is 0 or less where potentials are 0 or more. A longer cycle is made of these ones, so that for
    gamma 1 none pays if none of these does.

    Args:
        states_T1: State before each step and behind the last one.
        terms_T: What the shaping term paid at each step, finite.
        gamma: Discount per step, 0 to 1.

    Raises:
        CreditError: There is not one more state than terms, a term is not finite, or gamma is outside 0 to 1.
    """
    if len(states_T1) != len(terms_T) + 1 or not np.isfinite(terms_T).all():
        raise CreditError(
            f"{len(states_T1)} states and {len(terms_T)} terms; expected one more, terms finite"
        )
    to_go_T = discounted_returns(terms_T, gamma)
    last_visit: dict[Hashable, int] = {}
    gain, cycles = 0.0, 0
    where: tuple[int, int] | tuple[None, None] = (None, None)
    for t, state in enumerate(states_T1):
        start = last_visit.get(state)
        last_visit[state] = t
        if start is None:
            continue
        behind = float(to_go_T[t]) if t < len(terms_T) else 0.0
        paid = float(to_go_T[start]) - gamma ** (t - start) * behind
        if not cycles or paid > gain:
            gain, where = paid, (start, t)
        cycles += 1
    return CycleTest(gain, cycles, *where)
