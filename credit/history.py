"""What rollouts before a batch have earned, read from the store: all that a running baseline is made of.

Invariants:
* the same batch has the same history whenever it is credited: only what ended before its last rollout
  counts, so a trainer that restarts goes on with the same numbers;
* only rollouts of the batch's runs and splits count, current attempts that succeeded and have a reward;
* the cost does not grow with the store's age: of each kind the last few rollouts, as the decay says.
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from spangrad.adapters.calls import calls_of
from spangrad.adapters.model_call import ModelCall
from spangrad.credit.credit_config import CreditConfig
from spangrad.credit.groups import labels
from spangrad.credit.rewards import by_rollout, total_reward
from spangrad.credit.running import rollouts_remembered, running_baselines
from spangrad.store.base import Store
from spangrad.store.records import Rollout

logger = logging.getLogger(__name__)

_SHOWN: Final = 12
_SQL: Final = """
WITH ended AS (
  SELECT rollout_id, ended_ns, CAST({kind} AS VARCHAR) AS kind,
    rollout_id IN (SELECT unnest($batch::VARCHAR[])) AS is_own
  FROM rollouts LEFT JOIN tasks USING (task_key)
  WHERE status = 'succeeded' AND ended_ns IS NOT NULL AND split IN (SELECT unnest($splits::VARCHAR[]))
    AND coalesce(run_id, '') IN (SELECT unnest($runs::VARCHAR[]))
), bounds AS (
  SELECT kind, min(ended_ns) AS first_ns, max(ended_ns) AS last_ns FROM ended WHERE is_own GROUP BY kind
), placed AS (
  SELECT rollout_id, ended_ns, kind, is_own, ended_ns >= first_ns AS is_between,
    row_number() OVER (
      PARTITION BY kind, is_own, ended_ns >= first_ns ORDER BY ended_ns DESC, rollout_id DESC
    ) AS place
  FROM ended JOIN bounds USING (kind) WHERE ended_ns <= last_ns
)
SELECT rollout_id, ended_ns, kind, is_own FROM placed WHERE is_own OR is_between OR place <= $remembered
ORDER BY ended_ns, rollout_id
"""


def baselines_of(
    store: Store,
    totals: Mapping[str, float],
    batch: Sequence[Rollout],
    config: CreditConfig,
    *,
    authors: Sequence[str],
    weights: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """`running_baselines` of a batch by rollout id; those of no known kind and the first of theirs have none.

    Args:
        store: Where they are.
        totals: Returns of the batch, where they are known.
        batch: Rollouts that ended.
        config: Its `baseline_key` says what a rollout's kind is, its `baseline_decay` how far back to look.
        authors: Whose rewards count.
        weights: As in `rewards_of`.

    Rollouts are in order of the time at which they ended, those of one moment in order of their ids. Where
    none has the key, that is said, with the keys that there are.
    """
    _tell_no_kind(batch, config.baseline_key)
    names = config.baseline_key.split(".")[1:]
    parameters: dict[str, Any] = {
        "batch": [rollout.rollout_id for rollout in batch],
        "splits": sorted({rollout.split for rollout in batch}),
        "runs": sorted({rollout.run_id or "" for rollout in batch}),
        "remembered": rollouts_remembered(config.baseline_decay),
    }
    if names:
        parameters["path"] = "$" + "".join(f'."{name}"' for name in names)
    kind = {"task_id": "task_id", "all": "'all'"}.get(config.baseline_key, "(task ->> $path)")
    with store.query_arrow(_SQL.format(kind=kind), parameters) as answer:  # `query` has a limit of rows
        rows: list[dict[str, Any]] = answer.read_all().to_pylist()
    earlier = [row["rollout_id"] for row in rows if not row["is_own"]]
    known = {**totals, **totals_of(store, earlier, authors, weights)}
    ordered = [row for row in rows if row["rollout_id"] in known]
    baselines_M = running_baselines(
        np.array([known[row["rollout_id"]] for row in ordered], dtype=np.float64),
        labels([row["kind"] for row in ordered]),
        decay=config.baseline_decay,
    )
    return {
        row["rollout_id"]: baseline
        for row, baseline in zip(ordered, baselines_M.tolist(), strict=True)
        if row["is_own"] and not math.isnan(baseline)
    }


def nothing_before(
    diagnostics: Mapping[str, float], batch: Sequence[Rollout], config: CreditConfig
) -> str | None:
    """What to say if half of a batch or more has no baseline, as where no task comes twice; None: less has.

    Args:
        diagnostics: Of the batch, as `CreditDiagnostics.metrics` has them.
        batch: Its rollouts.
        config: What they were credited with.
    """
    missing = diagnostics.get("baseline/missing", 0.0)
    scored = diagnostics.get("rollouts/all", 0.0) - diagnostics.get("rollouts/missing_reward", 0.0)
    if not missing or 2.0 * missing < scored:
        return None
    key = config.baseline_key
    keys = [name for name in _all_keys(batch) if name != key]
    return (
        f"{missing:.0f} of {scored:.0f} rollouts train nothing: by credit.baseline_key {key!r}"
        " none of their kind ended before them, so a running baseline has nothing to compare them with; name"
        f" what tasks have in common, {_shown(keys)}"
    )


def _tell_no_kind(batch: Sequence[Rollout], key: str) -> None:
    keys = _all_keys(batch)
    if key not in keys:
        logger.warning(
            "none of %d rollouts has a %s, which credit.baseline_key names, so none has a baseline; there is"
            " %s",
            len(batch),
            key,
            _shown(keys),
        )


def _shown(keys: Sequence[str]) -> str:
    return ", ".join(keys[: _SHOWN + 1]) + (", ..." if len(keys) > _SHOWN + 1 else "")


def _all_keys(batch: Sequence[Rollout]) -> list[str]:
    """Values of `baseline_key` by which any rollout would be of a kind."""
    return ["all", *sorted({name for rollout in batch for name in _keys(rollout)})]


def _keys(rollout: Rollout) -> Iterator[str]:
    """Values of `baseline_key` by which the rollout would be of a kind."""
    if rollout.task_id is not None:
        yield "task_id"
    yield from _paths(rollout.task, "task")


def _paths(value: Any, above: str) -> Iterator[str]:
    for name, inner in value.items() if isinstance(value, Mapping) else ():
        if inner is not None:
            yield f"{above}.{name}"
            yield from _paths(inner, f"{above}.{name}")


def totals_of(
    store: Store, ids: Sequence[str], authors: Sequence[str], weights: Mapping[str, float] | None
) -> dict[str, float]:
    """Returns of the rollouts that have one. Calls are read only where one of them was rewarded."""
    if not ids:
        return {}
    given = by_rollout(store.rewards(ids))
    in_parts = [name for name, mine in given.items() if any(one.call_id is not None for one in mine)]
    calls: dict[str, list[ModelCall]] = {}
    for call in calls_of(store, in_parts) if in_parts else ():
        calls.setdefault(call.rollout_id or "", []).append(call)
    found = {}
    for rollout in store.rollouts(rollout_ids=ids):
        name = rollout.rollout_id
        total = total_reward(
            rollout, given.get(name, ()), calls.get(name, ()), authors=authors, weights=weights
        )
        if total is not None:
            found[name] = total
    return found
