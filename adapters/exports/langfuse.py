"""Langfuse's exports: traces, observations and scores, of the blob export, the API or the UI.

Knows their columns, in snake case and camel case; an observation's content is read by dialect `langfuse`.

Invariant: what is nested in a trace gives the same spans and scores as the rows of their own that it is, too.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from spangrad.adapters.dialects import langfuse as dialect
from spangrad.adapters.exports.columns import (
    SPAN_ID_DIGITS,
    TRACE_ID_DIGITS,
    attribute_name,
    attributes_of,
    listed,
    mapping,
    nanoseconds,
    number,
    otel_id,
    row_of,
    text,
    to_json,
)
from spangrad.adapters.exports.score import Score
from spangrad.store.records import Span

SOURCE: Final = "langfuse"
SCOPE: Final = "langfuse-export"
PREFIX: Final = "langfuse.row."
PLACES: Final = {"input": dialect.INPUT, "output": dialect.OUTPUT}
"""Columns that the dialect has; nothing is kept twice that may be big."""
_UPPER: Final = re.compile(r"(?<=[a-z0-9])([A-Z])")
_USAGE: Final = ("usage_details", "usage")
_MODEL: Final = ("provided_model_name", "model")
_NESTED: Final = ("observations", "scores")
"""Columns of the API's traces: whole rows, or only their ids."""
_OF_TRACES: Final = frozenset({"public", "bookmarked", "html_path", "release"})
_OF_MANY: Final = frozenset({"session_id", "user_id", "tags", "version", "environment", "project_id"})


def is_row(row: Mapping[str, Any]) -> bool:
    """Whether a row is a trace, an observation or a score of Langfuse."""
    columns = _snake(row)
    return _is_observation(columns) or _is_score(columns) or _is_trace(columns)


def spans_of(row: Mapping[str, Any]) -> Iterator[Span]:
    """The observation as a span, the trace as one beside those of its observations; nothing of a score."""
    columns = _snake(row)
    if _is_observation(columns):
        yield _observation(row, columns)
    elif _is_trace(columns):
        yield _trace(row, columns)
        for inner in _inner(columns, "observations"):
            yield from spans_of(inner)


def _trace(row: Mapping[str, Any], columns: Mapping[str, Any]) -> Span:
    """What a trace says of all its observations. It ends as it begins: its status says nothing."""
    told = {
        dialect.TYPE: dialect.TRACE,
        dialect.SESSION: _utf8(columns.get("session_id")),
        "user.id": _utf8(columns.get("user_id")),
    }
    start_ns = nanoseconds(columns["timestamp"]) or 0
    own = {column: value for column, value in row.items() if column not in _NESTED}
    return Span(
        trace_id=otel_id(columns["id"], TRACE_ID_DIGITS),
        span_id=dialect.TRACE_SPAN_ID,
        parent_span_id=None,
        name=_utf8(columns.get("name")) or dialect.TRACE,
        kind=1,
        start_ns=start_ns,
        end_ns=start_ns,
        status_code=0,
        status_message="",
        scope=SCOPE,
        attributes={key: value for key, value in told.items() if value is not None}
        | attributes_of(own, PREFIX, PLACES),
    )


def _observation(row: Mapping[str, Any], columns: Mapping[str, Any]) -> Span:
    start_ns = nanoseconds(columns.get("start_time")) or nanoseconds(columns.get("created_at")) or 0
    parent = text(columns.get("parent_observation_id"))
    is_error = columns.get("level") == "ERROR"
    return Span(
        trace_id=otel_id(columns["trace_id"], TRACE_ID_DIGITS),
        span_id=otel_id(columns["id"], SPAN_ID_DIGITS),
        parent_span_id=None if parent is None else otel_id(parent, SPAN_ID_DIGITS),
        name=_utf8(columns.get("name")) or columns["type"].lower(),
        kind=1,
        start_ns=start_ns,
        end_ns=nanoseconds(columns.get("end_time")) or start_ns,
        status_code=2 if is_error else 0,
        status_message=(_utf8(columns.get("status_message")) or "") if is_error else "",
        scope=SCOPE,
        attributes=_attributes(columns) | attributes_of(row, PREFIX, PLACES),
    )


def scores_of(row: Mapping[str, Any]) -> Iterator[Score]:
    """Scores of a trace, observation or session; nothing of an observation, or of a data set's score."""
    columns = _snake(row)
    if _is_trace(columns):
        for inner in _inner(columns, "scores"):
            yield from scores_of({"observation_id": None} | _snake(inner))
        return
    trace_id = text(columns.get("trace_id"))
    session_id = text(columns.get("session_id")) if trace_id is None else None
    if not _is_score(columns) or (trace_id is None and session_id is None):
        return
    span_id = text(columns.get("observation_id"))
    label = text(columns.get("string_value"))
    value = columns.get("value")
    is_label = columns.get("data_type") in ("CATEGORICAL", "TEXT")
    if isinstance(value, str):  # the API has the category here
        label = label or value
    yield Score(
        trace_id=None if trace_id is None else otel_id(trace_id, TRACE_ID_DIGITS),
        span_id=None if span_id is None or trace_id is None else otel_id(span_id, SPAN_ID_DIGITS),
        name=columns["name"],
        value=float(value) if isinstance(value, bool) else None if is_label else number(value),
        label=label,
        explanation=text(columns.get("comment")),
        author=text(columns.get("source")),
        time_ns=nanoseconds(columns.get("timestamp")) or nanoseconds(columns.get("created_at")),
        source=SOURCE,
        session_id=session_id,
        project=None if session_id is None else text(columns.get("project_id")),
    )


def original(span: Span) -> dict[str, Any]:
    """The row that a span was made of."""
    return row_of(span.attributes, PREFIX, PLACES)


def _snake(row: Mapping[str, Any]) -> dict[str, Any]:
    return {_UPPER.sub(r"_\1", str(column)).lower(): value for column, value in row.items()}


def _is_observation(columns: Mapping[str, Any]) -> bool:
    names = all(text(columns.get(column)) for column in ("id", "trace_id", "type"))
    known = {"start_time", "parent_observation_id", "level"} & columns.keys()
    return names and "start_time" in known and len(known) > 1 and columns["type"].isupper()


def _is_trace(columns: Mapping[str, Any]) -> bool:
    if not text(columns.get("id")) or not nanoseconds(columns.get("timestamp")):
        return False
    if not columns.keys().isdisjoint(("trace_id", "observation_id", "messages")):
        return False
    return bool(_OF_TRACES & columns.keys()) and len(_OF_MANY & columns.keys()) > 1


def _inner(columns: Mapping[str, Any], column: str) -> Iterator[dict[str, Any]]:
    """The rows that are nested in a trace, of which each may leave its id to the trace; of ids alone none."""
    for inner in listed(columns.get(column)):
        if isinstance(inner, Mapping):
            is_named = "trace_id" in _snake(inner)
            yield dict(inner) if is_named else {**inner, "trace_id": columns["id"]}


def _is_score(columns: Mapping[str, Any]) -> bool:
    if not text(columns.get("name")) or "trace_id" not in columns or "observation_id" not in columns:
        return False
    return "data_type" in columns and ("value" in columns or "string_value" in columns)


def _attributes(columns: Mapping[str, Any]) -> dict[str, Any]:
    """What the dialect reads beside input and output."""
    usage = next((found for name in _USAGE if (found := mapping(columns.get(name)))), {})
    told: dict[str, Any] = {
        dialect.TYPE: columns["type"].lower(),
        dialect.MODEL: next((model for name in _MODEL if (model := _utf8(columns.get(name)))), None),
        dialect.PARAMETERS: _as_json(columns.get("model_parameters")),
        dialect.USAGE: to_json({key: count for key, count in usage.items() if number(count) is not None}),
        dialect.LEVEL: _utf8(columns.get("level")),
        dialect.STATUS_MESSAGE: _utf8(columns.get("status_message")),
        dialect.COMPLETION_START: _as_json(columns.get("completion_start_time")),
        dialect.SESSION: _utf8(columns.get("session_id")),
        "user.id": _utf8(columns.get("user_id")),
    }
    if told[dialect.COMPLETION_START] is None and (number(columns.get("time_to_first_token")) or 0) > 0:
        told[dialect.COMPLETION_START] = ""
    for key, entry in mapping(columns.get("metadata")).items():
        told[attribute_name(dialect.METADATA + key)] = _as_json(entry)
    return {key: value for key, value in told.items() if value is not None}


def _as_json(value: Any) -> str | None:
    """A value as the SDK writes it: JSON; a string is JSON already, or will be taken for a text."""
    if value is None or value == "":
        return None
    return _utf8(value) if isinstance(value, str) else to_json(value)


def _utf8(value: Any) -> str | None:
    """A text that a span can have: what is no UTF-8 is in the row's own column only."""
    found = text(value)
    return None if found is None else found.encode("utf-8", "replace").decode()
