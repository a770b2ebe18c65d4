"""Which packs a model can take: found by trying, since a model's class does not tell.

Knows: models and how they can be told who sees whom. Does not know: rows, losses, the learner.

Invariant: what is not proven to give the logits and the gradient of separate rows, in the type that they will
be computed in, is refused, with the reason.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from spangrad.trainer.learning.model import vocabulary_size
from spangrad.trainer.learning.tree_attention import ATTENTION, Masking, Pack, Segment, Tree

TOLERANCE = 1e-4
"""Largest difference of a packed logit in float32, of the largest logit: rounding is far below, a token that
sees another one far above."""
GRADIENT_TOLERANCES: Mapping[torch.dtype, float] = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Largest norm of the difference of the packed gradient, of the gradient's norm. Who sees whom is proven by
the logits: a backward kernel that does something else is off by more than bfloat16 rounds."""


@dataclass(frozen=True, slots=True)
class Packable:
    """What packs a model takes."""

    masking: Masking | None
    """None: none; rows are padded."""
    longest_row: int | None = None
    """Tokens of the longest row that may be packed: a sliding window is not cut out of a pack."""
    reason: str = ""
    """Why `masking` is None."""


def packable(model: PreTrainedModel, compute_dtype: torch.dtype = torch.float32) -> Packable:
    """Try packs on a model, and set its attention to take them.

    The attention functions stay transformers' own for batches without a pack.

    Args:
        model: In float32; no gradient of it is left behind.
        compute_dtype: What it will be trained in: bfloat16 means autocast.
    """
    before = model.config._attn_implementation
    names: tuple[Masking, ...] = ("flex",) if model.device.type == "cuda" else ("segments", "mask")
    tried: list[str] = []
    if before != "sdpa":
        return Packable(None, reason=f"its attention is {before!r}; 'sdpa' is needed")
    for masking in names:
        try:
            alone, gradient_alone = _logits_alone(model), _gradient_alone(model, compute_dtype)
            model.set_attn_implementation("sdpa" if masking == "mask" else ATTENTION)
            off = _difference(model, masking, alone)
            gradient_off = _gradient_difference(model, masking, compute_dtype, gradient_alone)
        except Exception as error:  # another's model: whatever it raises is its refusal
            tried.append(f"{masking}: {' '.join(str(error).split())[:200] or type(error).__name__}")
        else:
            if off <= TOLERANCE and gradient_off <= GRADIENT_TOLERANCES[compute_dtype]:
                return Packable(masking, _window(model))
            what = f"logits of packed rows are off by {off:.1g} of the largest"
            if off <= TOLERANCE:
                what = f"the gradient of packed rows is off by {gradient_off:.1g} of its norm"
            tried.append(f"{masking}: {what}")
        model.set_attn_implementation(before)
    return Packable(None, reason="; ".join(tried))


_ROWS = ((0, 1, 2, 3, 4, 5), (0, 1, 2, 6, 7, 8), (9, 10, 11))
"""Places of the rows that are tried: two of one tree, one of another."""


def _ids(model: PreTrainedModel) -> Tensor:
    return torch.arange(12, device=model.device) % (min(16, vocabulary_size(model)) - 1) + 1


def _logits(model: PreTrainedModel, ids_P: Tensor, **inputs: Any) -> Tensor:
    with torch.no_grad():
        logits_PV: Tensor = model(input_ids=ids_P[None], use_cache=False, **inputs).logits[0]
    return logits_PV.float()


def _logits_alone(model: PreTrainedModel) -> list[Tensor]:
    return [_logits(model, _ids(model)[list(places)]) for places in _ROWS]


def _gradient(
    model: PreTrainedModel, ids_P: Tensor, rows: Sequence[Sequence[int]], dtype: torch.dtype, **inputs: Any
) -> Tensor:
    """(P, H), float32: what each place's embedding does to the log-probabilities of the rows' next tokens."""
    leaves: list[Tensor] = []

    def as_leaf(_module: torch.nn.Module, _args: Any, embedded: Tensor) -> Tensor:
        leaves.append(embedded.detach().requires_grad_())
        return leaves[-1]

    hook = model.get_input_embeddings().register_forward_hook(as_leaf)
    is_mixed = dtype == torch.bfloat16
    try:
        with torch.enable_grad():
            with torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=is_mixed):
                logits_PV = model(input_ids=ids_P[None], use_cache=False, **inputs).logits[0]
            logprobs_PV = logits_PV.float().log_softmax(-1)
            found = [logprobs_PV[list(row[:-1]), ids_P[list(row[1:])]].sum() for row in rows]
            return torch.autograd.grad(torch.stack(found).sum(), leaves[0])[0][0].float()
    finally:
        hook.remove()


def _gradient_alone(model: PreTrainedModel, dtype: torch.dtype) -> Tensor:
    """Of the places of the pack, added up over the rows that each is of."""
    ids_P = _ids(model)
    parts = [_gradient(model, ids_P[list(row)], [range(len(row))], dtype) for row in _ROWS]
    whole_PH = parts[0].new_zeros(len(ids_P), parts[0].shape[1])
    for row, part in zip(_ROWS, parts, strict=True):
        whole_PH[list(row)] += part
    return whole_PH


def _pack(model: PreTrainedModel, masking: Masking) -> Pack:
    segments = (Segment(0, 6, ()), Segment(6, 9, ((0, 3),)), Segment(9, 12, ()))
    tree = Tree(segments, torch.tensor([9, 9, 9, 6, 6, 6, 9, 9, 9, 12, 12, 12]))
    positions_BT = torch.tensor([[0, 1, 2, 3, 4, 5, 3, 4, 5, 0, 1, 2]])
    return Pack("tree", 3, positions_BT, torch.zeros(0, dtype=torch.int64), tree, masking).to(model.device)


def _difference(model: PreTrainedModel, masking: Masking, alone: list[Tensor]) -> float:
    """How far the logits of the packed rows are from theirs alone, of the largest logit."""
    packed_PV = _logits(model, _ids(model), **_pack(model, masking).model_inputs())
    off = max(
        float((packed_PV[list(p)] - logits).abs().max()) for p, logits in zip(_ROWS, alone, strict=True)
    )
    return off / max(float(logits.abs().max()) for logits in alone)


def _gradient_difference(
    model: PreTrainedModel, masking: Masking, dtype: torch.dtype, alone_PH: Tensor
) -> float:
    """How far the gradient of the packed rows is from theirs alone, of its norm."""
    packed_PH = _gradient(model, _ids(model), _ROWS, dtype, **_pack(model, masking).model_inputs())
    return float((packed_PH - alone_PH).norm() / alone_PH.norm())


def _window(model: PreTrainedModel) -> int | None:
    """Tokens that the layer with the shortest view sees; None: all see everything."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    windows = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
    found = [getattr(config, name, None) for kind, name in windows.items() if kinds is None or kind in kinds]
    return min((int(window) for window in found if window), default=None)
