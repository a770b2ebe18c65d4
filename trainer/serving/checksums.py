"""Checksums of a weights file, in its own header: what was written is what is loaded, or nothing is.

Each tensor has the CRC-32 of its bytes (two to three gigabytes a second and core, ten times BLAKE2b); the
file's digest is BLAKE2b over the names and checksums of all. Against accidents, not against forgers.

Knows safetensors and torch. Does not know engines or models.
"""

import hashlib
import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from spangrad.errors import PolicyError

_KEY = "spangrad.crc32"
"""Of a file's metadata; the value is JSON, tensor name -> eight hexadecimal digits."""


def with_checksums(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Metadata for a safetensors file of these tensors, which are contiguous and on the CPU."""
    checksums = {name: _checksum(tensor) for name, tensor in tensors.items()}
    return {"format": "pt", _KEY: json.dumps(checksums, separators=(",", ":"))}


def weights_digest(path: str | Path) -> str | None:
    """The digest that a file's header tells; None if it tells none or can't be read."""
    try:
        checksums = _told(path)
    except (OSError, SafetensorError, PolicyError):
        return None
    return None if checksums is None else _digest(checksums)


def check_weights(path: str | Path, digest: str | None) -> None:
    """Compare a file's tensors with its checksums, and these with a digest.

    Args:
        path: A safetensors file; one without checksums is taken as it is where no digest is given.
        digest: What `weights_digest` said of the file that is meant; None: any.

    Raises:
        PolicyError: It is another file, or a tensor is damaged.
    """
    checksums = _told(path)
    if digest is not None and (checksums is None or _digest(checksums) != digest):
        found = "no checksums" if checksums is None else f"digest {_digest(checksums)}"
        raise PolicyError(
            f"weights file {str(path)!r} has {found}, expected digest {digest}: it is another one"
        )
    if checksums is None:
        return
    with safe_open(str(path), framework="pt", device="cpu") as file:
        names = set(file.keys())
        if names != checksums.keys():
            raise PolicyError(f"weights file {str(path)!r} has checksums of other tensors than it holds")
        for name in file.offset_keys():
            if (found := _checksum(file.get_tensor(name))) != checksums[name]:
                raise PolicyError(
                    f"weights file {str(path)!r} is damaged: {name!r} has the checksum {found}, expected"
                    f" {checksums[name]}; write it again"
                )


def file_state(path: str | Path) -> tuple[int, int, int]:
    """Changes whenever a file is written to or another one takes its place."""
    found = os.stat(path)
    return found.st_ino, found.st_size, found.st_mtime_ns


def _told(path: str | Path) -> dict[str, str] | None:
    with safe_open(str(path), framework="pt", device="cpu") as file:
        text = (file.metadata() or {}).get(_KEY)
    if text is None:
        return None
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise PolicyError(f"weights file {str(path)!r} has checksums that can't be read; write it again")
    return {str(name): str(checksum) for name, checksum in value.items()}


def _digest(checksums: Mapping[str, str]) -> str:
    told = json.dumps(checksums, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(told.encode(), digest_size=16).hexdigest()


def _checksum(tensor: torch.Tensor) -> str:
    return f"{zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data):08x}"
