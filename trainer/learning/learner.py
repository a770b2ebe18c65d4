"""The learner: rows with advantages in, a changed policy and its numbers out.

Knows: one model, one optimizer, a critic where there is one, losses, checkpoints, and its part among ranks.
Does not know: Ray, engines, stores, rewards, or how advantages were made.

Shape letters: B rows, T positions, M trained tokens of a batch.

Invariants:
* one `update` is `epochs_per_update * minibatches_per_update` optimizer steps; the gradient
  of a step does not depend on how its rows are cut into microbatches;
* a saved and loaded learner continues bit for bit (same device, same thread count);
* a step with a gradient that is not finite is not taken;
* ranks that train one policy get the same rows and calls, make the same steps and return the same; the first
  one alone writes files.
"""

import copy
import itertools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from spangrad.credit.transition import Transition
from spangrad.errors import ConfigError, PolicyError
from spangrad.trainer.learning import losses
from spangrad.trainer.learning.adapter_folder import save_adapter
from spangrad.trainer.learning.corrections import correct
from spangrad.trainer.learning.critic import Critic, critic_metrics, values_of_calls
from spangrad.trainer.learning.echo import with_observations
from spangrad.trainer.learning.learner_config import LearnerConfig, scheduled_lr, update_lr
from spangrad.trainer.learning.lora import add_adapter
from spangrad.trainer.learning.memory import running_out_told
from spangrad.trainer.learning.model import (
    checkpoint_layers,
    load_model,
    save_model_folder,
    save_weights,
    usable_device,
    vocabulary_size,
    weight_tensors,
)
from spangrad.trainer.learning.monitors import Totals
from spangrad.trainer.learning.objective import batch_loss, measure_gap, monitor
from spangrad.trainer.learning.objectives import OBJECTIVES
from spangrad.trainer.learning.optimizer import make_optimizer
from spangrad.trainer.learning.output_head import Entropy, output_layer
from spangrad.trainer.learning.packer import Packer, count_batch, told
from spangrad.trainer.learning.packing import Batch, bucketed_batches, trimmed_length, whole_groups
from spangrad.trainer.learning.passes import Passes
from spangrad.trainer.learning.preference import Comparison
from spangrad.trainer.learning.ranks import Ranks
from spangrad.trainer.learning.resumable import Resumable
from spangrad.trainer.learning.selection import (
    CallKey,
    Selection,
    TrainedCall,
    check_vocabulary,
    data_metrics,
    largest_advantage,
    select_rows,
    trained_calls,
)
from spangrad.trainer.learning.sharding import shard, whole

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Learner:
    """Trains one policy. Not thread-safe; meant to be the only one in its process."""

    def __init__(self, config: LearnerConfig, ranks: Ranks | None = None) -> None:
        """Load the policy.

        Args:
            config: Settings; how many `workers` there are is for who starts them.
            ranks: Which part of the work is this learner's; None: all of it.

        Raises:
            PolicyError: The model folder can't be loaded.
            ConfigError: The device does not exist, the model takes no packs and the config asks for them, or
                it has no layers for an adapter that is asked for, or none that can be computed twice.
        """
        if config.threads:
            torch.set_num_threads(config.threads)
        self.config = config
        self._ranks = ranks or Ranks()
        self.device = usable_device(config.device)
        self._seed = config.seed or 0
        torch.manual_seed(self._seed)
        self.model = load_model(config.model_path, device=self.device)
        self._passes = Passes(
            self.model,
            Packer(config, self.model),
            self._ranks,
            device=self.device,
            compute_dtype=_DTYPES[config.dtype],
        )
        is_monitored = config.uses_ratio and config.kl_monitor_rows > 0
        compares = OBJECTIVES[config.objective].compares_sequences or config.kl_coef > 0
        needs_reference = compares or is_monitored
        self._reference: PreTrainedModel | None = None
        if config.lora_rank:
            add_adapter(
                self.model, rank=config.lora_rank, alpha=config.lora_alpha, targets=config.lora_targets
            )
            self._reference = self.model if needs_reference else None  # with the adapter off
        elif needs_reference:
            self._reference = copy.deepcopy(self.model).requires_grad_(False)
        self._passes.reference = self._reference
        if config.gradient_checkpointing:
            checkpoint_layers(self.model)
        if self._ranks.is_sharded:
            for model in (self.model, self._reference):
                if model is not None:
                    shard(model)
        self._optimizer = make_optimizer(self.model, config)
        self._critic: Critic | None = None
        if config.critic is not None:
            hidden_size = output_layer(self.model).weight.shape[-1]
            self._critic = Critic(config.critic, hidden_size, betas=config.betas, device=self.device)
        self._resumable = Resumable(
            config, self.model, self._optimizer, self._critic, self._ranks, device=self.device
        )
        self._vocabulary = vocabulary_size(self.model)
        self.updates = 0
        """Calls of `update` so far, over all resumes."""
        self.optimizer_steps = 0
        """Optimizer steps so far, those of `fit_bc` included."""
        self._trained: dict[CallKey, TrainedCall] = {}

    @running_out_told()
    def update(self, rows: Sequence[Transition], *, policy_version: int | None = None) -> dict[str, float]:
        """Train on rows once; `trainer/README.md` explains the returned metrics.

        Args:
            rows: Rows with advantages and loss weights.
            policy_version: Version of the current weights. `gap/*` then covers only tokens
                that this version sampled (NaN if none), and `data/staleness_*` is reported.

        Raises:
            EmptyBatchError: No row can train anything; nothing was changed.
            GradeError: A row lacks what the objective needs; nothing was changed.
            PolicyError: A gradient was not finite, or there is no memory; that step was not taken.
                Earlier steps of the same update were: load the last checkpoint to go on.
        """
        start = time.perf_counter()
        config = self.config
        selection = self._select(rows, objective=config.objective)
        totals = Totals()
        seconds = {"forward_backward": 0.0, "reference": 0.0, "optimizer": 0.0}
        if config.correction.is_on:
            selection = self._corrected(selection, policy_version, totals)
            seconds["correction"] = time.perf_counter() - start
        self._trained = trained_calls(selection.rows)
        self._optimizer.zero_grad(set_to_none=True)  # what is left of an update that failed
        is_frozen = False
        if self._critic is not None:
            self._critic.forget()
            is_frozen = self._critic.is_alone
        lr = 0.0 if is_frozen else update_lr(config, self.updates)
        groups = whole_groups(selection.rows)
        parts = min(config.minibatches_per_update, len(groups))
        comparison = self._comparison(selection.rows, seconds)
        own = Totals()  # of the rows that are this rank's
        is_first = True
        for epoch in range(config.epochs_per_update):
            rng = np.random.default_rng((self._seed, self.updates, epoch))
            for indices in np.array_split(rng.permutation(len(groups)), parts):
                step_rows = [row for i in indices for row in groups[i]]
                if comparison is not None:
                    step_rows = comparison.weighed(step_rows, totals, seconds)
                self._accumulate(step_rows, parts, policy_version, is_first, is_frozen, own, seconds)
                began = time.perf_counter()
                if not is_frozen:
                    totals.add_mean("grad/norm", self._step(lr, step_rows), 1)
                if self._critic is not None:
                    self._critic.fit(totals, self._ranks)
                seconds["optimizer"] += time.perf_counter() - began
                is_first = False
        for of_rank in self._ranks.gather(own):
            totals.add(of_rank)
        self.updates += 1
        logger.info("update %d: %d rows, %s", self.updates, len(selection.rows), told(totals.metrics()))
        metrics = totals.metrics() | data_metrics(selection, policy_version=policy_version)
        # Losses were summed over microbatches: report what one pass over all rows adds up to.
        metrics |= {k: v / config.epochs_per_update for k, v in metrics.items() if k.startswith("loss/")}
        if self._critic is not None:
            self._critic.updates += 1
            metrics |= critic_metrics(selection.rows)
        if config.uses_ratio:
            metrics = {"gap/mean": math.nan, "gap/max": math.nan} | metrics
        metrics["optimizer/lr"] = lr
        metrics |= {f"time/{name}_s": value for name, value in seconds.items()}
        metrics["time/update_s"] = time.perf_counter() - start
        return metrics

    def trained_calls(self) -> Mapping[CallKey, TrainedCall]:
        """What the last update trained, by call: the tokens add up to its `data/trained_tokens`."""
        return self._trained

    def _select(self, rows: Sequence[Transition], *, objective: str) -> Selection:
        config = self.config
        selection = select_rows(rows, objective=objective, needs_all_tokens=config.needs_all_tokens)
        check_vocabulary(selection.rows, size=self._vocabulary, model=config.model_path)
        return selection

    def _corrected(self, selection: Selection, policy_version: int | None, totals: Totals) -> Selection:
        """The selected rows under `learner.correction`; takes one forward pass over all of them."""
        scores = self.score(selection.rows)
        behavior = [row.behavior_logprobs[row.action_mask] for row in selection.rows]
        versions = [row.policy_versions[row.action_mask] for row in selection.rows]
        policy_M, behavior_M, versions_M = (
            torch.from_numpy(np.concatenate(parts)) for parts in (scores, behavior, versions)
        )
        measure_gap(policy_M, behavior_M, versions_M, policy_version, totals)
        corrected, metrics = correct(
            selection.rows,
            scores,
            self.config.correction,
            sequence=self.config.sequence,
            others=selection.silent,
        )
        for name, value in metrics.items():
            totals.add_sum(name, value)
        left_out = {"left out by a correction": int(metrics["correction/dropped_tokens"])}
        dropped = dict(selection.dropped_tokens) | (left_out if any(left_out.values()) else {})
        return replace(selection, rows=tuple(corrected), dropped_tokens=dropped)

    def _accumulate(
        self,
        rows: Sequence[Transition],
        parts: int,
        policy_version: int | None,
        is_first: bool,
        is_frozen: bool,
        totals: Totals,
        seconds: dict[str, float],
    ) -> None:
        """Add the gradient of one optimizer step, microbatch by microbatch, unless the policy is frozen.

        The first step's pass runs on the weights as they were before the update: the
        engine-to-learner gap and the distance to the start are read off it for free.
        """
        config = self.config
        rows = with_observations(rows) if config.echo_coef > 0 else rows
        # Groups are in random order: the first rows are a fair sample.
        compared = len(rows) if config.kl_coef > 0 else config.kl_monitor_rows if is_first else 0
        batches = itertools.chain(
            ((batch, self._reference is not None) for batch in self._passes.batches(rows[:compared])),
            ((batch, False) for batch in self._passes.batches(rows[compared:])),
        )
        use_temperature = config.uses_ratio
        for batch, is_compared in batches:
            if batch.is_idle:
                self._keep_step(batch, is_compared, is_frozen)
                continue
            count_batch(batch, totals, passes=config.epochs_per_update)
            reference_M = None
            if is_compared:
                began = time.perf_counter()
                with torch.no_grad():
                    stats = self._passes.stats(batch, of_reference=True, use_temperature=use_temperature)
                reference_M = stats.logprobs_M
                seconds["reference"] += time.perf_counter() - began
            began = time.perf_counter()
            entropy: Entropy = "grad" if config.entropy_coef > 0 else "value" if is_first else "none"
            with torch.set_grad_enabled(not is_frozen):
                stats = self._passes.stats(batch, use_temperature=use_temperature, entropy=entropy)
                loss = batch_loss(config, batch, stats, reference_M, totals)
            if not is_frozen:
                # Every step stands for the whole batch: its share of the sum is scaled up.
                torch.autograd.backward(loss * parts)
            if self._critic is not None:
                self._critic.see(
                    batch, self._passes.hidden(batch) if stats.hidden_MH is None else stats.hidden_MH
                )
            if is_first:
                monitor(config, batch, stats, reference_M, policy_version, totals)
            seconds["forward_backward"] += time.perf_counter() - began

    def _keep_step(self, batch: Batch, is_compared: bool, is_frozen: bool) -> None:
        """The passes of a microbatch without rows: other ranks wait for this one's weights and gradient."""
        if is_compared:
            with torch.no_grad():
                self._passes.stats(batch, of_reference=True, use_temperature=False)
        with torch.set_grad_enabled(not is_frozen):
            stats = self._passes.stats(batch, use_temperature=False)
        if not is_frozen:
            torch.autograd.backward(stats.logprobs_M.sum())
        if self._critic is not None and stats.hidden_MH is None:
            self._passes.hidden(batch)

    def _comparison(self, rows: Sequence[Transition], seconds: dict[str, float]) -> Comparison | None:
        if not OBJECTIVES[self.config.objective].compares_sequences:
            return None
        policy, reference = (partial(self._passes.sums, of_reference=which) for which in (False, True))
        return Comparison(rows, self.config, policy, reference, seconds)

    def _step(self, lr: float, rows: Sequence[Transition]) -> float:
        """Clip, check and take one optimizer step; returns the gradient norm before the clip."""
        self._ranks.sum_gradients(self.model.parameters())
        clipped = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm)
        norm = float(whole(clipped))
        if not math.isfinite(norm):
            self._optimizer.zero_grad(set_to_none=True)
            raise PolicyError(
                f"update {self.updates}: the gradient norm is {norm!r} on {len(rows)} rows, whose largest "
                f"advantage is {largest_advantage(rows)}; the step was not taken, correct its reward if that "
                f"is out of range, or lower learner.lr ({self.config.lr!r})"
            )
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.optimizer_steps += 1
        return norm

    @running_out_told()
    def fit_bc(
        self,
        rows: Sequence[Transition],
        steps: int,
        batch_rows: int,
        *,
        schedule: str = "cosine",
        warmup_steps: int = 20,
        progress: Callable[[int, Mapping[str, float]], None] | None = None,
    ) -> dict[str, float]:
        """Clone recorded rows for many optimizer steps: the warm-up before reinforcement.

        Each step's loss is the mean token loss over its rows, weighted by their
        `loss_weight`; temperatures are ignored. Rows are shuffled every pass and grouped by
        length. `policy/kl_to_start` still compares with the folder that the learner was made
        from: export, and make a new learner, for a new start.

        Args:
            rows: Rows of any trainable grade.
            steps: Optimizer steps.
            batch_rows: Rows per step; the last step of a pass may get fewer.
            schedule: `cosine`, `linear` or `constant`, from `config.lr`.
            warmup_steps: Steps of linear rise.
            progress: Called after every step with its number (from 1) and metrics.

        Raises:
            EmptyBatchError: No row has a trained token.
            PolicyError: A gradient was not finite; that step was not taken.
        """
        start = time.perf_counter()
        kept = self._select(rows, objective="bc").rows
        lengths = np.array([trimmed_length(row) for row in kept])
        totals, tail, own = Totals(), Totals(), Totals()
        chosen = bucketed_batches(lengths, batch_rows=batch_rows, steps=steps, seed=self._seed)
        for step, indices in enumerate(chosen):
            lr = scheduled_lr(self.config.lr, step, steps, schedule=schedule, warmup_steps=warmup_steps)
            step_rows = [kept[i] for i in indices]
            total_weight = sum(row.loss_weight * int(row.action_mask.sum()) for row in step_rows)
            step_loss = 0.0
            for batch in self._passes.batches(step_rows):
                if batch.is_idle:
                    self._keep_step(batch, is_compared=False, is_frozen=False)
                    continue
                count_batch(batch, own)
                mask_BT = batch.target_mask_BT
                stats = self._passes.stats(batch, use_temperature=False)
                weights_M = batch.weights_BT[mask_BT] / total_weight
                loss = losses.bc_loss(stats.logprobs_M, mask_BT[mask_BT], weights_M)
                torch.autograd.backward(loss)
                step_loss += float(loss.detach())
            step_loss = sum(self._ranks.gather(step_loss))
            metrics = {"loss/bc": step_loss, "grad/norm": self._step(lr, step_rows), "optimizer/lr": lr}
            totals.add_sum("data/trained_tokens", sum(int(row.action_mask.sum()) for row in step_rows))
            if step >= steps - max(1, steps // 10):
                tail.add_mean("loss/bc", step_loss, 1)
            if progress is not None:
                progress(step + 1, metrics)
        for of_rank in self._ranks.gather(own):
            totals.add(of_rank)
        return totals.metrics() | tail.metrics() | {"time/update_s": time.perf_counter() - start}

    @running_out_told()
    def score(self, rows: Sequence[Transition]) -> list[NDArray[np.float32]]:
        """Log-probability of every action token of every row under the current weights, nats.

        Each row is scored at its own temperature (0 counts as 1, as engines report it). A row
        without action tokens gets an empty array.
        """
        check_vocabulary(rows, size=self._vocabulary, model=self.config.model_path)
        return self._passes.logprobs(rows, use_temperature=True)

    @running_out_told()
    def values(self, rows: Sequence[Transition]) -> list[list[float]]:
        """What the critic expects to be still to come before each call of every row, reward units.

        Returns:
            For every row a number for each of its segments, read before its first token.

        Raises:
            PolicyError: The learner has no critic, or a row trains a call without its first token.
        """
        critic = self._critic
        if critic is None:
            raise PolicyError("the learner has no critic to ask; give it one with learner.critic")
        check_vocabulary(rows, size=self._vocabulary, model=self.config.model_path)
        found = self._passes.of_targets(rows, lambda batch: critic.values(self._passes.hidden(batch)))
        return [values_of_calls(row, values) for row, values in zip(rows, found, strict=True)]

    def export_weights(self, path: str | Path) -> None:
        """Write the weights in `config.dtype` as one safetensors file, complete or absent."""
        tensors = weight_tensors(self.model, dtype=_DTYPES[self.config.dtype])
        if self._ranks.is_first:
            save_weights(tensors, Path(path))

    def export_adapter(self, root: str | Path, *, model: str, version: int) -> str:
        """Write the adapter as a folder below `root`, complete or absent, and return its path.

        Args:
            root: Folder of adapters.
            model: The name by which agents know the policy.
            version: Policy version.

        Raises:
            ConfigError: No adapter is trained.
        """
        config = self.config
        if not config.lora_rank:
            raise ConfigError("learner.lora_rank is 0; there is no adapter to export")
        if not self._ranks.is_first:
            return str(root)
        folder = save_adapter(
            self.model,
            Path(root),
            model,
            version,
            rank=config.lora_rank,
            alpha=config.lora_alpha,
            dtype=_DTYPES[config.dtype],
        )
        return str(folder)

    def export_model(self, folder: str | Path) -> None:
        """Write a Hugging Face folder with the starting folder's tokenizer and chat template."""
        dtype = _DTYPES[self.config.dtype]
        tensors = weight_tensors(self.model, dtype=dtype)
        if self._ranks.is_first:
            source = Path(self.config.model_path)
            save_model_folder(tensors, Path(folder), source_folder=source, dtype=dtype)

    def save(self, root: str | Path, *, record: Any, keep: int = 3) -> Path:
        """Write a checkpoint under `root`, keep the newest `keep`, and return its folder.

        It holds whole weights: any number of ranks can go on from it, sharded or not. Ranks but the first
        write nothing and return `root`.

        Args:
            root: Folder of checkpoints.
            record: JSON value that `load` gives back, such as which rows are consumed.
            keep: Complete checkpoints to keep, 1 or more.

        Raises:
            StoreFullError: The disk is full; older checkpoints are untouched.
        """
        counters = {"updates": self.updates, "optimizer_steps": self.optimizer_steps}
        return self._resumable.save(root, counters, record=record, keep=keep)

    def load(self, folder: str | Path) -> Any:
        """Continue from a checkpoint and return its record.

        The starting policy that KL is measured against stays the one in `config.model_path`.

        Raises:
            StoreError: The checkpoint is torn or unreadable.
            PolicyError: It belongs to another model; nothing was changed.
        """
        checkpoint = self._resumable.load(folder)
        self.updates = int(checkpoint.counters["updates"])
        self.optimizer_steps = int(checkpoint.counters["optimizer_steps"])
        return checkpoint.record
