"""Phoenix's exports -> spans and scores.

Four shapes of rows: spans of its REST API (`/spans`), of `/spans/otlpv1` (OTLP in snake_case with every null
spelled out), rows of `get_spans_dataframe` (a column for each top-level attribute, messages as lists), and
span annotations. A page of an API (`{"data": [...]}`) is taken as the rows in it. All spans are brought back
to the attributes that were sent: OpenInference's dotted keys, `metadata` as JSON text.

Invariants:
* nothing is thrown away: what a span has no field for is in `phoenix.export.row`;
* a span that was sent in the words of the OTel GenAI conventions stays one. What Phoenix made of it in
  OpenInference's words is left beside, without the mark that would make it the reading: Phoenix dumps parsed
  arguments again, and nothing would tell.
"""

import base64
import binascii
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from spangrad.adapters.exports import ids
from spangrad.adapters.exports.columns import listed, plain_mapping, text
from spangrad.adapters.exports.score import Score
from spangrad.adapters.reading import parsed
from spangrad.store.records import Span, SpanEvent

SCOPE: Final = "phoenix"
KIND: Final = "openinference.span.kind"
PHOENIX_KIND: Final = "phoenix.span_kind"
REST: Final = "phoenix.export.row"
"""JSON of what a row has beside the fields of a span."""
STATUS: Final = {"OK": 1, "ERROR": 2, "STATUS_CODE_OK": 1, "STATUS_CODE_ERROR": 2, "1": 1, "2": 2}
KINDS: Final = {
    f"SPAN_KIND_{name}": number
    for number, name in enumerate(("UNSPECIFIED", "INTERNAL", "SERVER", "CLIENT", "PRODUCER", "CONSUMER"))
}
JSON_TEXTS: Final = ("metadata", "tool.parameters", "llm.prompt_template.variables")
"""Attributes that are JSON text when sent, and that Phoenix takes apart."""
LISTS: Final = frozenset(
    {"llm.input_messages", "llm.output_messages", "llm.tools", "llm.prompts", "llm.choices"}
    | {"retrieval.documents", "embedding.embeddings"}
    | {"reranker.input_documents", "reranker.output_documents"}
)
"""Attributes that were sent as `NAME.N.KEY`."""
GEN_AI: Final = ("gen_ai.input.messages", "gen_ai.output.messages")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_ATTRIBUTES: Final = "attributes."
_EVAL: Final = "eval."
_PLACED: Final = frozenset(
    {"name", "context", "context.span_id", "context.trace_id", "trace_id", "span_id", "parent_id"}
    | {"parent_span_id", "span_kind", "kind", "start_time", "end_time", "start_time_unix_nano"}
    | {"end_time_unix_nano", "status", "status_code", "status_message", "events", "links", "attributes"}
    | {"trace_state", "flags", "dropped_attributes_count", "dropped_events_count", "dropped_links_count"}
)


def is_row(row: Mapping[str, Any]) -> bool:
    """Whether the row is of Phoenix: a span, an annotation, or a page of them."""
    page = row.get("data")
    if isinstance(page, list) and "next_cursor" in row:
        return not page or (isinstance(page[0], Mapping) and is_row(page[0]))
    return _is_span(row) or _is_annotation(row)


def spans_of(row: Mapping[str, Any]) -> Iterator[Span]:
    """The span of a row, or those of a page."""
    for told in _rows(row):
        if _is_span(told):
            yield _span(told)


def scores_of(row: Mapping[str, Any]) -> Iterator[Score]:
    """The annotations of a row, and what evaluations were merged into its columns."""
    for told in _rows(row):
        if _is_annotation(told):
            yield from _annotation(told, "")
        elif _is_span(told):
            trace, span = _ids(told)
            for annotation in listed(_parsed(told.get("annotations"))):
                if isinstance(annotation, Mapping):
                    yield from _annotation({"span_id": span, **annotation}, ids.trace_id(trace))
            yield from _evaluations(told, ids.trace_id(trace), ids.span_id(span))


def _rows(row: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    page = row.get("data")
    if isinstance(page, list) and "next_cursor" in row:
        return [told for told in page if isinstance(told, Mapping)]
    return [row]


def _is_span(row: Mapping[str, Any]) -> bool:
    trace, span = _ids(row)
    if not trace or not span:
        return False
    if "span_kind" in row:
        return "context" in row or "context.span_id" in row
    return "start_time_unix_nano" in row and isinstance(row.get("attributes"), list)


def _is_annotation(row: Mapping[str, Any]) -> bool:
    return "annotator_kind" in row and any(text(row.get(key)) for key in ("span_id", "trace_id"))


def _ids(row: Mapping[str, Any]) -> tuple[str, str]:
    context = plain_mapping(row.get("context"))
    trace = row.get("context.trace_id") or context.get("trace_id") or row.get("trace_id")
    span = row.get("context.span_id") or context.get("span_id") or row.get("span_id")
    return text(trace) or "", text(span) or ""


def _span(row: Mapping[str, Any]) -> Span:
    trace, span = _ids(row)
    status = row.get("status")
    code = status.get("code") if isinstance(status, Mapping) else row.get("status_code")
    message = status.get("message") if isinstance(status, Mapping) else row.get("status_message")
    parent = text(row.get("parent_span_id") or row.get("parent_id"))
    attributes = _attributes(row)
    for name, told, found in (("trace_id", trace, ids.trace_id(trace)), ("span_id", span, ids.span_id(span))):
        if told.lower() != found:
            attributes[f"phoenix.export.{name}"] = told
    return Span(
        trace_id=ids.trace_id(trace),
        span_id=ids.span_id(span),
        parent_span_id=ids.span_id(parent) if parent else None,
        name=str(row.get("name") or ""),
        kind=KINDS.get(str(row.get("kind")), 0),
        start_ns=_time(row.get("start_time_unix_nano", row.get("start_time"))),
        end_ns=_time(row.get("end_time_unix_nano", row.get("end_time"))),
        status_code=STATUS.get(str(code), 0),
        status_message=str(message or ""),
        scope=SCOPE,
        attributes=attributes,
        events=tuple(_event(event) for event in listed(_parsed(row.get("events"))) if plain_mapping(event)),
        links=tuple(_link(link) for link in listed(row.get("links")) if isinstance(link, Mapping)),
        trace_state=str(row.get("trace_state") or ""),
        flags=_small(row.get("flags")),
        dropped_attributes=_small(row.get("dropped_attributes_count")),
        dropped_events=_small(row.get("dropped_events_count")),
        dropped_links=_small(row.get("dropped_links_count")),
    )


def _attributes(row: Mapping[str, Any]) -> dict[str, Any]:
    told = row.get("attributes")
    if isinstance(told, list):
        flat = _pairs(told)
    else:
        flat = {} if told is None else dict(_flat(plain_mapping(_parsed(told)), ""))
        columns = {key.removeprefix(_ATTRIBUTES): row[key] for key in row if key.startswith(_ATTRIBUTES)}
        for name, value in columns.items():
            flat |= _column(name, value)
    attributes = _with_texts(flat)
    kind = attributes.get(KIND) or text(row.get("span_kind"))
    if kind is not None and any(name in attributes for name in GEN_AI):
        attributes.pop(KIND, None)
        attributes[PHOENIX_KIND] = kind
    elif kind is not None:
        attributes[KIND] = kind
    rest = {
        key: value
        for key, value in row.items()
        if key not in _PLACED and not key.startswith(_ATTRIBUTES) and value is not None
    }
    if rest.get("__index_level_0__") == _ids(row)[1]:
        del rest["__index_level_0__"]
    return {**attributes, **({REST: json.dumps(rest, ensure_ascii=False, default=str)} if rest else {})}


def _column(name: str, value: Any) -> dict[str, Any]:
    """One column of a dataframe as dotted attributes; what pandas made a float of is a whole number again."""
    if value is None or value != value:
        return {}
    if name in JSON_TEXTS:
        return {name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)}
    if name in LISTS or "." not in name:
        parsed = _parsed(value)
        value = parsed if isinstance(parsed, (Mapping, list)) else value
    if name.startswith("llm.token_count.") and isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, Mapping):
        return dict(_flat(value, f"{name}."))
    return dict(_items(name, value))


def _flat(told: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in told.items():
        if isinstance(value, Mapping) and value and prefix + key not in JSON_TEXTS:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield from _items(f"{prefix}{key}", value)


def _items(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """A list of objects as `NAME.N.KEY`; any other value as it is."""
    if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        for index, item in enumerate(value):
            yield from _flat(item, f"{name}.{index}.")
    elif value is not None:
        yield name, value


def _with_texts(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes, with those put together again that Phoenix took apart."""
    texts: dict[str, dict[str, Any]] = {}
    attributes: dict[str, Any] = {}
    for name, value in flat.items():
        whole = next((each for each in JSON_TEXTS if name.startswith(f"{each}.")), None)
        if whole is not None and whole not in flat:
            _put(texts.setdefault(whole, {}), name.removeprefix(f"{whole}."), value)
            attributes[whole] = None
        elif name in JSON_TEXTS and not isinstance(value, str):
            attributes[name] = json.dumps(value, ensure_ascii=False, default=str)
        else:
            attributes[name] = value
    return attributes | {
        name: json.dumps(told, ensure_ascii=False, default=str) for name, told in texts.items()
    }


def _put(told: dict[str, Any], path: str, value: Any) -> None:
    key, dot, rest = path.partition(".")
    inner = told.get(key, {})
    if dot and isinstance(inner, dict):
        _put(told.setdefault(key, inner), rest, value)
    else:
        told[path] = value


def _pairs(told: Sequence[Any]) -> dict[str, Any]:
    """OTLP's list of keys and values."""
    pairs = [pair for pair in told if isinstance(pair, Mapping) and isinstance(pair.get("key"), str)]
    return {pair["key"]: _value(pair.get("value")) for pair in pairs}


def _value(told: Any) -> Any:
    for kind, value in plain_mapping(told).items():
        if value is None:
            continue
        if kind == "array_value":
            return [_value(item) for item in listed(plain_mapping(value).get("values"))]
        if kind == "kvlist_value":
            return _pairs(listed(plain_mapping(value).get("values")))
        if kind == "bytes_value" and isinstance(value, str):
            try:
                return base64.b64decode(value, validate=True)
            except (binascii.Error, ValueError):
                return value
        if kind == "int_value" and isinstance(value, str):
            return int(value) if value.lstrip("-").isdecimal() else value
        return value
    return None


def _event(told: Mapping[str, Any]) -> SpanEvent:
    attributes = told.get("attributes")
    return SpanEvent(
        name=str(told.get("name") or ""),
        time_ns=_time(told.get("time_unix_nano", told.get("timestamp"))),
        attributes=_pairs(attributes) if isinstance(attributes, list) else plain_mapping(attributes),
        dropped_attributes=_small(told.get("dropped_attributes_count")),
    )


def _link(told: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "trace_id": ids.trace_id(str(told.get("trace_id") or "")),
        "span_id": ids.span_id(str(told.get("span_id") or "")),
        "trace_state": str(told.get("trace_state") or ""),
        "attributes": _pairs(listed(told.get("attributes"))),
        "dropped_attributes": _small(told.get("dropped_attributes_count")),
        "flags": _small(told.get("flags")),
    }


def _annotation(row: Mapping[str, Any], trace_id: str) -> Iterator[Score]:
    """An annotation; `trace_id` is its span's, empty where the row names the span alone."""
    result = plain_mapping(_parsed(row.get("result")))
    told = {key: result.get(key, row.get(f"result.{key}", row.get(key))) for key in _RESULT}
    trace, span = text(row.get("trace_id")), text(row.get("span_id"))
    if told["score"] is None and told["label"] is None:
        return
    kind = str(row.get("annotator_kind") or "")
    yield Score(
        trace_id=ids.trace_id(trace) if trace else trace_id,
        span_id=ids.span_id(span) if span else None,
        name=str(row.get("name") or row.get("annotation_name") or "annotation"),
        author=text(row.get("user_id")) or text(row.get("identifier")),
        time_ns=_time(row.get("updated_at") or row.get("created_at")) or None,
        source=f"phoenix {kind}".strip(),
        **_judged(told),
    )


def _evaluations(row: Mapping[str, Any], trace_id: str, span_id: str) -> Iterator[Score]:
    """Columns `eval.NAME.score`, `.label` and `.explanation`."""
    columns = [key.removeprefix(_EVAL).rpartition(".") for key in row if key.startswith(_EVAL)]
    for name in dict.fromkeys(name for name, _, key in columns if key in _RESULT):
        told = {key: row.get(f"{_EVAL}{name}.{key}") for key in _RESULT}
        if told["score"] is not None or told["label"] is not None:
            yield Score(
                trace_id=trace_id,
                span_id=span_id,
                name=name,
                author=None,
                time_ns=None,
                source="phoenix",
                **_judged(told),
            )


_RESULT: Final = ("score", "label", "explanation")


def _judged(told: Mapping[str, Any]) -> dict[str, Any]:
    score = told["score"]
    return {
        "value": float(score) if isinstance(score, (int, float)) else None,
        "label": text(told["label"]),
        "explanation": text(told["explanation"]),
    }


def _time(told: Any) -> int:
    """Nanoseconds of a time in any of the forms; 0 if it is none."""
    if isinstance(told, str):
        if told.isascii() and told.isdigit():
            return int(told) if len(told) < 20 else 0
        try:
            told = datetime.fromisoformat(told)
        except ValueError:
            return 0
    if isinstance(told, datetime):
        since = (told if told.tzinfo is not None else told.replace(tzinfo=UTC)) - _EPOCH
        nanoseconds = getattr(told, "nanosecond", 0)  # a pandas timestamp has them
        return ((since.days * 86400 + since.seconds) * 1_000_000 + since.microseconds) * 1000 + nanoseconds
    return _count(told)


def _parsed(value: Any) -> Any:
    """The list or object that JSON text stands for; anything else as it is."""
    return parsed(value) if isinstance(value, str) and value[:1] in ("[", "{") else value


def _count(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**64 else 0


def _small(value: Any) -> int:
    """A number that OTLP has 32 bits for."""
    return min(_count(value), 2**32 - 1)
