"""Weight-transfer backend of vLLM that reads a safetensors file. Runs inside vLLM's workers.

Knows vLLM's layerwise reload and what the CPU build of vLLM keeps beside the weights.
Does not know versions, pausing or the prefix cache: see `publish.py`.

Invariants:
* a file is checked against its checksums and the model's tensors before the model is touched: one that
  is damaged, another than the one that is meant, or does not fit is refused, and the old weights stay served;
* a file that changes between that and the end of loading is an error, never new weights;
* when `update_weights` has returned, everything that computes logits is new;
* a worker dies with the process that started it, so that no engine is left without a server.
"""

import multiprocessing
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.logger import init_logger
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from spangrad.errors import PolicyError
from spangrad.trainer.processes import die_with_parent
from spangrad.trainer.serving.checksums import check_weights, file_state
from spangrad.trainer.serving.vllm_plugin import REFUSAL
from spangrad.trainer.serving.weight_files import Shapes, folder_shapes, misfit, read_shapes

logger = init_logger("vllm.spangrad")


@dataclass
class FileInitInfo(WeightTransferInitInfo):
    """Nothing has to be agreed on beforehand."""


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):
    """Where the weights are."""

    path: str
    """A safetensors file that every worker can read, with Hugging Face tensor names."""
    digest: str | None = None
    """What `weights_digest` said of the file that is meant; None: it was not asked."""


class FileWeightTransferEngine(WeightTransferEngine[FileInitInfo, FileUpdateInfo]):
    """Replaces all weights by those of a file, in one `update_weights`."""

    init_info_cls = FileInitInfo
    update_info_cls = FileUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Remember the tensors of the model folder: later files must fit them."""
        super().__init__(*args, **kwargs)
        _die_with_server()
        model = Path(self.model_config.model)
        self._expected: Shapes | None = folder_shapes(model) if model.is_dir() else None
        if self._expected is None:
            logger.warning("%s has no safetensors files: weight updates can't be checked beforehand", model)

    def init_transfer_engine(self, init_info: FileInitInfo) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        """Nothing is touched before a file was found to fit."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Check the file, then load it."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        """Replace the model's weights by the file's."""
        started = time.perf_counter()
        state = self._refuse_unfit(update_info)
        checked = time.perf_counter()
        initialize_layerwise_reload(self.model)
        self.model.load_weights(_tensors(update_info.path))  # type: ignore[operator]
        finalize_layerwise_reload(self.model, self.model_config)  # type: ignore[no-untyped-call]
        if self.device.type == "cpu":
            _repack_heads(self.model)
        else:
            torch.accelerator.synchronize()
        if file_state(update_info.path) != state:
            raise RuntimeError(f"weights file {update_info.path!r} was changed while it was loaded")
        times = (checked - started, time.perf_counter() - checked)
        logger.info("checked %s in %.3f s and loaded it in %.3f s", update_info.path, *times)

    def finish_weight_update(self) -> None:
        """Nothing is left to do."""

    def shutdown(self) -> None:
        """Nothing is held."""

    def _refuse_unfit(self, update_info: FileUpdateInfo) -> tuple[int, int, int]:
        """Check the file; returns its state, which must not change before all is loaded."""
        path = update_info.path
        try:
            state = file_state(path)
            found = read_shapes(path)
            check_weights(path, update_info.digest)
        except (PolicyError, OSError) as error:
            raise ValueError(f"{REFUSAL}can't be used: {error}") from error
        if self._expected is not None:
            is_tied = bool(getattr(self.model_config.hf_text_config, "tie_word_embeddings", False))
            if reason := misfit(found, self._expected, has_tied_head=is_tied):
                raise ValueError(f"{REFUSAL}does not fit the served model: {reason}")
        return state


def _tensors(path: str) -> Iterator[tuple[str, torch.Tensor]]:
    with safe_open(path, framework="pt", device="cpu") as file:
        for name in file.keys():  # noqa: SIM118 - not a dict
            yield name, file.get_tensor(name)


def _repack_heads(model: torch.nn.Module) -> None:
    """Refresh the packed copy of a tied head, which the CPU build's layerwise reload leaves old."""
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def _die_with_server() -> None:
    """Let the kernel end this worker when the process that started it is gone, however it went."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    die_with_parent()
    if os.getppid() != parent.pid:  # it went before the kernel was asked
        os._exit(1)
