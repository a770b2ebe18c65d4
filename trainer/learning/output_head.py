"""Log-probabilities and entropies of chosen tokens, without a tensor of positions x vocabulary.

Knows: hidden states, an output layer, targets. Does not know: what is before the output layer, rows, losses.

Shape letters: M targets, C targets of one chunk, H hidden, V vocabulary.

Invariants:
* no tensor has more than `CHUNK_LOGITS` logits (or one target's, if that is more), forward or backward, and
  no more than `KEPT_LOGITS` are kept from the one to the other, whatever the targets and the vocabulary;
* values and gradients are those of the whole computation at once, whatever the chunks are;
* bfloat16 multiplies matrices, no more: temperature, softmax and entropy are float32 (or a model's float64).
"""

from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from spangrad.trainer.learning.losses import token_entropy

Entropy = Literal["none", "value", "grad"]

CHUNK_LOGITS = 2**23
"""Logits in one chunk: 32 MiB in float32, which a cache can hold and a matrix product can use."""
KEPT_LOGITS = 2**25
"""Logits that are kept for the backward pass, 128 MiB in float32; those of other chunks are made again."""


@dataclass(frozen=True, slots=True)
class HeadForm:
    """How a model's logits follow from its output layer `y = W h + b`: `s y`, or `c tanh(s y / c)`."""

    scale: float = 1.0
    """s"""
    softcap: float | None = None
    """c; None: no cap."""

    def logits(self, output: Tensor) -> Tensor:
        """Apply it, in place."""
        if self.scale != 1.0:
            output.mul_(self.scale)
        return output if self.softcap is None else output.div_(self.softcap).tanh_().mul_(self.softcap)


def output_layer(model: PreTrainedModel) -> torch.nn.Linear:
    """The layer that makes logits of hidden states."""
    return cast(torch.nn.Linear, model.get_output_embeddings())  # type: ignore[no-untyped-call]


def head_form(model: PreTrainedModel) -> HeadForm | None:
    """How the model's logits follow from its output layer; None where they do in no form known here.

    Found by comparing the model's logits of a few tokens with the output layer's. A cap, which small
    logits would hide, is read off the setting `final_logit_softcapping`.
    """
    layer = output_layer(model)
    if not isinstance(layer, torch.nn.Linear):
        return None
    softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    ids_BT = torch.arange(1, min(9, layer.weight.shape[0]), device=model.device)[None]
    with torch.no_grad():
        full_BTV = model(input_ids=ids_BT, use_cache=False).logits
        output_BTV = layer(model.base_model(input_ids=ids_BT, use_cache=False).last_hidden_state)
        scaled_BTV = full_BTV if softcap is None else softcap * (full_BTV / softcap).atanh()
        scale = float((scaled_BTV * output_BTV).sum() / output_BTV.square().sum())  # least squares
        form = HeadForm(1.0 if abs(scale - 1.0) < 1e-5 else scale, softcap)
        is_same = torch.allclose(full_BTV, form.logits(output_BTV), rtol=1e-5, atol=1e-5)
    return form if is_same else None


def stats_of_targets(
    hidden_MH: Tensor,
    layer: torch.nn.Linear,
    targets_M: Tensor,
    temperatures_M: Tensor | None,
    *,
    form: HeadForm,
    compute_dtype: torch.dtype,
    entropy: Entropy = "none",
    chunk_logits: int = CHUNK_LOGITS,
    kept_logits: int = KEPT_LOGITS,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of every target, and the entropy of the distribution that it comes from.

        z = logits(W h + b) / temperature;  log p_t = z_t - log Z;  H = log Z - sum_v p_v z_v
        d log p_t / dz = 1_t - p;           dH / dz = -p (log p + H)

    The output layer runs chunk by chunk, and again in the backward pass, which knows how much each target
    weighs in the loss. The logits of the first chunks are kept, and where the output layer is frozen (LoRA)
    the forward pass already makes `d log p_t / dh`: neither needs the second run.

    Args:
        hidden_MH: Hidden state that predicts each target. A position with several targets comes several
            times: its gradients add up.
        layer: The output layer, `weight` (V, H) and `bias` (V) or None.
        targets_M: int64.
        temperatures_M: Above 0; None: all are 1.
        form: What `head_form` said of the model.
        compute_dtype: bfloat16 to multiply matrices in it; anything else: in the weight's own.
        entropy: `none`, `value` (no gradient) or `grad`.
        chunk_logits: Most logits at a time; changes no number but rounding.
        kept_logits: Most logits to keep for the backward pass.

    Returns:
        Nats, shapes (M,), float32 or the weight's float64; no entropy for `none`. Without targets both
        are empty.
    """
    dtype = compute_dtype if compute_dtype == torch.bfloat16 else layer.weight.dtype
    stats: tuple[Tensor, Tensor | None] = _Stats.apply(  # type: ignore[no-untyped-call]
        hidden_MH,
        layer.weight,
        layer.bias,
        targets_M,
        temperatures_M,
        form,
        dtype,
        entropy,
        (chunk_logits, kept_logits),
    )
    return stats


def stats_of_logits(
    logits_MV: Tensor, targets_M: Tensor, temperatures_M: Tensor | None, *, entropy: Entropy = "none"
) -> tuple[Tensor, Tensor | None]:
    """What `stats_of_targets` returns, of logits that are there: for a model without a `HeadForm`."""
    z_MV = logits_MV if logits_MV.dtype == torch.float64 else logits_MV.float()
    if temperatures_M is not None:
        z_MV = z_MV / temperatures_M[:, None]
    logprobs_M = z_MV.gather(-1, targets_M[:, None]).squeeze(-1) - z_MV.logsumexp(-1)
    if entropy == "none":
        return logprobs_M, None
    return logprobs_M, token_entropy(z_MV if entropy == "grad" else z_MV.detach())


class _Chunks:
    """Logits of a chunk of targets, and the gradient at them, in buffers that every chunk uses again."""

    def __init__(self, ctx: Any, hidden_MH: Tensor, weight_VH: Tensor, bias_V: Tensor | None) -> None:
        """Matrices in `ctx.dtype`; logits in float32, or in float64 where that is."""
        self.hidden_MH, self.weight_VH = hidden_MH.to(ctx.dtype), weight_VH.to(ctx.dtype)
        self.bias_V = None if bias_V is None else bias_V.to(ctx.dtype)
        self.form: HeadForm = ctx.form
        self.dtype = torch.float64 if ctx.dtype == torch.float64 else torch.float32
        self.size = max(1, min(len(hidden_MH), ctx.chunk_logits // len(weight_VH)))
        self.logits_of_one = self.size * len(weight_VH)
        self._buffers: dict[str, Tensor] = {}

    def parts(self) -> list[slice]:
        """All chunks."""
        return [slice(start, start + self.size) for start in range(0, len(self.hidden_MH), self.size)]

    def buffer(self, name: str, rows: int, dtype: torch.dtype | None = None) -> Tensor:
        """A place for `rows` rows of the vocabulary's size."""
        if name not in self._buffers:
            shape = (self.size, len(self.weight_VH))
            self._buffers[name] = self.weight_VH.new_empty(shape, dtype=dtype or self.dtype)
        return self._buffers[name][:rows]

    def logits(self, part: slice, temperatures_M: Tensor | None, *, is_kept: bool = False) -> Tensor:
        """The logits `z` of a part, in a place of their own if they are to be kept."""
        hidden_CH, weight_HV = self.hidden_MH[part], self.weight_VH.t()
        shape = (len(hidden_CH), len(self.weight_VH))
        z_CV = hidden_CH.new_empty(shape, dtype=self.dtype) if is_kept else self.buffer("logits", shape[0])
        is_cast = self.weight_VH.dtype != self.dtype
        output_CV = self.buffer("output", len(hidden_CH), self.weight_VH.dtype) if is_cast else z_CV
        if self.bias_V is None:
            torch.mm(hidden_CH, weight_HV, out=output_CV)
        else:
            torch.addmm(self.bias_V, hidden_CH, weight_HV, out=output_CV)
        if is_cast:
            z_CV.copy_(output_CV)
        self.form.logits(z_CV)
        return z_CV if temperatures_M is None else z_CV.div_(temperatures_M[part, None])

    def gradients(
        self,
        z_CV: Tensor,
        targets_C: Tensor,
        temperatures_C: Tensor | None,
        logprob_grads_C: Tensor,
        entropy_grads_C: Tensor | None = None,
        entropy_C: Tensor | None = None,
    ) -> Tensor:
        """The gradient at the output layer's `y`, in the matrices' dtype."""
        scale_C = self.form.scale if temperatures_C is None else self.form.scale / temperatures_C
        slopes_C1 = (logprob_grads_C * scale_C)[:, None]
        y_grads_CV = torch.softmax(z_CV, -1, out=self.buffer("probabilities", len(z_CV)))
        if entropy_grads_C is None or entropy_C is None:
            y_grads_CV.mul_(-slopes_C1)
        else:
            log_p_CV = torch.log_softmax(z_CV, -1, out=self.buffer("logprobs", len(z_CV)))
            log_p_CV.add_(entropy_C[:, None]).mul_((entropy_grads_C * scale_C)[:, None]).add_(slopes_C1)
            y_grads_CV.mul_(log_p_CV.neg_())
        y_grads_CV.scatter_add_(1, targets_C[:, None], slopes_C1)
        if self.form.softcap is not None:
            capped_CV = z_CV if temperatures_C is None else z_CV * temperatures_C[:, None]
            y_grads_CV.mul_(1.0 - (capped_CV / self.form.softcap).square())  # 1 - tanh^2
        return y_grads_CV.to(self.weight_VH.dtype)


class _Stats(torch.autograd.Function):
    """`stats_of_targets` as one step of autograd."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_MH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_M: Tensor,
        temperatures_M: Tensor | None,
        form: HeadForm,
        dtype: torch.dtype,
        entropy: Entropy,
        limits: tuple[int, int],
    ) -> tuple[Tensor, Tensor | None]:
        ctx.form, ctx.dtype, (ctx.chunk_logits, kept_logits) = form, dtype, limits
        chunks = _Chunks(ctx, hidden_MH, weight_VH, bias_V)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        is_frozen = not needs_weight and not needs_bias and entropy != "grad"
        slopes_MH = torch.empty_like(chunks.hidden_MH) if is_frozen and needs_hidden else None
        logprobs_M = hidden_MH.new_empty(len(hidden_MH), dtype=chunks.dtype)
        entropy_M = None if entropy == "none" else torch.empty_like(logprobs_M)
        keeps = slopes_MH is None and any(ctx.needs_input_grad)
        kept: list[Tensor] = []
        for part in chunks.parts():
            is_kept = keeps and (len(kept) + 1) * chunks.logits_of_one <= kept_logits
            z_CV = chunks.logits(part, temperatures_M, is_kept=is_kept)
            if is_kept:
                kept.append(z_CV)
            log_p_CV = torch.log_softmax(z_CV, -1, out=chunks.buffer("logprobs", len(z_CV)))
            logprobs_M[part] = log_p_CV.gather(1, targets_M[part, None]).squeeze(1)
            if entropy_M is not None:
                p_CV = torch.softmax(z_CV, -1, out=chunks.buffer("probabilities", len(z_CV)))
                entropy_M[part] = p_CV.mul_(log_p_CV).sum(-1).neg_()
            if slopes_MH is not None:  # d log p_t / dh
                temperatures_C = None if temperatures_M is None else temperatures_M[part]
                ones_C = torch.ones_like(logprobs_M[part])
                y_grads_CV = chunks.gradients(z_CV, targets_M[part], temperatures_C, ones_C)
                torch.mm(y_grads_CV, chunks.weight_VH, out=slopes_MH[part])
        ctx.save_for_backward(
            hidden_MH, weight_VH, bias_V, targets_M, temperatures_M, entropy_M, slopes_MH, *kept
        )
        ctx.set_materialize_grads(False)
        if entropy == "value":
            ctx.mark_non_differentiable(entropy_M)
        return logprobs_M, entropy_M

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, logprob_grads_M: Tensor | None, entropy_grads_M: Tensor | None) -> Any:
        hidden_MH, weight_VH, bias_V, targets_M, temperatures_M, entropy_M, slopes_MH, *kept = (
            ctx.saved_tensors
        )
        if logprob_grads_M is None:
            logprob_grads_M = torch.zeros_like(cast(Tensor, entropy_grads_M))
        others = (None,) * 6
        if slopes_MH is not None:
            return (slopes_MH * logprob_grads_M[:, None]).to(hidden_MH.dtype), None, None, *others
        chunks = _Chunks(ctx, hidden_MH, weight_VH, bias_V)
        is_needed = ctx.needs_input_grad
        hidden_grads_MH = torch.zeros_like(chunks.hidden_MH) if is_needed[0] else None
        weight_grads_VH = torch.zeros_like(weight_VH) if is_needed[1] else None
        bias_grads_V = torch.zeros_like(bias_V) if is_needed[2] else None
        for place, part in enumerate(chunks.parts()):
            z_CV = kept[place] if place < len(kept) else chunks.logits(part, temperatures_M)
            y_grads_CV = chunks.gradients(
                z_CV,
                targets_M[part],
                None if temperatures_M is None else temperatures_M[part],
                logprob_grads_M[part],
                None if entropy_grads_M is None else entropy_grads_M[part],
                None if entropy_M is None else entropy_M[part],
            )
            hidden_CH = chunks.hidden_MH[part]
            if hidden_grads_MH is not None:
                torch.mm(y_grads_CV, chunks.weight_VH, out=hidden_grads_MH[part])
            if weight_grads_VH is not None and y_grads_CV.dtype == weight_grads_VH.dtype:
                weight_grads_VH.addmm_(y_grads_CV.t(), hidden_CH)
            elif weight_grads_VH is not None:
                weight_grads_VH += y_grads_CV.t() @ hidden_CH
            if bias_grads_V is not None:
                bias_grads_V += y_grads_CV.sum(0, dtype=chunks.dtype)
        return hidden_grads_MH, weight_grads_VH, bias_grads_V, *others
