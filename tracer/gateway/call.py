"""One recorded call: pass it to the engine and back, then end its span.

The client's reply never waits for recording: chunks are passed on as they come, and
the span is ended in a background task.

Invariants: the client sees the engine's reply without what it did not ask for; a
stream that broke off never ends as if it were whole; every call makes one span.
"""

import asyncio
import logging
import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
from opentelemetry.trace import Span
from starlette.types import Message, Receive, Send

from spangrad.tracer import conventions as names
from spangrad.tracer.gateway.config import GatewayConfig
from spangrad.tracer.gateway.engines import CONNECT_ERRORS, Engine, EnginePool, Lease
from spangrad.tracer.gateway.http_parts import (
    engine_failure,
    error_body,
    error_event,
    reply_headers,
    upstream_headers,
)
from spangrad.tracer.gateway.raw_log import RawLog, parse_json
from spangrad.tracer.gateway.record import choice_count, reply_attributes, request_attributes
from spangrad.tracer.gateway.reply import Reply
from spangrad.tracer.gateway.rewrite import (
    EventSplitter,
    Route,
    UpstreamRequest,
    dump,
    event_data,
    is_left_over,
    is_reply,
    strip_reply,
)
from spangrad.tracer.gateway.spans import SpanRecorder, traceparent
from spangrad.tracer.gateway.versions import Observation, version_of_call
from spangrad.tracer.wire import chat

logger = logging.getLogger(__name__)

UNFINISHED_REASONS = ("abort", "error")
"""vLLM's finish reasons of a choice that the engine gave up."""


@dataclass(slots=True)
class Counts:
    """What a gateway has done since it started."""

    calls: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True)
class Services:
    """What every call shares."""

    instance: str
    """Another one after every start: spans that a gateway had not handed over died with it."""
    config: GatewayConfig
    engines: EnginePool
    recorder: SpanRecorder
    counts: Counts
    raw_log: RawLog | None


class Call:
    """One call, from the client's request to its span."""

    def __init__(
        self,
        services: Services,
        route: Route,
        request: UpstreamRequest,
        *,
        headers: Mapping[str, str],
        origin: Mapping[str, Any],
        start_ns: int,
    ) -> None:
        """Start the span; `origin` holds attributes that say whose call it is."""
        self._services = services
        self._route = route
        self._request = request
        self._headers = headers
        self._origin = origin
        self._started_at = time.monotonic()
        model = request.body.get("model") if isinstance(request.body, dict) else None
        name = f"{route.value} {model}" if isinstance(model, str) else route.value
        self._span: Span = services.recorder.start(name, headers=headers, start_ns=start_ns)
        self._reply = Reply()
        self._error: tuple[str, str] | None = None
        self._engine: Engine | None = None
        self._before: Observation | None = None
        self._ended_at: float | None = None
        self._end_ns = start_ns
        self._held: asyncio.Future[None] | None = None
        self._raw: list[bytes] = []
        services.counts.calls += 1

    async def run(self, receive: Receive, send: Send) -> None:
        """Relay the call and leave its span to a background task, whatever happens."""
        try:
            if not await _unless_gone(self._relay(send), receive) and not self._is_complete():
                message = "the client went away before the reply was complete"
                self._error = ("client_disconnected", message)
        except BaseException as error:
            self._error = (type(error).__name__, "the gateway failed or was stopped during the call")
            raise
        finally:
            self._end()
            assert self._held is not None
            self._services.recorder.end_later(self._record(), self._held)

    async def _relay(self, send: Send) -> None:
        body = self._request.body
        model = body.get("model") if isinstance(body, dict) else None
        with self._services.engines.lease(model, self._origin.get(names.ROLLOUT_ID)) as lease:
            try:
                response = await self._open(lease)
            except httpx.HTTPError as error:
                await self._refuse(error, send)
                return
            if response is None:
                status, kind, message = lease.failure()
                self._error = (kind if lease.error is None else type(lease.error).__name__, message)
                await self._answer_error(send, status, kind, message)
                return
            try:
                kind = response.headers.get("content-type", "")
                if response.is_success and kind.startswith("text/event-stream"):
                    await self._relay_stream(response, send)
                else:
                    await self._relay_whole(response, send)
            finally:
                await response.aclose()

    async def _open(self, lease: Lease) -> httpx.Response | None:
        """Send the request to the first engine that can be connected to; None if there is none."""
        config = self._services.config
        while (engine := lease.next()) is not None:
            self._engine = engine
            self._before = await engine.versions.observe(self._started_at - config.version_ttl_s)
            request = engine.client.build_request(
                "POST",
                f"{engine.url}/v1/{'chat/' if self._route is Route.CHAT else ''}completions",
                content=self._request.content,
                headers=upstream_headers(self._headers, config, engine.key, traceparent(self._span)),
            )
            try:
                return await engine.client.send(request, stream=True)
            except CONNECT_ERRORS as error:
                lease.no_connection(error)
        return None

    async def _relay_whole(self, response: httpx.Response, send: Send) -> None:
        try:
            content = await response.aread()
        except httpx.HTTPError as error:
            await self._refuse(error, send)
            return
        self._keep(content)
        data = parse_json(content)
        body = content
        if isinstance(data, dict):
            self._take(data)
            body = self._stripped(data, content)
        if not response.is_success:
            told = (self._reply.error or {}).get("message") or content[:500].decode(errors="replace")
            self._error = (str(response.status_code), str(told))
        elif not self._reply.choices:
            self._error = ("invalid_reply", "the engine's reply has no choices")
        await self._answer(send, response.status_code, reply_headers(response.headers), body)

    async def _relay_stream(self, response: httpx.Response, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": response.status_code,
                "headers": reply_headers(response.headers),
            }
        )
        events = EventSplitter()
        try:
            async for data in response.aiter_bytes():
                passed = b"".join([self._pass_event(event) for event in events.feed(data)])
                await self._send_on(send, data if self._request.is_untouched else passed)
        except httpx.HTTPError as error:
            status, message = self._engine_failure(error)
            self._error = (type(error).__name__, message)
            logger.warning("%s after a stream had begun", message)
            self._end()
            # No last body message: the server then cuts the connection, so that no client takes
            # what came for the whole.
            await send(_body(error_event(status, "engine_error", message), more=True))
            return
        rest = events.rest()
        passed = self._pass_event(rest) if rest else b""
        self._end()
        await send(_body(b"" if self._request.is_untouched else passed, more=False))

    def _pass_event(self, event: bytes) -> bytes:
        """Take in one event; returns what of it the client asked for."""
        data = event_data(event)
        if not data or data == b"[DONE]":
            return event
        self._keep(data)
        chunk = parse_json(data)
        if not isinstance(chunk, dict):
            return event
        self._take(chunk)
        stripped = self._stripped(chunk, data)
        if self._route is Route.CHAT and is_left_over(chunk, self._request):
            return b""
        return event if stripped is data else b"data: " + stripped + b"\n\n"

    def _stripped(self, data: dict[str, Any], raw: bytes) -> bytes:
        """`data` without what the client did not ask for, as JSON; `raw` itself if it may pass as it is."""
        if self._request.is_untouched or not is_reply(data):
            return raw
        return dump(strip_reply(data, self._request))

    async def _send_on(self, send: Send, data: bytes) -> None:
        if self._is_complete():
            self._end()
        if data:
            await send(_body(data, more=True))

    async def _refuse(self, error: httpx.HTTPError, send: Send) -> None:
        status, message = self._engine_failure(error)
        self._error = (type(error).__name__, message)
        await self._answer_error(send, status, "engine_error", message)

    async def _answer_error(self, send: Send, status: int, kind: str, message: str) -> None:
        logger.warning("%s", message)
        headers = [(b"content-type", b"application/json")]
        await self._answer(send, status, headers, dump(error_body(status, kind, message)))

    def _engine_failure(self, error: httpx.HTTPError) -> tuple[int, str]:
        assert self._engine is not None
        return engine_failure(error, self._engine.url, self._services.config.request_timeout_s)

    async def _answer(self, send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        self._end()
        headers = [*headers, (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send(_body(body, more=False))

    def _take(self, data: Mapping[str, Any]) -> None:
        try:
            self._reply.add(data)
        except (TypeError, AttributeError, ValueError, KeyError) as error:
            self._error = ("invalid_reply", f"the engine's reply can't be read: {error!r}")

    def _keep(self, raw: bytes) -> None:
        if self._services.raw_log is not None:
            self._raw.append(raw)

    def _is_complete(self) -> bool:
        return self._reply.is_complete(choice_count(self._request.body))

    def _end(self) -> None:
        """Note the end once, before the client can know of it: a flush from then on waits for the span."""
        if self._held is None:
            self._held = self._services.recorder.hold()
            self._ended_at = time.monotonic()
            self._end_ns = time.time_ns()

    async def _record(self) -> None:
        services = self._services
        version, problem = None, None
        engine = self._engine
        if engine and self._before is not None and self._ended_at is not None and self._reply.choices:
            after = await engine.versions.observe(self._ended_at)
            version, problem = version_of_call(self._before, after)
        error = self._error or self._engine_error()
        try:
            attributes = self._content(version, problem)
        except Exception as unreadable:  # foreign data: whatever it is, the span must come out
            reason = f"the call can't be read: {type(unreadable).__name__}: {unreadable}"
            attributes = {
                names.OPERATION_NAME: self._route.value,
                names.DROPPED: chat.dumps({"call": reason}),
            }
        attributes |= {**self._origin, names.POLICY: engine.policy if engine else services.config.policy}
        if engine is not None:
            attributes[names.ENGINE] = engine.url
        if self._request.is_stream:
            attributes[names.STREAM_COMPLETE] = self._is_complete() and error is None
        if error is not None:
            attributes[names.ERROR_TYPE] = error[0]
            services.counts.failed += 1
        services.recorder.end(self._span, attributes, end_ns=self._end_ns, error=error)
        if services.raw_log is not None:
            services.raw_log.write(
                self._span, self._origin, self._request.content, self._raw, is_stream=self._request.is_stream
            )

    def _content(self, version: int | None, problem: str | None) -> dict[str, Any]:
        return {
            **request_attributes(self._request.body, self._route),
            **reply_attributes(
                self._reply,
                self._request.body,
                version=version,
                version_problem=problem,
                logprobs_mode=self._services.config.logprobs_mode,
            ),
        }

    def _engine_error(self) -> tuple[str, str] | None:
        reply = self._reply
        if reply.error is not None:
            return str(reply.error.get("type") or "engine_error"), str(reply.error.get("message"))
        reasons = [choice.finish_reason for choice in reply.choices.values()]
        given_up = next((reason for reason in reasons if reason in UNFINISHED_REASONS), None)
        if given_up is not None:
            return given_up, "the engine gave up the call"
        if not self._is_complete():
            return "incomplete_reply", "the engine's reply ended without a finish reason"
        return None


async def _unless_gone(work: Coroutine[Any, Any, None], receive: Receive) -> bool:
    """Run `work` to its end, or cancel it when the client goes away. Returns whether it came to its end."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            return False
        task.result()
        return True
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _body(data: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}
