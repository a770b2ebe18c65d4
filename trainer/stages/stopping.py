"""Whether a run has made its updates, or the metric that `[stop]` names ends it before.

Knows the store's metrics and the config. Does not know: learners, what a metric means. What is decided
follows from the store: a restart decides the same.
"""

import difflib
from collections.abc import Mapping
from typing import Final

from spangrad.errors import ConfigError
from spangrad.store.base import Store
from spangrad.trainer.config import TrainConfig
from spangrad.trainer.stages.stop_config import stops

_VALUES: Final = "SELECT value FROM metrics WHERE run_id = ? AND name = ? ORDER BY update_index"


def why_ended(store: Store, config: TrainConfig, updates: int) -> str | None:
    """Why a run of so many updates has gone as far as it should; None: it goes on."""
    if updates >= config.run.updates:
        return f"run.updates: {config.run.updates} updates"
    if not config.stop.metric:
        return None
    with store.query_arrow(_VALUES, [config.run.id, config.stop.metric]) as answer:  # `query` has a limit
        values: list[float] = answer.read_all()["value"].to_pylist()
    return stops(config.stop, values)


def check_metric(config: TrainConfig, metrics: Mapping[str, float], updates: int) -> None:
    """Refuse a metric that an update should have, and has not.

    Args:
        config: Of the run.
        metrics: Of an update, with what followed it.
        updates: How many there were, this one included.

    Raises:
        ConfigError: It is not among them, though evaluations were due.
    """
    name = config.stop.metric
    all_due = updates % max(1, config.eval.every) == updates % max(1, config.promotion.every) == 0
    if name and all_due and name not in metrics:
        near = difflib.get_close_matches(name, metrics, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(sorted(metrics))}"
        raise ConfigError(
            f"stop.metric is {name!r}, which update {updates - 1} of run {config.run.id!r} does not have;"
            f" {hint} What was trained is kept"
        )
