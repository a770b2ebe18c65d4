"""Records model calls where httpx and httpx2 hand them to the network.

Below every SDK, so that ChatOpenAI, LiteLLM and the OpenAI SDK look alike, and the one place where token
ids survive them all. Patched, when (and only if) these modules are imported: the methods in `_TARGETS`.
Knows httpx; what the bytes mean is `calls.py`'s business.

Invariants:
* The client gets its own response object, the same bytes in the same pieces, and its own exceptions. Its
  request is as it was once it is sent: whoever sends these headers on tells nobody of rollouts.
* Nothing of ours raises into the client; a failure in here is logged at most every 30 s.
* The calling thread only takes references: no JSON is decoded, nothing is copied or sent.
* A call ends once: when its body was read to the end, closed, cancelled, failed, dropped unread, or
  recording stops (`end_open_calls`) with what had come by then. Not in a forked child that inherits it.
* Of two patched transports that wrap one another, the outer one records.
* Installing twice is installing once; `uninstall` restores what was there.
* A method of `_TARGETS` that is not there is told to `blind_spots.py`, never skipped in silence.
"""

import functools
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextvars import ContextVar
from dataclasses import replace
from types import ModuleType
from typing import Any

from spangrad.tracer import blind_spots
from spangrad.tracer import conventions as c
from spangrad.tracer.calls import MAX_RESPONSE_BYTES, ROUTES, RawCall
from spangrad.tracer.current import current_rollout, rollout_attributes
from spangrad.tracer.hooks import when_imported
from spangrad.tracer.hops import send_with, tell
from spangrad.tracer.patching import Patches
from spangrad.tracer.periodically import Periodically
from spangrad.tracer.propagation import SAMPLED_TRACEPARENT, header_value
from spangrad.tracer.runtime import Runtime, active
from spangrad.tracer.structure.place import place_of_call
from spangrad.tracer.wire.caching import HEADERS

logger = logging.getLogger(__name__)

_TARGETS = {
    "httpx": (("HTTPTransport", "handle_request"), ("AsyncHTTPTransport", "handle_async_request")),
    "httpx2": (("HTTPTransport", "handle_request"), ("AsyncHTTPTransport", "handle_async_request")),
    "httpx_aiohttp": (("AiohttpTransport", "handle_async_request"),),
    "litellm.llms.custom_httpx.aiohttp_transport": (("LiteLLMAiohttpTransport", "handle_async_request"),),
}
_SUFFIXES = {("/" + route).encode(): route for route in sorted(ROUTES, key=len, reverse=True)}
_TOLD = tuple(
    (name, header.encode())
    for name, header in (
        (c.STEP_NAME, c.HEADER_STEP),
        (c.STATE_KEY, c.HEADER_STATE),
        (c.PURPOSE, c.HEADER_PURPOSE),
    )
)
_RETRY_HEADER = b"x-stainless-retry-count"
_PURPOSE_HEADER = c.HEADER_PURPOSE.encode()
_ROLLOUT_HEADER = c.HEADER_ROLLOUT.encode()
_ATTEMPT_HEADER = c.HEADER_ATTEMPT.encode()

_patches = Patches()
_sending: ContextVar[Any] = ContextVar("spangrad_sending", default=None)
"""The request that an outer transport is sending."""
_said = Periodically()
_open_calls: set["_Call"] = set()
"""Calls in progress. Each is in here until it ends: whoever takes it out may end it, and nobody else."""


def install() -> None:
    """Patch the transports that are imported, and those that will be."""
    _patches.is_on = True
    for module in _TARGETS:
        when_imported(module, _patch)
    blind_spots.watch_clients()


def uninstall() -> None:
    """Restore every method that still is ours."""
    _patches.undo()


def end_open_calls() -> None:
    """End what is not read to its end yet, as it is: the process is about to. Neither blocks nor raises."""
    for call in _open_calls.copy():
        call.end_early()


def after_fork_in_child() -> None:
    """The calls in progress are the parent's to record."""
    _open_calls.clear()


def missing_targets(module: ModuleType) -> list[str]:
    """What of `_TARGETS` a module does not have."""
    return [
        f"{blind_spots.described(module.__name__)} has no {class_name}.{method}"
        for class_name, method in _TARGETS[module.__name__]
        if _target(module, class_name, method)[1] is None
    ]


def _target(module: ModuleType, class_name: str, method: str) -> tuple[type | None, Any]:
    owner = getattr(module, class_name, None)
    if not isinstance(owner, type):
        return None, None
    return owner, vars(owner).get(method)


def _patch(module: ModuleType) -> None:
    for spot in missing_targets(module):
        blind_spots.tell(spot)
    for class_name, method in _TARGETS[module.__name__]:
        owner, original = _target(module, class_name, method)
        if owner is None or original is None:
            continue
        is_async = method == "handle_async_request"
        tee = _tee_class(owner, is_async=is_async)
        make = _async_wrapper if is_async else _wrapper
        _patches.replace(owner, method, functools.partial(make, tee=tee), as_made=True)


def _wrapper(original: Callable[..., Any], tee: type) -> Callable[..., Any]:
    def handle_request(self: Any, request: Any) -> Any:
        sent = _begin(request)
        if sent is None:
            return original(self, request)
        try:
            response = original(self, request)
        except BaseException as error:
            sent.failed(request, error)
            raise
        return sent.answered(request, response, tee)

    return handle_request


def _async_wrapper(original: Callable[..., Any], tee: type) -> Callable[..., Any]:
    async def handle_async_request(self: Any, request: Any) -> Any:
        sent = _begin(request)
        if sent is None:
            return await original(self, request)
        try:
            response = await original(self, request)
        except BaseException as error:
            sent.failed(request, error)
            raise
        return sent.answered(request, response, tee)

    return handle_async_request


def _begin(request: Any) -> "_Call | _Told | None":
    try:
        runtime = active()
        if runtime is None or _sending.get() is request:
            return None
        route = _route(request.url.raw_path) if request.method == "POST" else None
        if route is None:
            own = tell(request, runtime.destinations)
            return None if own is None else _Told(own)
        return _Call(runtime, request, route)
    except Exception:
        _log_failure()
        return None


@functools.lru_cache(maxsize=256)
def _route(target: bytes) -> str | None:
    path = target.partition(b"?")[0]
    return next((route for ending, route in _SUFFIXES.items() if path.endswith(ending)), None)


def _by_name(headers: list[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Headers for several look-ups: each one in httpx's own object goes through them all."""
    return {name.lower(): value for name, value in headers}


def _log_failure() -> None:
    if _said.due():
        logger.warning("a model call could not be recorded", exc_info=True)


def _body(request: Any) -> bytes | None:
    """What is sent, if it is there as a whole: a redirect's is, though the request does not hold it."""
    content = getattr(request, "_content", None)
    if content is None and type(request.stream).__name__ == "ByteStream":
        content = b"".join(request.stream)
    return content


class _Told:
    """A request that is no model call and names the rollout."""

    __slots__ = ("_own",)

    def __init__(self, own: Any) -> None:
        self._own = own

    def failed(self, request: Any, error: BaseException) -> None:
        request.headers = self._own

    def answered(self, request: Any, response: Any, tee: type) -> Any:
        request.headers = self._own
        return response


class _Call:
    """A call in progress."""

    __slots__ = ("_outer", "_own", "_runtime", "raw")

    def __init__(self, runtime: Runtime, request: Any, route: str) -> None:
        self._runtime = runtime
        self._own: Any = None
        """The request's own headers, if it is sent with others."""
        rollout = current_rollout()
        parent, place = place_of_call(rollout)
        headers = request.headers.raw
        sent = _by_name(headers)
        attributes: dict[str, Any] = place if rollout is None else rollout_attributes(rollout) | place
        retries = sent.get(_RETRY_HEADER, b"0")
        if retries != b"0" and retries.isdigit():
            attributes[c.RETRIES] = int(retries)
        purpose = sent.get(_PURPOSE_HEADER)
        if purpose is not None:
            attributes[c.PURPOSE] = purpose.decode("latin-1")
        url = request.url
        host = url.host
        trace_id, span_id = runtime.new_ids(parent)
        self.raw = RawCall(
            trace_id=trace_id,
            span_id=span_id,
            parent=parent,
            start_ns=time.time_ns(),
            route=route,
            host=host,
            port=url.port,
            request_body=_body(request),
            attributes=attributes,
        )
        if runtime.destinations.allow(host):
            headers += self._told(sent, attributes)
            self._own = send_with(request, headers)
        self._outer = _sending.get()
        _sending.set(request)
        _open_calls.add(self)

    def failed(self, request: Any, error: BaseException) -> None:
        """It could not be sent, or was not answered."""
        self._put_back(request)
        self.end(error)

    def answered(self, request: Any, response: Any, tee: type) -> Any:
        """The response, whose body is on its way."""
        self._put_back(request)
        try:
            raw = self.raw
            raw.status_code = response.status_code
            got = _by_name(response.headers.raw)
            raw.content_type = got.get(b"content-type", b"").decode("latin-1")
            raw.content_encoding = got.get(b"content-encoding", b"").decode("latin-1")
            if not HEADERS.isdisjoint(got):
                raw.response_headers = {
                    name.decode(): got[name].decode("latin-1") for name in HEADERS.intersection(got)
                }
            response.stream = tee(response.stream, self)
        except Exception:
            _log_failure()
            self.end()
        return response

    def _put_back(self, request: Any) -> None:
        _sending.set(self._outer)
        if self._own is not None:
            request.headers = self._own

    def add(self, part: bytes) -> None:
        raw = self.raw
        raw.response_bytes += len(part)
        if raw.response_bytes <= MAX_RESPONSE_BYTES:
            raw.response.append(part)
        elif raw.response:
            raw.response = []

    def end(self, error: BaseException | None = None, *, is_exhausted: bool = False) -> None:
        try:
            _open_calls.remove(self)
        except KeyError:  # it has ended
            return
        self._put(self.raw, error, is_exhausted=is_exhausted)

    def end_early(self) -> None:
        """End it while its thread may go on: with a copy, to which nothing is added any more."""
        try:
            _open_calls.remove(self)
        except KeyError:
            return
        self._put(replace(self.raw, response=list(self.raw.response)), None, is_exhausted=False)

    def _put(self, raw: RawCall, error: BaseException | None, *, is_exhausted: bool) -> None:
        try:
            raw.end_ns = time.time_ns()
            raw.is_exhausted = is_exhausted
            if error is not None and not isinstance(error, GeneratorExit):
                raw.error_type = f"{type(error).__module__}.{type(error).__qualname__}"
            self._runtime.worker.put(raw)
        except Exception:
            _log_failure()

    def _told(self, sent: dict[bytes, bytes], attributes: dict[str, Any]) -> Iterator[tuple[bytes, bytes]]:
        """The headers that tell a server whose call it is; one that the request has is left as it is."""
        if b"traceparent" not in sent:  # the application's own tracing has been here
            yield b"traceparent", SAMPLED_TRACEPARENT % (self.raw.trace_id, self.raw.span_id)
        rollout_id = attributes.get(c.ROLLOUT_ID)
        if rollout_id is not None and _ROLLOUT_HEADER not in sent:
            yield _ROLLOUT_HEADER, header_value(rollout_id).encode()
            yield _ATTEMPT_HEADER, b"%d" % attributes[c.ATTEMPT]
        for name, header in _TOLD:
            if name in attributes and header not in sent:
                yield header, header_value(attributes[name]).encode()


class _Tee:
    """Passes a response's body on and keeps references to its pieces."""

    def __init__(self, stream: Any, call: _Call) -> None:
        self._stream = stream
        self._call = call

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_stream", "_call"):
            raise AttributeError(name)
        return getattr(self._stream, name)

    def __del__(self) -> None:
        call = self.__dict__.get("_call")
        if call is not None:
            call.end()


class _SyncTee(_Tee):
    def __iter__(self) -> Iterator[bytes]:
        call = self._call
        try:
            for part in self._stream:
                call.add(part)
                yield part
        except BaseException as error:
            call.end(error)
            raise
        call.end(is_exhausted=True)

    def close(self) -> None:
        self._call.end()
        self._stream.close()


class _AsyncTee(_Tee):
    async def __aiter__(self) -> AsyncIterator[bytes]:
        call = self._call
        stream = self._stream.__aiter__()
        try:
            async for part in stream:
                call.add(part)
                yield part
        except BaseException as error:
            call.end(error)
            if isinstance(error, GeneratorExit) and hasattr(stream, "aclose"):
                await stream.aclose()
            raise
        call.end(is_exhausted=True)

    async def aclose(self) -> None:
        self._call.end()
        await self._stream.aclose()


@functools.cache
def _tee_class(transport: type, *, is_async: bool) -> type:
    """A tee that passes the client's check for the stream class of its own library."""
    library = "httpx2" if transport.__module__.partition(".")[0] == "httpx2" else "httpx"
    module = __import__(library)
    if is_async:
        return type("AsyncTee", (_AsyncTee, module.AsyncByteStream), {})
    return type("SyncTee", (_SyncTee, module.SyncByteStream), {})
