"""How one learner lays out its rows: what its config asks for and its model takes.

Knows: the setting `packing`, what the model was found to take. Does not know: losses, optimizers.

Invariant: a layout that was asked for is used or refused; only `auto` chooses, and says what it can't have.
"""

import logging
from collections.abc import Mapping, Sequence

import torch
from transformers import PreTrainedModel

from spangrad.credit.transition import Transition
from spangrad.errors import ConfigError
from spangrad.trainer.learning.layouts import lay_out
from spangrad.trainer.learning.learner_config import PACKINGS, LearnerConfig
from spangrad.trainer.learning.monitors import Totals
from spangrad.trainer.learning.packable import packable
from spangrad.trainer.learning.packing import Batch, idle_batch, trimmed_length

logger = logging.getLogger(__name__)


class Packer:
    """Makes batches of rows for one model."""

    def __init__(self, config: LearnerConfig, model: PreTrainedModel) -> None:
        """Find out what the model takes, unless rows are padded anyway; sets the model's attention.

        On a GPU `auto` pads: no pack was ever trained on one, so that they are tried only when asked for.

        Raises:
            ConfigError: `packing` asks for packs, and the model takes none.
        """
        self._config = config
        self._said: set[str] = set()
        is_unproven = config.packing == "auto" and model.device.type == "cuda"
        if is_unproven:
            logger.warning(
                "rows are padded, tokens that they share are computed again: packs are not proven on a GPU; "
                "learner.packing = 'tree' tries them"
            )
        is_padded = is_unproven or config.packing == "padded"
        self._packable = None if is_padded else packable(model, getattr(torch, config.dtype))
        pad = model.config.pad_token_id
        self._pad_token_id = pad if isinstance(pad, int) else 0
        if self._packable is not None and self._packable.masking is None:
            self._refuse(
                f"model {config.model_path!r} ({type(model).__name__}) takes no packs:"
                f" {self._packable.reason}"
            )

    def batches(self, rows: Sequence[Transition]) -> list[Batch]:
        """Lay rows out; those without a trained token are left out.

        Raises:
            ConfigError: `packing` asks for packs, and a row is longer than the model's sliding window.
        """
        config, can = self._config, self._packable
        layout = "padded" if can is None or can.masking is None else config.packing
        if layout != "padded" and can is not None and can.longest_row is not None:
            longest = max(map(trimmed_length, rows), default=0)
            if longest > can.longest_row:
                layout = "padded"
                self._refuse(
                    f"a row has {longest} tokens, and layers of model {config.model_path!r} see"
                    f" {can.longest_row}: the window is not cut out of packs"
                )
        return lay_out(
            rows,
            layout=layout,
            max_tokens_per_batch=config.max_tokens_per_microbatch,
            pad_token_id=self._pad_token_id,
            masking=None if can is None else can.masking,
        )

    def idle_batch(self, rows: Sequence[Transition]) -> Batch:
        """A pass that trains nothing; see `packing.idle_batch`."""
        return idle_batch(rows, pad_token_id=self._pad_token_id)

    def _refuse(self, reason: str) -> None:
        if self._config.packing != "auto":
            raise ConfigError(
                f"learner.packing is {self._config.packing!r}, but {reason}; choose 'auto' or 'padded'"
            )
        if self._packable is not None and reason not in self._said:
            self._said.add(reason)
            logger.warning("rows are padded, tokens that they share are computed again: %s", reason)


def count_batch(batch: Batch, totals: Totals, *, passes: int = 1) -> None:
    """Add what a model computes for a batch, once for every `passes` that it is computed, to `totals`."""
    tokens = batch.forward_tokens
    totals.add_sum("data/forward_tokens", tokens / passes)
    totals.add_sum("data/shared_tokens", batch.shared_tokens / passes)
    totals.add_sum("data/padding_tokens", (batch.input_ids_BT.numel() - tokens) / passes)
    for layout in PACKINGS[1:]:
        totals.add_mean(f"packing/{layout}", float(layout == batch.layout), tokens)


def told(metrics: Mapping[str, float]) -> str:
    """What `count_batch` counted, in words."""
    shares = {layout: metrics.get(f"packing/{layout}", 0.0) for layout in PACKINGS[1:]}
    how = ", ".join(f"{share:.0%} {layout}" for layout, share in shares.items() if share)
    forward, shared, padding = (
        metrics.get(f"data/{name}_tokens", 0.0) for name in ("forward", "shared", "padding")
    )
    return f"{forward:.0f} tokens computed ({how}), {shared:.0f} shared, {padding:.0f} padding"
