"""Agent Lightning: spans out of the store of 0.3 (`Span.model_dump`), events out of the server of 1.0.

A rollout keeps its id. An attempt that has a number keeps it; one that has a name is a rollout of its own
(`rollout/attempt`), or retries would be read as one rollout.

Invariants: ids and logprobs are the engine's, as they were kept; the version is that of the weights which the
server said that it asked; a reward that the server filled in (`source: fallback`) is none.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from spangrad.adapters.dialects.agent_lightning import SCOPE_AGENT_LIGHTNING
from spangrad.adapters.exports.making import (
    call_attributes,
    call_span,
    number,
    span_id_of,
    time_ns,
    trace_id_of,
)
from spangrad.adapters.exports.score import Score
from spangrad.adapters.reading import parsed
from spangrad.store.records import Span, SpanEvent
from spangrad.tracer import conventions as c

NAME: Final = "agent_lightning"
DATA: Final = "agentlightning.data"
"""JSON of an event of 1.0 that is no model call."""
VERSION: Final = "agentlightning.server.version"
_STATUS: Final = {"UNSET": 0, "OK": 1, "ERROR": 2}
_SPAN_KEYS: Final = frozenset(
    {"rollout_id", "attempt_id", "sequence_id", "trace_id", "span_id", "name", "attributes"}
)
_EVENT_KEYS: Final = frozenset({"event_type", "rollout_id", "attempt_id", "timestamp", "data"})
_IDS: Final = {"prompt_token_ids": c.PROMPT_TOKEN_IDS, "response_token_ids": c.SAMPLED_TOKEN_IDS}
_REWARD: Final = "agentlightning.reward."
_LINK: Final = "agentlightning.link."
_OLD_REWARDS: Final = ("agentops.task.output", "agentops.entity.output")


def is_row(row: Mapping[str, Any]) -> bool:
    """Whether a row is a span of 0.3 or an event of 1.0."""
    return _is_span(row) or _is_event(row)


def spans_of(row: Mapping[str, Any]) -> Iterator[Span]:
    """The span that a row is; an event of 1.0 is a span of its own."""
    if _is_span(row):
        yield _span(row)
    elif _is_event(row):
        yield _call(row) if row["event_type"] == "model_request" else _other_event(row)


def scores_of(row: Mapping[str, Any]) -> Iterator[Score]:
    """Rewards of annotation spans (0.3) and of reward events (1.0); the first of a span is `reward`."""
    if _is_span(row):
        yield from _span_scores(row)
    elif _is_event(row) and row["event_type"] == "reward":
        data = row["data"]
        source = data.get("source")
        is_made_up = source == "fallback"
        explanation = data.get("message") or data.get("reason")
        yield Score(
            _event_trace(row),
            None,
            "reward",
            None if is_made_up else number(data.get("value")),
            "fallback" if is_made_up else None,
            None if explanation is None else str(explanation),
            None if source is None else str(source),
            time_ns(row["timestamp"]),
            NAME,
        )


def _is_span(row: Mapping[str, Any]) -> bool:
    return row.keys() >= _SPAN_KEYS and isinstance(row["attributes"], Mapping)


def _is_event(row: Mapping[str, Any]) -> bool:
    return row.keys() >= _EVENT_KEYS and isinstance(row["data"], Mapping)


def _named(row: Mapping[str, Any]) -> dict[str, Any]:
    """The rollout and attempt that a row names, as attributes."""
    rollout, attempt = str(row["rollout_id"] or ""), str(row["attempt_id"] or "")
    if not rollout:
        return {}
    found = c.attempt_number(attempt)
    if found is None and attempt:
        return {c.ROLLOUT_ID: f"{rollout}/{attempt}", c.ATTEMPT: 0}
    return {c.ROLLOUT_ID: rollout, c.ATTEMPT: found or 0}


def _span(row: Mapping[str, Any]) -> Span:
    attributes = dict(row["attributes"])
    dropped: dict[str, str] = {}
    for name, packed in _IDS.items():
        if isinstance(attributes.get(name), list):
            _pack(attributes, packed, attributes.pop(name), dropped)
    if logprobs := _logprobs(attributes):
        _pack(attributes, c.SAMPLED_LOGPROBS, logprobs, dropped)
    if dropped:
        attributes[c.DROPPED] = json.dumps(dropped)
    status = row.get("status")
    status = status if isinstance(status, Mapping) else {}
    resource = row.get("resource")
    resource = resource if isinstance(resource, Mapping) else {}
    origin, events = resource.get("attributes"), row.get("events")
    events = events if isinstance(events, list) else ()
    parent = row.get("parent_id")
    start = time_ns(row.get("start_time")) or 0
    return Span(
        trace_id=str(row["trace_id"]),
        span_id=str(row["span_id"]),
        parent_span_id=str(parent) if parent else None,
        name=str(row["name"]),
        kind=1,
        start_ns=start,
        end_ns=time_ns(row.get("end_time")) or start,
        status_code=_STATUS.get(str(status.get("status_code")), 0),
        status_message=str(status.get("description") or ""),
        scope=_scope(row, attributes),
        attributes=attributes | _named(row),
        events=tuple(_event(event) for event in events if isinstance(event, Mapping)),
        resource=dict(origin) if isinstance(origin, Mapping) else {},
        resource_schema_url=str(resource.get("schema_url") or ""),
    )


def _scope(row: Mapping[str, Any], attributes: Mapping[str, Any]) -> str:
    """LiteLLM's spans stay LiteLLM's: that dialect knows where they have what."""
    told = str(row.get("instrumentation_scope") or "")
    is_litellm = "litellm" in told or row["name"] in ("raw_gen_ai_request", "litellm_request")
    return "litellm" if is_litellm else SCOPE_AGENT_LIGHTNING


def _event(event: Mapping[str, Any]) -> SpanEvent:
    attributes = event.get("attributes")
    return SpanEvent(
        name=str(event.get("name") or ""),
        time_ns=time_ns(event.get("timestamp")) or 0,
        attributes=dict(attributes) if isinstance(attributes, Mapping) else {},
    )


def _logprobs(attributes: Mapping[str, Any]) -> list[Any]:
    """The logprob of each token of `logprobs.content`, which stays on the span with what else it has."""
    try:
        items = json.loads(attributes["logprobs.content"])
        return [item["logprob"] for item in items]
    except (KeyError, TypeError, ValueError, RecursionError):
        return []


def _span_scores(row: Mapping[str, Any]) -> Iterator[Score]:
    attributes = row["attributes"]
    span_id = str(row["span_id"]) if any(key.startswith(_LINK) for key in attributes) else None
    given: list[tuple[str, Any]] = []
    for key, value in attributes.items():
        index = key.removeprefix(_REWARD).removesuffix(".value")
        if key.startswith(_REWARD) and key.endswith(".value") and index.isdigit():
            name = str(attributes.get(f"{_REWARD}{index}.name") or "reward")
            given.append(("reward" if name == "primary" else name, value))
    given += [("reward", value) for value in map(_old_reward, map(attributes.get, _OLD_REWARDS)) if value]
    for name, value in given:
        yield Score(
            str(row["trace_id"]),
            span_id,
            name,
            number(value),
            None,
            None,
            None,
            time_ns(row.get("end_time")),
            NAME,
        )


def _old_reward(output: Any) -> Any:
    told = parsed(output)
    return told.get("value") if isinstance(told, Mapping) and told.get("type") == "reward" else None


def _event_trace(row: Mapping[str, Any]) -> str:
    return trace_id_of(NAME, row["rollout_id"], row["attempt_id"])


def _event_span(row: Mapping[str, Any]) -> str:
    """An event has no id; trimmed or not, it is the same one."""
    return span_id_of(NAME, *(row[key] for key in ("rollout_id", "attempt_id", "event_type", "timestamp")))


def _call(row: Mapping[str, Any]) -> Span:
    data = row["data"]
    if "response" in data:
        response = data["response"]
        if isinstance(response, list):  # chunks of a stream, in the first releases
            response = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in response)
        attributes, error = call_attributes(data.get("request"), response)
    else:
        attributes, error = _trimmed(data), None
    if data.get("status") == "error" or (number(data.get("http_status")) or 0) >= 400:
        error = error or f"status {data.get('http_status')}"
    server = data.get("server")
    version = data.get("model_version")
    if version is None and isinstance(server, Mapping):
        version = server.get("version")
    if isinstance(version, int) and not isinstance(version, bool):
        attributes |= {VERSION: version, **_versions(attributes, version)}
    end = time_ns(row["timestamp"]) or 0
    return call_span(
        SCOPE_AGENT_LIGHTNING,
        _event_trace(row),
        _event_span(row),
        attributes | _named(row),
        error,
        start_ns=max(0, end - int((number(data.get("latency_ms")) or 0) * 1e6)),
        end_ns=end,
    )


def _trimmed(data: Mapping[str, Any]) -> dict[str, Any]:
    """An event that was asked for with `format=triplet`: ids and logprobs, and no more."""
    attributes: dict[str, Any] = {c.OPERATION_NAME: "chat"}
    dropped: dict[str, str] = {}
    for name, packed in {**_IDS, "response_log_probs": c.SAMPLED_LOGPROBS}.items():
        if isinstance(data.get(name), list) and data[name]:
            _pack(attributes, packed, data[name], dropped)
    server = data.get("server")
    if isinstance(server, Mapping) and isinstance(server.get("model"), str):
        attributes[c.REQUEST_MODEL] = server["model"]
    return attributes | ({c.DROPPED: json.dumps(dropped)} if dropped else {})


def _versions(attributes: Mapping[str, Any], version: int) -> dict[str, Any]:
    """The version for each sampled id of each choice."""
    found: dict[str, Any] = {}
    index = 0
    while packed := attributes.get(c.choice_key(c.SAMPLED_TOKEN_IDS, index)):
        if 0 <= version < 2**31:
            found[c.choice_key(c.POLICY_VERSIONS, index)] = c.pack_ints([version] * (len(packed) // 4))
        index += 1
    return found


def _pack(attributes: dict[str, Any], name: str, values: Sequence[Any], dropped: dict[str, str]) -> None:
    pack = c.pack_floats if name == c.SAMPLED_LOGPROBS else c.pack_ints
    try:
        attributes[name] = pack(values)
    except (TypeError, OverflowError) as error:
        dropped[name] = f"not a list of numbers: {error}"


def _other_event(row: Mapping[str, Any]) -> Span:
    at = time_ns(row["timestamp"]) or 0
    return Span(
        trace_id=_event_trace(row),
        span_id=_event_span(row),
        parent_span_id=None,
        name=str(row["event_type"]),
        kind=1,
        start_ns=at,
        end_ns=at,
        status_code=0,
        status_message="",
        scope=SCOPE_AGENT_LIGHTNING,
        attributes={DATA: json.dumps(row["data"], default=str), **_named(row)},
    )
