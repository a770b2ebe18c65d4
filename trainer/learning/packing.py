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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spangrad.credit.transition import Transition
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
    values_BT: Tensor
    """float32; what a critic said before the predicted token, if that is a call's first; NaN: nothing."""
    value_targets_BT: Tensor
    """float32; what it should have said there; NaN: nothing."""
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
    def is_idle(self) -> bool:
        """Whether it has no rows: a pass that keeps this rank in step with others."""
        return not self.row_indices

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
    values, value_targets = np.full((2, *shape), np.nan, dtype=np.float32)
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
            for told, number in ((values, segment.value), (value_targets, segment.value_target)):
                if number is not None:
                    told[b, t][places == segment.start] = number
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
        "values_BT": torch.from_numpy(values),
        "value_targets_BT": torch.from_numpy(value_targets),
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


def idle_batch(rows: Sequence[Transition], *, pad_token_id: int) -> Batch:
    """A short pass that trains nothing: for a rank that has no rows left while others have."""
    shortest = min(filter(trimmed_length, rows), key=trimmed_length)
    (batch,) = pack([shortest], max_tokens_per_batch=1, pad_token_id=pad_token_id)
    return replace(batch, row_indices=(), target_mask_BT=torch.zeros_like(batch.target_mask_BT))


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
