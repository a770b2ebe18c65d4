"""Transition rows to shifted batches; padded ones are made here, packs without padding in `layouts.py`.

Knows: how rows are cut, sorted, bounded and laid out as tensors. Does not know: models,
losses or where the rows came from.

Shape letters: B rows of a batch, T input positions (one fewer than tokens: position t
predicts token t + 1). Padding is on the right, so a causal model needs no attention mask:
no real position ever looks at a padded one.

Invariants:
* every trained token of every row is in exactly one batch, exactly once;
* tokens behind a row's last trained token are not sent: nothing that is trained sees them;
* the same rows give the same batches.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spangrad.credit.books import check_books, dropped_metrics
from spangrad.credit.transition import Transition
from spangrad.errors import CreditError, EmptyBatchError, GradeError, PolicyError
from spangrad.trainer.learning.objectives import OBJECTIVES
from spangrad.trainer.learning.tree_attention import Pack


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Rows as tensors: padded rows of similar length, or a `pack`.

    In a pack, inputs have the shape (1, P), and the fields that tell of a predicted token count the row's
    targets instead of its positions. Targets come in the order of `target_mask_BT` either way, row by row;
    where that is False, those fields mean nothing.
    """

    row_indices: tuple[int, ...]
    """Place of each row in the sequence that was packed."""
    input_ids_BT: Tensor
    """int64; padded with the pad token."""
    attention_mask_BT: Tensor
    """bool; True on real tokens. For accounting and for models that are not causal."""
    target_ids_BT: Tensor
    """int64; the token that position t predicts."""
    target_mask_BT: Tensor
    """bool; True where the predicted token is trained."""
    behavior_logprobs_BT: Tensor
    """float32, nats, of the predicted token."""
    advantages_BT: Tensor
    """float32, of the predicted token."""
    weights_BT: Tensor
    """float32; the row's `loss_weight`."""
    versions_BT: Tensor
    """int64; policy version that sampled the predicted token, -1 = unknown."""
    row_ids_BT: Tensor
    """int64; which row the predicted token is of: a number of its own in this batch."""
    call_ids_BT: Tensor
    """int64; which call sampled the predicted token: a number of its own in this batch, whatever the row."""
    temperatures_BT: Tensor
    """float32; the row's sampling temperature, 1 where it was 0 (engines report greedy logprobs at 1)."""
    pack: Pack | None = None
    """None: padded rows."""

    def model_inputs(self) -> dict[str, Any]:
        """Keyword arguments of a model's forward pass."""
        return {"input_ids": self.input_ids_BT} | ({} if self.pack is None else self.pack.model_inputs())

    def at_targets(self, values_BTX: Tensor) -> Tensor:
        """What of a model's outputs (hidden states, logits) predicts the targets, (M, X) in mask order."""
        if self.pack is None:
            return values_BTX[self.target_mask_BT]
        return values_BTX.flatten(0, 1)[self.pack.sources_M]

    @property
    def layout(self) -> str:
        """How the rows are laid out: `padded`, `varlen` or `tree`."""
        return "padded" if self.pack is None else self.pack.layout

    @property
    def forward_tokens(self) -> int:
        """Tokens that the model computes, padding not counted."""
        return int(self.attention_mask_BT.sum())

    @property
    def shared_tokens(self) -> int:
        """Tokens of rows that are not computed because another row has them."""
        return 0 if self.pack is None else self.pack.shared_tokens

    @property
    def trained_tokens(self) -> int:
        """Number of trained tokens."""
        return int(self.target_mask_BT.sum())

    def to(self, device: torch.device) -> "Batch":
        """The same batch on another device."""
        moved: dict[str, Any] = {
            field.name: value.to(device)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor | Pack)
        }
        return replace(self, **moved)


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
    if np.isinf(row.advantages[row.action_mask]).any():
        raise CreditError(
            f"{row_name(row)}: an advantage is infinite; expected finite, or NaN for not assigned"
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
    metrics |= dropped_metrics(selection.dropped_tokens)
    return {name: float(value) for name, value in metrics.items()}


def whole_groups(rows: Sequence[Transition]) -> list[list[Transition]]:
    """Rows by group, in order of first appearance; a row without a group goes with its rollout.

    What a group is compared by sums to zero over the whole group only: an optimizer step that sees half
    of one pushes the tokens that all its members share up or down for no reason.
    """
    groups: dict[tuple[str, str], list[Transition]] = {}
    for row in rows:
        key = ("rollout", row.rollout_id) if row.group_id is None else ("group", row.group_id)
        groups.setdefault(key, []).append(row)
    return list(groups.values())


def trimmed_length(row: Transition) -> int:
    """Tokens of a row up to its last trained one; 0 if none is trained."""
    trained = np.flatnonzero(row.action_mask)
    return int(trained[-1]) + 1 if trained.size else 0


def target_tensors(
    rows: Sequence[Transition], indices: Sequence[int], tokens: Sequence[NDArray[np.int64]]
) -> dict[str, Any]:
    """The fields of `Batch` that tell of predicted tokens.

    Args:
        rows: What the indices are of.
        indices: Rows of the batch.
        tokens: For each of them the places of its predicted tokens, from 1 on; they fill its line from the
            left.
    """
    shape = (len(indices), max(len(places) for places in tokens))
    target_ids = np.zeros(shape, dtype=np.int64)
    target_mask = np.zeros(shape, dtype=np.bool_)
    behavior = np.zeros(shape, dtype=np.float32)
    advantages = np.zeros(shape, dtype=np.float32)
    weights = np.zeros(shape, dtype=np.float32)
    versions = np.full(shape, -1, dtype=np.int64)
    temperatures = np.ones(shape, dtype=np.float32)
    row_ids = np.repeat(np.arange(shape[0])[:, None], shape[1], axis=1)
    # A trained token outside every segment counts as of one more call of its row.
    call_ids = row_ids.copy()
    calls = shape[0]
    for b, (index, places) in enumerate(zip(indices, tokens, strict=True)):
        row, t = rows[index], slice(0, len(places))
        target_ids[b, t] = row.token_ids[places]
        target_mask[b, t] = row.action_mask[places]
        behavior[b, t] = row.behavior_logprobs[places]
        advantages[b, t] = row.advantages[places]
        versions[b, t] = row.policy_versions[places]
        weights[b, :] = row.loss_weight
        for segment in row.segments:
            call_ids[b, t][(places >= segment.start) & (places < segment.stop)] = calls
            calls += 1
        temperatures[b, :] = row.temperature if row.temperature > 0 else 1.0
    return {
        "target_ids_BT": torch.from_numpy(target_ids),
        "target_mask_BT": torch.from_numpy(target_mask),
        "behavior_logprobs_BT": torch.from_numpy(behavior),
        "advantages_BT": torch.from_numpy(advantages),
        "weights_BT": torch.from_numpy(weights),
        "versions_BT": torch.from_numpy(versions),
        "row_ids_BT": torch.from_numpy(row_ids),
        "call_ids_BT": torch.from_numpy(call_ids),
        "temperatures_BT": torch.from_numpy(temperatures),
    }


def _batch(
    rows: Sequence[Transition], indices: Sequence[int], lengths: NDArray[np.int64], pad_token_id: int
) -> Batch:
    shape = (len(indices), int(max(lengths[i] for i in indices)) - 1)
    input_ids = np.full(shape, pad_token_id, dtype=np.int64)
    attention_mask = np.zeros(shape, dtype=np.bool_)
    for b, index in enumerate(indices):
        t = slice(0, int(lengths[index]) - 1)
        input_ids[b, t] = rows[index].token_ids[t]
        attention_mask[b, t] = True
    return Batch(
        row_indices=tuple(indices),
        input_ids_BT=torch.from_numpy(input_ids),
        attention_mask_BT=torch.from_numpy(attention_mask),
        **target_tensors(rows, indices, [np.arange(1, lengths[i]) for i in indices]),
    )


def pack(rows: Sequence[Transition], *, max_tokens_per_batch: int, pad_token_id: int) -> list[Batch]:
    """Lay rows out as padded batches, longest first.

    Args:
        rows: Rows to pack; those without a trained token are left out.
        max_tokens_per_batch: Bound on `B * T`, padding included. A single longer row gets a
            batch of its own: it can't be split without changing what its tokens see.
        pad_token_id: Token that fills the padding.

    Returns:
        Batches in order of falling length; ties keep the rows' order.
    """
    lengths = np.array([trimmed_length(row) for row in rows], dtype=np.int64)
    order = [int(i) for i in np.argsort(-lengths, kind="stable") if lengths[i] > 0]
    batches: list[Batch] = []
    start = 0
    while start < len(order):
        width = int(lengths[order[start]]) - 1
        count = max(1, max_tokens_per_batch // width)
        batches.append(_batch(rows, order[start : start + count], lengths, pad_token_id))
        start += count
    return batches


def bucketed_batches(
    lengths: NDArray[np.int64], *, batch_rows: int, steps: int, seed: int, bucket_batches: int = 16
) -> Iterator[NDArray[np.int64]]:
    """Choose the rows of every step of a long fit.

    Each pass shuffles all rows, sorts by length inside windows of `bucket_batches` batches (so
    that rows of a batch are of like length), and gives the batches in shuffled order.

    Args:
        lengths: Length of every row.
        batch_rows: Rows per step.
        steps: Number of batches to give.
        seed: Equal arguments and seed give equal batches.
        bucket_batches: Size of the windows, in batches.
    """
    given = passes = 0
    while given < steps:
        rng = np.random.default_rng((seed, passes))
        shuffled = rng.permutation(len(lengths))
        window = batch_rows * bucket_batches
        batches: list[NDArray[np.int64]] = []
        for start in range(0, len(shuffled), window):
            part = shuffled[start : start + window]
            part = part[np.argsort(lengths[part], kind="stable")]
            batches += [part[i : i + batch_rows] for i in range(0, len(part), batch_rows)]
        for index in rng.permutation(len(batches))[: steps - given]:
            yield batches[index]
        given += len(batches)
        passes += 1
