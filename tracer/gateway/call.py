"""One recorded call: pass it to the engine and back, then end its span.

The client's reply never waits for recording: chunks are passed on as they come, and
the span is ended in a background task.

Invariants: the client sees the engine's reply without what it did not ask for; a
stream that broke off never ends as if it were whole; every call makes one span; a call for which
its rollout has no turn left reaches no engine.
"""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
from starlette.types import Message, Receive, Send

from spangrad.tracer import conventions as names
from spangrad.tracer.gateway import beyond
from spangrad.tracer.gateway.adapters import Adapter
from spangrad.tracer.gateway.budgets import Budget, Budgets
from spangrad.tracer.gateway.config import GatewayConfig
from spangrad.tracer.gateway.engine import Engine
from spangrad.tracer.gateway.engine_settings import EngineSettings
from spangrad.tracer.gateway.engines import CONNECT_ERRORS, EnginePool, Lease
from spangrad.tracer.gateway.follow_up import FollowUp, TokensIn
from spangrad.tracer.gateway.http_parts import (
    engine_failure,
    error_body,
    error_event,
    reply_headers,
    upstream_headers,
)
from spangrad.tracer.gateway.policy_choice import Asked, PolicyChoice
from spangrad.tracer.gateway.raw_log import RawLog
from spangrad.tracer.gateway.readers import Facts, Problem, TokenReader, refusal
from spangrad.tracer.gateway.rewrite import UpstreamRequest, dump, with_model
from spangrad.tracer.gateway.routes import RecordedRoute
from spangrad.tracer.gateway.spans import SpanRecorder, traceparent
from spangrad.tracer.gateway.upstream import read_whole
from spangrad.tracer.gateway.versions import Observation, SampledBy, version_of_call
from spangrad.tracer.span_size import shorten
from spangrad.tracer.wire import chat
from spangrad.tracer.wire.caching import is_served_by_cache
from spangrad.tracer.wire.repeated import Readers

logger = logging.getLogger(__name__)

ACTS = "agent"
"""Purpose of a call that takes a turn."""
CLIENT_GONE = "client_disconnected"
"""Type of the error of a call that its client left."""


@dataclass(slots=True)
class Counts:
    """What a gateway has done since it started."""

    calls: int = 0
    failed: int = 0
    running: int = 0
    """Calls whose span is not on its way yet."""


@dataclass(frozen=True, slots=True)
class Services:
    """What every call shares."""

    instance: str
    """Another one after every start: spans that a gateway had not handed over died with it."""
    config: GatewayConfig
    engines: EnginePool
    policies: PolicyChoice
    recorder: SpanRecorder
    counts: Counts
    budgets: Budgets
    requests: Readers
    """What decodes their JSON."""
    tokens_in: TokensIn | None
    """None: requests are sent as they are asked."""
    raw_log: RawLog | None


class Call:
    """One call, from the client's request to its span."""

    def __init__(
        self,
        services: Services,
        route: RecordedRoute,
        request: UpstreamRequest,
        *,
        headers: Mapping[str, str],
        query: bytes,
        origin: Mapping[str, Any],
        asked: Asked,
        start_ns: int,
    ) -> None:
        """Start the span; `origin` holds attributes that say whose call it is, `asked` what it wants."""
        self._services = services
        self._route = route
        self._request = request
        self._headers = headers
        self._path = route.path + (f"?{query.decode('latin-1')}" if query else "")
        self._origin = origin
        self._asked: Asked = asked
        self._started_at = time.monotonic()
        model = request.body.get("model") if isinstance(request.body, dict) else None
        name = f"{route.operation} {model}" if isinstance(model, str) else route.operation
        self._span = services.recorder.start(name, headers=headers, start_ns=start_ns)
        self._reader = route.reader(request, services.raw_log is not None)
        self._follow_up: FollowUp | None = None
        if services.tokens_in is not None and route.takes_ids:
            rollout_id, attempt = origin.get(names.ROLLOUT_ID), origin.get(names.ATTEMPT)
            self._follow_up = services.tokens_in.start(rollout_id, attempt, request)
        self._content_sent = request.content
        self._error: Problem | None = None
        self._engine: Engine | None = None
        self._before: Observation | None = None
        self._adapter: Adapter | None = None
        """What stands for the model; its name says the version."""
        self._ended_at: float | None = None
        self._end_ns = start_ns
        self._held: asyncio.Future[None] | None = None
        self._is_cached = False
        self._takes_turn = False
        """Whether it took one of its rollout's turns."""
        self._spent = self._take_turn()
        services.counts.calls += 1
        services.counts.running += 1

    async def run(self, receive: Receive, send: Send) -> None:
        """Relay the call and leave its span to a background task, whatever happens."""
        try:
            if not await _unless_gone(self._relay(send), receive) and not self._reader.is_complete():
                self._error = (CLIENT_GONE, "the client went away before the reply was complete")
        except BaseException as error:
            self._error = (type(error).__name__, "the gateway failed or was stopped during the call")
            raise
        finally:
            self._end()
            assert self._held is not None
            self._services.recorder.end_later(self._record(), self._held)
            self._services.counts.running -= 1

    @property
    def _attempt_of_rollout(self) -> tuple[str, int]:
        return self._origin[names.ROLLOUT_ID], self._origin[names.ATTEMPT]

    def _take_turn(self) -> Budget | None:
        """Take a turn if the call needs one; returns the rollout's budget if it has none left."""
        acts = self._origin.get(names.PURPOSE, ACTS) == ACTS and self._route.path in beyond.PATHS
        if names.ROLLOUT_ID not in self._origin or not acts:
            return None
        if not self._services.engines.is_trained(self._request.body):
            return None
        spent = self._services.budgets.take(*self._attempt_of_rollout)
        self._takes_turn = spent is None
        return spent

    async def _relay(self, send: Send) -> None:
        if self._spent is not None:
            await self._pass_on(self._beyond(self._spent), send)
            return
        body = self._request.body
        model = body.get("model") if isinstance(body, dict) else None
        with self._services.engines.lease(model, self._origin.get(names.ROLLOUT_ID)) as lease:
            await self._services.policies.narrow(lease, self._asked)
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
            self._is_cached = is_served_by_cache(response.headers.items())
            try:
                await self._pass_on(response, send)
            finally:
                await response.aclose()

    def _beyond(self, budget: Budget) -> httpx.Response:
        """What the call gets in the engine's place."""
        if budget.reply is not None:
            return beyond.reply(self._route.path, self._request.body, budget.reply)
        rollout_id, attempt = self._attempt_of_rollout
        message = f"rollout {rollout_id!r} has taken its {budget.turns} turns"
        if attempt != budget.attempt:
            message = f"rollout {rollout_id!r} is in attempt {budget.attempt}, this is attempt {attempt}"
        return beyond.refusal(self._route.path, message)

    async def _pass_on(self, response: httpx.Response, send: Send) -> None:
        kind = response.headers.get("content-type", "")
        if response.is_success and kind.startswith("text/event-stream"):
            await self._relay_stream(response, send)
        else:
            await self._relay_whole(response, send)

    async def _open(self, lease: Lease) -> httpx.Response | None:
        """Send the request to the first engine that can be connected to; None if there is none."""
        config = self._services.config
        while (engine := await lease.next()) is not None:
            self._engine = engine
            self._adapter = adapter = await lease.find_adapter()
            if self._reader.has_tokens and adapter is None:
                self._before = await engine.versions.observe(self._started_at - config.version_ttl_s)
            content = self._request.content
            if self._follow_up is not None and engine.provider == "vllm":
                headers = upstream_headers(self._headers, config, engine.key)
                content = await self._follow_up.content(engine, headers)
            if adapter is not None:
                content = with_model(content, adapter.name)
            self._content_sent = content
            headers = upstream_headers(self._headers, config, engine.key, traceparent(self._span))
            try:
                response = await engine.client.open(engine.url + self._path, content=content, headers=headers)
            except CONNECT_ERRORS as error:
                lease.no_connection(error)
                continue
            if response.status_code == httpx.codes.NOT_FOUND and adapter is not None:
                engine.adapters.forget()  # it was restarted, and nobody has noticed
            if response.status_code != httpx.codes.SERVICE_UNAVAILABLE or not lease.is_refused_for_swap():
                return response
            await response.aclose()
        return None

    async def _relay_whole(self, response: httpx.Response, send: Send) -> None:
        try:
            content = await read_whole(response)
        except httpx.HTTPError as error:
            await self._refuse(error, send)
            return
        body = self._reader.take_whole(content, is_success=response.is_success)
        if not response.is_success:
            self._error = (str(response.status_code), refusal(content))
        await self._answer(send, response.status_code, reply_headers(response.headers), body)

    async def _relay_stream(self, response: httpx.Response, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": response.status_code,
                "headers": reply_headers(response.headers),
            }
        )
        try:
            async for data in response.aiter_bytes():
                passed = self._reader.take(data)
                if self._reader.is_complete():
                    self._end()
                if passed:
                    await send(_body(passed, more=True))
        except httpx.HTTPError as error:
            status, message = self._engine_failure(error)
            self._error = (type(error).__name__, message)
            logger.warning("%s after a stream had begun", message)
            self._end()
            # No last body message: the server then cuts the connection, so that no client takes
            # what came for the whole.
            event = error_event(status, "engine_error", message, path=self._route.path)
            await send(_body(event, more=True))
            return
        rest = self._reader.take_rest()
        self._end()
        await send(_body(rest, more=False))

    async def _refuse(self, error: httpx.HTTPError, send: Send) -> None:
        status, message = self._engine_failure(error)
        self._error = (type(error).__name__, message)
        await self._answer_error(send, status, "engine_error", message)

    async def _answer_error(self, send: Send, status: int, kind: str, message: str) -> None:
        logger.warning("%s", message)
        headers = [(b"content-type", b"application/json")]
        body = error_body(status, kind, message, path=self._route.path)
        await self._answer(send, status, headers, dump(body))

    def _engine_failure(self, error: httpx.HTTPError) -> tuple[int, str]:
        assert self._engine is not None
        return engine_failure(error, self._engine.url, self._services.config.request_timeout_s)

    async def _answer(self, send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        self._end()
        headers = [*headers, (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send(_body(body, more=False))

    def _end(self) -> None:
        """Note the end once, before the client can know of it: a flush from then on waits for the span.

        A call that got no answer gives its turn back; its client may try again at once.
        """
        if self._held is None:
            if self._takes_turn and self._error is not None and self._error[0] != CLIENT_GONE:
                self._services.budgets.give_back(*self._attempt_of_rollout)
            if self._follow_up is not None and isinstance(self._reader, TokenReader):
                self._follow_up.end(self._reader.reply)
            self._held = self._services.recorder.hold()
            self._ended_at = time.monotonic()
            self._end_ns = time.time_ns()

    async def _record(self) -> None:
        services = self._services
        versions = SampledBy()
        settings = EngineSettings()
        engine = self._engine
        before, ended_at = self._before, self._ended_at
        if engine and ended_at is not None and self._reader.needs_version():
            if self._adapter is not None:
                versions = SampledBy(self._adapter.version, self._adapter.version)
            elif before is not None:
                versions = version_of_call(before, await engine.versions.observe(ended_at))
            if versions != SampledBy():
                settings = await engine.settings.known()
        error = self._error or self._reader.problem()
        attributes, dropped = self._content(Facts(versions, services.config.logprobs_mode, settings))
        attributes |= self._whose()
        if self._is_cached:
            attributes[names.CACHED] = True
        if self._request.is_stream:
            attributes[names.STREAM_COMPLETE] = self._reader.is_complete() and error is None
        if error is not None:
            attributes[names.ERROR_TYPE] = error[0]
            services.counts.failed += 1
        shorten(attributes, dropped)
        if dropped:
            attributes[names.DROPPED] = chat.dumps(dropped)
        services.recorder.end(self._span, attributes, end_ns=self._end_ns, error=error)
        if services.raw_log is not None:
            services.raw_log.write(
                self._span.context,
                self._origin,
                self._content_sent,
                self._reader.raw(),
                is_stream=self._request.is_stream,
            )

    def _whose(self) -> dict[str, Any]:
        """Attributes of the rollout, of the policy that was asked for, and of the engine."""
        if self._spent is not None:
            own = {names.SYNTHETIC: names.NO_TURN_LEFT, names.PURPOSE: "other", names.POLICY: "frozen"}
            return {**self._origin, **own, names.PROVIDER_NAME: "spangrad"}
        origin = self._origin if self._asked == "any" else {**self._origin, names.POLICY_ASKED: self._asked}
        if self._engine is None:
            return {**origin, names.POLICY: self._services.config.policy}
        engine = {
            names.POLICY: self._engine.policy,
            names.ENGINE: self._engine.url,
            names.PROVIDER_NAME: self._engine.provider,
        }
        if self._follow_up is not None and self._follow_up.outcome is not None:
            engine[names.TOKENS_IN] = self._follow_up.outcome
        return {**origin, **engine}

    def _content(self, facts: Facts) -> tuple[dict[str, Any], dict[str, str]]:
        """What was asked and answered, and what of it can't be told."""
        attributes: dict[str, Any] = {names.OPERATION_NAME: self._route.operation}
        dropped: dict[str, str] = {}
        parts: dict[str, Callable[[], Mapping[str, Any]]] = {
            "request": lambda: self._route.request(self._request.body),
            "response": lambda: self._reader.attributes(facts),
        }
        for what, read in parts.items():
            try:
                attributes |= read()
                if told := attributes.pop(names.DROPPED, None):
                    dropped |= json.loads(told)
            except Exception as error:  # foreign data: whatever it is, the span must come out
                dropped[what] = f"can't be read: {type(error).__name__}: {error}"
        return attributes, dropped


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
