"""The gateway's HTTP application: routes, and the parts that all calls share.

    agent --> POST [/rollout/ID[/ATTEMPT]]/v1/chat/completions --> engine
                        |
                        +--> span --> exporter --> hub or file store

Only recorded routes are passed on, and reads below /v1: an agent never reaches the
engine's control plane (pause, weight update, sleep), which vLLM leaves unguarded.
"""

import asyncio
import re
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from opentelemetry.sdk.trace.export import SpanExporter
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.routing import Route as HttpRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from spangrad.tracer import conventions as names
from spangrad.tracer.exporter import Exporter, SpoolExporter
from spangrad.tracer.gateway.agent_keys import RequireAgentKey, RolloutKeys
from spangrad.tracer.gateway.budgets import Budgets
from spangrad.tracer.gateway.call import Call, Counts, Services
from spangrad.tracer.gateway.config import GatewayConfig
from spangrad.tracer.gateway.ends import Ends
from spangrad.tracer.gateway.engines import EnginePool
from spangrad.tracer.gateway.follow_up import TokensIn
from spangrad.tracer.gateway.http_parts import error_response
from spangrad.tracer.gateway.operator_routes import Operator
from spangrad.tracer.gateway.policy_choice import PolicyChoice
from spangrad.tracer.gateway.raw_log import RawLog
from spangrad.tracer.gateway.reads import Reads
from spangrad.tracer.gateway.rewrite import UpstreamRequest
from spangrad.tracer.gateway.routes import END, KNOWN, PASSED_ON, ROUTES, RecordedRoute
from spangrad.tracer.gateway.spans import SpanRecorder
from spangrad.tracer.gateway.whose import origin_of
from spangrad.tracer.hub_exporter import HubExporter, spool_of_hub
from spangrad.tracer.redaction import rule_of
from spangrad.tracer.wire.repeated import Readers

UNWIND_S = 2.0
"""Longest wait for calls that were cut when the gateway stopped to give up their spans."""
_CALL = re.compile("(?:/rollout/(?P<rollout_id>[^/]+)(?:/(?P<attempt>[^/]+))?)?(?P<path>/v1/.+)", re.DOTALL)
PREFIXES = ("", "/rollout/{rollout_id}", "/rollout/{rollout_id}/{attempt}")
READABLE = ("/health", "/ping", "/version")
"""The engine's paths outside /v1 that agents may read."""


def create_app(config: GatewayConfig, *, exporter: SpanExporter | None = None) -> Starlette:
    """Build the gateway.

    Args:
        config: Its settings.
        exporter: Where spans go; None: `config.store`.

    Raises:
        ConfigError: Nothing could be recorded, or the raw log can't be written.
    """
    exporter = exporter or _exporter(config)
    services = Services(
        instance=secrets.token_hex(8),
        config=config,
        engines=EnginePool(config),
        policies=PolicyChoice(config),
        recorder=SpanRecorder(exporter, redact=rule_of(config.redact)),
        counts=Counts(),
        budgets=Budgets(_budgets_file(exporter)),
        requests=Readers(),
        tokens_in=TokensIn() if config.fidelity == "tokens-in" else None,
        raw_log=RawLog(config.raw_log) if config.raw_log is not None else None,
    )

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        interval_s, timeout_s = config.health_interval_s, config.health_timeout_s
        background = [
            asyncio.create_task(services.recorder.drain_while_waiting()),
            *(asyncio.create_task(e.watch(interval_s, timeout_s)) for e in services.engines.engines),
        ]
        yield
        for task in background:
            task.cancel()
        # Calls that were cut because the time was over unwind in tasks of their own.
        deadline = time.monotonic() + UNWIND_S
        while services.counts.running and time.monotonic() < deadline:
            await asyncio.sleep(0.005)
        await services.recorder.close()
        await services.engines.close()
        await services.policies.close()
        services.budgets.close()
        if services.raw_log is not None:
            services.raw_log.close()

    layers = [Middleware(RolloutKeys)]
    if config.agent_key is not None:
        layers.append(Middleware(RequireAgentKey, key=config.agent_key))
    return Starlette(
        routes=_routes(services),
        middleware=[*layers, Middleware(_Calls, services=services)],
        lifespan=lifespan,
        exception_handlers={404: _no_such_route, 405: _no_such_route},
    )


def _exporter(config: GatewayConfig) -> SpanExporter:
    if config.store.startswith(("http://", "https://")):
        spool = config.spool_dir or spool_of_hub(config.store, "gateway")
        return HubExporter(config.store, key=config.store_key, spool_dir=spool)
    return SpoolExporter(config.store)


def _budgets_file(exporter: SpanExporter) -> Path | None:
    """Beside the folder in which spans wait, so that the next gateway with the same spool finds it."""
    folder = exporter.folder if isinstance(exporter, Exporter) else None
    return None if folder is None else folder.with_name(f"{folder.name}.budgets")


def _routes(services: Services) -> list[BaseRoute]:
    reads, ends = Reads(services), Ends(services)
    operator = Operator(services)
    routes: list[BaseRoute] = [
        HttpRoute("/spangrad/health", operator.health),
        HttpRoute("/spangrad/flush", operator.flush, methods=["POST"]),
        HttpRoute("/spangrad/refresh", operator.refresh, methods=["POST"]),
        HttpRoute("/spangrad/budgets", operator.budgets, methods=["POST"]),
        HttpRoute("/spangrad/engines", operator.engines),
        HttpRoute("/spangrad/engines/join", operator.join, methods=["POST"]),
        HttpRoute("/spangrad/engines/leave", operator.leave, methods=["POST"]),
        HttpRoute("/spangrad/engines/drain", operator.drain, methods=["POST"]),
        HttpRoute("/spangrad/engines/undrain", operator.undrain, methods=["POST"]),
        HttpRoute("/spangrad/engines/swap", operator.swap, methods=["POST"]),
        HttpRoute("/spangrad/engines/swapped", operator.swapped, methods=["POST"]),
        *(HttpRoute(path, reads.read) for path in READABLE),
    ]
    for prefix in PREFIXES:
        routes.append(HttpRoute(prefix + END, ends.end, methods=["POST"]))
        routes += [HttpRoute(prefix + path, reads.pass_on, methods=["POST"]) for path in PASSED_ON]
        routes.append(HttpRoute(f"{prefix}/v1/{{path:path}}", reads.read_api))
    return routes


class _Calls:
    """Middleware: the recorded routes. In front of the router, which would take its time with each call."""

    def __init__(self, app: ASGIApp, services: Services) -> None:
        """Let `app` serve everything else."""
        self._app = app
        self._services = services
        self._routes = {route.path: route for route in ROUTES}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Record a call, or pass the request on."""
        if scope["type"] == "http" and scope["method"] == "POST":
            found = _CALL.fullmatch(scope["path"].removeprefix(scope.get("root_path", "")))
            route = self._routes.get(found["path"]) if found is not None else None
            if found is not None and route is not None:
                named = {name: found[name] for name in ("rollout_id", "attempt") if found[name] is not None}
                await self._call(route, {**scope, "path_params": named}, receive, send)
                return
        await self._app(scope, receive, send)

    async def _call(self, route: RecordedRoute, scope: Scope, receive: Receive, send: Send) -> None:
        start_ns = time.time_ns()
        request = Request(scope, receive)
        try:
            origin = origin_of(request)
            asked = self._services.policies.asked(
                request.headers.get(names.HEADER_POLICY), origin.get(names.ROLLOUT_ID)
            )
        except ValueError as error:
            refusal = error_response(400, "invalid_header", str(error), path=route.path)
            await refusal(scope, receive, send)
            return
        try:
            raw = await request.body()
        except ClientDisconnect:
            return
        engines = self._services.engines
        parse = self._services.requests.of(origin.get(names.ROLLOUT_ID)).read
        upstream = route.upstream(raw, engines.models, parse)
        if engines.is_hosted(upstream.body):  # it has no ids to give
            upstream = UpstreamRequest(upstream.body, raw, strip_ids=False, strip_logprobs=False)
        call = Call(
            self._services,
            route,
            upstream,
            headers=request.headers,
            query=scope["query_string"],
            origin=origin,
            asked=asked,
            start_ns=start_ns,
        )
        await call.run(receive, send)


async def _no_such_route(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 404
    message = f"there is no {request.method} {request.url.path}: {KNOWN}"
    return error_response(status, "not_found", message)
