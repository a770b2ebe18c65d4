"""The policy as a Hugging Face model: load it, read log-probabilities off it, write it out.

Knows: model folders, safetensors, where logits are needed. Does not know: losses,
optimizers or rows.

Shape letters: B rows, T positions, M targets (the True places of `target_mask_BT`, row by
row), H hidden, V vocabulary.

Invariants:
* a folder that can't be loaded completely is one `PolicyError`, never a half random model;
* a file or folder that this module writes is complete or absent under its final name.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging as transformers_logging

from spangrad.errors import ConfigError, PolicyError
from spangrad.trainer.learning.checkpoint import fsync_path, writing
from spangrad.trainer.learning.lora import adapter_tensors, merged_state
from spangrad.trainer.learning.output_head import (
    Entropy,
    HeadForm,
    output_layer,
    stats_of_logits,
    stats_of_targets,
)
from spangrad.trainer.learning.packing import Batch
from spangrad.trainer.learning.sharding import divided_as, in_pass, storage_place, whole
from spangrad.trainer.serving.checksums import with_checksums

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Loading problems become our one-line errors; transformers' own tables and bars stay off."""
    verbosity = transformers_logging.get_verbosity()
    had_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if had_bars:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def usable_device(name: str) -> torch.device:
    """The device of that name, tried out.

    Raises:
        ConfigError: torch can't use it on this machine.
    """
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"learner.device is {name!r}, which torch can't use here: {reason}") from error
    return device


def load_model(folder: str | Path, *, device: torch.device) -> PreTrainedModel:
    """Load a causal language model in float32, without dropout.

    Raises:
        PolicyError: The folder lacks a file, a file is damaged, or the weights don't fit
            the config; says which.
    """
    if not str(folder):
        raise PolicyError("learner.model_path is empty; expected a Hugging Face model folder")
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise PolicyError(
            f"model folder {str(folder)!r} has no config.json; expected a Hugging Face model folder"
        )
    try:
        with _quiet_transformers():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, local_files_only=True, output_loading_info=True
            )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError, json.JSONDecodeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise PolicyError(f"model folder {str(folder)!r} can't be loaded: {reason}") from error
    model, info = cast("tuple[PreTrainedModel, dict[str, Any]]", loaded)
    problems = {
        "no weights for": sorted(info["missing_keys"]),
        "another shape for": sorted(str(key) for key in info["mismatched_keys"]),
        "unknown weights": sorted(info["unexpected_keys"]),
    }
    for what, keys in problems.items():
        if keys:
            raise PolicyError(
                f"model folder {str(folder)!r} has {what} {len(keys)} of the model's tensors, first "
                f"{keys[0]!r}; config.json and the safetensors files must belong together"
            )
    cast(torch.nn.Module, model).eval()  # no dropout: the behaviour policy had none
    cast(torch.nn.Module, model).to(device)
    return model


def vocabulary_size(model: PreTrainedModel) -> int:
    """Number of token ids that the model has an embedding for."""
    return int(cast(torch.nn.Embedding, model.get_input_embeddings()).weight.shape[0])


@dataclass(frozen=True, slots=True, eq=False)
class TargetStats:
    """What a forward pass says about the targets of a batch, in mask order."""

    logprobs_M: Tensor
    """Log-probability of each target under the row's temperature, nats, float32 or better."""
    entropy_M: Tensor | None
    """Entropy of the distribution that each target comes from, nats; None where not asked for."""
    hidden_MH: Tensor | None = None
    """Last hidden state that predicts each target; None where the model made its own logits of it."""


def target_stats(
    model: PreTrainedModel,
    batch: Batch,
    *,
    compute_dtype: torch.dtype,
    head: HeadForm | None,
    use_temperature: bool = True,
    entropy: Entropy = "none",
) -> TargetStats:
    """Log-probabilities (and entropies) at the trained positions of a batch.

    The output layer runs on the M target positions alone, chunk by chunk: with a quarter of the tokens
    trained it costs a quarter, and no (B, T, V) or (M, V) tensor exists.

    Args:
        model: A causal language model.
        batch: Rows, already on the model's device.
        compute_dtype: float32, or bfloat16 for autocast over float32 weights.
        head: What `head_form` said; None: the model makes all its logits.
        use_temperature: Divide logits by the row's temperature; off for cloning.
        entropy: `none`, `value` (no gradient) or `grad`.
    """
    mask_BT = batch.target_mask_BT
    targets_M = batch.target_ids_BT[mask_BT]
    temperatures_M = batch.temperatures_BT[mask_BT] if use_temperature else None
    if temperatures_M is not None and not bool((temperatures_M != 1.0).any()):
        temperatures_M = None
    device_type = mask_BT.device.type
    if head is None:
        with torch.autocast(device_type, dtype=torch.bfloat16, enabled=compute_dtype == torch.bfloat16):
            logits_MV = batch.at_targets(model(**batch.model_inputs(), use_cache=False).logits)
        return TargetStats(*stats_of_logits(logits_MV, targets_M, temperatures_M, entropy=entropy))

    def of_targets() -> tuple[Tensor, Tensor | None, Tensor]:
        hidden_MH = _target_hidden(model, batch, compute_dtype)
        stats = stats_of_targets(
            hidden_MH,
            output_layer(model),
            targets_M,
            temperatures_M,
            form=head,
            compute_dtype=compute_dtype,
            entropy=entropy,
        )
        return *stats, hidden_MH

    return TargetStats(*in_pass(model, of_targets))


def target_hidden(model: PreTrainedModel, batch: Batch, *, compute_dtype: torch.dtype) -> Tensor:
    """The last hidden states that predict the targets of a batch, (M, H) in mask order."""
    return in_pass(model, lambda: _target_hidden(model, batch, compute_dtype))


def _target_hidden(model: PreTrainedModel, batch: Batch, compute_dtype: torch.dtype) -> Tensor:
    device_type = batch.target_mask_BT.device.type
    with torch.autocast(device_type, dtype=torch.bfloat16, enabled=compute_dtype == torch.bfloat16):
        hidden_BTH = model.base_model(**batch.model_inputs(), use_cache=False).last_hidden_state
    return batch.at_targets(hidden_BTH)


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Let the layers keep only their inputs for the backward pass, which computes them again.

    transformers' own switch works in training mode alone, where dropout would be on.

    Raises:
        ConfigError: The model's layers are not made for it.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"learner.gradient_checkpointing is true, but {type(model).__name__} has no layer that "
            "transformers can compute twice; leave it out"
        )
    for layer in layers:
        again = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
        setattr(layer, "forward", again)  # noqa: B010


def weight_tensors(model: PreTrainedModel, *, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The model's weights by Hugging Face name, on the CPU, each stored once (tied copies left out).

    Adapters are merged: names and shapes are those of the model without them.
    """
    seen: set[int] = set()
    tensors: dict[str, Tensor] = {}
    for name, stored, value in merged_state(model):
        if (place := storage_place(stored)) in seen:
            continue
        seen.add(place)
        is_cast = dtype is not None and value.is_floating_point()
        tensors[name] = whole(value.detach()).to("cpu", dtype=dtype if is_cast else None).contiguous()
    return tensors


def resumable_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """What training changes, on the CPU, for `load_weights`: all weights, or the adapters' own."""
    adapters = adapter_tensors(model)
    if not adapters:
        return weight_tensors(model)
    return {name: value.detach().cpu().contiguous() for name, value in adapters.items()}


def load_weights(model: PreTrainedModel, tensors: Mapping[str, Tensor], *, where: str) -> None:
    """Copy weights, as `resumable_tensors` gave them, into a model of the same shape.

    Raises:
        PolicyError: Names or shapes differ; the model is unchanged.
    """
    own = resumable_tensors(model)
    for name in sorted(own.keys() | tensors.keys()):
        expected = tuple(own[name].shape) if name in own else None
        found = tuple(tensors[name].shape) if name in tensors else None
        if expected != found:
            raise PolicyError(f"{where}: tensor {name!r} has shape {found}, the model needs {expected}")
    state = model.state_dict()
    with torch.no_grad():
        for name, value in tensors.items():
            state[name].copy_(divided_as(value, state[name]))


def save_weights(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write `weight_tensors` as one safetensors file with checksums; a process that dies leaves all or none.

    It is not forced to disk, which takes longer than all else of a publish: if the machine dies the file may
    be damaged, which its checksums tell.

    Raises:
        StoreFullError: The disk is full; a file of that name is as it was.
        StoreError: It can't be written for another reason.
    """
    temporary = path.with_name(f".tmp-{os.getpid()}-{path.name}")
    with writing("the weights", path, "what was there is untouched"):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            save_file(dict(tensors), temporary, metadata=with_checksums(tensors))
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def save_model_folder(
    tensors: Mapping[str, Tensor], folder: Path, *, source_folder: Path, dtype: torch.dtype
) -> None:
    """Write a Hugging Face folder: config, `weight_tensors`, the source's tokenizer files byte for byte.

    An existing `folder` is replaced; a reader sees the old one, none for an instant, or the new one.

    Raises:
        StoreFullError: The disk is full; a folder of that name is as it was.
        StoreError: It can't be written for another reason.
    """
    with writing("the model", folder, "what was there is untouched"):
        _write_folder(tensors, folder, source_folder, dtype)


def _write_folder(
    tensors: Mapping[str, Tensor], folder: Path, source_folder: Path, dtype: torch.dtype
) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".tmp-{os.getpid()}-{folder.name}")
    replaced = folder.with_name(f".old-{os.getpid()}-{folder.name}")
    for stale in (temporary, replaced):
        shutil.rmtree(stale, ignore_errors=True)
    try:
        temporary.mkdir()
        for path in sorted(source_folder.iterdir()):
            if path.is_file() and path.name != "config.json" and not path.name.endswith(WEIGHT_SUFFIXES):
                shutil.copyfile(path, temporary / path.name)
        config = json.loads((source_folder / "config.json").read_text())
        config.pop("torch_dtype", None)
        config["dtype"] = str(dtype).removeprefix("torch.")
        (temporary / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        save_file(dict(tensors), temporary / "model.safetensors", metadata={"format": "pt"})
        for path in temporary.iterdir():
            fsync_path(path)
        fsync_path(temporary)
        if folder.exists():
            os.rename(folder, replaced)
        os.rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)
    fsync_path(folder.parent)
