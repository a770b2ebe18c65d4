"""Which rows a learner trains: checked, and what can't train left out and counted.

Knows: rows, what objectives need of them. Does not know: tensors, models or how rows are laid out.

Invariant: every token that rows came to train is kept, or counted as dropped for a reason.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from spangrad.credit.books import check_books, dropped_metrics
from spangrad.credit.transition import Transition
from spangrad.errors import CreditError, EmptyBatchError, GradeError, PolicyError
from spangrad.trainer.learning.objectives import OBJECTIVES

CallKey = tuple[str, int, str]
"""rollout_id, attempt, call_id."""


@dataclass(frozen=True, slots=True)
class TrainedCall:
    """What an update trained of one call."""

    tokens: int
    loss_weight: float
    """Of each of these tokens; the mean where they are in several rows."""


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """Rows that can train, and how many rows and tokens could not."""

    rows: tuple[Transition, ...]
    rows_without_tokens: int
    """Rows without a trained token."""
    rows_without_signal: int
    """Rows whose advantages are all zero and that no other loss term needs, that lack a preference which the
    objective needs, or whose weight is 0."""
    silent: tuple[Transition, ...]
    """Those rows."""
    tokens_without_advantage: int
    """Trained tokens whose advantage is NaN (not assigned): taken out of the action mask."""
    dropped_tokens: Mapping[str, int]
    """Why tokens that rows came to train are not trained -> how many."""


def row_name(row: Transition) -> str:
    """What errors call a row."""
    calls = ",".join(segment.call_id for segment in row.segments)
    return f"rollout {row.rollout_id!r} attempt {row.attempt} calls [{calls}]"


def _check_row(row: Transition) -> None:
    tokens = len(row.token_ids)
    for name in ("action_mask", "behavior_logprobs", "policy_versions", "advantages"):
        if len(getattr(row, name)) != tokens:
            raise CreditError(
                f"{row_name(row)}: {name} has {len(getattr(row, name))} values, token_ids has {tokens}; "
                "both must cover every token"
            )
    if tokens and row.action_mask[0]:
        raise CreditError(
            f"{row_name(row)}: the first token is marked as sampled; nothing precedes it, so it can't be "
            "trained"
        )
    if not np.isfinite(row.loss_weight) or row.loss_weight < 0:
        raise CreditError(f"{row_name(row)}: loss_weight is {row.loss_weight!r}; expected a number >= 0")


def _check_finite_advantages(row: Transition) -> None:
    advantages = row.advantages[row.action_mask]
    if (wrong := advantages[np.abs(advantages) > np.finfo(np.float32).max]).size:
        raise CreditError(
            f"{row_name(row)}: an advantage is {wrong[0]:g}, infinite in float32; expected finite, or NaN "
            "for not assigned"
        )


def _check_ratio_row(row: Transition, objective: str) -> None:
    logprobs = row.behavior_logprobs[row.action_mask]
    unknown = int((~np.isfinite(logprobs)).sum())
    if unknown:
        raise GradeError(
            f"{row_name(row)} has grade {row.grade!r}: {unknown} of {logprobs.size} trained tokens have no "
            f"behaviour logprob; {objective} needs grade 'exact', train these rows with objective 'bc'"
        )
    if not row.temperature > 0:
        raise GradeError(
            f"{row_name(row)} was sampled at temperature {row.temperature!r}; {objective} needs tokens "
            "that were sampled at a temperature above 0"
        )


def select_rows(rows: Sequence[Transition], *, objective: str, needs_all_tokens: bool) -> Selection:
    """Check rows and keep those that can change the policy.

    Args:
        rows: Rows as they come from credit.
        objective: Name of one; those with a ratio need behaviour logprobs and advantages, those that compare
            sequences need preferences.
        needs_all_tokens: Keep rows whose advantages are all zero: an entropy or KL term
            trains on them too.

    Raises:
        CreditError: A row contradicts itself.
        GradeError: A row lacks what the objective needs.
        EmptyBatchError: Nothing is left; the counts are in the message.
        BooksError: A token is neither kept nor counted as dropped, or both.
    """
    kept: list[Transition] = []
    silent: list[Transition] = []
    without_tokens = without_advantage = 0
    dropped: Counter[str] = Counter()
    for row in rows:
        _check_row(row)
        if not row.action_mask.any():
            without_tokens += 1
            continue
        chosen = OBJECTIVES[objective]
        if chosen.needs_credit:
            if chosen.uses_ratio:
                _check_ratio_row(row, objective)
            _check_finite_advantages(row)
            is_unassigned = row.action_mask & np.isnan(row.advantages)
            without_advantage += int(is_unassigned.sum())
            if is_unassigned.any():
                row = replace(row, action_mask=row.action_mask & ~is_unassigned)
            has_signal = bool((row.advantages[row.action_mask] != 0).any())
            has_signal = has_signal or (
                (needs_all_tokens or not chosen.uses_ratio) and bool(row.action_mask.any())
            )
        else:
            has_signal = bool(row.preferences) or not chosen.compares_sequences
        if has_signal and row.loss_weight > 0:
            kept.append(row)
            continue
        silent.append(row)
        lacks = "preference" if chosen.compares_sequences else "advantage other than 0"
        why = "loss weight is 0" if has_signal else f"no {lacks}"
        dropped[why] += int(row.action_mask.sum())
    if not kept:
        raise EmptyBatchError(
            f"none of {len(rows)} rows can train objective {objective!r}: {without_tokens} have no trained "
            f"token, {len(silent)} have zero weight, no preference or only zero or unassigned advantages "
            f"({without_advantage} tokens unassigned); check rewards and groups"
        )
    dropped["advantage not assigned"] = without_advantage
    check_books(
        sum(int(row.action_mask.sum()) for row in rows),
        sum(int(row.action_mask.sum()) for row in kept),
        dropped,
        where=f"{len(rows)} rows",
    )
    return Selection(tuple(kept), without_tokens, len(silent), tuple(silent), without_advantage, +dropped)


def largest_advantage(rows: Sequence[Transition]) -> str:
    """The largest advantage of some rows, in size, and whose it is."""
    found = [(float(np.nanmax(np.abs(row.advantages), initial=0.0)), row.rollout_id) for row in rows]
    size, rollout_id = max(found)
    return f"{size:g}, of rollout {rollout_id!r}"


def check_vocabulary(rows: Sequence[Transition], *, size: int, model: str) -> None:
    """Refuse token ids that the model does not have.

    Raises:
        PolicyError: A row has an id outside `0..size - 1`.
    """
    for row in rows:
        low, high = int(row.token_ids.min(initial=0)), int(row.token_ids.max(initial=0))
        if low < 0 or high >= size:
            raise PolicyError(
                f"{row_name(row)}: token ids span {low}..{high}, the model in {model!r} knows 0..{size - 1}; "
                "the rows come from another tokenizer"
            )


def trained_calls(rows: Sequence[Transition]) -> dict[CallKey, TrainedCall]:
    """What the rows train of each call; a call that none of them trains is not in it."""
    tokens: Counter[CallKey] = Counter()
    weights: dict[CallKey, float] = {}
    for row in rows:
        for segment in row.segments:
            key = (row.rollout_id, row.attempt, segment.call_id)
            trained = int(row.action_mask[segment.start : segment.stop].sum())
            tokens[key] += trained
            weights[key] = weights.get(key, 0.0) + row.loss_weight * trained
    return {key: TrainedCall(count, weights[key] / count) for key, count in tokens.items() if count}


def data_metrics(selection: Selection, *, policy_version: int | None) -> dict[str, float]:
    """What an update trained on and what it left out; staleness in updates if the version is given."""
    rows = selection.rows
    metrics: dict[str, float] = {
        "data/rows": len(rows),
        "data/rollouts": len({(row.rollout_id, row.attempt) for row in rows}),
        "data/trained_tokens": sum(int(row.action_mask.sum()) for row in rows),
        "data/rows_without_tokens": selection.rows_without_tokens,
        "data/rows_without_signal": selection.rows_without_signal,
        "data/tokens_without_advantage": selection.tokens_without_advantage,
    }
    if policy_version is not None:
        versions = np.concatenate([row.policy_versions[row.action_mask] for row in rows])
        staleness = policy_version - versions[versions >= 0]
        if staleness.size:
            metrics["data/staleness_mean"] = float(staleness.mean())
            metrics["data/staleness_max"] = float(staleness.max())
            for updates, count in zip(*np.unique(staleness, return_counts=True), strict=True):
                metrics[f"data/staleness_{updates}"] = count / staleness.size
    metrics |= dropped_metrics(selection.dropped_tokens)
    return {name: float(value) for name, value in metrics.items()}
