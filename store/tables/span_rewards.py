"""Events of spans that are rewards: `gen_ai.evaluation.result`.

Knows the table `spans` and who owns what. Invariants: their author is the agent; one without a finite number
is no reward; a span of a trace that names no rollout rewards the one that the trace is found to be of.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import replace

import duckdb

from spangrad.store.records import Reward, RewardAuthor, Span, SpanEvent
from spangrad.store.tables.evaluations import is_rewarded
from spangrad.store.tables.expand import events_from_json
from spangrad.store.tables.lineage import Admission, Key, Owner
from spangrad.store.tables.placing import placed
from spangrad.store.tables.rewards import insert_rewards
from spangrad.tracer import conventions

logger = logging.getLogger(__name__)


def event_rewards(
    con: duckdb.DuckDBPyConnection, fresh: Sequence[Span], admission: Admission
) -> list[tuple[Reward, str]]:
    """Of new spans, and of those stored before that have an owner now."""
    rewards: list[tuple[Reward, str]] = []
    for span in fresh:
        key = (span.trace_id, span.span_id)
        if span.events and (owner := admission.owners.get(key)):
            operation = span.attributes.get(conventions.OPERATION_NAME)
            role = span.attributes.get(conventions.SPAN_ROLE)
            rewards += _rewards_of(key, owner, is_rewarded(operation, role), span.events)
    if admission.settled_earlier:
        trace_ids = sorted({trace_id for trace_id, _ in admission.settled_earlier})
        for row in con.execute(
            "SELECT trace_id, span_id, attributes->>?, attributes->>?, events FROM spans "
            "WHERE trace_id IN (SELECT unnest(?)) AND contains(events::VARCHAR, ?)",
            [conventions.OPERATION_NAME, conventions.SPAN_ROLE, trace_ids, conventions.REWARD_EVENT],
        ).fetchall():
            if owner := admission.settled_earlier.get((row[0], row[1])):
                events = events_from_json(row[4])
                rewards += _rewards_of((row[0], row[1]), owner, is_rewarded(row[2], row[3]), events)
    return rewards


def _rewards_of(
    key: Key, owner: Owner, is_its_own: bool, events: Sequence[SpanEvent]
) -> list[tuple[Reward, str]]:
    span = f"{key[0]}-{key[1]}"
    found: list[tuple[Reward, str]] = []
    for position, event in enumerate(events):
        value = event.attributes.get(conventions.REWARD_VALUE)
        if event.name != conventions.REWARD_EVENT or isinstance(value, bool):
            continue
        if isinstance(value, float) and not math.isfinite(value):
            logger.warning(
                "span %s: a reward of rollout %r is %r; only finite ones are kept", span, owner[0], value
            )
        elif isinstance(value, int | float):
            explanation = event.attributes.get(conventions.REWARD_EXPLANATION)
            reward = Reward(
                rollout_id=owner[0],
                value=float(value),
                name=str(event.attributes.get(conventions.REWARD_NAME, "reward")),
                call_id=span if is_its_own else None,
                author=RewardAuthor.AGENT,
                explanation=None if explanation is None else str(explanation),
                attempt=owner[1],
                time_ns=min(event.time_ns, 2**63 - 1),
            )
            found.append((reward, f"{span}:{position}"))
    return found


def reward_by_events(con: duckdb.DuckDBPyConnection, trace_ids: Sequence[str]) -> int:
    """Store what events say of spans in these traces, whose rollouts are known by their sessions alone."""
    rewards: list[tuple[Reward, str]] = []
    for trace_id, span_id, rollout_id, operation, role, is_call, events in con.execute(
        "SELECT s.trace_id, s.span_id, n.rollout_id, s.attributes->>?, s.attributes->>?, "
        "EXISTS (SELECT 1 FROM calls WHERE call_id = s.trace_id || '-' || s.span_id), s.events "
        "FROM spans s JOIN sessions n ON n.trace_id = s.trace_id WHERE s.rollout_id IS NULL "
        "AND s.trace_id IN (SELECT unnest(?)) AND contains(s.events::VARCHAR, ?)",
        [conventions.OPERATION_NAME, conventions.SPAN_ROLE, list(trace_ids), conventions.REWARD_EVENT],
    ).fetchall():
        is_its_own = is_call or is_rewarded(operation, role)
        rewards += _rewards_of((trace_id, span_id), (rollout_id, None), is_its_own, events_from_json(events))
    of_traces = [
        reward if reward.call_id is not None else replace(reward, trace_id=identity.partition("-")[0])
        for reward, identity in rewards
    ]
    in_place = placed(con, of_traces)
    return insert_rewards(con, list(zip(in_place, [identity for _, identity in rewards], strict=True)))
