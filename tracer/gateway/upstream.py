"""The gateway's way to engines: httpx's transport interface over aiohttp's connections.

httpx's own transport looks through all connections of its pool for each request: with 32 calls at once it
costs 1.4 ms of CPU a call where aiohttp takes 0.1. Everything above speaks httpx all the same.

Invariants: a request is sent once, or not at all (aiohttp repeats only what is idempotent, and only on a
connection that had been used before); bytes come as the engine sent them, as soon as they come; a
response that is closed before its end closes its connection, so that the engine stops sampling; cookies
go from an engine to the agent that asked and are not kept for the next one.

Knows HTTP, httpx and aiohttp. Knows nothing of calls.
"""

import asyncio
import io
import ssl
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.cookiejar import CookieJar, DefaultCookiePolicy

import aiohttp
import httpx
from yarl import URL

MAX_BYTES_BODY = 2**20
"""From here on aiohttp warns of a body given as bytes, which it writes at once."""
WATCH_S = 1.0
"""How often a silent connection is looked at: aiohttp closes one whose chunks can't be read, and tells
nobody."""
MAX_HEADER_BYTES = 2**16
"""Longest header of a response: as long as those that the gateway's own server takes."""
KEEPALIVE_S = 2.0
"""Below the 5 s after which uvicorn, and so vLLM, closes an idle connection under a request."""


class EngineClient(httpx.AsyncClient):
    """An httpx client with a short way for the calls that matter."""

    def __init__(
        self, *, timeout: httpx.Timeout | None, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        """Connect later. `transport` is used instead of connections, and `timeout` is then its business."""
        self._connections = None if transport is not None else Connections()
        no_cookies = CookieJar(DefaultCookiePolicy(allowed_domains=[]))
        super().__init__(transport=transport or self._connections, timeout=timeout, cookies=no_cookies)

    async def open(self, url: str, *, content: bytes, headers: Mapping[str, str]) -> httpx.Response:
        """POST; returns once the response's head is there. Raises `httpx.TransportError`.

        Leaves out what httpx adds (cookies, redirects, its own headers), a third of what such a call costs.
        """
        if self._connections is None:
            return await self.send(
                self.build_request("POST", url, content=content, headers=headers), stream=True
            )
        timeout = (self.timeout.connect, self.timeout.read)
        return await self._connections.send("POST", url, content, list(headers.items()), timeout)


async def read_whole(response: httpx.Response) -> bytes:
    """The body of a response of `EngineClient.open`. Raises `httpx.TransportError`.

    Without what httpx does to decode it, where there is nothing to decode.
    """
    body = response.stream
    if isinstance(body, _Body) and "content-encoding" not in response.headers:
        return await body.read()
    return await response.aread()


class Connections(httpx.AsyncBaseTransport):
    """Any number of connections, each kept for `KEEPALIVE_S` after its last use. For one event loop."""

    def __init__(self) -> None:
        """Connect later."""
        self._session: aiohttp.ClientSession | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """What httpx's clients call."""
        raw = request.headers.raw
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in raw]
        times = request.extensions.get("timeout", {})
        timeout = (times.get("connect"), times.get("read"))
        return await self.send(request.method, str(request.url), await request.aread(), headers, timeout)

    async def send(
        self,
        method: str,
        url: str,
        content: bytes,
        headers: Sequence[tuple[str, str]],
        timeout_s: tuple[float | None, float | None],
    ) -> httpx.Response:
        """Send a request, `timeout_s` for connecting and for each wait for bytes."""
        connect_s, read_s = timeout_s
        with _as_httpx():
            response = await self._opened().request(
                method,
                URL(url, encoded=True),
                data=_data(content),
                headers=headers,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(sock_connect=connect_s, sock_read=read_s),
            )
        return httpx.Response(response.status, headers=response.raw_headers, stream=_Body(response))

    async def aclose(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S, use_dns_cache=False),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
                trust_env=False,
                max_line_size=MAX_HEADER_BYTES,
                max_field_size=MAX_HEADER_BYTES,
            )
        return self._session


def _data(content: bytes) -> io.BytesIO | bytes | None:
    return io.BytesIO(content) if len(content) > MAX_BYTES_BODY else content or None


class _Body(httpx.AsyncByteStream):
    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            with _as_httpx():
                while data := await self._next():
                    yield data
        finally:
            self._response.close()

    async def read(self) -> bytes:
        """All of it."""
        pieces: list[bytes] = []
        try:
            with _as_httpx():
                while data := await self._next():
                    pieces.append(data)
        finally:
            self._response.close()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def _next(self) -> bytes:
        """What has come, as soon as something has; empty at the end."""
        if self._response.content.at_eof():
            return b""
        while True:
            try:
                async with asyncio.timeout(WATCH_S) as watch:
                    return await self._response.content.readany()
            except TimeoutError:
                connection = self._response.connection
                transport = None if connection is None else connection.transport
                if not watch.expired():
                    raise  # the engine was silent for too long
                if transport is None or transport.is_closing():
                    raise aiohttp.ClientPayloadError("the connection is gone") from None

    async def aclose(self) -> None:
        self._response.close()  # after its end the connection is the pool's again, and this does nothing


@contextmanager
def _as_httpx() -> Iterator[None]:
    """Raise httpx's errors in the place of aiohttp's."""
    try:
        yield
    except aiohttp.ConnectionTimeoutError as error:
        raise httpx.ConnectTimeout(str(error)) from error
    except (TimeoutError, aiohttp.ServerTimeoutError) as error:
        raise httpx.ReadTimeout(str(error)) from error
    except aiohttp.ClientConnectorError as error:
        raise httpx.ConnectError(str(error)) from error
    except (aiohttp.ServerDisconnectedError, aiohttp.ClientPayloadError) as error:
        raise httpx.RemoteProtocolError(str(error)) from error
    except (aiohttp.ClientError, OSError, ssl.SSLError) as error:
        raise httpx.ReadError(str(error)) from error
