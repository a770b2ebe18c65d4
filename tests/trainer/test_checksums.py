"""A weights file that is not what was written is found out before it is used."""

import json
import struct
import zlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.trainer.small_policy import make_policy

from spangrad.errors import PolicyError
from spangrad.trainer.learning.model import load_model, save_weights, weight_tensors
from spangrad.trainer.serving.checksums import check_weights, file_state, weights_digest, with_checksums

TENSORS = {
    "a.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "b.weight": torch.arange(6, dtype=torch.bfloat16),
    "count": torch.tensor(3),
    "none": torch.zeros(0, 4),
}


def write(path: Path, tensors: dict[str, torch.Tensor] = TENSORS) -> Path:
    save_file(tensors, path, metadata=with_checksums(tensors))
    return path


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_the_checksum_of_a_tensor_is_that_of_its_bytes() -> None:
    told = json.loads(with_checksums(TENSORS)["spangrad.crc32"])
    assert told["count"] == f"{zlib.crc32(struct.pack('<q', 3)):08x}"
    assert told["a.weight"] == f"{zlib.crc32(struct.pack('<12f', *range(12))):08x}"
    assert told["none"] == "00000000"


def test_what_was_written_is_taken(tmp_path: Path) -> None:
    path = write(tmp_path / "w.safetensors")
    check_weights(path, None)
    check_weights(path, weights_digest(path))


@pytest.mark.parametrize("name", ["a.weight", "b.weight", "count"])
def test_one_bit_names_the_tensor_that_has_it(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "w.safetensors")
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    flip(path, 8 + length + json.loads(data[8 : 8 + length])[name]["data_offsets"][0])
    with pytest.raises(PolicyError, match=rf"w.safetensors' is damaged: '{name}' has the checksum"):
        check_weights(path, None)


def test_another_file_is_not_the_one_that_is_meant(tmp_path: Path) -> None:
    path = write(tmp_path / "w.safetensors")
    meant = weights_digest(path)
    write(path, {**TENSORS, "count": torch.tensor(4)})
    check_weights(path, None)  # whole it is
    with pytest.raises(PolicyError, match=f"expected digest {meant}: it is another one"):
        check_weights(path, meant)
    save_file(TENSORS, path)
    with pytest.raises(PolicyError, match="has no checksums, expected digest"):
        check_weights(path, meant)


def test_a_file_without_checksums_is_taken_as_it_is(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "w.safetensors", metadata={"format": "pt"})
    assert weights_digest(tmp_path / "w.safetensors") is None
    check_weights(tmp_path / "w.safetensors", None)


@pytest.mark.parametrize("told", ["{", "[]", '{"a.weight": "00000000"}'])
def test_checksums_that_say_nothing_of_the_tensors_are_refused(tmp_path: Path, told: str) -> None:
    save_file(TENSORS, tmp_path / "w.safetensors", metadata={"spangrad.crc32": told})
    with pytest.raises(
        PolicyError, match=r"w.safetensors' has checksums (that can't be read|of other tensors)"
    ):
        check_weights(tmp_path / "w.safetensors", None)


def test_what_can_not_be_read_has_no_digest(tmp_path: Path) -> None:
    assert weights_digest(tmp_path / "missing") is None
    (tmp_path / "half").write_bytes(write(tmp_path / "w").read_bytes()[:100])
    assert weights_digest(tmp_path / "half") is None


def test_a_file_that_is_written_or_replaced_has_another_state(tmp_path: Path) -> None:
    path = write(tmp_path / "w.safetensors")
    state = file_state(path)
    assert file_state(path) == state
    other = write(tmp_path / "other.safetensors")
    other.replace(path)
    assert file_state(path) != state


def test_a_learners_weights_have_checksums(tmp_path: Path) -> None:
    model = load_model(str(make_policy(tmp_path / "policy")), device=torch.device("cpu"))
    path = tmp_path / "weights.safetensors"
    save_weights(weight_tensors(model, dtype=torch.bfloat16), path)
    digest = weights_digest(path)
    assert digest is not None
    check_weights(path, digest)
    flip(path, path.stat().st_size - 1)
    with pytest.raises(PolicyError, match="is damaged"):
        check_weights(path, digest)
