"""The recorded routes: how each is asked, read and told, one row a route.

Chat and text completions are asked for token ids. vLLM has none on the other routes, so
there the request passes as it is and text is recorded; embeddings without their vectors.

A new route is a row in `ROUTES`. Knows paths and JSON. Knows no HTTP and no OpenTelemetry.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from spangrad.tracer import conventions as names
from spangrad.tracer.gateway import record
from spangrad.tracer.gateway.readers import Reader, TextForm, TextReader, TokenReader, embeddings_reply
from spangrad.tracer.gateway.rewrite import Route, UpstreamRequest, renamed_request, upstream_request
from spangrad.tracer.wire import chat, other

Attributes = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RecordedRoute:
    """One route that is recorded."""

    path: str
    """As agents ask for it and as the engine serves it."""
    operation: str
    """The GenAI operation's name."""
    upstream: Callable[[bytes, Mapping[str, str]], UpstreamRequest]
    """The client's bytes and the mapped model names -> what the engine is asked."""
    reader: Callable[[UpstreamRequest, bool], Reader]
    """A reader for the reply; True: it keeps the raw reply for the raw log."""
    request: Callable[[Any], Attributes]
    """The client's JSON as span attributes; may raise on what it can't read."""


def _token_route(path: str, route: Route) -> RecordedRoute:
    return RecordedRoute(
        path,
        route.value,
        lambda raw, models: upstream_request(raw, route, models),
        lambda request, keeps_raw: TokenReader(request, route, keeps_raw=keeps_raw),
        lambda body: record.request_attributes(body, route),
    )


def _text_route(
    path: str, operation: str, request: Callable[[dict[str, Any]], Attributes], form: TextForm
) -> RecordedRoute:
    return RecordedRoute(
        path,
        operation,
        renamed_request,
        lambda upstream, keeps_raw: TextReader(form),
        partial(_text_request, operation, request),
    )


def _text_request(operation: str, read: Callable[[dict[str, Any]], Attributes], body: Any) -> Attributes:
    attributes: Attributes = {names.OPERATION_NAME: operation, names.PROVIDER_NAME: "vllm"}
    if isinstance(body, dict):
        attributes |= read(body)
    return attributes


def _responses_request(body: dict[str, Any]) -> Attributes:
    attributes = other.responses_request(body)
    kept = [name for name in ("previous_response_id", "conversation", "prompt") if body.get(name)]
    if kept:  # the rest of the prompt is known to the engine only
        reason = f"the request continues what the engine keeps: {', '.join(kept)}"
        attributes[names.DROPPED] = chat.dumps({names.INPUT_MESSAGES: reason})
    return attributes


def _embeddings_request(body: dict[str, Any]) -> Attributes:
    given = body.get("input")
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        return {**chat.request_attributes(body), names.PURPOSE: "embedding"}
    attributes = chat.request_attributes({key: value for key, value in body.items() if key != "input"})
    parts = [{"type": "text", "content": text} for text in texts]
    attributes[names.INPUT_MESSAGES] = chat.dumps([{"role": "user", "parts": parts}])
    return {**attributes, names.PURPOSE: "embedding"}


def _embeddings_reply(body: dict[str, Any]) -> Attributes:
    usage = body.get("usage") or {}
    found = {
        names.RESPONSE_ID: body.get("id"),
        names.RESPONSE_MODEL: body.get("model"),
        names.INPUT_TOKENS: usage.get("prompt_tokens"),
    }
    return {name: value for name, value in found.items() if isinstance(value, str | int)}


def _unfinished_response(body: Mapping[str, Any]) -> str | None:
    status = body.get("status")
    return None if status in ("completed", "incomplete") else f"the response's status is {status!r}"


def _unfinished_message(body: Mapping[str, Any]) -> str | None:
    return None if body.get("stop_reason") else "the engine gave up the message: it has no stop reason"


ROUTES = (
    _token_route("/v1/chat/completions", Route.CHAT),
    _token_route("/v1/completions", Route.COMPLETION),
    _text_route(
        "/v1/responses",
        "chat",
        _responses_request,
        TextForm(
            attributes=other.responses_response,
            assemble=other.assemble_responses,
            ends=(b"event: response.completed\n", b"event: response.incomplete\n"),
            unfinished=_unfinished_response,
        ),
    ),
    _text_route(
        "/v1/messages",
        "chat",
        other.messages_request,
        TextForm(
            attributes=other.messages_response,
            assemble=other.assemble_messages,
            ends=(b"event: message_stop\n",),
            unfinished=_unfinished_message,
        ),
    ),
    _text_route(
        "/v1/embeddings",
        "embeddings",
        _embeddings_request,
        TextForm(attributes=_embeddings_reply, parse=embeddings_reply),
    ),
)
PASSED_ON = ("/v1/messages/count_tokens", "/v1/responses/{response_id}/cancel")
"""POST routes that sample nothing and are not recorded."""
