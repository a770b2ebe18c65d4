"""Evaluations that come as log records -> rewards of the rollout that they judge.

Knows the tables `logs` and `spans`. A record judges the span that it names; if that is no model call, or not
here, the call whose response it names. Whichever of record and span comes first, the reward is there with
the second.

Invariants: the author of such a reward is whoever's key brought the record; a record that judges a span of no
rollout, or the calls of several, is no reward; one without a finite number never is.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import duckdb

from spangrad.store.encoding import decode_json
from spangrad.store.records import Reward, RewardAuthor, Span
from spangrad.store.tables.placing import placed
from spangrad.store.tables.rewards import insert_rewards
from spangrad.store.tables.rows import select_dicts
from spangrad.tracer import conventions as c

logger = logging.getLogger(__name__)

MODEL_OPERATIONS: Final = frozenset({"chat", "text_completion", "generate_content"})
SCORE_LABEL: Final = "gen_ai.evaluation.score.label"
_LAST_NS: Final = 2**63 - 1
_IS_EVALUATION: Final = f"coalesce(nullif(event_name, ''), attributes->>'event.name') = '{c.REWARD_EVENT}'"
_COLUMNS: Final = "log_id, trace_id, span_id, time_ns, observed_ns, attributes, author"
_SPANS: Final = (
    "SELECT s.trace_id, s.span_id, coalesce(s.rollout_id, n.rollout_id) AS rollout_id, s.attempt, "
    "s.rollout_id IS NULL AS is_found, "
    f"s.attributes->>'{c.OPERATION_NAME}' AS operation, s.attributes->>'{c.SPAN_ROLE}' AS role, "
    f"s.attributes->>'{c.RESPONSE_ID}' AS response_id, "
    "EXISTS (SELECT 1 FROM calls WHERE call_id = s.trace_id || '-' || s.span_id) AS is_call "
    "FROM spans s LEFT JOIN sessions n ON n.trace_id = s.trace_id "
    "AND n.trace_id NOT IN (SELECT trace_id FROM unread_traces)"
)
"""A trace without a rollout of its own is judged once it was read: only then is a call that an adapter alone
knows in `calls`."""


def is_rewarded(operation: Any, role: Any) -> bool:
    """Whether a reward on such a span is for the call or step that it is, and not for the rollout."""
    return operation in MODEL_OPERATIONS or role == "step"


def has_evaluations(con: duckdb.DuckDBPyConnection) -> bool:
    """Whether any record in the file is an evaluation."""
    return bool(con.execute(f"SELECT 1 FROM logs WHERE {_IS_EVALUATION} LIMIT 1").fetchall())


def reward_by_records(con: duckdb.DuckDBPyConnection, log_ids: Sequence[str]) -> int:
    """Store the rewards that these records give by now. Returns how many were new."""
    sql = f"SELECT {_COLUMNS} FROM logs WHERE log_id IN (SELECT unnest(?::VARCHAR[])) AND {_IS_EVALUATION}"
    return _reward(con, select_dicts(con, sql, [list(log_ids)]))


def reward_by_spans(con: duckdb.DuckDBPyConnection, fresh: Sequence[Span], trace_ids: Sequence[str]) -> int:
    """Store what earlier records give, now that these spans are here or these traces have owners."""
    told = (span.attributes.get(c.RESPONSE_ID) for span in fresh)
    responses = sorted({response for response in told if isinstance(response, str)})
    traces = sorted({span.trace_id for span in fresh} | set(trace_ids))
    return _reward_of_traces(con, traces, responses)


def reward_by_sessions(con: duckdb.DuckDBPyConnection, trace_ids: Sequence[str]) -> int:
    """Store what earlier records give, now that these traces are of a rollout."""
    if trace_ids and has_evaluations(con):
        return reward_by_traces(con, trace_ids)
    return 0


def reward_by_traces(con: duckdb.DuckDBPyConnection, trace_ids: Sequence[str]) -> int:
    """Store what earlier records give to the calls of these traces, now that they were read."""
    told = con.execute(
        f"SELECT DISTINCT attributes->>'{c.RESPONSE_ID}' FROM spans WHERE trace_id IN (SELECT unnest(?))",
        [list(trace_ids)],
    ).fetchall()
    return _reward_of_traces(con, list(trace_ids), [response for (response,) in told if response is not None])


def _reward_of_traces(con: duckdb.DuckDBPyConnection, traces: Sequence[str], responses: Sequence[str]) -> int:
    sql = (
        f"SELECT {_COLUMNS} FROM logs WHERE {_IS_EVALUATION} AND (trace_id IN (SELECT unnest(?::VARCHAR[])) "
        f"OR attributes->>'{c.RESPONSE_ID}' IN (SELECT unnest(?::VARCHAR[])))"
    )
    return _reward(con, select_dicts(con, sql, [list(traces), list(responses)]))


def _reward(con: duckdb.DuckDBPyConnection, rows: Sequence[dict[str, Any]]) -> int:
    if not rows:
        return 0
    records = [row | {"attributes": decode_json(row["attributes"])} for row in rows]
    judged = _judged(con, records)
    rewards = [
        (reward, row["log_id"])
        for row, span in zip(records, judged, strict=True)
        if span is not None and (reward := _reward_of(row, span)) is not None
    ]
    in_place = placed(con, [reward for reward, _ in rewards])
    return insert_rewards(con, list(zip(in_place, [log_id for _, log_id in rewards], strict=True)))


def _judged(
    con: duckdb.DuckDBPyConnection, records: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any] | None]:
    """The span that each record judges; None where there is none yet."""
    traces = sorted({row["trace_id"] for row in records if row["trace_id"]})
    named = sorted({row["span_id"] for row in records if row["span_id"]})
    sql = f"{_SPANS} WHERE s.trace_id IN (SELECT unnest(?::VARCHAR[]))"
    sql += " AND s.span_id IN (SELECT unnest(?::VARCHAR[]))"
    by_id = {(s["trace_id"], s["span_id"]): s for s in select_dicts(con, sql, [traces, named])}
    found = [by_id.get((row["trace_id"], row["span_id"])) for row in records]
    wanted = {
        response
        for row, span in zip(records, found, strict=True)
        if isinstance(response := row["attributes"].get(c.RESPONSE_ID), str)
        and (span is None or not _is_its_own(span))
    }
    if wanted:
        by_response = _by_response(con, sorted(wanted))
        for index, row in enumerate(records):
            response = row["attributes"].get(c.RESPONSE_ID)
            if isinstance(response, str) and response in by_response:
                span = found[index]
                if span is None or not _is_its_own(span):
                    found[index] = by_response[response]
    return found


def _by_response(con: duckdb.DuckDBPyConnection, responses: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Response id -> the first call that has it, where all that have it are of one rollout."""
    sql = f"{_SPANS} WHERE s.attributes->>'{c.RESPONSE_ID}' IN (SELECT unnest(?::VARCHAR[]))"
    sql += " AND coalesce(s.rollout_id, n.rollout_id) IS NOT NULL ORDER BY s.start_ns, s.span_id"
    found: dict[str, list[dict[str, Any]]] = {}
    for span in select_dicts(con, sql, [list(responses)]):
        found.setdefault(span["response_id"], []).append(span)
    return {
        response: spans[0]
        for response, spans in found.items()
        if len({(span["rollout_id"], span["attempt"]) for span in spans}) == 1
    }


def _reward_of(row: Mapping[str, Any], span: Mapping[str, Any]) -> Reward | None:
    attributes = row["attributes"]
    value = attributes.get(c.REWARD_VALUE)
    if span["rollout_id"] is None or isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if not math.isfinite(value):
        logger.warning(
            "an evaluation of rollout %r is %r; only finite ones are kept", span["rollout_id"], value
        )
        return None
    explanation = attributes.get(c.REWARD_EXPLANATION, attributes.get(SCORE_LABEL))
    is_its_own = _is_its_own(span)
    return Reward(
        rollout_id=span["rollout_id"],
        value=float(value),
        name=str(attributes.get(c.REWARD_NAME, "reward")),
        call_id=f"{span['trace_id']}-{span['span_id']}" if is_its_own else None,
        author=RewardAuthor(row["author"]),
        explanation=None if explanation is None else str(explanation),
        attempt=span["attempt"],
        time_ns=min(row["time_ns"] or row["observed_ns"], _LAST_NS),
        trace_id=span["trace_id"] if span["is_found"] and not is_its_own else None,
    )


def _is_its_own(span: Mapping[str, Any]) -> bool:
    return bool(span["is_call"]) or is_rewarded(span["operation"], span["role"])
