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
from spangrad.tracer.gateway.rewrite import (
    Parse,
    Route,
    UpstreamRequest,
    renamed_request,
    upstream_request,
)
from spangrad.tracer.wire import chat
from spangrad.tracer.wire.anthropic import assemble_messages, messages_request, messages_response
from spangrad.tracer.wire.embeddings import embeddings_request, embeddings_response
from spangrad.tracer.wire.responses import assemble_responses, responses_request, responses_response

Attributes = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RecordedRoute:
    """One route that is recorded."""

    path: str
    """As agents ask for it and as the engine serves it."""
    operation: str
    """The GenAI operation's name."""
    upstream: Callable[[bytes, Mapping[str, str], Parse], UpstreamRequest]
    """The client's bytes, the mapped model names, what decodes JSON -> what the engine is asked."""
    reader: Callable[[UpstreamRequest, bool], Reader]
    """A reader for the reply; True: it keeps the raw reply for the raw log."""
    request: Callable[[Any], Attributes]
    """The client's JSON as span attributes; may raise on what it can't read."""
    takes_ids: bool = False
    """Whether the engine takes the prompt as ids beside messages."""


def _token_route(path: str, route: Route) -> RecordedRoute:
    return RecordedRoute(
        path,
        route.value,
        lambda raw, models, parse: upstream_request(raw, route, models, parse),
        lambda request, keeps_raw: TokenReader(request, route, keeps_raw=keeps_raw),
        lambda body: record.request_attributes(body, route),
        takes_ids=route is Route.CHAT,
    )


def _text_route(
    path: str,
    operation: str,
    request: Callable[[Mapping[str, Any], dict[str, str]], Attributes],
    form: TextForm,
) -> RecordedRoute:
    return RecordedRoute(
        path,
        operation,
        renamed_request,
        lambda upstream, keeps_raw: TextReader(form, upstream.body),
        partial(_text_request, operation, request),
    )


def _text_request(
    operation: str, read: Callable[[Mapping[str, Any], dict[str, str]], Attributes], body: Any
) -> Attributes:
    attributes: Attributes = {names.OPERATION_NAME: operation, names.PROVIDER_NAME: "vllm"}
    if not isinstance(body, dict):
        return attributes
    dropped: dict[str, str] = {}
    attributes |= read(body, dropped)
    return attributes | ({names.DROPPED: chat.dumps(dropped)} if dropped else {})


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
        responses_request,
        TextForm(
            attributes=responses_response,
            assemble=assemble_responses,
            ends=(b"event: response.completed\n", b"event: response.incomplete\n"),
            unfinished=_unfinished_response,
        ),
    ),
    _text_route(
        "/v1/messages",
        "chat",
        messages_request,
        TextForm(
            attributes=messages_response,
            assemble=assemble_messages,
            ends=(b"event: message_stop\n",),
            unfinished=_unfinished_message,
        ),
    ),
    _text_route(
        "/v1/embeddings",
        "embeddings",
        embeddings_request,
        TextForm(attributes=embeddings_response, parse=embeddings_reply),
    ),
)
PASSED_ON = ("/v1/messages/count_tokens", "/v1/responses/{response_id}/cancel")
"""POST routes that sample nothing and are not recorded."""
END = "/v1/end"
"""POST: the rollout is over. Below its base URL, so that an agent's client reaches it with what it has."""
KNOWN = (
    f"the gateway records POST {', '.join(route.path for route in ROUTES)}, ends a rollout with POST {END}, "
    f"and passes on POST {', '.join(PASSED_ON)} and what an engine has at GET /v1/..., such as GET /v1/models"
)
"""What there is, for an error's message."""
