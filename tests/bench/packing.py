"""An update on long rollouts with forks: prefix trees against rows one by one, at the same gradient."""

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers.utils.logging import disable_progress_bar

from spangrad.credit.transition import Transition
from spangrad.trainer.learning.learner import Learner
from spangrad.trainer.learning.learner_config import LearnerConfig
from spangrad.trainer.learning.losses import bc_loss
from spangrad.trainer.learning.model import load_model, target_stats
from spangrad.trainer.learning.output_head import head_form
from spangrad.trainer.learning.packer import Packer
from tests.bench.figures import Figure
from tests.bench.pairs import paired
from tests.trainer.small_policy import make_model, make_row

SHOWN, SAMPLED = 20, 10
"""Tokens of a step."""


def forked_rollout(number: int, *, steps: int = 50, forks: Sequence[int] = (15, 30, 42)) -> list[Transition]:
    """Rows of one rollout: a trunk, and after each of these steps of it a branch that goes on to the end.

    A token that rows share is trained in the first of them.
    """
    rng = np.random.default_rng(number)
    step, length = SHOWN + SAMPLED, steps * (SHOWN + SAMPLED)
    trunk = rng.integers(3, 320, length).astype(np.int32)
    is_sampled = np.arange(length) % step >= SHOWN
    rows: list[Transition] = []
    for start in (0, *(fork * step for fork in forks)):
        ids = np.concatenate([trunk[:start], rng.integers(3, 320, length - start).astype(np.int32)])
        mask = is_sampled & (np.arange(length) >= start)
        row = make_row(number, tokens=length)
        rows.append(
            replace(
                row,
                token_ids=ids if start else trunk,
                action_mask=mask,
                behavior_logprobs=np.where(mask, -5.0, np.nan).astype(np.float32),
                advantages=np.where(mask, rng.normal(size=length), 0.0),
            )
        )
    weight = 1.0 / sum(int(row.action_mask.sum()) for row in rows)
    return [replace(row, loss_weight=weight) for row in rows]


def bench_packing(*, rollouts: int = 2, blocks: int = 3) -> list[Figure]:
    """CPU time of an update of packed rows, of rows one by one; and how far their gradients are apart."""
    rows = [row for number in range(rollouts) for row in forked_rollout(number)]
    disable_progress_bar()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        make_model(hidden=192, layers=4).save_pretrained(folder)
        alone = LearnerConfig(model_path=folder, packing="padded", max_tokens_per_microbatch=1, lr=1e-6)
        alone = replace(alone, kl_monitor_rows=0)
        packed = replace(alone, packing="auto", max_tokens_per_microbatch=4096)
        found = {config.packing: Learner(config).update(rows) for config in (alone, packed)}
        unique, total = (found[name]["data/forward_tokens"] for name in ("auto", "padded"))
        measured, baseline = (("s", partial(_seconds, Learner(config), rows)) for config in (packed, alone))
        (pair,) = paired(["update"], measured, ("one by one", baseline[1]), blocks)
        off = _largest_difference(folder, rows, packed, alone)
    faster = statistics.median(b / a for a, b in zip(pair.measured, pair.baseline, strict=True))
    told = f"{faster:.2f} times; {unique:,.0f} of {total:,.0f} tokens are computed"
    share = faster * unique / total
    return [
        Figure("packing: speed-up of an update, of the ideal", share, "", at_least=0.8, note=told),
        Figure("packing: largest difference of the gradient", off * 1e6, "1e-6 of its largest", at_most=10),
    ]


def _seconds(learner: Learner, rows: list[Transition]) -> tuple[float]:
    started = time.process_time()  # one thread: what other processes take does not count
    learner.update(rows)
    return (time.process_time() - started,)


def _largest_difference(folder: str, rows: list[Transition], *configs: LearnerConfig) -> float:
    gradients = []
    for config in configs:
        model: Any = load_model(folder, device=torch.device("cpu"))
        packer, head = Packer(config, model), head_form(model)
        for batch in packer.batches(rows):
            mask = batch.target_mask_BT
            stats = target_stats(model, batch, compute_dtype=torch.float32, head=head)
            weights_M = batch.weights_BT[mask] * batch.advantages_BT[mask]
            torch.autograd.backward(bc_loss(stats.logprobs_M, mask[mask], weights_M))
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    one, other = gradients
    return float((one - other).abs().max() / other.abs().max())
