"""Checkpoints of promoted versions, kept for good.

    <run folder>/promoted/version-000007/    a whole checkpoint, as `learning.checkpoint` writes it

Knows folders and links. Does not know what is in a checkpoint, or who promoted it.

Invariants: a folder is complete under its final name or does not count; nothing here is deleted when
`run.keep_checkpoints` deletes older checkpoints; files are hard links to the checkpoint's where the disk
can do that, so that a version costs its space once.
"""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from spangrad.errors import StoreError
from spangrad.store.records import Policy, PolicyDecision, origin_of
from spangrad.trainer.learning.checkpoint import fsync_path, is_complete, writing

FOLDER: Final = "promoted"
"""Name of the folder in a run's folder."""
WEIGHTS_FILE: Final = "weights.safetensors"


def kept_folder(run: Path, version: int) -> Path:
    """Where a version is kept, if it is, of the run whose folder is `run`."""
    return run / FOLDER / f"version-{version:06d}"


def keep(checkpoint: Path, run: Path, version: int) -> Path:
    """Keep a checkpoint as a version of the run whose folder is `run`; again, it changes nothing.

    Returns:
        Its folder.

    Raises:
        StoreFullError: The disk is full.
        StoreError: The checkpoint is gone or torn, or can't be kept for another reason.
    """
    target = kept_folder(run, version)
    if is_complete(target):
        return target
    if not is_complete(checkpoint):
        raise StoreError(
            f"the weights of version {version} can't be kept: {str(checkpoint)!r} is no complete checkpoint"
            " (any more); promote a newer version"
        )
    temporary = target.with_name(f".tmp-{target.name}")
    with writing(f"version {version} to", target, "the checkpoint is untouched"):
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            for file in sorted(checkpoint.iterdir()):
                _link(file, temporary / file.name)
            fsync_path(temporary)
            shutil.rmtree(target, ignore_errors=True)  # torn: somebody else's doing
            os.rename(temporary, target)
            fsync_path(target.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return target


def run_folder(policy: Policy) -> Path | None:
    """Folder of the run that a version's weights are in; None for a model folder that a run began from."""
    folder = Path(policy.path).parent
    return folder.parent if folder.name in ("checkpoints", FOLDER) else None


def folder_of(policy: Policy, decisions: Sequence[PolicyDecision]) -> Path | None:
    """The checkpoint that holds a version's weights; None if there is none any more.

    Args:
        policy: The version.
        decisions: Those about its run, in order.
    """
    version = policy.policy_version
    named = [Path(one.path) for one in reversed(decisions) if one.policy_version == version and one.path]
    folder = run_folder(policy)
    kept = [] if folder is None else [kept_folder(folder, origin_of(version, decisions))]
    return next((one for one in (*named, *kept, Path(policy.path)) if is_complete(one)), None)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another disk, or one without links
        shutil.copyfile(source, target)
        fsync_path(target)
