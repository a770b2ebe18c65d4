"""LangSmith's exports: runs and feedback, as JSON lines or Parquet, and what its SDK posts.

Knows their columns; a run's content is read by the dialect `langsmith`.

Invariants:
* a run's time order (`dotted_order`) names its parent and trace where their columns do not;
* ids of spans are hashes: LangSmith's exporter takes the first half of a run's UUID, which another run that
  began in the same millisecond may have, too.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from spangrad.adapters.dialects import langsmith as dialect
from spangrad.adapters.exports.columns import (
    SPAN_ID_DIGITS,
    TRACE_ID_DIGITS,
    attribute_name,
    attributes_of,
    is_plain,
    mapping,
    nanoseconds,
    number,
    otel_id,
    row_of,
    text,
    to_json,
)
from spangrad.adapters.exports.score import Score
from spangrad.adapters.reading import parsed
from spangrad.store.records import Span, SpanEvent
from spangrad.tracer import conventions as c

SOURCE: Final = "langsmith"
PREFIX: Final = "langsmith.row."
PLACES: Final = {"inputs": dialect.PROMPT, "outputs": dialect.COMPLETION}
"""Columns that the dialect has; nothing is kept twice that may be big."""
_UUID_LENGTH: Final = 36


def is_row(row: Mapping[str, Any]) -> bool:
    """Whether a row is a run or feedback of LangSmith."""
    return _is_run(row) or _is_feedback(row)


def spans_of(row: Mapping[str, Any]) -> Iterator[Span]:
    """The run as a span; nothing of feedback."""
    if not _is_run(row):
        return
    above = _above(row)
    parent = text(row.get("parent_run_id")) or (above[-1] if above else None)
    trace = text(row.get("trace_id")) or (above[0] if above else row["id"])
    start_ns = nanoseconds(row.get("start_time")) or 0
    error = text(row.get("error"))
    is_error = error is not None or row.get("status") == "error"
    yield Span(
        trace_id=otel_id(trace, TRACE_ID_DIGITS),
        span_id=otel_id(row["id"], SPAN_ID_DIGITS),
        parent_span_id=None if parent is None else otel_id(parent, SPAN_ID_DIGITS),
        name=_utf8(text(row.get("name")) or row["run_type"]),
        kind=1,
        start_ns=start_ns,
        end_ns=nanoseconds(row.get("end_time")) or start_ns,
        status_code=2 if is_error else 1 if row.get("status") == "success" else 0,
        status_message=_utf8(error or "") if is_error else "",
        scope=dialect.SCOPE,
        attributes=_attributes(row) | attributes_of(row, PREFIX, PLACES),
        events=tuple(_events(row)),
    )


def scores_of(row: Mapping[str, Any]) -> Iterator[Score]:
    """The feedback; nothing of a run, whose `feedback_stats` only count what feedback tells."""
    run_id = text(row.get("run_id")) or text(row.get("trace_id"))
    if not _is_feedback(row) or run_id is None:
        return
    trace_id = text(row.get("trace_id")) or run_id
    source = mapping(row.get("feedback_source"))
    score, value = row.get("score"), row.get("value")
    label = value if isinstance(value, str) else None if value is None else to_json(value)
    yield Score(
        trace_id=otel_id(trace_id, TRACE_ID_DIGITS),
        span_id=None if run_id == trace_id else otel_id(run_id, SPAN_ID_DIGITS),
        name=row["key"],
        value=float(score) if isinstance(score, bool) else number(score),
        label=label or None,
        explanation=text(row.get("comment")),
        author=text(source.get("type")) or text(row.get("feedback_source_type")),
        time_ns=nanoseconds(row.get("created_at")),
        source=SOURCE,
    )


def original(span: Span) -> dict[str, Any]:
    """The row that a span was made of."""
    return row_of(span.attributes, PREFIX, PLACES)


def _is_run(row: Mapping[str, Any]) -> bool:
    if not text(row.get("id")) or not text(row.get("run_type")) or "start_time" not in row:
        return False
    return "dotted_order" in row or "trace_id" in row


def _is_feedback(row: Mapping[str, Any]) -> bool:
    return bool(text(row.get("key"))) and "run_id" in row and ("score" in row or "value" in row)


def _above(row: Mapping[str, Any]) -> list[str]:
    """Ids of the runs above, the root first, as the time order has them."""
    order = text(row.get("dotted_order"))
    return [] if order is None else [part[-_UUID_LENGTH:] for part in order.split(".")[:-1]]


def _attributes(row: Mapping[str, Any]) -> dict[str, Any]:
    """What the dialect reads beside inputs and outputs, as the SDK's exporter writes it."""
    extra = mapping(row.get("extra"))
    asked = extra.get("invocation_params")
    attributes: dict[str, Any] = {dialect.KIND: _utf8(row["run_type"])}
    if isinstance(asked, Mapping):
        attributes[dialect.INVOCATION] = to_json(asked)
        if isinstance(asked.get("model"), str):
            attributes[c.REQUEST_MODEL] = _utf8(asked["model"])
    for key, value in mapping(extra.get("metadata")).items():
        name = attribute_name(dialect.METADATA + key)
        if isinstance(value, str):
            attributes[name] = _utf8(value)
        elif value is not None:
            attributes[name] = value if is_plain(value) else to_json(value)
    for column, name in (("prompt_tokens", c.INPUT_TOKENS), ("completion_tokens", c.OUTPUT_TOKENS)):
        if (count := number(row.get(column))) is not None and 0 < count < 2**53:
            attributes[name] = int(count)
    return attributes


def _events(row: Mapping[str, Any]) -> Iterator[SpanEvent]:
    told = parsed(row.get("events"))
    for event in told if isinstance(told, list) else ():
        if isinstance(event, Mapping) and isinstance(event.get("name"), str):
            yield SpanEvent(_utf8(event["name"]), nanoseconds(event.get("time")) or 0)


def _utf8(value: str) -> str:
    """A text that a span can have: what is no UTF-8 is in the row's own column only."""
    return value.encode("utf-8", "replace").decode()
