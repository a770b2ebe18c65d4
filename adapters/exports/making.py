"""What formats without spans of their own share: ids, times, and a call's attributes from its JSON.

Invariants: an id follows from content alone, so that the same row twice is the same span; a request or reply
that can't be read is said on the span, and makes no other row worse.
"""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Any, Final

from spangrad.adapters.reading import parsed
from spangrad.store.records import Span
from spangrad.tracer import conventions as c
from spangrad.tracer.wire.anthropic import messages_request, messages_response
from spangrad.tracer.wire.chat import request_attributes, response_attributes
from spangrad.tracer.wire.responses import responses_request, responses_response
from spangrad.tracer.wire.streams import assemble_chat

CLIENT: Final = 3
ERROR: Final = 2
_NS: Final = 1_000_000_000
_UNITS: Final = ((1e17, 1), (1e14, 10**3), (1e11, 10**6), (0.0, _NS))
"""Unix times from this size on -> their unit in ns; the first is year 1973 in each unit."""
SESSION_KEYS: Final = ("session_id", "conversation_id", "thread_id", "chat_id")


def hex_id(length: int, *parts: Any) -> str:
    """`length` hex digits that follow from the parts."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return blake2b(text.encode(), digest_size=length // 2).hexdigest()


def trace_id_of(*parts: Any) -> str:
    """A trace id that follows from the parts."""
    return hex_id(32, *parts)


def span_id_of(*parts: Any) -> str:
    """A span id that follows from the parts."""
    return hex_id(16, *parts)


def time_ns(value: Any) -> int | None:
    """A time as ns: ISO text (UTC where it names no zone), `datetime`, Unix time in s, ms, us or ns."""
    if isinstance(value, str):
        try:
            value = float(value) if value.strip()[:4].isdigit() and "-" not in value else _parsed(value)
        except ValueError:
            return None
    if isinstance(value, datetime):
        aware = value if value.tzinfo else value.replace(tzinfo=UTC)
        since = aware - datetime(1970, 1, 1, tzinfo=UTC)
        return max(0, (since.days * 86_400 + since.seconds) * _NS + since.microseconds * 1000)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**63:
        return None
    return next(int(value * unit) for least, unit in _UNITS if value >= least)


def _parsed(text: str) -> datetime:
    return datetime.fromisoformat(text.strip().replace("Z", "+00:00"))


def number(value: Any) -> float | None:
    """A finite number, or a truth value as 1 or 0; None for anything else."""
    try:
        return float(value) if isinstance(value, int | float) and value - value == 0 else None
    except OverflowError:  # an integer beyond what a float holds
        return None


def session_of(row: Mapping[str, Any]) -> str | None:
    """The session, thread or conversation that a row names."""
    places = (row, row["metadata"]) if isinstance(row.get("metadata"), Mapping) else (row,)
    found = (place.get(key) for place in places for key in SESSION_KEYS)
    return next((str(value) for value in found if isinstance(value, str | int) and value != ""), None)


def decoded(value: Any) -> Any:
    """A JSON object or list that was written as text; anything else as it is."""
    return parsed(value) if isinstance(value, str) and value.lstrip()[:1] in ("{", "[") else value


def call_attributes(request: Any, response: Any) -> tuple[dict[str, Any], str | None]:
    """Attributes of a call from its raw request and response, and its error if it failed.

    Chat and text completions, the Responses API and Anthropic's messages; a stream as the text that was sent.
    Ids and logprobs are those of the response, or not there.
    """
    dropped: dict[str, str] = {}
    attributes: dict[str, Any] = {c.OPERATION_NAME: "chat"}
    request, response = _body(request), _body(response)
    error = _error(response)
    asked = request if isinstance(request, Mapping) else {}
    try:
        if isinstance(response, str) and response.lstrip().startswith("data:"):
            stream = assemble_chat(response.encode("utf-8", "replace"), asked.get("n") or 1)
            attributes[c.REQUEST_STREAM], attributes[c.STREAM_COMPLETE] = True, stream.is_complete
            response, error = stream.body, _error({"error": stream.error})
            if stream.unreadable:
                dropped["response"] = f"{stream.unreadable} chunks of the stream can't be read"
        reading_request, reading_response = _readers(asked, response)
    except Exception as failure:  # boundary: whatever a row holds
        return _unreadable(attributes, dropped, "response", failure), error
    try:
        attributes |= reading_request(asked, dropped)
    except Exception as failure:  # boundary
        attributes = _unreadable(attributes, dropped, "request", failure)
    if isinstance(response, Mapping) and error is None:
        try:
            attributes |= reading_response(response, dropped, asked)
        except Exception as failure:  # boundary
            attributes = _unreadable(attributes, dropped, "response", failure)
    if dropped:
        attributes[c.DROPPED] = json.dumps(dropped)
    return attributes, error


def call_span(
    scope: str, trace_id: str, span_id: str, attributes: Mapping[str, Any], error: str | None, **more: Any
) -> Span:
    """A model call's span."""
    return Span(
        trace_id=trace_id,
        span_id=span_id,
        parent_span_id=more.pop("parent_span_id", None),
        name=f"chat {attributes.get(c.REQUEST_MODEL, '')}".strip(),
        kind=CLIENT,
        status_code=ERROR if error is not None else 0,
        status_message=error or "",
        scope=scope,
        attributes=attributes,
        **more,
    )


def _readers(request: Mapping[str, Any], response: Any) -> tuple[Any, Any]:
    answer = response if isinstance(response, Mapping) else {}
    if answer.get("object") == "response" or ("input" in request and "messages" not in request):
        return responses_request, responses_response
    if answer.get("type") == "message" or ("system" in request and "messages" in request):
        return messages_request, messages_response
    return request_attributes, response_attributes


def _body(value: Any) -> Any:
    """The body of a request or response, out of what a proxy or a batch puts around it."""
    value = decoded(value)
    if isinstance(value, Mapping) and "body" in value and not {"messages", "choices"} & value.keys():
        return decoded(value["body"])
    return value


def _error(response: Any) -> str | None:
    if response is None:
        return "no response was recorded"
    error = response.get("error") if isinstance(response, Mapping) else None
    if not error:
        return None
    if isinstance(error, Mapping):
        return ": ".join(str(error[key]) for key in ("type", "code", "message") if error.get(key)) or "error"
    return str(error)


def _unreadable(
    attributes: dict[str, Any], dropped: dict[str, str], what: str, failure: Exception
) -> dict[str, Any]:
    dropped[what] = f"it can't be read ({type(failure).__name__}: {failure})"
    return attributes | {c.DROPPED: json.dumps(dropped)}
