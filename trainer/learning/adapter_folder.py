"""A trained adapter as a folder that an engine loads, in peft's form.

Knows peft's names of tensors and its config. Does not know engines.

Invariant: a folder's name ends in the digest of its weights, so that equal names are equal adapters.
"""

import json
import os
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from spangrad.trainer.learning.lora import adapter_tensors
from spangrad.trainer.serving.adapter_transfer import WEIGHTS, adapter_name
from spangrad.trainer.serving.checksums import with_checksums


def save_adapter(
    model: PreTrainedModel,
    root: Path,
    name: str,
    version: int,
    *,
    rank: int,
    alpha: float,
    dtype: torch.dtype,
) -> Path:
    """Write the adapter of a model into `root`, as NAME-vVERSION-DIGEST; complete or absent.

    Args:
        model: With an adapter of `rank` and `alpha`, see `add_adapter`.
        root: Folder of adapters, made if it is not there.
        name: The name by which agents know the policy.
        version: Policy version.
        rank: R.
        alpha: Scale.
        dtype: Of the written tensors.
    """
    tensors = {
        # peft's own name of the adapter is no part of a file's names.
        f"base_model.model.{tensor_name.replace('.default.', '.')}": value.detach()
        .to("cpu", dtype=dtype)
        .contiguous()
        for tensor_name, value in adapter_tensors(model).items()
    }
    layers = sorted({tensor_name.split(".lora_")[0].rpartition(".")[2] for tensor_name in tensors})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": layers,
        "bias": "none",
        "fan_in_fan_out": False,
        "base_model_name_or_path": None,
    }
    root.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".tmp-", dir=root))
    try:
        save_file(tensors, temporary / WEIGHTS, metadata=with_checksums(tensors))
        (temporary / "adapter_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
        temporary.chmod(0o755)
        folder = root / adapter_name(name, version, temporary / WEIGHTS)
        if not folder.exists():  # else it is the same
            os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder
