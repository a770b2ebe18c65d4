"""MLflow's trace dictionaries (`Trace.to_dict`, `to_json`, rows of `search_traces`) -> spans and scores.

A dictionary is a trace: `info` (state, metadata, tags, assessments) and the spans, whose ids are base64 and
whose attributes are JSON in strings, as MLflow's OTLP export has them, too. Dictionaries of MLflow 2 have hex
ids and other names for the same.

Invariant: nothing is thrown away. `info` is an attribute of the trace's first span without a parent; whatever
of a span OTel has no field for is one of that span. The session, if there is one, is on every span, for a
span is read by itself; so is the experiment.
"""

import base64
import binascii
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from spangrad.adapters.conversations import PROJECT
from spangrad.adapters.dialects.mlflow import SESSION
from spangrad.adapters.exports import ids
from spangrad.adapters.exports.columns import listed, plain_mapping, text
from spangrad.adapters.exports.score import Score
from spangrad.store.records import Span, SpanEvent

SCOPE: Final = "mlflow"
INFO: Final = "mlflow.export.info"
"""JSON of all of a trace that is not its spans."""
REST: Final = "mlflow.export.span"
"""JSON of what a span has beside the fields of OTel."""
STATUS: Final = {"OK": 1, "ERROR": 2, "STATUS_CODE_OK": 1, "STATUS_CODE_ERROR": 2, "1": 1, "2": 2}
_PLACED: Final = frozenset(
    {"trace_id", "span_id", "parent_span_id", "parent_id", "context", "name", "status", "status_code"}
    | {"status_message", "start_time_unix_nano", "end_time_unix_nano", "start_time", "end_time"}
    | {"attributes", "events", "links"}
)


def is_row(row: Mapping[str, Any]) -> bool:
    """Whether the row is a trace of MLflow's."""
    return _parts(row) is not None


def spans_of(row: Mapping[str, Any]) -> Iterator[Span]:
    """The spans of a trace."""
    parts = _parts(row)
    if parts is None:
        return
    info, spans = parts
    session = _metadata(info).get(SESSION)
    experiment = _experiment(info)
    roots = [index for index, span in enumerate(spans) if _parent(span) is None]
    first = roots[0] if roots else 0
    for index, told in enumerate(spans):
        extra = {INFO: json.dumps(info, ensure_ascii=False, default=str)} if index == first and info else {}
        if isinstance(session, str) and session:
            extra[SESSION] = json.dumps(session, ensure_ascii=False)
        if experiment is not None:
            extra[PROJECT] = experiment
        yield _span(told, info, extra)


def scores_of(row: Mapping[str, Any]) -> Iterator[Score]:
    """The assessments of a trace that judge: no expected answers, none that was replaced."""
    parts = _parts(row)
    for told in listed(parts[0].get("assessments")) if parts else ():
        if not isinstance(told, Mapping) or told.get("valid") is False:
            continue
        feedback = told.get("feedback")
        value = feedback.get("value") if isinstance(feedback, Mapping) else None
        if value is None:
            continue
        source = plain_mapping(told.get("source"))
        span = text(told.get("span_id"))
        yield Score(
            trace_id=_trace_id(text(told.get("trace_id")) or _row_id(parts[0] if parts else {}) or ""),
            span_id=_span_id(span) if span else None,
            name=str(told.get("assessment_name") or told.get("name") or "feedback"),
            value=float(value) if isinstance(value, (bool, int, float)) else None,
            label=_label(value),
            explanation=text(told.get("rationale")),
            author=text(source.get("source_id")),
            time_ns=_time(told.get("last_update_time") or told.get("create_time")),
            source=" ".join(("mlflow", str(source.get("source_type") or ""))).strip(),
        )


def _parts(row: Mapping[str, Any]) -> tuple[Mapping[str, Any], Sequence[Mapping[str, Any]]] | None:
    """What a trace says beside its spans, and its spans; None for a row of something else."""
    info, data = row.get("info"), row.get("data")
    if isinstance(info, Mapping) and isinstance(data, Mapping) and isinstance(data.get("spans"), list):
        rest = {key: value for key, value in data.items() if key != "spans"}
        more = {key: value for key, value in row.items() if key not in ("info", "data")}
        return {**info, **({"data": rest} if rest else {}), **more}, _spans(data["spans"])
    if isinstance(row.get("trace"), str) and _row_id(row):
        try:
            return _parts(json.loads(row["trace"]))
        except (ValueError, RecursionError, AttributeError):
            return None
    spans = row.get("spans")
    if isinstance(spans, str):
        try:
            spans = json.loads(spans)
        except (ValueError, RecursionError):
            return None
    if isinstance(spans, list) and _row_id(row) and ("trace_metadata" in row or "tags" in row):
        return {key: value for key, value in row.items() if key not in ("spans", "trace")}, _spans(spans)
    return None


def _spans(told: Sequence[Any]) -> list[Mapping[str, Any]]:
    return [span for span in told if isinstance(span, Mapping)]


def _span(told: Mapping[str, Any], info: Mapping[str, Any], extra: Mapping[str, Any]) -> Span:
    context = plain_mapping(told.get("context"))
    named = text(told.get("trace_id") or context.get("trace_id")) or _row_id(info) or ""
    own = text(told.get("span_id") or context.get("span_id")) or ""
    status = told.get("status")
    code = status.get("code") if isinstance(status, Mapping) else told.get("status_code")
    message = status.get("message") if isinstance(status, Mapping) else told.get("status_message")
    rest = {key: value for key, value in told.items() if key not in _PLACED}
    kept = {
        **plain_mapping(told.get("attributes")),
        **extra,
        **({REST: json.dumps(rest, ensure_ascii=False, default=str)} if rest else {}),
    }
    for name, said, found in (("trace_id", named, _trace_id(named)), ("span_id", own, _span_id(own))):
        if _decoded(said) != found:
            kept[f"mlflow.export.{name}"] = said
    parent = _parent(told)
    return Span(
        trace_id=_trace_id(named),
        span_id=_span_id(own),
        parent_span_id=_span_id(parent) if parent else None,
        name=str(told.get("name") or ""),
        kind=0,
        start_ns=_number(told.get("start_time_unix_nano", told.get("start_time"))),
        end_ns=_number(told.get("end_time_unix_nano", told.get("end_time"))),
        status_code=STATUS.get(str(code), 0),
        status_message=str(message or ""),
        scope=SCOPE,
        attributes=kept,
        events=tuple(_event(event) for event in listed(told.get("events")) if isinstance(event, Mapping)),
        links=tuple(_link(link) for link in listed(told.get("links")) if isinstance(link, Mapping)),
    )


def _event(told: Mapping[str, Any]) -> SpanEvent:
    time = told.get("time_unix_nano")
    if time is None:  # MLflow 2 has microseconds
        time = _number(told.get("timestamp")) * 1000
    return SpanEvent(
        name=str(told.get("name") or ""),
        time_ns=_number(time),
        attributes=plain_mapping(told.get("attributes")),
    )


def _link(told: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "trace_id": _trace_id(str(told.get("trace_id") or "")),
        "span_id": _span_id(str(told.get("span_id") or "")),
        "attributes": plain_mapping(told.get("attributes")),
    }


def _parent(told: Mapping[str, Any]) -> str | None:
    return text(told.get("parent_span_id") or told.get("parent_id"))


def _trace_id(told: str) -> str:
    return ids.trace_id(_decoded(told))


def _span_id(told: str) -> str:
    return ids.span_id(_decoded(told))


def _decoded(told: str) -> str:
    """Hex of an id in base64; without `tr-` or `0x` before it."""
    plain = told.removeprefix("tr-").removeprefix("0x").lower()
    if len(plain) not in (12, 24) or not told.endswith("="):
        return plain
    try:
        return base64.b64decode(told, validate=True).hex()
    except (binascii.Error, ValueError):
        return plain


def _row_id(info: Mapping[str, Any]) -> str | None:
    return text(info.get("trace_id") or info.get("request_id"))


def _metadata(info: Mapping[str, Any]) -> Mapping[str, Any]:
    return plain_mapping(info.get("trace_metadata") or info.get("request_metadata"))


def _experiment(info: Mapping[str, Any]) -> str | None:
    place = plain_mapping(info.get("trace_location"))
    found = info.get("experiment_id") or plain_mapping(place.get("mlflow_experiment")).get("experiment_id")
    return str(found) if isinstance(found, str | int) else None


def _label(value: Any) -> str | None:
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    return None if isinstance(value, (int, float)) else json.dumps(value, ensure_ascii=False)


def _time(told: Any) -> int | None:
    """Nanoseconds of a time as RFC 3339 or in milliseconds."""
    if isinstance(told, int) and not isinstance(told, bool):
        return told * 1_000_000
    try:
        time = datetime.fromisoformat(told) if isinstance(told, str) else None
    except ValueError:
        return None
    return None if time is None else round(time.timestamp() * 1_000_000) * 1000


def _number(value: Any) -> int:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20:
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**64 else 0
