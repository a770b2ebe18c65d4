"""A row of a file of rewards -> what it says, or what is wrong with it.

Knows columns. Knows no store: whether there is such a rollout is for `reward_places.py` to find.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from spangrad.adapters.exports import ids
from spangrad.adapters.scoring.values import as_number, is_text
from spangrad.tracer.conventions import MAX_ATTEMPT

COLUMNS: Final = (
    "rollout_id",
    "trace_id",
    "span_id",
    "call_id",
    "response_id",
    "name",
    "value",
    "explanation",
    "attempt",
    "time_ns",
)
NO_OWNER: Final = "neither rollout_id, trace_id nor call_id"
NO_VALUE: Final = "no value"
BAD_VALUE: Final = "value is no finite number"
BAD_CALL_ID: Final = "call_id is not trace-span"
BAD_COLUMN: Final = "a column of the wrong type"
_CALL_ID: Final = re.compile("([0-9a-f]{32})-([0-9a-f]{16})")
_MAX_NS: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class RewardRow:
    """One row that can be a reward, if there is what it is about."""

    line: int
    rollout_id: str | None
    trace_id: str | None
    span_id: str | None
    is_call: bool
    """The span was named as a call: it is none of a whole rollout, though it may be a root."""
    response_id: str | None
    name: str
    value: float
    explanation: str | None
    attempt: int | None
    time_ns: int | None


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A row that gave no reward."""

    path: str
    line: int
    reason: str
    """Its kind, the same for all such rows."""
    detail: str = ""


def parse(path: str, line: int, row: Mapping[str, Any], name: str) -> RewardRow | LeftOut:
    """Read one row.

    Args:
        path: File, for what is said of a row that is left out.
        line: Its line.
        row: Column -> value.
        name: Of a reward that names none.
    """
    told = {column: row[column] for column in COLUMNS if row.get(column) is not None}
    for column in told.keys() - {"value", "attempt", "time_ns"}:
        if not is_text(told[column]) or (not told[column] and column != "explanation"):
            return LeftOut(path, line, BAD_COLUMN, f"{column} is {told[column]!r:.60}, text was expected")
    for column, most in (("attempt", MAX_ATTEMPT), ("time_ns", _MAX_NS)):
        if column in told and (type(told[column]) is not int or not 0 <= told[column] <= most):
            return LeftOut(path, line, BAD_COLUMN, f"{column} is {told[column]!r:.60}, a count was expected")
    trace_id = ids.trace_id(told["trace_id"]) if "trace_id" in told else None
    span_id = ids.span_id(told["span_id"]) if "span_id" in told else None
    if "call_id" in told:
        named = _CALL_ID.fullmatch(told["call_id"].lower())
        if named is None:
            return LeftOut(path, line, BAD_CALL_ID, f"{told['call_id']!r:.60}")
        if trace_id not in (None, named[1]) or span_id not in (None, named[2]):
            return LeftOut(path, line, BAD_CALL_ID, f"{told['call_id']!r} contradicts trace_id or span_id")
        trace_id, span_id = named[1], named[2]
    if trace_id is None and "rollout_id" not in told:
        return LeftOut(path, line, NO_OWNER, f"columns: {', '.join(map(str, row)) or 'none'}"[:120])
    if "value" not in told:
        return LeftOut(path, line, NO_VALUE, f"columns: {', '.join(map(str, row))}"[:120])
    try:
        value = as_number(told["value"])
    except ValueError:
        return LeftOut(path, line, BAD_VALUE, f"{told['value']!r:.60}")
    return RewardRow(
        line=line,
        rollout_id=told.get("rollout_id"),
        trace_id=trace_id,
        span_id=span_id,
        is_call="call_id" in told,
        response_id=told.get("response_id"),
        name=told.get("name", name),
        value=value,
        explanation=told.get("explanation"),
        attempt=told.get("attempt"),
        time_ns=told.get("time_ns"),
    )
