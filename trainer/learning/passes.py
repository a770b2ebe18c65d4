"""Passes over rows: what a model says of their trained tokens.

Knows one policy, the one that it started from, and how rows are laid out. Does not know: losses, optimizers,
advantages.

Shape letters: B rows, T positions, M trained tokens of a batch, H hidden.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from spangrad.credit.transition import Transition
from spangrad.trainer.learning.lora import adapter_off
from spangrad.trainer.learning.model import TargetStats, target_hidden, target_stats
from spangrad.trainer.learning.output_head import Entropy, head_form
from spangrad.trainer.learning.packer import Packer
from spangrad.trainer.learning.packing import Batch
from spangrad.trainer.learning.ranks import Ranks


class Passes:
    """Forward passes of one learner."""

    def __init__(
        self,
        model: PreTrainedModel,
        packer: Packer,
        ranks: Ranks,
        *,
        device: torch.device,
        compute_dtype: torch.dtype,
    ) -> None:
        """Of a policy without a reference, until `reference` is set."""
        self.reference: PreTrainedModel | None = None
        """What the policy started as; the policy itself: with its adapter off."""
        self.head = head_form(model)
        self._model = model
        self._packer = packer
        self._ranks = ranks
        self._device = device
        self._compute_dtype = compute_dtype

    def batches(self, rows: Sequence[Transition]) -> Iterator[Batch]:
        """This rank's rows laid out, on the device; where ranks compute in step, as many as any other has."""
        mine = self._ranks.share(rows)
        batches = self._packer.batches([rows[place] for place in mine])
        idle_passes = self._ranks.idle_passes(len(batches))  # asks the others, before any pass
        for batch in batches:
            yield replace(batch, row_indices=tuple(mine[i] for i in batch.row_indices)).to(self._device)
        for _ in range(idle_passes):
            yield self._packer.idle_batch(rows).to(self._device)

    def stats(
        self,
        batch: Batch,
        *,
        use_temperature: bool,
        entropy: Entropy = "none",
        of_reference: bool = False,
    ) -> TargetStats:
        """Log-probabilities (and entropies) at the trained positions of a batch."""
        model = self.reference if of_reference else self._model
        assert model is not None
        with adapter_off(model) if of_reference else contextlib.nullcontext():
            return target_stats(
                model,
                batch,
                compute_dtype=self._compute_dtype,
                head=self.head,
                use_temperature=use_temperature,
                entropy=entropy,
            )

    def hidden(self, batch: Batch) -> Tensor:
        """Hidden states that predict the trained tokens of a batch, (M, H); no gradient."""
        with torch.no_grad():
            return target_hidden(self._model, batch, compute_dtype=self._compute_dtype)

    def logprobs(
        self, rows: Sequence[Transition], *, use_temperature: bool, of_reference: bool = False
    ) -> list[NDArray[np.float32]]:
        """Log-probability of every action token of every row, nats; no gradient."""
        stats = partial(self.stats, use_temperature=use_temperature, of_reference=of_reference)
        return self.of_targets(rows, lambda batch: stats(batch).logprobs_M)

    def sums(self, rows: Sequence[Transition], *, of_reference: bool) -> NDArray[np.float64]:
        """Summed log-probability of the action tokens of every row, nats; temperatures are ignored."""
        scores = self.logprobs(rows, use_temperature=False, of_reference=of_reference)
        return np.array([piece.sum(dtype=np.float64) for piece in scores])

    def of_targets(
        self, rows: Sequence[Transition], of_batch: Callable[[Batch], Tensor]
    ) -> list[NDArray[np.float32]]:
        """A number for every action token of every row; no gradient."""
        own: dict[int, NDArray[np.float32]] = {}
        with torch.no_grad():
            for batch in self.batches(rows):
                numbers = of_batch(batch).cpu().numpy()
                if batch.is_idle:
                    continue
                counts = batch.target_mask_BT.sum(dim=1).cpu().numpy()
                pieces = np.split(numbers, np.cumsum(counts)[:-1])
                own |= dict(zip(batch.row_indices, pieces, strict=True))
        found = {place: piece for of_rank in self._ranks.gather(own) for place, piece in of_rank.items()}
        return [found.get(place, np.zeros(0, dtype=np.float32)) for place in range(len(rows))]
