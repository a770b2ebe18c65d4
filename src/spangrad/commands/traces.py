"""Traces that belong to no rollout, looked at as rollouts, so that they can be cloned.

Knows that other recorders name no rollout. Knows no rewards: such a trace has none.

Invariants: nothing is written; a call that names a rollout is left out, also where the rest of its trace
names none.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from spangrad.errors import ConfigError
from spangrad.store.records import LogRecord, Rollout, RolloutStatus, Span
from spangrad.tracer import conventions as c

if TYPE_CHECKING:
    from spangrad.adapters.model_call import ModelCall
    from spangrad.credit.pipeline import CreditedBatch, Render
    from spangrad.store.base import Store


def calls_without_rollout(store: "Store") -> "list[ModelCall]":
    """Model calls in the store that name no rollout."""
    from spangrad.adapters.calls import calls_of

    return [call for call in calls_of(store) if call.rollout_id is None]


def clone_traces(
    store: "Store", calls: "Sequence[ModelCall]", *, min_grade: str, render: "Render | None"
) -> "CreditedBatch":
    """Rows of the traces of these calls, each trace a rollout whose id is the trace's."""
    from spangrad.credit.pipeline import credited_rows

    ids = list(dict.fromkeys(call.trace_id for call in calls))
    rollouts = [Rollout(trace_id, status=RolloutStatus.SUCCEEDED) for trace_id in ids]
    view = cast("Store", _TracesAsRollouts(store))
    return credited_rows(view, rollouts, None, min_grade=min_grade, render=render)


def renderer(folder: Path) -> "Render":
    """What gives text-grade calls their token ids: the chat template of a model folder.

    Raises:
        ConfigError: The folder has no tokenizer or no chat template.
    """
    from transformers import AutoTokenizer

    from spangrad.trainer.learning.rendering import with_rendered_ids

    expected = "expected a model folder (Hugging Face format) with tokenizer and chat template"
    if not folder.is_dir():
        raise ConfigError(f"--tokenizer is {str(folder)!r}, which is no folder; {expected}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder))
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise ConfigError(f"--tokenizer {str(folder)!r} can't be loaded: {first}; {expected}") from error
    if tokenizer.chat_template is None:
        raise ConfigError(f"--tokenizer {str(folder)!r} has no chat template; {expected}")
    return lambda call: with_rendered_ids(call, tokenizer)


class _TracesAsRollouts:
    """The part of a store that crediting reads; a rollout id is a trace id."""

    def __init__(self, store: "Store") -> None:
        self._store = store

    def spans(self, rollout_ids: Sequence[str]) -> Iterator[Span]:
        spans = list(self._store.spans(trace_ids=rollout_ids))
        for span in spans:
            if span.rollout_id is None:
                named = {**span.attributes, c.ROLLOUT_ID: span.trace_id}
                yield dataclasses.replace(span, attributes=named, rollout_id=span.trace_id)
            else:
                yield span

    def logs(self, rollout_ids: Sequence[str]) -> Iterable[LogRecord]:
        return self._store.logs(trace_ids=rollout_ids)

    def rollouts(self, *, rollout_ids: Sequence[str]) -> Iterable[Rollout]:
        return ()
