"""What an update makes of the rollouts that it got: by the objective, credited rows or judged ones.

Knows the config of a run, its store and its model's folder. Does not know: engines, learners.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from spangrad.adapters.model_call import Grade, ModelCall
from spangrad.credit.critic import Critic
from spangrad.credit.history import nothing_before
from spangrad.credit.pipeline import CreditedBatch, credited_rows
from spangrad.credit.scoring import scorer
from spangrad.store.base import Store
from spangrad.store.records import Rollout, UpdateSample
from spangrad.trainer.config import TrainConfig
from spangrad.trainer.learning.objectives import OBJECTIVES
from spangrad.trainer.learning.rendering import ChatTokenizer, with_rendered_ids
from spangrad.trainer.learning.selection import CallKey, TrainedCall
from spangrad.trainer.learning.vocabulary import check_length, check_size
from spangrad.trainer.row_settings import row_settings
from spangrad.trainer.serving.weight_files import check_model_folder, context_length

logger = logging.getLogger(__name__)


class Crediting:
    """Rollouts of a run to the rows of an update."""

    def __init__(self, config: TrainConfig, model: Path) -> None:
        """Read the sizes of the model's vocabulary and context, and try to load what gives scores.

        Raises:
            ConfigError: The function in `credit.scores` can't be loaded.
            PolicyError: The model folder can't be loaded.
        """
        self._config = config
        self._model = model
        self._objective = OBJECTIVES[config.learner.objective]
        scorer(config.credit, config.base_dir)
        folder = check_model_folder(model)
        self._vocab_size: int | None = folder.get("vocab_size")
        self._context = context_length(folder)
        self._told_alone = False

    def rows(
        self,
        store: Store,
        rollouts: Sequence[Rollout],
        policy_version: int,
        critic: Critic | None = None,
    ) -> CreditedBatch:
        """Credit the rollouts, or judge them, as the objective needs; a call's grade must do for it.

        `critic` gives values to the terms that ask for some.
        """
        config = self._config
        batch = credited_rows(
            store,
            rollouts,
            policy_version=config.version_of_rows(policy_version),
            max_staleness=config.rollout.max_staleness,
            render=self._rendered,
            critic=critic,
            **row_settings(config),
        )
        if batch.diagnostics.get("shaping/passes") == 0:
            logger.warning(
                "going in a circle earned up to %.3g from what credit.shaping adds; an agent can farm it",
                batch.diagnostics["shaping/farming_gain"],
            )
        alone = nothing_before(batch.diagnostics, rollouts, config.credit)
        if alone is not None and not self._told_alone:
            self._told_alone = True
            logger.warning("%s", alone)
        return batch

    def why_nothing(self, batch: CreditedBatch, rollouts: Sequence[Rollout]) -> str:
        """What of the settings of credit leaves a batch without signal, to be put behind other reasons."""
        alone = nothing_before(batch.diagnostics, rollouts, self._config.credit)
        return "" if alone is None else f"; {alone}"

    def informative_groups(self, batch: CreditedBatch) -> int:
        """How many groups an update can learn from; a rollout without one is a group of its own."""
        rows = batch.rows
        if self._objective.needs_credit:
            rows = [row for row in rows if np.any(row.advantages[row.action_mask] != 0)]
        return len({row.group_id or row.rollout_id for row in rows})

    def _rendered(self, call: ModelCall) -> ModelCall:
        """The call, if it can be the model's; one of grade `text` gets ids if the objective trains it."""
        if call.grade is Grade.TEXT and self._objective.min_grade == "text":
            call = with_rendered_ids(call, self._tokenizer)
        elif self._vocab_size is not None and call.grade in (Grade.EXACT, Grade.IDS):
            check_size(call, self._vocab_size)
        if self._context is not None:
            check_length(call, self._context)
        return call

    @cached_property
    def _tokenizer(self) -> ChatTokenizer:
        tokenizer: ChatTokenizer = AutoTokenizer.from_pretrained(self._model)
        return tokenizer


def as_trained(samples: Sequence[UpdateSample], trained: Mapping[CallKey, TrainedCall]) -> list[UpdateSample]:
    """Samples with what the learner trained of each: tokens that it left out are in its books."""
    nothing = TrainedCall(0, 0.0)
    found = [trained.get((one.rollout_id, one.attempt, one.call_id), nothing) for one in samples]
    return [
        replace(one, trained_tokens=call.tokens, loss_weight=call.loss_weight)
        for one, call in zip(samples, found, strict=True)
    ]
