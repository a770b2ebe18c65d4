"""Rows to batches: padded, in one line without padding, or as prefix trees that compute a shared token once.

Knows: tokens, budgets, places in a pack. Does not know: models, losses, where rows came from.

A pack holds rows in the order of their tokens, so that a row shares most with its predecessor; laid out are
the tokens that the predecessor does not have. That is the prefix tree of the rows in depth-first order. Rows
of one rollout share its history, those of a group the prompt; whether rows share is read off their tokens
alone, since a token's hidden state depends on nothing but the tokens before it.

Invariants:
* a target's logprob and gradient are, to rounding, what they are when its row is computed alone;
* every trained token of every row is in exactly one batch, exactly once, with its row's own values;
* a tree beyond the budget is cut between two rows; the second piece repeats its prefix as context;
* the same rows give the same batches.

Shape letters: B rows, T targets of a row, M targets of a batch, P places of a pack, L tokens of a row.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from spangrad.credit.transition import Transition
from spangrad.trainer.learning.packing import Batch, pack, target_tensors, trimmed_length
from spangrad.trainer.learning.tree_attention import Masking, Pack, Segment, Tree

Plan = list[list[tuple[int, int]]]
"""For every pack its rows, each with the number of tokens that the pack has already."""
WORTHWHILE = 0.9
"""A pack is chosen if it computes at most this share of the simpler layout's tokens: attention by segments
costs a CPU about a tenth more per token."""


def lay_out(
    rows: Sequence[Transition],
    *,
    layout: str,
    max_tokens_per_batch: int,
    pad_token_id: int,
    masking: Masking | None = "segments",
) -> list[Batch]:
    """Lay rows out for a model.

    Args:
        rows: Rows to pack; those without a trained token are left out.
        layout: `tree`, `varlen` or `padded`; `auto` takes what computes fewest tokens, the simpler one
            where it hardly matters.
        max_tokens_per_batch: Bound on the tokens of a batch, padding included. A single longer row gets a
            batch of its own: it can't be split without changing what its tokens see.
        pad_token_id: Token that fills the padding.
        masking: How the model is told who sees whom in a pack; None: only `padded` is possible.
    """
    lengths = np.array([max(0, trimmed_length(row) - 1) for row in rows], dtype=np.int64)
    plans: dict[str, Plan] = {}
    if layout in ("auto", "tree"):
        plans["tree"] = _tree_plan(rows, lengths, max_tokens_per_batch)
    if layout in ("auto", "varlen"):
        plans["varlen"] = _varlen_plan(lengths, max_tokens_per_batch)
    if layout == "auto":
        layout = _cheapest(plans, lengths, max_tokens_per_batch)
    if layout == "padded" or masking is None:
        return pack(rows, max_tokens_per_batch=max_tokens_per_batch, pad_token_id=pad_token_id)
    name: Literal["tree", "varlen"] = "tree" if layout == "tree" else "varlen"
    return [_batch(rows, part, lengths, name, masking) for part in plans[name]]


def padded_tokens(lengths_B: NDArray[np.int64], max_tokens_per_batch: int) -> int:
    """Tokens that `pack` computes for rows of these lengths, padding included."""
    falling, start, total = np.sort(lengths_B[lengths_B > 0])[::-1], 0, 0
    while start < len(falling):
        width = int(falling[start])
        stop = min(len(falling), start + max(1, max_tokens_per_batch // width))
        total += width * (stop - start)
        start = stop
    return total


def _cheapest(plans: dict[str, Plan], lengths: NDArray[np.int64], max_tokens_per_batch: int) -> str:
    padded = padded_tokens(lengths, max_tokens_per_batch)
    varlen, tree = (
        sum(int(lengths[index]) - shared for part in plans[name] for index, shared in part)
        for name in ("varlen", "tree")
    )
    if tree <= WORTHWHILE * min(varlen, padded):
        return "tree"
    return "varlen" if varlen <= WORTHWHILE * padded else "padded"


def _varlen_plan(lengths: NDArray[np.int64], max_tokens: int) -> Plan:
    order = [int(i) for i in np.argsort(-lengths, kind="stable") if lengths[i] > 0]
    return _fill(((index, 0) for index in order), lengths, max_tokens)


def _tree_plan(rows: Sequence[Transition], lengths: NDArray[np.int64], max_tokens: int) -> Plan:
    inputs = {i: rows[i].token_ids[: lengths[i]].astype(">u4") for i in range(len(rows)) if lengths[i] > 0}
    keys = {index: ids.tobytes() for index, ids in inputs.items()}
    order = sorted(inputs, key=lambda index: (keys[index], index))
    before = [np.zeros(0), *(inputs[index] for index in order)]
    return _fill(
        ((index, _common(one, inputs[index])) for one, index in zip(before, order, strict=False)),
        lengths,
        max_tokens,
    )


def _common(one: NDArray[Any], other: NDArray[Any]) -> int:
    length = min(len(one), len(other))
    differs = np.flatnonzero(one[:length] != other[:length])
    return int(differs[0]) if differs.size else length


def _fill(items: Iterable[tuple[int, int]], lengths: NDArray[np.int64], max_tokens: int) -> Plan:
    """Cut the rows, each with what it shares with its predecessor, where the budget ends."""
    plan: Plan = []
    used = 0
    for index, shared in items:
        fresh = int(lengths[index]) - shared
        if not plan or (fresh and used + fresh > max_tokens):
            plan.append([])
            used, shared, fresh = 0, 0, int(lengths[index])
        plan[-1].append((index, shared))
        used += fresh
    return plan


def _batch(
    rows: Sequence[Transition],
    part: Sequence[tuple[int, int]],
    lengths: NDArray[np.int64],
    layout: Literal["tree", "varlen"],
    masking: Masking,
) -> Batch:
    size = sum(int(lengths[index]) - shared for index, shared in part)
    input_ids_P = np.empty(size, dtype=np.int64)
    positions_P = np.empty(size, dtype=np.int64)
    ends_P = np.full(size, size, dtype=np.int64)
    segments: list[Segment] = []
    sources: list[NDArray[np.int64]] = []
    targets: list[NDArray[np.int64]] = []
    places_L = np.zeros(0, dtype=np.int64)  # of the row's tokens in the pack
    start = 0
    for index, shared in part:
        row, length = rows[index], int(lengths[index])
        stop = start + length - shared
        ends_P[places_L[shared:]] = start  # no later row has these tokens
        places_L = np.concatenate([places_L[:shared], np.arange(start, stop)])
        if stop > start:
            segments.append(Segment(start, stop, _ranges(places_L[:shared])))
        input_ids_P[start:stop] = row.token_ids[shared:length]
        positions_P[start:stop] = np.arange(shared, length)
        targets.append(np.flatnonzero(row.action_mask[: length + 1]))
        sources.append(places_L[targets[-1] - 1])
        start = stop
    indices = tuple(index for index, _ in part)
    return Batch(
        row_indices=indices,
        input_ids_BT=torch.from_numpy(input_ids_P)[None],
        attention_mask_BT=torch.ones((1, size), dtype=torch.bool),
        **target_tensors(rows, indices, targets),
        pack=Pack(
            layout=layout,
            shared_tokens=sum(shared for _, shared in part),
            position_ids_BT=torch.from_numpy(positions_P)[None],
            sources_M=torch.from_numpy(np.concatenate(sources)),
            tree=Tree(tuple(segments), torch.from_numpy(ends_P)),
            masking=masking,
        ),
    )


def _ranges(places: NDArray[np.int64]) -> tuple[tuple[int, int], ...]:
    """Rising places as ranges `(start, stop)`."""
    if not places.size:
        return ()
    breaks = np.flatnonzero(np.diff(places) != 1)
    starts = places[np.concatenate([[0], breaks + 1])].tolist()
    stops = (places[np.concatenate([breaks, [len(places) - 1]])] + 1).tolist()
    return tuple(zip(starts, stops, strict=True))
