"""Scores of exports -> rewards in a store.

Knows where a score belongs: the rollout that its span or trace names, or the session that its trace is in; a
trace of neither is a rollout under its own id. Knows no files.

Invariants: the author of a reward is whoever's key it comes with, whatever the export says; a label without a
number is no reward; every score that gives none is counted with the reason.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from spangrad.adapters.exports.score import Score
from spangrad.store.base import Store
from spangrad.store.records import Reward

AT_ONCE: Final = 1000
NO_NUMBER: Final = "no number"
NO_TRACE: Final = "no such trace"
NO_SPAN: Final = "no such span"
MANY_ROLLOUTS: Final = "several rollouts in the trace"

_SPANS: Final = "spans s LEFT JOIN sessions n ON n.trace_id = s.trace_id"

Place = tuple[str, int | None, str | None]
"""Where a reward belongs: (rollout id, attempt, call id)."""


@dataclass(slots=True)
class ScoreReport:
    """What became of scores."""

    new_rewards: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    """Scores that gave no reward, by reason."""


def put_scores(store: Store, scores: Iterable[Score]) -> ScoreReport:
    """Store scores as rewards. Their spans are in the store, and their calls recorded."""
    report = ScoreReport()
    usable: list[Score] = []
    for score in scores:
        if score.value is None or not math.isfinite(score.value):
            report.left_out[NO_NUMBER] += 1
        else:
            usable.append(score)
    for start in range(0, len(usable), AT_ONCE):
        report.new_rewards += _put(store, usable[start : start + AT_ONCE], report)
    return report


def _put(store: Store, scores: Sequence[Score], report: ScoreReport) -> int:
    places = places_of(store, [(score.trace_id, score.span_id) for score in scores])
    rewards: list[Reward] = []
    for score in scores:
        place = places.get((score.trace_id, score.span_id))
        if not isinstance(place, tuple):
            report.left_out[place or NO_TRACE] += 1
            continue
        rollout_id, attempt, call_id = place
        rewards.append(
            Reward(
                rollout_id,
                float(score.value or 0.0),
                name=score.name,
                call_id=call_id,
                explanation=score.explanation if score.explanation is not None else score.label,
                attempt=attempt,
                time_ns=score.time_ns,
            )
        )
    return store.put_rewards(rewards) if rewards else 0


def places_of(
    store: Store, wanted: Sequence[tuple[str, str | None]]
) -> dict[tuple[str, str | None], Place | str]:
    """Where rewards of (trace id, span id or None) belong, or why nowhere; unknown traces are left out."""
    traces = sorted({trace_id for trace_id, _ in wanted})
    owners: dict[str, set[tuple[str, int | None]]] = {}
    sql = (
        "SELECT DISTINCT s.trace_id, coalesce(s.rollout_id, n.rollout_id) AS rollout_id, s.attempt "
        f"FROM {_SPANS} WHERE s.trace_id IN (SELECT unnest(?))"
    )
    for row in store.query(sql, [traces]):
        owner = owners.setdefault(row["trace_id"], set())
        if row["rollout_id"] is not None:
            owner.add((row["rollout_id"], row["attempt"]))
    places: dict[tuple[str, str | None], Place | str] = {}
    for trace_id, found in owners.items():
        rollout_id, attempt = next(iter(found), (trace_id, None))
        places[trace_id, None] = MANY_ROLLOUTS if len(found) > 1 else (rollout_id, attempt, None)
    places |= {(trace_id, span_id): NO_SPAN for trace_id, span_id in wanted if span_id is not None}
    for row in _spans(store, traces, sorted({span_id for _, span_id in wanted if span_id is not None})):
        trace_id, span_id = row["trace_id"], row["span_id"]
        is_whole = row["parent_span_id"] is None and not row["is_call"]
        rollout_id = row["rollout_id"] or trace_id
        places[trace_id, span_id] = rollout_id, row["attempt"], None if is_whole else f"{trace_id}-{span_id}"
    return places


def _spans(store: Store, traces: Sequence[str], span_ids: Sequence[str]) -> list[dict[str, Any]]:
    if not span_ids:
        return []
    sql = (
        "SELECT s.trace_id, s.span_id, s.parent_span_id, coalesce(s.rollout_id, n.rollout_id) AS rollout_id, "
        "s.attempt, EXISTS (SELECT 1 FROM calls WHERE call_id = s.trace_id || '-' || s.span_id) AS is_call "
        f"FROM {_SPANS} WHERE s.trace_id IN (SELECT unnest(?)) AND s.span_id IN (SELECT unnest(?))"
    )
    return store.query(sql, [list(traces), list(span_ids)])
