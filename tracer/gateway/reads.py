"""Requests that are passed on unrecorded, to any engine that can be connected to: they sample nothing.

Knows HTTP. Knows no spans and no calls.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any
from urllib.parse import unquote

import httpx
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from spangrad.tracer.gateway.call import Services
from spangrad.tracer.gateway.engine import Engine
from spangrad.tracer.gateway.engines import CONNECT_ERRORS
from spangrad.tracer.gateway.http_parts import engine_failure, error_response, reply_headers, upstream_headers
from spangrad.tracer.gateway.raw_log import parse_json
from spangrad.tracer.gateway.rewrite import renamed_request
from spangrad.tracer.gateway.routes import KNOWN

RESPONSES = "/v1/responses/"
"""Below it are responses that one engine keeps and the others do not know."""


class Reads:
    """Handlers of what agents may ask without being recorded."""

    def __init__(self, services: Services) -> None:
        """Serve one gateway."""
        self._services = services

    async def read_api(self, request: Request) -> Response:
        """A path below /v1."""
        path = request.path_params["path"]
        if path == "models" and self._services.engines.model_names:
            return await self._all_models(request)
        return await self._get(request, f"/v1/{path}")

    async def read(self, request: Request) -> Response:
        """One of the other paths that agents may read."""
        return await self._get(request, request.url.path)

    async def pass_on(self, request: Request) -> Response:
        """A POST below /v1; the name of its model is mapped."""
        path = "/v1/" + request.url.path.partition("/v1/")[2]
        sent = renamed_request(await request.body(), self._services.engines.models)
        model = sent.body.get("model") if isinstance(sent.body, dict) else None
        if model is None:
            return await self._get(request, path, content=sent.content)
        with self._services.engines.lease(model, request.path_params.get("rollout_id")) as lease:
            engine = await lease.next()
            if engine is None:
                status, kind, message = lease.failure()
                return error_response(status, kind, message, path=path)
            return await self._get(request, path, content=sent.content, engines=[engine])

    async def _get(
        self,
        request: Request,
        path: str,
        *,
        content: bytes | None = None,
        engines: Sequence[Engine] | None = None,
    ) -> Response:
        """Ask `engines`, or all, in turn until one can be connected to and knows the response asked for."""
        if ".." in unquote(path).split("/"):  # a proxy before an engine may decode once more
            return error_response(404, "not_found", f"no path {path}")
        failures: list[str] = []
        unknown: httpx.Response | None = None
        for engine in engines or self._services.engines.healthy_first():
            try:
                upstream = await self._ask(engine, request, path, content)
            except CONNECT_ERRORS as error:
                failures.append(f"{engine.url} ({type(error).__name__})")
                engine.out(f"no connection ({type(error).__name__})")
            except httpx.HTTPError as error:
                timeout_s = self._services.config.request_timeout_s
                status, message = engine_failure(error, engine.url, timeout_s)
                return error_response(status, "engine_error", message, path=path)
            else:
                if _is_bare_404(upstream) and not path.startswith(RESPONSES):
                    message = f"the engine at {engine.url} has no {request.method} {path}; {KNOWN}"
                    return error_response(404, "not_found", message, path=path)
                if upstream.status_code != 404 or not path.startswith(RESPONSES):
                    return _answer(upstream)
                if unknown is not None:
                    await unknown.aclose()
                unknown = upstream
        if unknown is not None:
            return _answer(unknown)
        message = f"no engine answers: {', '.join(failures)}"
        return error_response(502, "engine_error", message, path=path)

    async def _all_models(self, request: Request) -> Response:
        """One list of what engines serve that serve different models."""
        engines = self._services.engines.all
        lists = await asyncio.gather(*(self._models_of(engine, request) for engine in engines))
        models: dict[str, Any] = {}
        for listed in lists:
            for entry in listed:
                models.setdefault(entry["id"], entry)
        return JSONResponse({"object": "list", "data": list(models.values())})

    async def _models_of(self, engine: Engine, request: Request) -> list[dict[str, Any]]:
        """What an engine says that it serves; of an engine with names, only those."""
        named = [{"id": name, "object": "model"} for name in engine.models]
        try:
            said = parse_json((await self._ask(engine, request, "/v1/models")).content)
        except httpx.HTTPError:
            return named
        entries = said.get("data") if isinstance(said, dict) else None
        if not isinstance(entries, list):
            return named
        told = [entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("id"), str)]
        return [entry for entry in told if not named or entry["id"] in engine.models] + named

    async def _ask(
        self, engine: Engine, request: Request, path: str, content: bytes | None = None
    ) -> httpx.Response:
        url = httpx.URL(engine.url + path).copy_with(query=request.url.query.encode() or None)
        headers = upstream_headers(request.headers, self._services.config, engine.key)
        method = "GET" if content is None else "POST"
        sent = engine.client.build_request(method, url, headers=headers, content=content)
        answer = await engine.client.send(sent, stream=True)
        if not _is_stream(answer):
            await answer.aread()
        return answer


def _is_bare_404(upstream: httpx.Response) -> bool:
    """Whether it is what an engine's web framework says, which tells a client nothing."""
    if upstream.status_code != 404 or _is_stream(upstream):
        return False
    said = parse_json(upstream.content)
    return not isinstance(said, dict) or "error" not in said


def _is_stream(upstream: httpx.Response) -> bool:
    kind: str = upstream.headers.get("content-type", "")
    return kind.startswith("text/event-stream")


def _answer(upstream: httpx.Response) -> Response:
    response: Response
    if _is_stream(upstream):
        response = StreamingResponse(_pieces(upstream), upstream.status_code)
    else:
        response = Response(upstream.content, upstream.status_code)
    response.raw_headers = [*response.raw_headers, *reply_headers(upstream.headers)]
    return response


async def _pieces(upstream: httpx.Response) -> AsyncIterator[bytes]:
    """The body as it comes; the engine is let go of when the client leaves."""
    try:
        async for piece in upstream.aiter_raw():
            yield piece
    finally:
        await upstream.aclose()
