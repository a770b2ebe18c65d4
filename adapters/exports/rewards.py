"""Scores of exports -> rewards in a store.

Knows where a score belongs: the rollout that its span or trace names, or the session that its trace is in or
that it names; a trace of neither is a rollout under its own id. Which part of a session a trace is, the store
knows. Knows no files.

Invariants: the author of a reward is whoever's key it comes with, whatever the export says; a label without a
number is no reward; every score that gives none is counted with the reason.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, NamedTuple

from spangrad.adapters.conversations import conversation_key
from spangrad.adapters.exports.score import Score
from spangrad.store.base import Store
from spangrad.store.records import Reward

AT_ONCE: Final = 1000
NO_NUMBER: Final = "no number"
NO_TRACE: Final = "no such trace"
NO_SESSION: Final = "no such session, or its id is unspecific"
NO_SPAN: Final = "no such span"
MANY_ROLLOUTS: Final = "several rollouts in the trace"
MANY_SESSIONS: Final = "several rollouts in the session"
SAME_SCORE: Final = "the same score again"

_SPANS: Final = "spans s LEFT JOIN sessions n ON n.trace_id = s.trace_id"


class Place(NamedTuple):
    """Where a reward belongs."""

    rollout_id: str
    attempt: int | None
    call_id: str | None
    trace_id: str | None = None
    """The trace whose part of the rollout it is for."""


@dataclass(slots=True)
class ScoreReport:
    """What became of scores."""

    new_rewards: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    """Scores that gave no reward, by reason."""
    kept_at_last_call: int = 0
    """Scores of traces inside longer rollouts: rewards of the trace's last call."""


def put_scores(store: Store, scores: Iterable[Score]) -> ScoreReport:
    """Store scores as rewards. Their spans are in the store, and their calls recorded."""
    report = ScoreReport()
    rest = iter(scores)
    while given := list(islice(rest, AT_ONCE)):
        usable = [score for score in given if score.value is not None and math.isfinite(score.value)]
        if numberless := len(given) - len(usable):
            report.left_out[NO_NUMBER] += numberless
        if usable:
            report.new_rewards += _put(store, usable, report)
    return report


def _put(store: Store, scores: Sequence[Score], report: ScoreReport) -> int:
    wanted = [(score.trace_id, score.span_id) for score in scores if score.trace_id is not None]
    of_traces = places_of(store, wanted)
    of_sessions = _sessions(store, [score for score in scores if score.trace_id is None])
    rewards: list[Reward] = []
    for score in scores:
        if score.trace_id is not None:
            place = of_traces.get((score.trace_id, score.span_id), NO_TRACE)
        else:
            place = of_sessions.get((score.project, score.session_id or ""), NO_SESSION)
        if not isinstance(place, Place):
            report.left_out[place] += 1
            continue
        rewards.append(
            Reward(
                place.rollout_id,
                float(score.value or 0.0),
                name=score.name,
                call_id=place.call_id,
                explanation=score.explanation if score.explanation is not None else score.label,
                attempt=place.attempt,
                time_ns=score.time_ns,
                trace_id=place.trace_id,
            )
        )
    new = store.put_rewards(rewards) if rewards else 0
    if repeated := len(rewards) - new:
        report.left_out[SAME_SCORE] += repeated
    parts = [reward.trace_id for reward in rewards if reward.trace_id is not None]
    sql = (
        "SELECT DISTINCT trace_id FROM rewards "
        "WHERE call_id IS NOT NULL AND trace_id IN (SELECT unnest(?::VARCHAR[]))"
    )
    kept = {row["trace_id"] for row in store.query(sql, [parts])} if parts else set()
    report.kept_at_last_call += sum(trace_id in kept for trace_id in parts)
    return new


def _sessions(store: Store, scores: Sequence[Score]) -> dict[tuple[str | None, str], Place | str]:
    """Where rewards of whole sessions belong, by (project, session id); those of no rollout are left out.

    A session of that project, or else the only one of that id: its spans may name a service and no project.
    """
    wanted = {(score.project, score.session_id) for score in scores if score.session_id is not None}
    sql = (
        "SELECT DISTINCT k.conversation_id AS id, k.conversation_key AS key, n.rollout_id FROM call_keys k "
        "JOIN sessions n ON n.trace_id = k.trace_id WHERE k.conversation_key IS NOT NULL "
        "AND k.conversation_id IN (SELECT unnest(?::VARCHAR[]))"
    )
    rows = store.query(sql, [sorted({session_id for _, session_id in wanted})]) if wanted else []
    found: dict[tuple[str | None, str], Place | str] = {}
    for project, session_id in wanted:
        own = conversation_key(project, session_id)
        known = [row for row in rows if row["id"] == session_id]
        rollouts = {row["rollout_id"] for row in known if row["key"] == own} or {
            r["rollout_id"] for r in known
        }
        if rollouts:
            is_one = len(rollouts) == 1
            found[project, session_id] = Place(rollouts.pop(), None, None) if is_one else MANY_SESSIONS
    return found


def places_of(
    store: Store, wanted: Sequence[tuple[str, str | None]]
) -> dict[tuple[str, str | None], Place | str]:
    """Where rewards of (trace id, span id or None) belong, or why nowhere; unknown traces are left out."""
    traces = sorted({trace_id for trace_id, _ in wanted})
    owners: dict[str, set[Place]] = {}
    sql = (
        "SELECT DISTINCT s.trace_id, coalesce(s.rollout_id, n.rollout_id) AS rollout_id, s.attempt, "
        "s.rollout_id IS NULL AS is_found "
        f"FROM {_SPANS} WHERE s.trace_id IN (SELECT unnest(?))"
    )
    for row in store.query(sql, [traces]):
        owner = owners.setdefault(row["trace_id"], set())
        if row["rollout_id"] is not None:
            part = row["trace_id"] if row["is_found"] else None
            owner.add(Place(row["rollout_id"], row["attempt"], None, part))
    places: dict[tuple[str, str | None], Place | str] = {}
    for trace_id, found in owners.items():
        alone = Place(trace_id, None, None, trace_id)
        places[trace_id, None] = MANY_ROLLOUTS if len(found) > 1 else next(iter(found), alone)
    places |= {(trace_id, span_id): NO_SPAN for trace_id, span_id in wanted if span_id is not None}
    for row in _spans(store, traces, sorted({span_id for _, span_id in wanted if span_id is not None})):
        trace_id, span_id = row["trace_id"], row["span_id"]
        is_whole = row["parent_span_id"] is None and not row["is_call"]
        call_id = None if is_whole else f"{trace_id}-{span_id}"
        part = trace_id if is_whole and row["is_found"] else None
        places[trace_id, span_id] = Place(row["rollout_id"] or trace_id, row["attempt"], call_id, part)
    return places


def _spans(store: Store, traces: Sequence[str], span_ids: Sequence[str]) -> list[dict[str, Any]]:
    if not span_ids:
        return []
    sql = (
        "SELECT s.trace_id, s.span_id, s.parent_span_id, coalesce(s.rollout_id, n.rollout_id) AS rollout_id, "
        "s.attempt, s.rollout_id IS NULL AS is_found, "
        "EXISTS (SELECT 1 FROM calls WHERE call_id = s.trace_id || '-' || s.span_id) AS is_call "
        f"FROM {_SPANS} WHERE s.trace_id IN (SELECT unnest(?)) AND s.span_id IN (SELECT unnest(?))"
    )
    return store.query(sql, [list(traces), list(span_ids)])
