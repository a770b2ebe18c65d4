"""Corrections for tokens that were sampled by another policy than the one that is about to be trained.

They compare the behaviour policy mu (the engine, some versions ago) with the policy before the first step
of an update, once for all rows: so what is left out and how much the rest weighs depends on no
microbatch. Knows rows and log-probabilities. Does not know torch, models or losses.

    w = pi_before / mu      of a trained token; of a sequence: the product or geometric mean of its tokens'

Shape letters: M trained tokens of the rows, in order.

Invariants:
* a token that is left out leaves every term of the loss and its denominator (`aggregation.reweigh`);
* where the sequence is a call, cutting rollouts into other rows changes nothing;
* what each rule left out is counted.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from spangrad.credit.aggregation import reweigh
from spangrad.credit.settings import check_values
from spangrad.credit.transition import Transition
from spangrad.errors import ConfigError, EmptyBatchError
from spangrad.trainer.learning.objectives import SequenceUnit

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

_UNBOUNDED: Final = ("token_tis", "sequence_tis", "token_band", "geometric_band", "veto_band")


@dataclass(frozen=True, slots=True)
class CorrectionConfig:
    """Which corrections; all are off unless named. What a sequence is: `learner.sequence`."""

    proximal: bool = False
    """Take the loss's ratio to the policy before the update (decoupled PPO, arXiv:2505.24298) and not to the
    behaviour policy: bounds then hold what the update itself moves. What lies between the two is left to
    `token_tis` or `sequence_tis`; without them the rows are treated as if they were on-policy."""
    token_tis: float | None = None
    """Weigh each token by `min(w, token_tis)`; needs `proximal`; above 0 (2 in public code), inf: no cap."""
    sequence_tis: float | None = None
    """Weigh each sequence by `min(product of w, sequence_tis)`; needs `proximal`; above 0 (2 to 10), inf: no
    cap."""
    token_band: tuple[float, float] | None = None
    """Leave out tokens whose w is outside: IcePop, masked importance sampling (0.5 and 5).
    The upper bound of a band may be inf."""
    geometric_band: tuple[float, float] | None = None
    """Leave out sequences whose geometric mean of w is outside (0.99 and 1.01)."""
    sequence_max: float | None = None
    """Leave out sequences whose product of w is above: sequence MIS (3)."""
    veto_band: tuple[float, float] | None = None
    """Leave out sequences with any token whose w is outside (1e-4 and 100)."""
    off_policy_max: float | None = None
    """Leave out tokens with A < 0 in sequences whose mean of -log w is above, nats: DeepSeek-V3.2 (0.5)."""
    m2_max: float | None = None
    """Leave out the tokens with the largest `(log w)^2` until its mean over the rest is no larger: M2PO
    (0.04). Applied last."""

    def __post_init__(self) -> None:
        """Check ranges and combinations."""
        check_values(self, "learner.correction.", unbounded=_UNBOUNDED)
        for name in ("token_tis", "sequence_tis", "sequence_max", "off_policy_max", "m2_max"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"learner.correction.{name} is {value!r}, expected more than 0")
        for name in ("token_band", "geometric_band", "veto_band"):
            band = getattr(self, name)
            if band is not None and not (len(band) == 2 and 0 < band[0] < band[1]):
                raise ConfigError(
                    f"learner.correction.{name} is {band!r}, expected two ratios above 0, the lower first"
                )
        if self.token_tis is not None and self.sequence_tis is not None:
            raise ConfigError("learner.correction has token_tis and sequence_tis; a token has one weight")
        for name in ("token_tis", "sequence_tis"):
            if getattr(self, name) is not None and not self.proximal:
                raise ConfigError(
                    f"learner.correction.{name} needs proximal = true: otherwise the loss's own ratio is to "
                    "the behaviour policy and counts the difference already"
                )

    @property
    def is_on(self) -> bool:
        """Whether there is anything to measure before an update."""
        return self != CorrectionConfig()

    @property
    def uses_sequences(self) -> bool:
        """Whether it matters what a sequence is."""
        names = ("sequence_tis", "geometric_band", "sequence_max", "veto_band", "off_policy_max")
        return any(getattr(self, name) is not None for name in names)


def correct(
    rows: Sequence[Transition],
    policy_logprobs: Sequence[NDArray[np.floating[Any]]],
    config: CorrectionConfig,
    *,
    sequence: SequenceUnit,
    others: Sequence[Transition] = (),
) -> tuple[list[Transition], dict[str, float]]:
    """Leave out and weigh trained tokens.

    Sources: token and sequence TIS, Yao et al. 2025 ("Your efficient RL framework secretly brings you
    off-policy RL training"); IcePop, arXiv:2510.18855; M2PO, arXiv:2510.01161; DeepSeek-V3.2. Differs from
    public code: a token that is left out leaves the denominator too.

    Args:
        rows: Rows to train, weighed by `aggregation.weigh`, with a behaviour logprob and an advantage for
            every trained token.
        policy_logprobs: Of the trained tokens of each row under the policy before the update, nats.
        config: Which corrections.
        sequence: What a sequence is.
        others: Rows of the same batch that train nothing: they count in denominators.

    Returns:
        The rows that are left, with fewer trained tokens, new weights, advantages times the weight of TIS,
        and (`proximal`) the policy's logprobs in place of the behaviour policy's. And what to report, under
        `correction/*`: see `trainer/README.md`.

    Raises:
        EmptyBatchError: No token is left.
    """
    policy_M = np.concatenate([np.asarray(scores, dtype=np.float64) for scores in policy_logprobs])
    behavior_M = np.concatenate([row.behavior_logprobs[row.action_mask] for row in rows]).astype(np.float64)
    advantages_M = np.concatenate([row.advantages[row.action_mask] for row in rows])
    log_w_M = policy_M - behavior_M
    ids_M = _sequence_ids(rows, sequence)
    left_out = _left_out(log_w_M, advantages_M, ids_M, config)
    kept_M = ~np.logical_or.reduce([np.zeros(len(log_w_M), dtype=np.bool_), *left_out.values()])
    metrics = {f"correction/{name}": float(out_M.mean()) for name, out_M in left_out.items()}
    log_weight_M, cap = np.zeros_like(log_w_M), math.inf
    if config.token_tis is not None:
        log_weight_M, cap = log_w_M, math.log(config.token_tis)
    elif config.sequence_tis is not None:
        log_weight_M, cap = _sums(log_w_M, ids_M), math.log(config.sequence_tis)
    weights_M = np.exp(np.minimum(log_weight_M, cap))
    if not kept_M.any():
        shares = ", ".join(f"{name} {out_M.mean():.0%}" for name, out_M in left_out.items())
        raise EmptyBatchError(
            f"corrections leave none of {len(kept_M)} trained tokens ({shares}); widen their bounds, or look "
            "whether engine and learner have the same weights"
        )
    if config.token_tis is not None or config.sequence_tis is not None:
        metrics["correction/capped"] = float((log_weight_M > cap)[kept_M].mean())
        metrics["correction/weight_mean"] = float(weights_M[kept_M].mean())
    ratios = np.exp(log_w_M[kept_M] - log_w_M[kept_M].max())  # up to a factor, which cancels
    metrics |= {
        "correction/dropped_tokens": float((~kept_M).sum()),
        "correction/m2": float(np.square(log_w_M).mean()),
        "correction/sample_share": float(ratios.mean() ** 2 / np.square(ratios).mean()),
    }
    corrected = []
    starts = np.cumsum([0, *(len(scores) for scores in policy_logprobs)])
    for row, start, stop in zip(rows, starts[:-1], starts[1:], strict=True):
        part = slice(int(start), int(stop))
        corrected.append(
            replace(
                row,
                action_mask=_filled(row, kept_M[part], False, np.bool_),
                advantages=_filled(row, row.advantages[row.action_mask] * weights_M[part], 0.0, np.float64),
                behavior_logprobs=_filled(row, policy_M[part], np.nan, np.float32)
                if config.proximal
                else row.behavior_logprobs,
            )
        )
    corrected = reweigh([*rows, *others], [*corrected, *others])[: len(rows)]
    left = [row for row in corrected if row.action_mask.any()]
    metrics["correction/dropped_rows"] = float(len(rows) - len(left))
    return left, metrics


def _left_out(
    log_w_M: Floats, advantages_M: Floats, ids_M: NDArray[np.int64], config: CorrectionConfig
) -> dict[str, Bools]:
    """Rule -> tokens that it leaves out, for the rules that are on."""
    found: dict[str, Bools] = {}
    if config.token_band is not None:
        found["token_band"] = _outside(log_w_M, config.token_band)
    if config.geometric_band is not None:
        found["geometric_band"] = _outside(_means(log_w_M, ids_M), config.geometric_band)
    if config.sequence_max is not None:
        found["sequence_max"] = _sums(log_w_M, ids_M) > math.log(config.sequence_max)
    if config.veto_band is not None:
        outside_M = _outside(log_w_M, config.veto_band)
        found["veto_band"] = _sums(outside_M.astype(np.float64), ids_M) > 0
    if config.off_policy_max is not None:
        found["off_policy_max"] = (advantages_M < 0) & (-_means(log_w_M, ids_M) > config.off_policy_max)
    if config.m2_max is not None:
        kept_M = ~np.logical_or.reduce([np.zeros(len(log_w_M), dtype=np.bool_), *found.values()])
        found["m2_max"] = kept_M & (np.square(log_w_M) > _m2_limit(np.square(log_w_M[kept_M]), config.m2_max))
    return found


def _m2_limit(squares: Floats, largest_mean: float) -> float:
    """The largest value such that the mean of all values up to it is at most `largest_mean`; -1: none is."""
    ordered = np.sort(squares)
    means = np.cumsum(ordered) / np.arange(1, len(ordered) + 1)
    is_last_of_ties = np.append(ordered[1:] != ordered[:-1], True)[: len(ordered)]
    fits = ordered[(means <= largest_mean) & is_last_of_ties]
    return float(fits[-1]) if len(fits) else -1.0


def _outside(log_ratio: Floats, band: tuple[float, float]) -> Bools:
    return (log_ratio < math.log(band[0])) | (log_ratio > math.log(band[1]))


def _sums(values_M: Floats, ids_M: NDArray[np.int64]) -> Floats:
    return np.bincount(ids_M, weights=values_M).astype(np.float64)[ids_M]


def _means(values_M: Floats, ids_M: NDArray[np.int64]) -> Floats:
    return _sums(values_M, ids_M) / np.bincount(ids_M)[ids_M]


def _sequence_ids(rows: Sequence[Transition], sequence: SequenceUnit) -> NDArray[np.int64]:
    """Number of each trained token's sequence; one outside every segment is of one more call of its row."""
    numbers: list[NDArray[np.int64]] = []
    count = 0
    for row in rows:
        ids_T = np.full(len(row.token_ids), count, dtype=np.int64)
        if sequence == "call":
            for place, segment in enumerate(row.segments, start=1):
                ids_T[segment.start : segment.stop] = count + place
        count += len(row.segments) + 1
        numbers.append(ids_T[row.action_mask])
    return np.concatenate(numbers)


def _filled(row: Transition, values: NDArray[Any], elsewhere: Any, dtype: Any) -> NDArray[Any]:
    """The values at the row's trained tokens."""
    whole_T = np.full(len(row.token_ids), elsewhere, dtype=dtype)
    whole_T[row.action_mask] = values
    return whole_T
