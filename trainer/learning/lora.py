"""Low-rank adapters: a few numbers are trained beside frozen weights, and merged where weights leave.

Knows: peft, the names of a model's layers. Does not know: optimizers, files.

Shape letters: O outputs of a layer, I inputs, R rank.

    W' = W + (alpha / R) B A;   A_RI random, B_OR zero at the start

Source: LoRA, arXiv:2106.09685.

Invariants:
* with the adapter off the model is the starting one: its own reference, without a second copy;
* merged weights have the starting model's names and shapes, and merging changes nothing that is trained.
"""

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from spangrad.errors import ConfigError
from spangrad.trainer.learning.output_head import output_layer

_ADAPTER = "default"


def add_adapter(model: PreTrainedModel, *, rank: int, alpha: float, targets: Sequence[str]) -> None:
    """Freeze a model and put adapters into its linear layers.

    Args:
        model: Changed in place; computes what it did before until the adapters are trained.
        rank: R, 1 or more.
        alpha: Scale of the adapters' output, divided by the rank.
        targets: Names of linear layers, such as `q_proj`, or ends of their full names; none: all but the
            output layer.

    Raises:
        ConfigError: A name is of no linear layer, or of the output layer.
    """
    from peft import LoraConfig, inject_adapter_in_model

    named = [
        (name, layer) for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear | Conv1D)
    ]
    for target in targets:
        chosen = [layer for name, layer in named if f".{name}".endswith(f".{target}")]
        if not chosen:
            known = sorted({name.rpartition(".")[2] for name, _ in named})
            raise ConfigError(
                f"learner.lora_targets has {target!r}, which is no linear layer of {type(model).__name__}; "
                f"expected some of {', '.join(known)}"
            )
        if any(layer is output_layer(model) for layer in chosen):
            raise ConfigError(
                f"learner.lora_targets has {target!r}, the output layer: its weights may be those of the "
                "embedding, and no adapter runs where its logits are made by chunks; leave it out"
            )
    config = LoraConfig(
        r=rank,
        lora_alpha=cast(int, alpha),  # peft divides it by the rank, and takes any number
        lora_dropout=0.0,
        target_modules=list(targets) or "all-linear",
    )
    inject_adapter_in_model(config, model, adapter_name=_ADAPTER)


def _adapted(model: PreTrainedModel) -> dict[str, Any]:
    """Layers with an adapter by name."""
    return {name: layer for name, layer in model.named_modules() if hasattr(layer, "lora_A")}


def adapter_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """The adapters' own weights by name, in place; none where the model has no adapter."""
    prefixes = tuple(f"{name}.lora_" for name in _adapted(model))
    return {name: value for name, value in model.state_dict().items() if name.startswith(prefixes)}


def base_digest(model: PreTrainedModel) -> str:
    """Hash of the frozen weights that adapters are trained beside: their names, shapes and bytes.

    Equal weights have equal ones on every device. Costs about a second a gigabyte.
    """
    adapters, digest = adapter_tensors(model), hashlib.blake2b(digest_size=16)
    for name, value in model.state_dict().items():
        if name not in adapters:
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
            digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def merged_state(model: PreTrainedModel) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Every weight of the starting model: its name, the tensor that holds it, its value with the adapter."""
    adapted, adapters = _adapted(model), adapter_tensors(model)
    for name, value in model.state_dict().items():
        layer_name, _, own_name = name.rpartition(".base_layer.")
        if layer_name in adapted:
            with torch.no_grad():
                is_matrix = own_name == "weight"
                merged = value + adapted[layer_name].get_delta_weight(_ADAPTER) if is_matrix else value
            yield f"{layer_name}.{own_name}", value, merged
        elif name not in adapters:
            yield name, value, value


@contextlib.contextmanager
def adapter_off(model: PreTrainedModel) -> Iterator[None]:
    """Inside, the model computes what it did before its adapters; nothing happens to one that has none."""
    layers = list(_adapted(model).values())
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
