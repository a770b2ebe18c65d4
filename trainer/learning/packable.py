"""Which packs a model can take: found by trying, since a model's class does not tell.

Knows: models and how they can be told who sees whom. Does not know: rows, losses, the learner.

Invariant: what is not proven to give the logits of separate rows is refused, with the reason.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from spangrad.trainer.learning.model import vocabulary_size
from spangrad.trainer.learning.tree_attention import ATTENTION, Masking, Pack, Segment, Tree

TOLERANCE = 1e-4
"""Largest difference of a packed logit, of the largest logit: rounding of float32 is far below, a token that
sees another one far above."""


@dataclass(frozen=True, slots=True)
class Packable:
    """What packs a model takes."""

    masking: Masking | None
    """None: none; rows are padded."""
    longest_row: int | None = None
    """Tokens of the longest row that may be packed: a sliding window is not cut out of a pack."""
    reason: str = ""
    """Why `masking` is None."""


def packable(model: PreTrainedModel) -> Packable:
    """Try packs on a model, and set its attention to take them.

    The attention functions stay transformers' own for batches without a pack.
    """
    before = model.config._attn_implementation
    names: tuple[Masking, ...] = ("flex",) if model.device.type == "cuda" else ("segments", "mask")
    tried: list[str] = []
    if before != "sdpa":
        return Packable(None, reason=f"its attention is {before!r}; 'sdpa' is needed")
    for masking in names:
        try:
            alone = _logits_alone(model)
            model.set_attn_implementation("sdpa" if masking == "mask" else ATTENTION)
            off = _difference(model, masking, alone)
        except Exception as error:  # another's model: whatever it raises is its refusal
            tried.append(f"{masking}: {' '.join(str(error).split())[:200] or type(error).__name__}")
        else:
            if off <= TOLERANCE:
                return Packable(masking, _window(model))
            tried.append(f"{masking}: logits of packed rows are off by {off:.1g} of the largest")
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


def _difference(model: PreTrainedModel, masking: Masking, alone: list[Tensor]) -> float:
    """How far the logits of the packed rows are from theirs alone, of the largest logit."""
    segments = (Segment(0, 6, ()), Segment(6, 9, ((0, 3),)), Segment(9, 12, ()))
    tree = Tree(segments, torch.tensor([9, 9, 9, 6, 6, 6, 9, 9, 9, 12, 12, 12]))
    positions_BT = torch.tensor([[0, 1, 2, 3, 4, 5, 3, 4, 5, 0, 1, 2]])
    pack = Pack("tree", 3, positions_BT, torch.zeros(0, dtype=torch.int64), tree, masking).to(model.device)
    packed_PV = _logits(model, _ids(model), **pack.model_inputs())
    off = max(
        float((packed_PV[list(p)] - logits).abs().max()) for p, logits in zip(_ROWS, alone, strict=True)
    )
    return off / max(float(logits.abs().max()) for logits in alone)


def _window(model: PreTrainedModel) -> int | None:
    """Tokens that the layer with the shortest view sees; None: all see everything."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    windows = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
    found = [getattr(config, name, None) for kind, name in windows.items() if kinds is None or kind in kinds]
    return min((int(window) for window in found if window), default=None)
