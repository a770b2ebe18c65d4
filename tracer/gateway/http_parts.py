"""HTTP odds and ends: which headers pass, what an error looks like, who may do what.

Knows HTTP and OpenAI's error JSON. Knows no spans.
"""

import hmac
from collections.abc import Iterable, Mapping
from typing import Any

import httpx
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from spangrad.tracer.gateway.config import GatewayConfig, is_loopback
from spangrad.tracer.gateway.rewrite import dump

OPERATOR_PATHS = "/spangrad/"
"""Paths below it are the gateway's own."""
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
    }
)
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
    headers = {
        name: value
        for name, value in incoming.items()
        if name not in _NOT_SENT_ON and not name.startswith("x-spangrad-")
    }
    headers["accept-encoding"] = "identity"
    if engine_key is not None:
        headers["authorization"] = f"Bearer {engine_key}"
    elif config.agent_key is None and "authorization" in incoming:
        headers["authorization"] = incoming["authorization"]
    return headers | dict(added or {})


def reply_headers(upstream: httpx.Headers) -> list[tuple[bytes, bytes]]:
    """The engine's headers for the client, without those that the server sets itself."""
    raw: Iterable[tuple[bytes, bytes]] = upstream.raw
    return [(name.lower(), value) for name, value in raw if name.lower().decode() not in _NOT_SENT_BACK]


def error_body(status: int, kind: str, message: str) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def error_response(status: int, kind: str, message: str) -> JSONResponse:
    """A whole response with such an error."""
    return JSONResponse(error_body(status, kind, message), status)


def error_event(status: int, kind: str, message: str) -> bytes:
    """The same as the last event of a stream that broke off."""
    return b"data: " + dump(error_body(status, kind, message)) + b"\n\n"


def engine_failure(error: httpx.HTTPError, url: str, timeout_s: float) -> tuple[int, str]:
    """Status and message for the engine at `url` that was silent for too long or broke off."""
    name = type(error).__name__
    if isinstance(error, httpx.TimeoutException):
        return 504, f"the engine at {url} was silent for {timeout_s:g} s ({name})"
    return 502, f"the engine at {url} broke off its reply ({name})"


def bearer_matches(request: Request, key: str) -> bool:
    """Whether a request carries `Authorization: Bearer KEY`."""
    scheme, _, sent = request.headers.get("authorization", "").partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(sent.strip().encode(), key.encode())


def is_operator(request: Request, config: GatewayConfig) -> bool:
    """Whether a request comes from this machine or carries the store's key."""
    if request.client is not None and is_loopback(request.client.host):
        return True
    return config.store_key is not None and bearer_matches(request, config.store_key)


class RequireAgentKey:
    """Middleware: 401 for a request without the agents' key, except below `/spangrad/`."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        """Guard `app`."""
        self._app = app
        self._key = key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 401."""
        guarded = scope["type"] == "http" and not scope["path"].startswith(OPERATOR_PATHS)
        if guarded and not bearer_matches(Request(scope), self._key):
            message = "the gateway refuses this key; send `Authorization: Bearer KEY` with the agents' key"
            await error_response(401, "invalid_api_key", message)(scope, receive, send)
            return
        await self._app(scope, receive, send)
