"""What of a learner is in a checkpoint: weights, optimizer, critic, random numbers.

Knows models, optimizers and critics. Does not know: rows, losses, what a caller records beside.

Invariant: what is loaded continues bit for bit (same device, same thread count); a checkpoint of another
model or of other adapters is refused before anything is changed.
"""

import logging
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from spangrad.errors import PolicyError
from spangrad.trainer.learning.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from spangrad.trainer.learning.critic import Critic
from spangrad.trainer.learning.learner_config import LearnerConfig
from spangrad.trainer.learning.lora import base_digest
from spangrad.trainer.learning.model import load_weights, resumable_tensors
from spangrad.trainer.learning.optimizer import load_optimizer, optimizer_tensors
from spangrad.trainer.learning.ranks import Ranks

logger = logging.getLogger(__name__)


class Resumable:
    """The parts of one learner that a checkpoint holds."""

    def __init__(
        self,
        config: LearnerConfig,
        model: PreTrainedModel,
        optimizer: torch.optim.Optimizer,
        critic: Critic | None,
        ranks: Ranks,
        *,
        device: torch.device,
    ) -> None:
        """Hold the parts, which change as the learner learns."""
        self._config = config
        self._model = model
        self._optimizer = optimizer
        self._critic = critic
        self._ranks = ranks
        self._device = device

    def save(self, root: str | Path, counters: Mapping[str, int], *, record: Any, keep: int) -> Path:
        """Write a checkpoint under `root`, as `Learner.save` says."""
        rng = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            rng["cuda"] = torch.cuda.get_rng_state(self._device)
        told = {**counters, "adapter": self._adapter, "adapter_base": self._adapter_base}
        tensors = {
            "weights": resumable_tensors(self._model),
            "optimizer": optimizer_tensors(self._optimizer, self._model),
            "rng": rng,
        }
        if self._critic is not None:
            tensors |= self._critic.tensors()
            told["critic_updates"] = self._critic.updates
        if not self._ranks.is_first:
            return Path(root)
        return save_checkpoint(root, Checkpoint(tensors, told, record), keep=keep)

    def load(self, folder: str | Path) -> Checkpoint:
        """Continue from a checkpoint, as `Learner.load` says, and return it."""
        checkpoint = load_checkpoint(folder)
        saved, own = checkpoint.counters.get("adapter"), self._adapter
        if saved != own:
            raise PolicyError(
                f"checkpoint {str(folder)!r} has {saved or 'no adapters'}, the learner {own or 'none'} "
                "(learner.lora_rank, lora_alpha, lora_targets); they can't change in the middle of a run"
            )
        base = checkpoint.counters.get("adapter_base")
        if base != self._adapter_base:
            raise PolicyError(
                f"checkpoint {str(folder)!r} has adapters to weights with hash {base!r}, those of "
                f"{self._config.model_path!r} have {self._adapter_base!r}; go on from the folder that the "
                "run started from, as it was then"
            )
        load_weights(self._model, checkpoint.tensors["weights"], where=f"checkpoint {str(folder)!r}")
        load_optimizer(self._optimizer, self._model, checkpoint.tensors["optimizer"])
        if self._critic is not None:
            self._critic.restore(checkpoint.tensors, int(checkpoint.counters.get("critic_updates", 0)))
        elif "critic" in checkpoint.tensors:
            logger.warning(
                "checkpoint %r has a critic that nothing asks any more: it is left out", str(folder)
            )
        torch.set_rng_state(checkpoint.tensors["rng"]["cpu"])
        if self._device.type == "cuda" and "cuda" in checkpoint.tensors["rng"]:
            torch.cuda.set_rng_state(checkpoint.tensors["rng"]["cuda"], self._device)
        return checkpoint

    @property
    def _adapter(self) -> list[Any] | None:
        """What a checkpoint's adapters must have been made with; None: there are none."""
        config = self._config
        return [config.lora_rank, config.lora_alpha, list(config.lora_targets)] if config.lora_rank else None

    @cached_property
    def _adapter_base(self) -> str | None:
        """Hash of the weights that a checkpoint's adapters must have been trained beside."""
        return base_digest(self._model) if self._config.lora_rank else None
