import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.waiting import wait_until

from spangrad.errors import StoreError, StoreFullError
from spangrad.trainer.learning.checkpoint import (
    Checkpoint,
    complete_checkpoints,
    latest,
    load_checkpoint,
    save_checkpoint,
)

SAVE_FOREVER = """
import sys, torch
from spangrad.trainer.learning.checkpoint import Checkpoint, save_checkpoint
n = 0
while True:
    n += 1
    weights = {f"w{i}": torch.full((64, 1024), float(n)) for i in range(16)}
    save_checkpoint(sys.argv[1], Checkpoint({"weights": weights}, {"n": n}, None), keep=2)
"""


def has_other_checkpoints(root: Path, known: list[Path]) -> bool:
    return bool(set(complete_checkpoints(root)) - set(known))


def is_writing(root: Path, part: str) -> bool:
    return bool(list(root.glob(f".tmp-checkpoint-*/{part}")))


def make(n: int) -> Checkpoint:
    return Checkpoint(
        tensors={"weights": {"w": torch.full((4, 4), float(n))}, "optimizer": {}},
        counters={"updates": n},
        record={"consumed": [f"row-{n}"]},
    )


def test_a_checkpoint_comes_back_as_it_was_saved(tmp_path):
    folder = save_checkpoint(tmp_path / "root", make(3), keep=3)
    assert latest(tmp_path / "root") == folder
    loaded = load_checkpoint(folder)
    assert torch.equal(loaded.tensors["weights"]["w"], torch.full((4, 4), 3.0))
    assert loaded.tensors["optimizer"] == {}
    assert loaded.counters == {"updates": 3}
    assert loaded.record == {"consumed": ["row-3"]}


def test_only_the_newest_are_kept_and_numbers_never_repeat(tmp_path):
    folders = [save_checkpoint(tmp_path, make(n), keep=2) for n in range(5)]
    assert complete_checkpoints(tmp_path) == folders[-2:]
    assert [folder.name for folder in folders[-2:]] == ["checkpoint-000004", "checkpoint-000005"]


def test_latest_passes_over_torn_checkpoints(tmp_path):
    assert latest(tmp_path / "nowhere") is None
    good = save_checkpoint(tmp_path, make(1), keep=9)
    damages: tuple[Callable[[Path], object], ...] = (
        lambda folder: os.truncate(folder / "weights.safetensors", 10),
        lambda folder: (folder / "optimizer.safetensors").unlink(),
        lambda folder: (folder / "state.json").write_text("{"),
        lambda folder: (folder / "state.json").unlink(),
    )
    for damage in damages:
        torn = save_checkpoint(tmp_path, make(2), keep=9)
        assert latest(tmp_path) == torn
        damage(torn)
        assert latest(tmp_path) == good
        with pytest.raises(StoreError, match="not a complete checkpoint"):
            load_checkpoint(torn)


def test_a_damaged_tensor_file_is_one_clear_error(tmp_path):
    folder = save_checkpoint(tmp_path, make(1), keep=1)
    path = folder / "weights.safetensors"
    path.write_bytes(b"\xff" * path.stat().st_size)
    with pytest.raises(StoreError, match="can't be read"):
        load_checkpoint(folder)


def test_a_full_disk_leaves_older_checkpoints_and_no_rest(tmp_path):
    good = save_checkpoint(tmp_path, make(1), keep=1)
    big = Checkpoint({"weights": {"w": torch.zeros(1 << 20)}}, {}, None)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(StoreFullError, match="older ones are untouched"):
            save_checkpoint(tmp_path, big, keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == [good]


def test_a_root_that_cannot_be_written_is_a_store_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="can't write a checkpoint"):
        save_checkpoint(tmp_path / "file", make(1), keep=1)


@pytest.mark.slow
def test_after_a_kill_the_newest_complete_checkpoint_loads(tmp_path):
    for part in ("", "weights.safetensors", "state.json"):
        process = subprocess.Popen([sys.executable, "-c", SAVE_FOREVER, str(tmp_path)])
        try:
            wait_until(partial(has_other_checkpoints, tmp_path, complete_checkpoints(tmp_path)), 60)
            # Strike at a different place of the writing each time.
            wait_until(partial(is_writing, tmp_path, part), 60, 0.0)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        newest = latest(tmp_path)
        assert newest is not None
        loaded = load_checkpoint(newest)
        n = loaded.counters["n"]
        assert all(
            torch.equal(w, torch.full((64, 1024), float(n))) for w in loaded.tensors["weights"].values()
        )
    save_checkpoint(tmp_path, make(1), keep=1)
    assert len(list(tmp_path.iterdir())) == 1
