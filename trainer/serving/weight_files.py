"""What a safetensors file or a model folder holds, read without loading a tensor.

Knows file headers and Hugging Face folder layout. Does not know torch or vLLM: both
the trainer and vLLM's worker processes read headers with it.

Invariant: a folder or file that can't be served is one PolicyError that names the file.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spangrad.errors import PolicyError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
"""One of these makes a folder's tokenizer loadable."""
TIED_HEAD = "lm_head.weight"
"""Absent from, or a copy of the embedding in, the files of a model with tied embeddings."""

Shapes = dict[str, tuple[int, ...]]


def read_shapes(path: str | Path) -> Shapes:
    """Name and shape of every tensor of a safetensors file.

    Raises:
        PolicyError: There is no such file, or it is not a complete safetensors file.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="numpy") as tensors:
            return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise PolicyError(f"weights file {str(path)!r} does not exist") from error
    except (OSError, SafetensorError) as error:
        raise PolicyError(
            f"weights file {str(path)!r} is not a complete safetensors file ({error}); write it again"
        ) from error


def folder_shapes(folder: str | Path) -> Shapes | None:
    """Name and shape of every tensor of a model folder; None if its weights are not safetensors.

    Raises:
        PolicyError: A file is missing or damaged.
    """
    folder = Path(folder)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, Mapping):
            raise PolicyError(f"{str(index)!r} has no object 'weight_map'; save the model again")
        files = sorted({folder / str(name) for name in weight_map.values()})
    else:
        files = sorted(folder.glob("*.safetensors"))
    shapes: Shapes = {}
    for file in files:
        shapes |= read_shapes(file)
    return shapes or None


def check_model_folder(folder: str | Path) -> dict[str, Any]:
    """The folder's config, if everything is there that an engine needs to serve it.

    Raises:
        PolicyError: Says what is missing or damaged.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise PolicyError(f"model folder {str(folder)!r} does not exist")
    if not (folder / "config.json").exists():
        raise PolicyError(f"model folder {str(folder)!r} has no config.json; expected a Hugging Face folder")
    config = _read_json(folder / "config.json")
    if folder_shapes(folder) is None and not any(folder.glob("*.bin")):
        raise PolicyError(f"model folder {str(folder)!r} has no weights; expected a *.safetensors file")
    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        raise PolicyError(
            f"model folder {str(folder)!r} has no tokenizer; expected one of {', '.join(TOKENIZER_FILES)}"
        )
    return config


def context_length(config: Mapping[str, Any]) -> int | None:
    """The most tokens that a model can be shown, by its folder's config; None: nothing there bounds them."""
    text = config.get("text_config") or config
    positions = text.get("max_position_embeddings")
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    kinds = [
        rope,
        *(kind for kind in rope.values() if isinstance(kind, Mapping)),
    ]  # some have one a layer type
    factors = [float(kind.get("factor") or 1.0) for kind in kinds]
    return int(positions * max(1.0, *factors)) if isinstance(positions, int) else None


def misfit(found: Shapes, expected: Shapes, *, has_tied_head: bool) -> str | None:
    """Why tensors `found` can't replace the tensors `expected`; None if they fit."""
    ignored = {TIED_HEAD} if has_tied_head else set()
    if missing := sorted(expected.keys() - found.keys() - ignored):
        return f"it lacks {len(missing)} of the model's tensors, the first is {missing[0]!r}"
    if unknown := sorted(found.keys() - expected.keys() - ignored):
        return f"it has {len(unknown)} tensors that the model has not, the first is {unknown[0]!r}"
    for name in sorted(found.keys() & expected.keys()):
        if found[name] != expected[name]:
            return f"{name!r} has shape {found[name]}, the model's has {expected[name]}"
    return None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PolicyError(f"{str(path)!r} can't be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise PolicyError(f"{str(path)!r} holds no JSON object")
    return value
