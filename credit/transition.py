"""Training rows: flat token sequences with parallel arrays.

Shape letters: T token positions of one row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Denominator = Literal["batch", "rollout", "row", "constant"]


@dataclass(frozen=True, slots=True)
class CallSegment:
    """The sampled tokens of one call inside a row: positions `start:stop`."""

    call_id: str
    span_id: str
    step_index: int
    """0, 1, ...: order of the call inside its rollout."""
    start: int
    stop: int
    value: float | None = None
    """What a critic expected to be still to come, before the call's first token; None: nobody asked one."""
    value_target: float | None = None
    """What it should have expected (`values.value_targets`); None: nobody asked one."""


@dataclass(frozen=True, slots=True)
class Preference:
    """That a sequence is good or bad: all trained tokens of all rows that carry this preference.

    A pair is two preferences with one id, one of them good.
    """

    id: str
    """Of the pair, or of the sequence where it is judged alone."""
    is_good: bool
    weight: float
    """Weight of the pair, or of the sequence, in the loss; the same in all its rows."""


@dataclass(frozen=True, slots=True, eq=False)
class Transition:
    """One row of training data: a path of a rollout's call tree from the root.

    All arrays have length T. Where `action_mask` is False, `behavior_logprobs` is
    NaN, `policy_versions` is -1 and `advantages` is 0; losses must not read them.
    """

    rollout_id: str
    attempt: int
    group_id: str | None
    segments: Sequence[CallSegment]
    """Calls whose sampled tokens are trained by this row, in order."""
    token_ids: NDArray[np.int32]
    action_mask: NDArray[np.bool_]
    """True exactly where the policy sampled the token and this row trains it."""
    behavior_logprobs: NDArray[np.float32]
    """nats, of the distribution that was sampled."""
    policy_versions: NDArray[np.int32]
    advantages: NDArray[np.float64]
    loss_weight: float
    """Weight of each trained token of this row in the loss; travels with the row."""
    grade: str
    """Worst grade among its calls."""
    temperature: float = 1.0
    """Sampling temperature of its calls; the learner recomputes under the same."""
    observation_mask: NDArray[np.bool_] | None = None
    """True where the environment answered a call of the policy, on tokens that no other row has so: what ECHO
    learns to predict. Never where a token was sampled. None: not known."""
    preferences: Sequence[Preference] = ()
    """What preference losses (DPO, KTO) compare; other losses do not read it."""
    denominator: Denominator = "constant"
    """Whose trained tokens `loss_weight` was divided by: one that a correction leaves out gives its weight to
    the others."""
