import math
from typing import Any

import pytest
import torch
from tests.trainer.small_policy import make_model, make_row
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaForCausalLM,
)

from spangrad.trainer.learning.model import target_stats
from spangrad.trainer.learning.output_head import Entropy, HeadForm, head_form, stats_of_targets
from spangrad.trainer.learning.packing import pack

TARGETS, HIDDEN, VOCABULARY = 7, 5, 11
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
SMALL: dict[str, Any] = {
    **SIZES,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 32,
    "pad_token_id": 0,
}


def inputs(
    *, bias: bool = False, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, torch.nn.Linear, Tensor]:
    generator = torch.Generator().manual_seed(0)
    layer = torch.nn.Linear(HIDDEN, VOCABULARY, bias=bias, dtype=dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(2 * torch.randn(parameter.shape, generator=generator, dtype=dtype))
    hidden_MH = torch.randn(TARGETS, HIDDEN, generator=generator, dtype=dtype, requires_grad=True)
    return hidden_MH, layer, torch.randint(VOCABULARY, (TARGETS,), generator=generator)


def reference(
    hidden_MH: Tensor,
    layer: torch.nn.Linear,
    targets_M: Tensor,
    temperatures_M: Tensor | None,
    form: HeadForm,
) -> tuple[Tensor, Tensor]:
    """Row by row, as one writes it on paper."""
    logprobs, entropies = [], []
    for m in range(len(hidden_MH)):
        y = form.scale * layer(hidden_MH[m])
        z = y if form.softcap is None else form.softcap * torch.tanh(y / form.softcap)
        p = torch.exp(z if temperatures_M is None else z / temperatures_M[m])
        p = p / p.sum()
        logprobs.append(p[targets_M[m]].log())
        entropies.append(-(p * p.log()).sum())
    return torch.stack(logprobs), torch.stack(entropies)


def gradients(hidden_MH: Tensor, layer: torch.nn.Linear, loss: Tensor) -> list[Tensor]:
    wanted = [value for value in (hidden_MH, *layer.parameters()) if value.requires_grad]
    return list(torch.autograd.grad(loss, wanted))


@pytest.mark.parametrize("chunk_logits", [1, 2 * VOCABULARY, 3 * VOCABULARY + 1, 10**6])
@pytest.mark.parametrize("entropy", ["none", "value", "grad"])
@pytest.mark.parametrize(
    ("bias", "temperatures", "form", "frozen"),
    [
        (False, False, HeadForm(), False),
        (True, True, HeadForm(), False),
        (True, True, HeadForm(scale=0.5, softcap=3.0), False),
        (False, True, HeadForm(scale=2.0), True),
        (True, False, HeadForm(softcap=2.0), True),
    ],
    ids=["plain", "bias-temperature", "scale-cap", "frozen-scale", "frozen-cap"],
)
def test_values_and_gradients_are_those_of_the_plain_computation(
    chunk_logits: int, entropy: Entropy, bias: bool, temperatures: bool, form: HeadForm, frozen: bool
) -> None:
    hidden_MH, layer, targets_M = inputs(bias=bias)
    layer.requires_grad_(not frozen)
    temperatures_M = torch.linspace(0.5, 2.0, TARGETS, dtype=torch.float64) if temperatures else None
    weights_M = torch.linspace(-1.0, 2.0, TARGETS, dtype=torch.float64)
    expected_M, expected_entropy_M = reference(hidden_MH, layer, targets_M, temperatures_M, form)
    logprobs_M, entropy_M = stats_of_targets(
        hidden_MH,
        layer,
        targets_M,
        temperatures_M,
        form=form,
        compute_dtype=torch.float32,
        entropy=entropy,
        chunk_logits=chunk_logits,
        kept_logits=3 * chunk_logits,
    )
    assert torch.allclose(logprobs_M, expected_M, rtol=1e-12)
    # Not linear, so that the gradient of every target depends on its value.
    loss, expected = (weights_M * logprobs_M.exp()).sum(), (weights_M * expected_M.exp()).sum()
    if entropy == "none":
        assert entropy_M is None
    else:
        assert entropy_M is not None and torch.allclose(entropy_M, expected_entropy_M, rtol=1e-12)
        assert entropy_M.requires_grad == (entropy == "grad")
    if entropy == "grad" and entropy_M is not None:
        loss, expected = loss + (entropy_M**2).sum(), expected + (expected_entropy_M**2).sum()
    found = gradients(hidden_MH, layer, loss)
    wanted = gradients(hidden_MH, layer, expected)
    assert len(found) == 1 + (not frozen) * (1 + bias)
    assert all(torch.allclose(a, b, rtol=1e-10, atol=1e-12) for a, b in zip(found, wanted, strict=True))


def test_entropy_alone_has_a_gradient_and_no_targets_give_nothing() -> None:
    hidden_MH, layer, targets_M = inputs()
    settings: dict[str, Any] = {"form": HeadForm(), "compute_dtype": torch.float32, "entropy": "grad"}
    _, entropy_M = stats_of_targets(hidden_MH, layer, targets_M, None, **settings)
    _, expected_M = reference(hidden_MH, layer, targets_M, None, HeadForm())
    assert entropy_M is not None
    found = gradients(hidden_MH, layer, entropy_M.sum())
    assert torch.allclose(found[0], gradients(hidden_MH, layer, expected_M.sum())[0], rtol=1e-10, atol=1e-12)
    empty, none = stats_of_targets(hidden_MH[:0], layer, targets_M[:0], None, **settings)
    assert none is not None and empty.shape == none.shape == (0,)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation gives."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, Tensor):
                self.elements = max(self.elements, value.numel())
        return result


@pytest.mark.parametrize("entropy", ["none", "value", "grad"])
@pytest.mark.parametrize("frozen", [False, True])
def test_no_tensor_is_larger_than_a_chunk_or_the_weights(entropy: Entropy, frozen: bool) -> None:
    targets, hidden, vocabulary, chunk = 200, 4, 500, 6_000
    layer = torch.nn.Linear(hidden, vocabulary, bias=False).requires_grad_(not frozen)
    hidden_MH = torch.randn(targets, hidden, requires_grad=True)
    with Largest() as largest:
        logprobs_M, entropy_M = stats_of_targets(
            hidden_MH,
            layer,
            torch.arange(targets),
            torch.full((targets,), 0.9),
            form=HeadForm(softcap=30.0),
            compute_dtype=torch.float32,
            entropy=entropy,
            chunk_logits=chunk,
            kept_logits=2 * chunk,
        )
        loss = logprobs_M.sum() + (entropy_M.sum() if entropy == "grad" and entropy_M is not None else 0.0)
        loss.backward()
    assert largest.elements == chunk  # of 100,000 logits


def test_the_gradient_in_bfloat16_is_close_and_logits_are_softened_in_float32() -> None:
    (batch,) = pack([make_row(seed) for seed in range(4)], max_tokens_per_batch=10**6, pad_token_id=0)
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = make_model().eval()
        stats = target_stats(model, batch, compute_dtype=dtype, head=HeadForm(), entropy="grad")
        assert stats.entropy_M is not None
        assert stats.logprobs_M.dtype == stats.entropy_M.dtype == torch.float32
        (stats.logprobs_M.sum() + stats.entropy_M.sum()).backward()
        grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        assert {value.dtype for value in grads} == {torch.float32}
        found[dtype] = stats, torch.cat([value.flatten() for value in grads])
    (exact, exact_grad), (rounded, rounded_grad) = found.values()
    # bfloat16 keeps 8 bits: 0.4 % of a logit, and the errors of two layers add up.
    assert float((exact.logprobs_M - rounded.logprobs_M).detach().abs().max()) < 0.1
    assert float((exact_grad - rounded_grad).norm() / exact_grad.norm()) < 0.03
    # A sum of probabilities rounded to bfloat16 would be off by 1e-3.
    hidden_MH, layer, _ = inputs(dtype=torch.float32)
    everything = torch.arange(VOCABULARY)
    logprobs_V, _ = stats_of_targets(
        hidden_MH[:1].expand(VOCABULARY, HIDDEN),
        layer,
        everything,
        torch.full((VOCABULARY,), 0.7),
        form=HeadForm(),
        compute_dtype=torch.bfloat16,
    )
    assert float(logprobs_V.detach().exp().sum()) == pytest.approx(1.0, abs=1e-5)


def test_the_form_of_the_head_is_found_by_comparing_logits() -> None:
    torch.manual_seed(0)
    granite = GraniteForCausalLM(GraniteConfig(**SMALL, logits_scaling=4.0))
    cohere = CohereForCausalLM(CohereConfig(**SMALL, logit_scale=0.25))
    gemma = Gemma2ForCausalLM(Gemma2Config(**SMALL, final_logit_softcapping=5.0))
    found = [head_form(model.eval()) for model in (make_model(), granite, cohere, gemma)]
    assert all(form is not None for form in found)
    forms = [form for form in found if form is not None]
    assert [form.softcap for form in forms] == [None, None, None, 5.0]
    assert [form.scale for form in forms] == pytest.approx([1.0, 0.25, 0.25, 1.0], rel=1e-4)
    assert forms[0].scale == 1.0


class Doubtful(LlamaForCausalLM):
    """Its logits follow from the output layer in a way that nobody knows."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits + output.logits.square()
        return output


def test_a_head_of_unknown_form_gives_all_its_logits() -> None:
    model = Doubtful(make_model().config).eval()
    assert head_form(model) is None
    (batch,) = pack([make_row(0, temperature=0.5)], max_tokens_per_batch=10**6, pad_token_id=0)
    stats = target_stats(model, batch, compute_dtype=torch.float32, head=None, entropy="value")
    logits_TV = model(input_ids=batch.input_ids_BT).logits[0] / 0.5
    places = batch.target_mask_BT[0].nonzero().squeeze(1)
    expected_M = logits_TV.log_softmax(-1)[places, batch.target_ids_BT[0, places]]
    assert torch.allclose(stats.logprobs_M, expected_M, atol=1e-5)
    assert stats.entropy_M is not None and float(stats.entropy_M.detach().max()) < math.log(320)
