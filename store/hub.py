"""The hub: a store behind HTTP.

    POST /v1/traces      OTLP: protobuf or JSON, compressed or not  agent
    POST /v1/logs        the same, log records                      agent
    POST /api/<name>     the other methods of a store, JSON         see operations.py
    POST /api/query      accepting Arrow: a stream of any length    evaluator
    POST /api/spans      spans as frames of OTLP protobuf           evaluator
    POST /api/logs       log records, likewise                      evaluator
    GET  /healthz                                                   anybody

Knows HTTP, keys and the size of bodies; what an operation does is in `operations.py`.
Invariants:

* 200 to `/v1/traces` and `/v1/logs` means on disk, all but the `rejected_spans` that it names;
* an agent's key does not send spans that a gateway vouches for;
* 400 is for what the caller sent and will never be taken; whatever else fails is 503, and the same
  request may be sent again;
* without keys only requests that name a loopback host, and come from no foreign web page, are answered;
* what keeps the store from writing or reading is logged when it begins, and when spans are stored again;
* an error is JSON `{"error": class, "message": sentence}`, which `HubClient` raises again.
"""

import asyncio
import json
import logging
import threading
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from typing import Any, Final

from google.protobuf.json_format import MessageToDict  # type: ignore[import-untyped]
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from spangrad.errors import LeaseLostError, PermissionDeniedError, SpangradError, StoreError
from spangrad.store.arrow import ARROW_TYPE, ipc_from_answer
from spangrad.store.checking import check_arguments
from spangrad.store.encoding import decode_json, encode_json
from spangrad.store.faults import FAULTS_HEADER, Faults, Outcome, faults_to_text
from spangrad.store.file_store import UNSTORABLE, FileStore
from spangrad.store.keys import Keys, Role
from spangrad.store.migrations import SCHEMA_VERSION
from spangrad.store.operations import AUTHORS, OPERATIONS, run_operation
from spangrad.store.otlp import json_logs_to_protobuf, spans_of
from spangrad.store.records import Span
from spangrad.store.requests import trace_request
from spangrad.store.streaming import stream
from spangrad.store.tables.database import OUTAGES
from spangrad.store.tables.query import ARROW_TIMEOUT_S
from spangrad.store.wire import LOGS_TYPE, SPANS_TYPE, logs_to_frames, spans_to_frames
from spangrad.store.writer import GroupWriter
from spangrad.tracer.conventions import SCOPE_GATEWAY
from spangrad.tracer.periodically import Periodically

logger = logging.getLogger(__name__)

MAX_BODY_BYTES: Final = 64 * 2**20
LOOPBACK_HOSTS: Final = frozenset({"localhost", "127.0.0.1", "::1"})
NEW_SPANS_HEADER: Final = "x-spangrad-new-spans"
NEW_LOGS_HEADER: Final = "x-spangrad-new-logs"

_WINDOWS: Final = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS, "zlib": zlib.MAX_WBITS}
"""Encodings of bodies and the form of zlib that each is in."""
FORGED: Final = "spans of a gateway came with the agent key"
_NEEDED: Final = "it needs the evaluator key"

Handler = Callable[[Request], Awaitable[Response]]
Beside = Callable[[FileStore, threading.Event], None]
"""Work on the store of a hub, until the event is set."""

_STATUS: Final = (
    (PermissionDeniedError, 403),
    (LeaseLostError, 409),
    (OUTAGES, 503),
    (SpangradError, 400),
)


class _Refused(Exception):
    """A request that is answered with a status of its own."""

    def __init__(self, status: int, message: str, kind: str = "StoreError") -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind


def create_app(
    store: FileStore,
    *,
    keys: Keys | None = None,
    allowed_hosts: Collection[str] | None = None,
    on_invalidated: Callable[[], None] | None = None,
    beside: Beside | None = None,
) -> Starlette:
    """The hub's application. It owns the store and closes it at shutdown.

    Args:
        store: Where everything goes.
        keys: Who may do what; without, every caller is an admin.
        allowed_hosts: Names that a request's Host may have; by default loopback's without keys,
            any with keys (a web page that gets here by DNS rebinding has no key).
        on_invalidated: Called when DuckDB met a fatal error: every request gets 503 from then on.
        beside: Run in a thread while requests are answered; it is to return soon when the event is set.
    """
    if allowed_hosts is None and keys is None:
        allowed_hosts = LOOPBACK_HOSTS
    hub = _Hub(store, keys, allowed_hosts, on_invalidated, beside)
    return Starlette(
        routes=[
            Route("/healthz", hub.answer(hub.health, None)),
            Route("/v1/traces", hub.answer(hub.traces, Role.AGENT), methods=["POST"]),
            Route("/v1/logs", hub.answer(hub.logs, Role.AGENT), methods=["POST"]),
            Route("/api/spans", hub.answer(hub.stored_spans, Role.EVALUATOR), methods=["POST"]),
            Route("/api/logs", hub.answer(hub.stored_logs, Role.EVALUATOR), methods=["POST"]),
            Route("/api/query", hub.answer(hub.query, OPERATIONS["query"].role), methods=["POST"]),
            *(
                Route(f"/api/{name}", hub.answer(hub.operation(name), operation.role), methods=["POST"])
                for name, operation in OPERATIONS.items()
            ),
        ],
        lifespan=hub.lifespan,
    )


class _Hub:
    def __init__(
        self,
        store: FileStore,
        keys: Keys | None,
        allowed_hosts: Collection[str] | None,
        on_invalidated: Callable[[], None] | None,
        beside: Beside | None,
    ) -> None:
        self._store = store
        self._keys = keys
        self._allowed_hosts = allowed_hosts
        self._on_invalidated = on_invalidated
        self._beside = beside
        self._writer = GroupWriter(store.put_batches, store.take_in)
        self._said = Periodically()
        self._outages: set[type[SpangradError]] = set()
        """Kinds of them that have been logged since spans were stored the last time."""

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        stop = threading.Event()
        thread = None
        if self._beside is not None:
            thread = threading.Thread(
                target=self._beside, args=(self._store, stop), name="spangrad-beside", daemon=True
            )
            thread.start()
        yield
        await run_in_threadpool(self._writer.close)
        stop.set()
        if thread is not None:
            await run_in_threadpool(thread.join)
        await run_in_threadpool(self._store.close)

    def answer(self, handler: Handler, least: Role | None) -> Handler:
        """Check host, origin and key around a handler, and turn errors into JSON."""

        async def endpoint(request: Request) -> Response:
            try:
                self._check_host(request)
                if least is not None:
                    request.state.role = self._check_key(request, least)
                return await handler(request)
            except _Refused as error:
                return _error(error.status, error.kind, str(error))
            except SpangradError as error:
                status = next(status for kind, status in _STATUS if isinstance(error, kind))
                if status == 503:
                    self._log_outage(error)
                if self._store.is_invalidated and self._on_invalidated is not None:
                    self._on_invalidated()
                return _error(status, type(error).__name__, str(error))
            except ClientDisconnect:
                raise
            except Exception as error:  # boundary: the sender must learn that it can try again
                logger.exception("%s could not be answered", request.url.path)
                return _error(503, "StoreError", f"{request.url.path} failed: {error!r}")

        return endpoint

    async def health(self, request: Request) -> Response:
        if self._store.is_invalidated:
            raise _Refused(503, "the database met a fatal error; start the hub again")
        return JSONResponse({"status": "ok", "schema_version": SCHEMA_VERSION, "has_keys": bool(self._keys)})

    async def traces(self, request: Request) -> Response:
        body = await _body(request)
        is_json = _is_json(request)
        spans, faults = await run_in_threadpool(_decode, body, is_json)
        if request.state.role is Role.AGENT:
            sent, spans = spans, [span for span in spans if span.scope != SCOPE_GATEWAY]
            forged = len(sent) - len(spans)
            if forged and not spans:  # 403: the sender keeps them, and may have the right key the next time
                raise PermissionDeniedError(f"{forged} {FORGED}; {_NEEDED}")
            if forged:
                faults.add(FORGED, Outcome.LEFT_OUT, _NEEDED, forged)
        stored = self._writer.submit(spans, len(body))
        if stored is None:
            raise _Refused(503, "too many spans wait to be written; send them again later")
        new, put_aside = await asyncio.wrap_future(stored)
        if spans and self._outages:
            self._outages.clear()
            logger.info("spans are stored again")
        if put_aside:
            faults.add(UNSTORABLE, Outcome.LEFT_OUT, "the log of the hub says why", put_aside)
        if new + put_aside < len(spans):  # some were there before: they may have said something else
            faults.merge(await run_in_threadpool(self._store.conflicts, spans))
        headers = {NEW_SPANS_HEADER: str(new)}
        return self._taken(ExportTraceServiceResponse(), "rejected_spans", faults, headers, is_json=is_json)

    async def logs(self, request: Request) -> Response:
        body = await _body(request)
        is_json = _is_json(request)
        author = AUTHORS[request.state.role]

        faults = Faults()

        def put() -> int:
            sent = json_logs_to_protobuf(body, faults) if is_json else body
            return self._store.put_logs(sent, faults, author=author)

        headers = {NEW_LOGS_HEADER: str(await run_in_threadpool(put))}
        return self._taken(
            ExportLogsServiceResponse(), "rejected_log_records", faults, headers, is_json=is_json
        )

    async def stored_spans(self, request: Request) -> Response:
        arguments = await _arguments(request)
        check_arguments("spans", FileStore.spans, arguments)
        return await stream(lambda: spans_to_frames(self._store.spans(**arguments)), SPANS_TYPE)

    async def stored_logs(self, request: Request) -> Response:
        arguments = await _arguments(request)
        check_arguments("logs", FileStore.logs, arguments)
        return await stream(lambda: logs_to_frames(self._store.logs(**arguments)), LOGS_TYPE)

    async def query(self, request: Request) -> Response:
        """Rows as JSON, or as Arrow for whoever accepts that."""
        if ARROW_TYPE not in request.headers.get("accept", ""):
            return await self.operation("query")(request)
        arguments = await _arguments(request)
        check_arguments("query", FileStore.query_arrow, arguments)
        arguments.setdefault("timeout_s", ARROW_TIMEOUT_S)
        return await stream(
            lambda: ipc_from_answer(self._store.query_arrow(**arguments)),
            ARROW_TYPE,
            limit_s=arguments["timeout_s"],
        )

    def operation(self, name: str) -> Handler:
        async def handler(request: Request) -> Response:
            arguments = await _arguments(request)
            result = await run_in_threadpool(run_operation, self._store, name, arguments, request.state.role)
            return Response(encode_json({"result": result}), media_type="application/json")

        return handler

    def _taken(
        self, reply: Any, rejected: str, faults: Faults, headers: dict[str, str], *, is_json: bool
    ) -> Response:
        """The answer to what was stored: what of it was left out or mended is in `partial_success`."""
        if faults:
            told = faults.told()
            if self._said.due():
                logger.warning("of what came not all was kept as it was: %s", told)
            setattr(reply.partial_success, rejected, faults.count(Outcome.LEFT_OUT))
            reply.partial_success.error_message = told
            headers = {**headers, FAULTS_HEADER: faults_to_text(faults)}
        if is_json:
            return JSONResponse(MessageToDict(reply), headers=headers)
        return Response(reply.SerializeToString(), media_type="application/x-protobuf", headers=headers)

    def _log_outage(self, error: SpangradError) -> None:
        if type(error) not in self._outages:
            self._outages.add(type(error))
            logger.error("senders get 503 and are to try again: %s", error)

    def _check_host(self, request: Request) -> None:
        if self._allowed_hosts is None:
            return
        hosts = [_host_name(request.headers.get("host", ""))]
        if origin := request.headers.get("origin"):
            hosts.append(_host_name(origin.partition("://")[2]))
        for host in hosts:
            if host not in self._allowed_hosts:
                raise _Refused(
                    403,
                    f"requests for host {host!r} are not answered; use one of {sorted(self._allowed_hosts)}",
                    "PermissionDeniedError",
                )

    def _check_key(self, request: Request, least: Role) -> Role:
        if self._keys is None:
            return Role.ADMIN
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        role = self._keys.role_of(key.strip()) if scheme.lower() == "bearer" else None
        if role is None:
            raise _Refused(
                401,
                "this hub needs a key: send `Authorization: Bearer KEY`, or set SPANGRAD_KEY",
                "PermissionDeniedError",
            )
        if role < least:
            raise PermissionDeniedError(
                f"{request.url.path} needs the {least.name.lower()} key, this is the {role.name.lower()} key"
            )
        return role


def _decode(body: bytes, is_json: bool) -> tuple[list[Span], Faults]:
    request, faults = trace_request(body, is_json=is_json)
    return spans_of(request), faults


def _is_json(request: Request) -> bool:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind == "application/json"


async def _arguments(request: Request) -> dict[str, Any]:
    body = await _body(request)
    try:
        arguments = decode_json(body.decode()) if body else {}
    except (ValueError, json.JSONDecodeError) as error:
        raise StoreError(f"{len(body)} bytes are no JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise StoreError(f"an object of arguments was expected, got {arguments!r:.80}")
    return arguments


async def _body(request: Request) -> bytes:
    """The body, unpacked; 413 if it is too long before or after."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "", *_WINDOWS):
        raise _Refused(415, f"content-encoding {encoding!r} is unknown; send gzip, deflate or none")
    unpack = zlib.decompressobj(_WINDOWS[encoding]) if encoding in _WINDOWS else None
    pieces: list[bytes] = []
    size = 0
    async for piece in request.stream():
        if unpack is not None:
            try:
                piece = unpack.decompress(piece, MAX_BODY_BYTES + 1 - size)
            except zlib.error as error:
                raise StoreError(f"the body is no {encoding}: {error}") from error
        size += len(piece)
        if size > MAX_BODY_BYTES:
            raise _Refused(413, f"the body has more than {MAX_BODY_BYTES} bytes; send smaller batches")
        pieces.append(piece)
    if unpack is not None and not unpack.eof:
        raise StoreError(f"the body is {encoding} that was cut off; send it whole")
    return b"".join(pieces)


def _host_name(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()


def _error(status: int, kind: str, message: str) -> Response:
    headers = {"retry-after": "1"} if status == 503 else None
    return JSONResponse({"error": kind, "message": message}, status, headers=headers)
