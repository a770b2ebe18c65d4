"""A request and its response, as JSON of the OpenAI API -> a reading.

For dialects and files that keep the exchange itself. Reads what the gateway would have written of it, so an
exchange says the same whoever recorded it. Knows the three routes; does not know where a dialect keeps them.

Invariants:
* an exchange that can't be read is a fault of the reading, never an exception;
* ids and logprobs are the engine's, as the response has them.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from spangrad.adapters.dialects.otel_genai import read_as
from spangrad.adapters.reading import Reading
from spangrad.store.records import Span
from spangrad.tracer import conventions as c
from spangrad.tracer.wire.chat import request_attributes, response_attributes
from spangrad.tracer.wire.embeddings import embeddings_request, embeddings_response
from spangrad.tracer.wire.responses import responses_request, responses_response
from spangrad.tracer.wire.streams import Assembled, assemble_chat

EMBEDDINGS: Final = "embeddings"
_KEPT: Final = (
    *(c.ERROR_TYPE, c.CONVERSATION_ID, c.AGENT_NAME, c.STEP_NAME, c.STEP_INDEX, c.STATE_KEY),
    *(c.ROLLOUT_ID, c.ATTEMPT, c.PURPOSE, c.POLICY),
)
"""Attributes of the span that say something beside the exchange."""
_BROKEN: Final = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What reading JSON of another shape raises."""


def read_exchange(
    dialect: str,
    span: Span,
    request: Mapping[str, Any],
    response: Mapping[str, Any] | None,
    *,
    is_stream_complete: bool | None = None,
) -> Reading:
    """Read a request to one of OpenAI's routes and its response; None: there was none.

    `extra_body` and `extra_headers`, which only the client sees, may be in the request.
    """
    attributes = {name: span.attributes[name] for name in _KEPT if name in span.attributes}
    faults: list[str] = []
    dropped: dict[str, str] = {}
    asked = _sent(request)
    try:
        attributes |= _request(asked, response, dropped)
    except _BROKEN as error:
        faults.append(f"unreadable: the request has another shape ({error!r:.200})")
    try:
        attributes |= _response(asked, response, dropped) if response else {}
    except _BROKEN as error:
        faults.append(f"unreadable: the response has another shape ({error!r:.200})")
    if dropped:
        attributes[c.DROPPED] = json.dumps(dropped)
    if is_stream_complete is not None:
        attributes[c.REQUEST_STREAM] = True
        attributes[c.STREAM_COMPLETE] = is_stream_complete
    reading = read_as(dialect, replace(span, attributes=attributes))
    return replace(reading, span=span, faults=(*reading.faults, *faults))


def assembled(chunks: Iterable[Mapping[str, Any]], choice_count: int) -> Assembled | None:
    """The response that chunks of a streamed chat completion add up to; None if one has another shape."""
    body = b"".join(b"data: %s\n\n" % json.dumps(chunk).encode() for chunk in chunks)
    try:
        return assemble_chat(body, choice_count)
    except _BROKEN:
        return None


def _sent(request: Mapping[str, Any]) -> dict[str, Any]:
    """The request as it went out, of the arguments of a client's call."""
    extra = request.get("extra_body")
    sent = {k: v for k, v in request.items() if k not in ("extra_body", "extra_headers", "extra_query")}
    return {**sent, **(extra if isinstance(extra, Mapping) else {})}


def _request(
    asked: Mapping[str, Any], response: Mapping[str, Any] | None, dropped: dict[str, str]
) -> dict[str, Any]:
    match _route(asked, response):
        case "embeddings":
            return {c.OPERATION_NAME: EMBEDDINGS, **embeddings_request(asked, dropped)}
        case "responses":
            return {c.OPERATION_NAME: "chat", **responses_request(asked, dropped)}
    return {c.OPERATION_NAME: "chat", **request_attributes(asked, dropped)}


def _response(
    asked: Mapping[str, Any], response: Mapping[str, Any], dropped: dict[str, str]
) -> dict[str, Any]:
    match _route(asked, response):
        case "embeddings":
            return embeddings_response(response, dropped, asked)
        case "responses":
            return responses_response(response, dropped, asked)
    return response_attributes(response, dropped, asked)


def _route(asked: Mapping[str, Any], response: Mapping[str, Any] | None) -> str:
    told = response or {}
    if "choices" in told or "messages" in asked or "input" not in asked:
        return "chat"
    if told.get("object") == "list" or "encoding_format" in asked or "dimensions" in asked:
        return "embeddings"
    return "responses"
