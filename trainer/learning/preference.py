"""From summed log-probabilities of rows to what each of their tokens is worth in a loss over sequences.

DPO and KTO depend on sums of log-probabilities over whole sequences, whose rows are in different
microbatches. The sums are taken first, without a gradient; then dL / dS of a row's sequences is a constant
factor of its tokens, and a plain weighted sum of token log-probabilities has the loss's exact gradient,
however the rows are cut into microbatches.

Knows rows, their preferences and their sums. Does not know: models.

The reference is the starting policy. Log-probabilities are those of the policy itself, as in cloning: the
temperature that somebody sampled at is left out.

Shape letters: B rows, P pairs, N sequences, K memberships of a row in a sequence.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spangrad.credit.labels import mismatched
from spangrad.credit.transition import Preference, Transition
from spangrad.errors import CreditError
from spangrad.trainer.learning import losses
from spangrad.trainer.learning.learner_config import LearnerConfig
from spangrad.trainer.learning.monitors import Totals
from spangrad.trainer.learning.objectives import OBJECTIVES

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """Summed log-probabilities, nats, of the trained tokens of rows: under the weights and the reference."""

    policy: Floats
    reference: Floats


@dataclass(frozen=True, slots=True, eq=False)
class _Sequences:
    """The judged sequences of some rows, in order of first appearance."""

    names: Sequence[tuple[str, bool]]
    """(id of the preference, is it good)."""
    weights_N: Tensor
    row_K: Tensor
    sequence_K: Tensor

    def sums(self, values_B: Tensor) -> Tensor:
        """Sum of its rows' values for every sequence."""
        return values_B.new_zeros(len(self.names)).index_add(0, self.sequence_K, values_B[self.row_K])


Sums = Callable[[Sequence[Transition]], Floats]
"""Rows -> the summed log-probability of each one's action tokens, nats."""


class Comparison:
    """What an update with a loss over sequences needs beside a gradient: sums under both policies."""

    def __init__(
        self,
        rows: Sequence[Transition],
        config: LearnerConfig,
        policy: Sums,
        reference: Sums,
        seconds: dict[str, float],
    ) -> None:
        """Score all rows of an update under the reference, which does not move.

        Args:
            rows: The same objects that `weighed` gets.
            config: Objective and settings.
            policy: Sums under the weights being trained, as they are when it is called.
            reference: Sums under the starting policy.
            seconds: Times of the update; `reference` grows by what is spent here and in `weighed`.
        """
        began = time.perf_counter()
        self._config, self._policy, self._reference = config, policy, reference
        self._known = dict(zip(map(id, rows), reference(rows).tolist(), strict=True))
        seconds["reference"] += time.perf_counter() - began

    def weighed(
        self, rows: Sequence[Transition], totals: Totals, seconds: dict[str, float]
    ) -> list[Transition]:
        """The rows of one optimizer step with what their tokens are worth; adds the loss to `totals`."""
        began = time.perf_counter()
        config = self._config
        others = mismatched(rows) if config.objective == "kto" else []
        weighed, value, monitors = with_coefficients(
            rows,
            Scores(self._policy(rows), np.array([self._known[id(row)] for row in rows])),
            Scores(*(by_rollout(others, sums(others)) for sums in (self._policy, self._reference))),
            objective=config.objective,
            settings={name: getattr(config, name) for name in OBJECTIVES[config.objective].settings},
        )
        for name in ("total", config.objective):
            totals.add_sum(f"loss/{name}", value)
        for name, mean in monitors.items():
            totals.add_mean(f"policy/{name}", mean, 1)
        seconds["reference"] += time.perf_counter() - began
        return weighed


def with_coefficients(
    rows: Sequence[Transition],
    scores: Scores,
    mismatched: Scores,
    *,
    objective: str,
    settings: Mapping[str, float],
) -> tuple[list[Transition], float, dict[str, float]]:
    """Rows whose `advantages` make `-sum_k loss_weight * A * log pi_k` have the gradient of the loss.

        A = -(dL / dS) / loss_weight

    Args:
        rows: Of one optimizer step, with preferences; both sides of a pair must be there.
        scores: Of these rows.
        mismatched: Of what KTO takes its reference point from, one sum per rollout; empty for DPO.
        objective: `dpo` or `kto`.
        settings: What its function in `losses` takes beside the sequences, by name.

    Returns:
        The rows, the value of the loss, and what to report as `policy/*`.

    Raises:
        CreditError: A pair lacks a side, a sequence has two weights, or a row is not judged.
    """
    sequences = _sequences(rows)
    policy_B = torch.from_numpy(scores.policy).requires_grad_()
    policy_N = sequences.sums(policy_B)
    reference_N = sequences.sums(torch.from_numpy(scores.reference))
    if objective == "dpo":
        chosen, rejected = _sides(sequences)
        loss, monitors = losses.dpo_loss(
            policy_N[chosen],
            policy_N[rejected],
            reference_N[chosen],
            reference_N[rejected],
            sequences.weights_N[chosen],
            **settings,
        )
    else:
        loss, monitors = losses.kto_loss(
            policy_N,
            reference_N,
            torch.tensor([is_good for _, is_good in sequences.names]),
            sequences.weights_N,
            losses.kto_reference_point(
                torch.from_numpy(mismatched.policy), torch.from_numpy(mismatched.reference)
            ),
            **settings,
        )
    (slopes_B,) = torch.autograd.grad(loss, policy_B)  # dL / dS
    told = [
        replace(row, advantages=np.where(row.action_mask, -slope / row.loss_weight, 0.0))
        for row, slope in zip(rows, slopes_B.tolist(), strict=True)
    ]
    return told, float(loss.detach()), {name: float(value) for name, value in monitors.items()}


def by_rollout(rows: Sequence[Transition], values: Floats) -> Floats:
    """Sums of the rows' values over each rollout, in order of first appearance."""
    index: dict[str, int] = {}
    places = np.array([index.setdefault(row.rollout_id, len(index)) for row in rows], dtype=np.int64)
    return np.bincount(places, weights=values, minlength=len(index)).astype(np.float64)


def _sequences(rows: Sequence[Transition]) -> _Sequences:
    index: dict[tuple[str, bool], int] = {}
    weights: list[float] = []
    row_K: list[int] = []
    sequence_K: list[int] = []
    for b, row in enumerate(rows):
        for preference in row.preferences:
            n = index.setdefault((preference.id, preference.is_good), len(index))
            if n == len(weights):
                weights.append(preference.weight)
            elif weights[n] != preference.weight:
                raise CreditError(_two_weights(row, preference, weights[n]))
            row_K.append(b)
            sequence_K.append(n)
    return _Sequences(
        names=list(index),
        weights_N=torch.tensor(weights, dtype=torch.float64),
        row_K=torch.tensor(row_K, dtype=torch.int64),
        sequence_K=torch.tensor(sequence_K, dtype=torch.int64),
    )


def _two_weights(row: Transition, preference: Preference, other: float) -> str:
    return (
        f"rollout {row.rollout_id!r}: preference {preference.id!r} has weight {preference.weight!r} in one "
        f"row and {other!r} in another; all rows of a sequence must say the same"
    )


def _sides(sequences: _Sequences) -> tuple[Tensor, Tensor]:
    """Positions of what is chosen and what is rejected, pair by pair."""
    index = {name: n for n, name in enumerate(sequences.names)}
    chosen = [n for (_, is_good), n in index.items() if is_good]
    for pair, is_good in sequences.names:
        if (pair, not is_good) not in index:
            lacking = "rejected" if is_good else "chosen"
            raise CreditError(
                f"pair {pair!r} has no {lacking} side among the rows of its optimizer step; rows of a pair "
                "need the same group_id, trained tokens and a weight above 0"
            )
    rejected = [index[sequences.names[n][0], False] for n in chosen]
    return torch.tensor(chosen, dtype=torch.int64), torch.tensor(rejected, dtype=torch.int64)
