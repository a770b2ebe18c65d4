"""Attention over rows that share prefixes: every token sees its own row and nothing else.

    q sees k   where   k <= q  and  q < subtree_end[k]

Knows: places in a pack, queries, keys, values. Does not know: rows, tokens, losses, models.

Invariants:
* a token's output is, to rounding, what it is when its row is computed alone;
* no (P, P) matrix exists on the CPU: a segment is computed against the ranges that it sees, exactly once.

Shape letters: P places of a pack (tokens in depth-first order), Q and K places of a query and a key range,
H heads, D width of a head.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from spangrad.errors import PolicyError

Masking = Literal["segments", "mask", "flex"]
"""How a model is told who sees whom in a pack: by `attention_forward`, a dense mask, or FlexAttention."""
ATTENTION = "spangrad_tree"
"""Name under which transformers finds `attention_forward`: `model.set_attn_implementation(ATTENTION)`."""
UNSUPPORTED = ("softcap", "s_aux", "position_bias")
"""What a model may ask of its attention that segments do not compute."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens of one row that no earlier row of the pack has: places `start:stop`."""

    start: int
    stop: int
    context: Sequence[tuple[int, int]]
    """Ranges of earlier places that hold the row's tokens before them, in order."""


@dataclass(frozen=True, slots=True, eq=False)
class Tree:
    """Who sees whom in a pack of several trees."""

    segments: Sequence[Segment]
    """Cover the places `0:P` in order."""
    subtree_end_P: Tensor
    """int64; one more than the last place whose row holds this one."""

    def mask_PP(self) -> Tensor:
        """bool, True where the query of the first place sees the key of the second."""
        places_P = torch.arange(len(self.subtree_end_P), device=self.subtree_end_P.device)
        return (places_P <= places_P[:, None]) & (places_P[:, None] < self.subtree_end_P)

    def block_mask(self) -> BlockMask:
        """The same for FlexAttention."""
        ends_P, length = self.subtree_end_P, len(self.subtree_end_P)

        def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) & (query < ends_P[key])

        return create_block_mask(sees, None, None, length, length, device=ends_P.device)


@dataclass(frozen=True, slots=True, eq=False)
class Pack:
    """Rows in one line, without padding; in a tree, what several of them begin with is there once."""

    layout: Literal["tree", "varlen"]
    shared_tokens: int
    """Tokens that rows have in common with earlier ones, and that are therefore not computed again."""
    position_ids_BT: Tensor
    """int64, (1, P): how many tokens of its row precede each one."""
    sources_M: Tensor
    """int64; the place whose output predicts each target, in mask order."""
    tree: Tree
    masking: Masking

    def model_inputs(self) -> dict[str, Any]:
        """What tells a model the positions and who sees whom."""
        inputs: dict[str, Any] = {"position_ids": self.position_ids_BT}
        if self.masking == "flex":
            return inputs | {"attention_mask": self.tree.block_mask()}
        if self.masking == "mask":
            return inputs | {"attention_mask": self.tree.mask_PP()[None, None]}
        # Four dimensions keep transformers from making a mask of its own; segments read none.
        unread = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=self.position_ids_BT.device)
        return inputs | {"attention_mask": unread, "tree": self.tree}

    def to(self, device: torch.device) -> "Pack":
        """The same pack on another device."""
        tree = replace(self.tree, subtree_end_P=self.tree.subtree_end_P.to(device))
        positions, sources = self.position_ids_BT.to(device), self.sources_M.to(device)
        return replace(self, position_ids_BT=positions, sources_M=sources, tree=tree)


class _SegmentAttention(torch.autograd.Function):
    """softmax(Q K^T) V of every segment, from the partial results of the ranges that it sees.

    Parts are merged by their log-sum-exp, as in FlashAttention (arXiv:2205.14135):

        lse = log sum_j exp(lse_j);   o = sum_j exp(lse_j - lse) o_j

    The backward kernel gets the merged `o` and `lse`, so that a part's probabilities are those of the whole
    softmax: exp(q k - lse). The parts' gradients then add up.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, segments: Sequence[Segment], scale: float
    ) -> Tensor:
        """All shapes (1, H, P, D); float32, float64 or bfloat16."""
        out = torch.empty_like(query)
        lse = query.new_empty(query.shape[:-1], dtype=torch.promote_types(query.dtype, torch.float32))
        for segment in segments:
            own = slice(segment.start, segment.stop)
            parts = [_part(query[:, :, own], key[:, :, own], value[:, :, own], True, scale)]
            if segment.context:
                keys, values = _gather(key, segment.context), _gather(value, segment.context)
                parts.append(_part(query[:, :, own], keys, values, False, scale))
            out[:, :, own], lse[:, :, own] = _merge(parts)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.segments, ctx.scale = segments, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        """Add up the gradients of all parts."""
        query, key, value, out, lse = ctx.saved_tensors
        d_query, d_key, d_value = (torch.zeros_like(each) for each in (query, key, value))
        for segment in ctx.segments:
            own = slice(segment.start, segment.stop)
            queries = tuple(each[:, :, own] for each in (grad_out, query, out, lse))
            found = _part_backward(queries, key[:, :, own], value[:, :, own], True, ctx.scale)
            for grad, each in zip((d_query, d_key, d_value), found, strict=True):
                grad[:, :, own] += each
            if segment.context:
                keys, values = _gather(key, segment.context), _gather(value, segment.context)
                into_query, *into = _part_backward(queries, keys, values, False, ctx.scale)
                d_query[:, :, own] += into_query
                for grad, each in zip((d_key, d_value), into, strict=True):
                    _scatter_add(grad, each, segment.context)
        return d_query, d_key, d_value, None, None


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | BlockMask | None,
    *,
    tree: Tree | None = None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """What transformers calls in every attention layer: by segments for a `tree`, else as it would anyway.

    Args:
        module: The attention layer.
        query: (B, H, P, D); with a tree B is 1.
        key: (B, H of keys, P, D); groups of query heads share one.
        value: Like `key`.
        attention_mask: Of a pass without a tree; a `BlockMask` goes to FlexAttention.
        tree: Who sees whom.
        scaling: Factor of the scores; by default 1 / sqrt(D).
        kwargs: What else the model gives its attention.

    Raises:
        PolicyError: The model needs what segments do not compute.
    """
    if isinstance(attention_mask, BlockMask):
        return flex_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    if tree is None:
        found: tuple[Tensor, Tensor | None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return found
    if unknown := [name for name in UNSUPPORTED if kwargs.get(name) is not None]:
        raise PolicyError(f"its attention has {unknown[0]!r}, which attention by segments does not compute")
    groups = query.shape[1] // key.shape[1]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    if torch.is_autocast_enabled(query.device.type):  # as torch's own attention does
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    out: Tensor = _SegmentAttention.apply(  # type: ignore[no-untyped-call]
        query, key, value, tree.segments, scale
    )
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, attention_forward)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def _part(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, scale=scale
    )
    return found


def _part_backward(
    queries: tuple[Tensor, ...], key: Tensor, value: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    grad_out, query, out, lse = queries
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    found: tuple[Tensor, Tensor, Tensor] = backward(
        grad_out, query, key, value, out, lse, 0.0, is_causal, scale=scale
    )
    return found


def _merge(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    if len(parts) == 1:
        return parts[0]
    lse_JHQ = torch.stack([lse for _, lse in parts])
    lse = lse_JHQ.logsumexp(0)
    shares_JHQ = (lse_JHQ - lse).exp()
    out = torch.stack([out for out, _ in parts])
    return (shares_JHQ[..., None] * out).sum(0), lse


def _gather(values: Tensor, ranges: Sequence[tuple[int, int]]) -> Tensor:
    parts = [values[:, :, start:stop] for start, stop in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _scatter_add(into: Tensor, values: Tensor, ranges: Sequence[tuple[int, int]]) -> None:
    done = 0
    for start, stop in ranges:
        into[:, :, start:stop] += values[:, :, done : done + stop - start]
        done += stop - start
