"""HTTP odds and ends: which headers pass, what an error looks like, who may do what.

Knows HTTP, and OpenAI's and Anthropic's error JSON. Knows no spans.
"""

import hmac
from collections.abc import Iterable, Mapping
from typing import Any

import httpx
from starlette.requests import Request
from starlette.responses import JSONResponse

from spangrad.tracer.access import is_loopback
from spangrad.tracer.gateway.config import GatewayConfig
from spangrad.tracer.gateway.rewrite import dump

OPERATOR_PATHS = "/spangrad/"
"""Paths below it are the gateway's own."""
ANTHROPIC_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    504: "timeout_error",
}
"""Status -> the type that Anthropic's clients know; any other is `api_error`."""
_NOT_SENT_ON = frozenset(
    {
        "accept-encoding",
        "authorization",
        "connection",
        "content-length",
        "expect",
        "host",
        "keep-alive",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "traceparent",
        "tracestate",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "x-api-key",
    }
)
_JSON = "application/json"
_HAS_BODY = frozenset({"content-length", "transfer-encoding"})
_KEYS = ("authorization", "x-api-key")
_NOT_SENT_BACK = frozenset(
    {
        "connection",
        "content-encoding",
        "content-length",
        "date",
        "keep-alive",
        "server",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)


def upstream_headers(
    incoming: Mapping[str, str],
    config: GatewayConfig,
    engine_key: str | None,
    added: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Headers for the engine: the client's without hop-by-hop ones and without our names and keys."""
    hop_by_hop = {name.strip().lower() for name in incoming.get("connection", "").split(",")}
    headers: dict[str, str] = {}
    for name, value in incoming.items():
        if name in _NOT_SENT_ON or name in hop_by_hop or name.startswith("x-spangrad-"):
            continue
        separator = "; " if name == "cookie" else ", "
        headers[name] = f"{headers[name]}{separator}{value}" if name in headers else value
    headers["accept-encoding"] = "identity"
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != _JSON and not _HAS_BODY.isdisjoint(incoming):
        headers["content-type"] = _JSON  # all that is passed on is; curl says a form, which engines refuse
    if engine_key is not None:
        headers["authorization"] = f"Bearer {engine_key}"
    elif config.agent_key is None:
        headers |= {name: incoming[name] for name in _KEYS if name in incoming}
    return headers | dict(added or {})


def reply_headers(upstream: httpx.Headers) -> list[tuple[bytes, bytes]]:
    """The engine's headers for the client, without those that the server sets itself."""
    raw: Iterable[tuple[bytes, bytes]] = upstream.raw
    return [(name.lower(), value) for name, value in raw if name.lower().decode() not in _NOT_SENT_BACK]


def error_body(status: int, kind: str, message: str, *, path: str = "") -> dict[str, Any]:
    """An error as the clients of `path` read it: Anthropic's below /v1/messages, else OpenAI's."""
    if is_anthropic(path):
        error = {"type": ANTHROPIC_ERRORS.get(status, "api_error"), "message": message}
        return {"type": "error", "error": error}
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def error_response(status: int, kind: str, message: str, *, path: str = "") -> JSONResponse:
    """A whole response with such an error."""
    return JSONResponse(error_body(status, kind, message, path=path), status)


def error_event(status: int, kind: str, message: str, *, path: str = "") -> bytes:
    """The same as the last event of a stream that broke off."""
    body = error_body(status, kind, message, path=path)
    if is_anthropic(path):
        return b"event: error\ndata: " + dump(body) + b"\n\n"
    if path.endswith("/v1/responses"):
        # OpenAI's clients give an event of type "error" to the agent, and raise on a key "error".
        typed = {"type": "error", "code": str(status), "message": message, "param": None}
        return b"event: error\ndata: " + dump(typed | body) + b"\n\n"
    return b"data: " + dump(body) + b"\n\n"


def is_anthropic(path: str) -> bool:
    """Whether the clients of `path` are Anthropic's."""
    return path.endswith(("/v1/messages", "/v1/messages/count_tokens"))


def engine_failure(error: httpx.HTTPError, url: str, timeout_s: float) -> tuple[int, str]:
    """Status and message for the engine at `url` that was silent for too long or broke off."""
    name = type(error).__name__
    if isinstance(error, httpx.TimeoutException):
        return 504, f"the engine at {url} was silent for {timeout_s:g} s ({name})"
    return 502, f"the engine at {url} broke off its reply ({name})"


def is_operator(request: Request, config: GatewayConfig) -> bool:
    """Whether a request carries `Authorization: Bearer KEY` of an operator; without such keys: is from here.

    An agent on this machine would else be one of those that may, whatever its key.
    """
    if config.operator_keys:
        return _has_operator_key(request, config)
    return request.client is not None and is_loopback(request.client.host)


def _has_operator_key(request: Request, config: GatewayConfig) -> bool:
    scheme, _, sent = request.headers.get("authorization", "").partition(" ")
    key = sent.strip().encode() if scheme.lower() == "bearer" else b""
    return any([hmac.compare_digest(key, known.encode()) for known in config.operator_keys])
