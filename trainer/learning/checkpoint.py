"""Checkpoints: a folder with everything that a later process needs to continue.

    root/checkpoint-000007/
      weights.safetensors     the policy's weights, or its adapters'
      optimizer.safetensors   optimizer moments, by parameter name
      critic.safetensors      the value head, if there is one; its moments in critic_optimizer.safetensors
      rng.safetensors         states of the random generators
      state.json              counters, the caller's record, and the size of every other file

Knows: named tensors, JSON, files. Does not know: models or optimizers. No pickle anywhere:
loading a checkpoint runs no code.

Invariants:
* a checkpoint is complete under its final name or does not count: it is written beside it,
  fsynced and renamed, and `latest` believes only a folder whose files have the sizes that
  `state.json` names;
* a new checkpoint never overwrites an older one; its number is one higher.
"""

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from spangrad.errors import StoreError, StoreFullError

STATE_FILE = "state.json"
FORMAT = 1
_NAME = re.compile(r"^checkpoint-(\d{6,})$")
_FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """Contents of one checkpoint."""

    tensors: Mapping[str, Mapping[str, Tensor]]
    """File stem (`weights`, `optimizer`, `rng`) -> tensor name -> tensor, on the CPU."""
    counters: Mapping[str, Any]
    """Small JSON values of the learner."""
    record: Any
    """The caller's JSON value, such as which rows are consumed."""


def fsync_path(path: Path) -> None:
    """Force a file, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _number(folder: Path) -> int:
    match = _NAME.match(folder.name)
    return int(match.group(1)) if match else -1


def is_complete(folder: Path) -> bool:
    """Whether a folder is a checkpoint with all its files."""
    try:
        state = json.loads((folder / STATE_FILE).read_text())
        sizes = dict(state["files"])
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def complete_checkpoints(root: str | Path) -> list[Path]:
    """Complete checkpoints under `root`, oldest first; none if there is no such folder."""
    root = Path(root)
    if not root.is_dir():
        return []
    folders = sorted((path for path in root.iterdir() if _number(path) >= 0), key=_number)
    return [folder for folder in folders if is_complete(folder)]


def latest(root: str | Path) -> Path | None:
    """Newest complete checkpoint under `root`, or None. Torn ones are passed over."""
    complete = complete_checkpoints(root)
    return complete[-1] if complete else None


def _write(folder: Path, checkpoint: Checkpoint) -> None:
    folder.mkdir()
    sizes: dict[str, int] = {}
    for stem, tensors in checkpoint.tensors.items():
        path = folder / f"{stem}.safetensors"
        save_file(dict(tensors), path)
        fsync_path(path)
        sizes[path.name] = path.stat().st_size
    state = {
        "format": FORMAT,
        "files": sizes,
        "counters": dict(checkpoint.counters),
        "record": checkpoint.record,
    }
    state_path = folder / STATE_FILE
    state_path.write_text(json.dumps(state, indent=2))
    fsync_path(state_path)
    fsync_path(folder)


@contextlib.contextmanager
def writing(what: str, where: Path, otherwise: str) -> Iterator[None]:
    """Turn what goes wrong with a file into one error; `otherwise` says what is left as it was.

    Raises:
        StoreFullError: The disk is full.
        StoreError: It can't be written for another reason.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        if _is_full(error):
            raise StoreFullError(
                f"no room for {what} {str(where)!r} ({error}); {otherwise}, free some space"
            ) from error
        raise StoreError(f"can't write {what} {str(where)!r}: {error}") from error


def _is_full(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno in _FULL_ERRNOS
    match = re.search(r"os error (\d+)", str(error))
    return match is not None and int(match.group(1)) in _FULL_ERRNOS


def save_checkpoint(root: str | Path, checkpoint: Checkpoint, *, keep: int) -> Path:
    """Write a new checkpoint under `root` and delete all but the newest `keep`.

    One process may save under a root at a time.

    Returns:
        Its folder.

    Raises:
        StoreFullError: The disk is full; older checkpoints are untouched.
        StoreError: It can't be written for another reason.
    """
    root = Path(root)
    temporary: Path | None = None
    with writing("a checkpoint under", root, "older ones are untouched"):
        try:
            root.mkdir(parents=True, exist_ok=True)
            for leftover in root.glob(".tmp-checkpoint-*"):
                shutil.rmtree(leftover)
            number = 1 + max((_number(path) for path in root.iterdir()), default=-1)
            folder = root / f"checkpoint-{max(number, 1):06d}"
            temporary = root / f".tmp-{folder.name}"
            _write(temporary, checkpoint)
            os.rename(temporary, folder)
            fsync_path(root)
            for old in complete_checkpoints(root)[: -max(keep, 1)]:
                shutil.rmtree(old)
        finally:
            if temporary is not None:
                shutil.rmtree(temporary, ignore_errors=True)
    return folder


def load_record(folder: str | Path) -> Any:
    """The caller's record of one checkpoint, without its tensors.

    Raises:
        StoreError: The folder is not a complete checkpoint of this format.
    """
    return _state(Path(folder))["record"]


def load_counters(folder: str | Path) -> Mapping[str, Any]:
    """What a checkpoint counts, without its tensors.

    Raises:
        StoreError: The folder is not a complete checkpoint of this format.
    """
    counters: Mapping[str, Any] = _state(Path(folder))["counters"]
    return counters


def load_checkpoint(folder: str | Path) -> Checkpoint:
    """Read one checkpoint.

    Raises:
        StoreError: The folder is not a complete checkpoint of this format.
    """
    folder = Path(folder)
    state = _state(folder)
    try:
        tensors = {Path(name).stem: load_file(folder / name) for name in state["files"]}
    except (OSError, SafetensorError) as error:
        raise StoreError(f"checkpoint {str(folder)!r} can't be read: {error}") from error
    return Checkpoint(tensors=tensors, counters=state["counters"], record=state["record"])


def _state(folder: Path) -> dict[str, Any]:
    if not is_complete(folder):
        raise StoreError(f"{str(folder)!r} is not a complete checkpoint; expected a folder with state.json")
    state: dict[str, Any] = json.loads((folder / STATE_FILE).read_text())
    if state.get("format") != FORMAT:
        raise StoreError(
            f"checkpoint {str(folder)!r} has format {state.get('format')!r}, this spangrad reads {FORMAT}; "
            "upgrade it"
        )
    return state
