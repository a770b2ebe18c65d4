"""How the tokens of a batch are averaged: the weight of each, which travels with its row.

Knows rows. Does not know losses: an objective sums `loss_weight * token loss` and never normalises.

Invariant: a weight depends on the rollout, never on how it was cut into rows (but for `row-token-mean`,
whose unit is the row).
"""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Literal, get_args

from spangrad.credit.transition import Denominator, Transition
from spangrad.errors import ConfigError

Aggregation = Literal["token-mean", "rollout-token-mean", "rollout-step-mean", "row-token-mean", "constant"]

Share = tuple[Denominator, Hashable]

DENOMINATORS: dict[Aggregation, Denominator] = {
    "token-mean": "batch",
    "rollout-token-mean": "rollout",
    "rollout-step-mean": "batch",
    "row-token-mean": "row",
    "constant": "constant",
}
"""Whose trained tokens share a weight: see `Transition.denominator`."""


def weigh(
    rows: Sequence[Transition],
    aggregation: Aggregation = "rollout-token-mean",
    *,
    constant: float | None = None,
    n_rollouts: int | None = None,
) -> list[Transition]:
    """Set `loss_weight` so that the loss is the sum over trained tokens of weight * token loss.

        token-mean           1 / sum_i Z_i
        rollout-token-mean   1 / (N * Z_i), Z_i = trained tokens of rollout i in all its rows
        rollout-step-mean    1 / (N * T_i * m), T_i = trained calls of rollout i, m = tokens of a mean call
        row-token-mean       1 / (rows * trained tokens of the row)
        constant             1 / (N * constant)

    The first counts every token alike, the second every rollout, the third every rollout and inside it
    every token of the batch's mean call, so that short answers are not favoured and many calls are not
    either. The fourth is what is published as the mean over sequences: a rollout of three rows counts
    three times.

    Sources: DAPO, arXiv:2503.14476; per-rollout fairness, `credit/README.md`; the length bias of the
    second, cua-lite, pull request 13; GRPO, arXiv:2402.03300; Dr.GRPO, arXiv:2503.20783.

    Args:
        rows: All rows of the batch.
        aggregation: What counts equally.
        constant: The constant, in tokens; from the config, never this batch's longest.
        n_rollouts: N, where rollouts without a row count too; by default those that have rows.

    Returns:
        The same rows with new weights; rows without a trained token get 0.

    Raises:
        ConfigError: The constant is missing or not above 0, or the aggregation is unknown.
    """
    if aggregation not in get_args(Aggregation):
        names = ", ".join(repr(name) for name in get_args(Aggregation))
        raise ConfigError(f"aggregation is {aggregation!r}; expected one of {names}")
    if aggregation == "constant" and not (constant is not None and constant > 0):
        raise ConfigError(
            f"aggregation 'constant' has constant {constant!r}; expected a number of tokens above 0"
        )
    tokens: dict[tuple[str, int], int] = {}
    calls: dict[tuple[str, int], set[str]] = {}
    for row in rows:
        tokens[_rollout(row)] = tokens.get(_rollout(row), 0) + _trained(row)
        calls.setdefault(_rollout(row), set()).update(segment.call_id for segment in row.segments)
    n = n_rollouts if n_rollouts is not None else len(tokens)
    total = sum(tokens.values())
    call_mean = total / max(1, sum(map(len, calls.values())))
    n_rows = sum(_trained(row) > 0 for row in rows)
    denominators: dict[Aggregation, Callable[[Transition], float]] = {
        "token-mean": lambda row: total,
        "rollout-token-mean": lambda row: n * tokens[_rollout(row)],
        "rollout-step-mean": lambda row: n * len(calls[_rollout(row)]) * call_mean,
        "row-token-mean": lambda row: n_rows * _trained(row),
        "constant": lambda row: n * (constant or 0.0),
    }
    return [
        replace(
            row,
            loss_weight=1.0 / float(denominators[aggregation](row)) if _trained(row) else 0.0,
            denominator=DENOMINATORS[aggregation],
        )
        for row in rows
    ]


def reweigh(rows: Sequence[Transition], kept: Sequence[Transition]) -> list[Transition]:
    """Give the weight of trained tokens that were left out to the others of their denominator.

    A token that leaves the loss leaves its denominator too: a mean stays a mean over what is left. Where
    nothing of a rollout (or row) is left, the other rollouts (or rows) get its share; where the
    denominator is a constant nothing changes.

    Args:
        rows: All rows of the batch, as `weigh` gave them.
        kept: For each of them the same row with fewer trained tokens, perhaps none.

    Returns:
        `kept` with new weights. Their sum over trained tokens is that of `rows`, unless nothing is left.
    """
    before: dict[Share, float] = {}
    after: dict[Share, float] = {}
    for index, (row, less) in enumerate(zip(rows, kept, strict=True)):
        share = _share(row, index)
        before[share] = before.get(share, 0.0) + row.loss_weight * _trained(row)
        after[share] = after.get(share, 0.0) + row.loss_weight * _trained(less)
    factors: dict[Share, float] = {}
    for denominator in {share[0] for share in before} - {"constant"}:
        own = {share: weight for share, weight in before.items() if share[0] == denominator}
        # What nothing is left of leaves its share to the others.
        spread = math.fsum(own.values()) / (math.fsum(own[share] for share in own if after[share]) or 1.0)
        factors |= {share: own[share] / after[share] * spread for share in own if after[share]}
    return [
        replace(less, loss_weight=row.loss_weight * factors.get(_share(row, index), 1.0))
        for index, (row, less) in enumerate(zip(rows, kept, strict=True))
    ]


def _rollout(row: Transition) -> tuple[str, int]:
    return row.rollout_id, row.attempt


def _trained(row: Transition) -> int:
    return int(row.action_mask.sum())


def _share(row: Transition, index: int) -> Share:
    """What a row's weight is shared by: equal for rows with one denominator."""
    of: dict[Denominator, Hashable] = {"rollout": _rollout(row), "row": index}
    return row.denominator, of.get(row.denominator)
