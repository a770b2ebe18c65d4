"""A rollout goes along with HTTP requests, and goes on in the server that gets them.

    agent  --- x-spangrad-rollout, -attempt, traceparent --->  tool server: `continue_rollout(headers)`

Knows header names and rollouts; it does not know HTTP clients or servers. Invariants:
* A header that the request has is left as it is; none goes to hosts that may not be told (`propagation.py`).
  A request that is sent has its own headers again, so no redirect takes ours anywhere.
* Headers come from anybody: values that can't be ours are ignored. The worst that a lie can do is to have
  this server's calls recorded under the wrong rollout; where they are sent is not the headers' to say.
"""

import logging
import os
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from spangrad.tracer import conventions as c
from spangrad.tracer.current import (
    ENVIRONMENT,
    Rollout,
    current_rollout,
    enter,
    leave,
    open_rollout_of,
)
from spangrad.tracer.hooks import when_imported
from spangrad.tracer.patching import Patches
from spangrad.tracer.periodically import Periodically
from spangrad.tracer.propagation import Destinations, header_value, parse_traceparent, traceparent

logger = logging.getLogger(__name__)

MAX_ID_CHARS = 512
"""A longer rollout id in a header is not believed."""
_TRACEPARENT = "traceparent"
_TAKEN = (c.HEADER_ROLLOUT, c.HEADER_ATTEMPT, _TRACEPARENT)
_said = Periodically()
_patches = Patches()

Headers = (
    Mapping[str, str] | Mapping[bytes, bytes] | Iterable[tuple[str, str]] | Iterable[tuple[bytes, bytes]]
)
Message = Any
App = Callable[[Any, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]


def rollout_headers() -> dict[str, str]:
    """The current rollout as request headers, for clients that are not captured; empty outside of rollouts.

    Also a way to take it along by hand, as plain strings: through a queue, to a Ray actor, to a job.
    """
    rollout = current_rollout()
    return {} if rollout is None else _headers_of(rollout)


@contextmanager
def continue_rollout(headers: Headers) -> Iterator[Rollout | None]:
    """Make the rollout that a request's headers name the current one.

    Args:
        headers: A mapping or pairs, of text or bytes; names in any case. Of several the first counts.

    Yields:
        The rollout, or None if the headers name none: then everything stays as it is.
    """
    rollout = _rollout_of(headers)
    if rollout is None:
        yield None
        return
    before = enter(rollout)
    try:
        yield rollout
    finally:
        leave(rollout, before)


class RolloutMiddleware:
    """ASGI middleware: what a request makes this server do belongs to the caller's rollout."""

    def __init__(self, app: App) -> None:
        """Wrap `app`."""
        self._app = app

    async def __call__(
        self,
        scope: Any,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        """Serve a request."""
        with continue_rollout(scope.get("headers") or ()):
            await self._app(scope, receive, send)


def install() -> None:
    """Under `spangrad run`, where nobody can add the middleware, Starlette and FastAPI do without it."""
    if ENVIRONMENT in os.environ:
        _patches.is_on = True
        when_imported("starlette.applications", _patch)


def uninstall() -> None:
    """Put it back."""
    _patches.undo()


def _patch(module: ModuleType) -> None:
    # uvicorn takes an application that can be called without arguments for a function that makes one
    _patches.replace(module.Starlette, "__call__", _served, as_made=True)


def _served(original: Callable[..., Awaitable[None]]) -> Callable[..., Any]:
    async def __call__(self: Any, scope: Any, receive: Any, send: Any) -> None:
        with continue_rollout((scope.get("headers") if _patches.is_on else None) or ()):
            await original(self, scope, receive, send)

    return __call__


def tell(request: Any, destinations: Destinations) -> Any:
    """Name the current rollout in a request of httpx's, if its host may be told.

    Returns the request's own headers, for `request.headers` once it is sent; None: they are unchanged.
    Does not raise.
    """
    own = None
    try:
        rollout = current_rollout()
        if rollout is not None and destinations.allow(request.url.host):
            headers = request.headers
            named = c.HEADER_ROLLOUT in headers
            added = {
                name: value
                for name, value in _headers_of(rollout).items()
                if name not in headers and (name == _TRACEPARENT or not named)
            }
            pairs = [(name.encode(), value.encode()) for name, value in added.items()]
            own = send_with(request, request.headers.raw + pairs) if added else None
    except Exception:  # the boundary: the request must be made
        if _said.due():
            logger.warning("a request could not be told of its rollout", exc_info=True)
    return own


def send_with(request: Any, headers: list[tuple[bytes, bytes]]) -> Any:
    """Give a request other headers. Returns its own."""
    own = request.headers
    request.headers = type(own)(headers)
    return own


def _headers_of(rollout: Rollout) -> dict[str, str]:
    headers = {
        c.HEADER_ROLLOUT: header_value(rollout.rollout_id),
        c.HEADER_ATTEMPT: str(rollout.attempt),
    }
    if rollout.context is not None:
        headers[_TRACEPARENT] = traceparent(rollout.context)
    return headers


def _rollout_of(headers: Headers) -> Rollout | None:
    try:
        found: dict[str, str] = {}
        source: Any = headers
        pairs: Iterable[Any] = source.items() if hasattr(source, "items") else source
        for name, value in pairs:
            name = _text(name).lower()
            if name in _TAKEN:
                found.setdefault(name, _text(value).strip())
        rollout_id = found.get(c.HEADER_ROLLOUT, "")
        if not 0 < len(rollout_id) <= MAX_ID_CHARS or not (rollout_id.isascii() and rollout_id.isprintable()):
            return None
        attempt = c.attempt_number(found.get(c.HEADER_ATTEMPT, "0"))
    except Exception:  # foreign data: whatever it is, the request must be served
        return None
    if attempt is None:
        return None
    known = open_rollout_of(rollout_id, attempt)
    if known is not None:
        return known
    return Rollout(rollout_id, attempt, None, parse_traceparent(found.get(_TRACEPARENT, "")))


def _text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value
