"""API keys of agents: is it the right one, and which rollout does it name.

An agent that can be given a base URL and an API key, and no more, says whose calls it makes
with the key: `KEY~ROLLOUT` or `KEY~ROLLOUT~ATTEMPT`, where KEY is what the key would be
otherwise (anything if nobody checks it) and ROLLOUT is percent-encoded.
`Authorization: Bearer` and Anthropic's `x-api-key` are read alike.

Invariants: behind `RolloutKeys` a key has no rollout in it any more, so no engine gets to see
one; a key is in no message, log or span.
"""

import hmac
from dataclasses import dataclass
from typing import Self
from urllib.parse import unquote

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from spangrad.tracer import conventions as names
from spangrad.tracer.gateway.http_parts import OPERATOR_PATHS, error_response

SEPARATOR = "~"
"""Between key, rollout and attempt; no other part of a key."""
SCOPE_ROLLOUT = "spangrad.key_rollout"
"""Where the ASGI scope of a request holds its `KeyRollout`."""
_HEADERS = (b"authorization", b"x-api-key")


@dataclass(frozen=True, slots=True)
class KeyRollout:
    """The rollout that a key names."""

    rollout_id: str
    attempt: int | None
    """None: not in the key."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what is behind the first separator of a key. Raises ValueError, without the text."""
        encoded, has_attempt, attempt_text = text.partition(SEPARATOR)
        rollout_id = unquote(encoded)
        attempt = names.attempt_number(attempt_text) if has_attempt else None
        if not rollout_id or (has_attempt and attempt is None):
            raise ValueError(
                "the API key names no rollout; expected KEY~ROLLOUT or KEY~ROLLOUT~ATTEMPT with an "
                f"attempt from 0 to {names.MAX_ATTEMPT} (a key of another kind can't have a '~')"
            )
        return cls(rollout_id, attempt)


class RolloutKeys:
    """Middleware: take the rollout out of the API key; the rest of the gateway sees the key alone."""

    def __init__(self, app: ASGIApp) -> None:
        """Serve `app`."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on with `SCOPE_ROLLOUT` set, or answer 400."""
        if scope["type"] == "http" and not scope["path"].startswith(OPERATOR_PATHS):
            mark = SEPARATOR.encode()
            if any(name in _HEADERS and mark in value for name, value in scope["headers"]):
                try:
                    scope = _without_rollout(scope)
                except ValueError as error:
                    refusal = error_response(400, "invalid_api_key", str(error), path=scope["path"])
                    await refusal(scope, receive, send)
                    return
        await self._app(scope, receive, send)


def _without_rollout(scope: Scope) -> Scope:
    kept: list[tuple[bytes, bytes]] = []
    found: KeyRollout | None = None
    for name, value in scope["headers"]:
        if name not in _HEADERS or SEPARATOR.encode() not in value:
            kept.append((name, value))
            continue
        key, _, rest = value.decode("latin-1").partition(SEPARATOR)
        rollout = KeyRollout.parse(rest)
        if found is None or name == b"authorization":
            found = rollout
        if key.strip().lower() not in ("", "bearer"):
            kept.append((name, key.encode("latin-1")))
    return {**scope, "headers": kept, SCOPE_ROLLOUT: found}


class RequireAgentKey:
    """Middleware: 401 for a request without the agents' key, except below `/spangrad/`."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        """Guard `app`."""
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 401."""
        guarded = scope["type"] == "http" and not scope["path"].startswith(OPERATOR_PATHS)
        if guarded and not any(hmac.compare_digest(key, self._key) for key in _sent_keys(scope)):
            message = (
                "the gateway refuses this key; send `Authorization: Bearer KEY` or `x-api-key: KEY` with "
                "the agents' key"
            )
            refusal = error_response(401, "invalid_api_key", message, path=scope["path"])
            await refusal(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _sent_keys(scope: Scope) -> list[bytes]:
    headers = Headers(scope=scope)
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    sent = [bearer.strip()] if scheme.lower() == "bearer" else []
    return [key.encode() for key in (*sent, headers.get("x-api-key", "").strip()) if key]
