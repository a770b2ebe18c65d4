"""The transport to engines: httpx's interface and errors over aiohttp's connections."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from spangrad.tracer.gateway import upstream
from spangrad.tracer.gateway.upstream import EngineClient

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]
HEAD = b"HTTP/1.1 200 OK\r\nX-Odd-CASE: 1\r\nset-cookie: a=b\r\n"


@asynccontextmanager
async def engine(answer: Answer) -> AsyncIterator[str]:
    """A server that answers each request as told, on connections that it counts."""
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def client(read_s: float = 30.0) -> EngineClient:
    return EngineClient(timeout=httpx.Timeout(read_s, connect=5.0, pool=None))


async def read_request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    return head + await reader.readexactly(int(length.split(b":")[1]))


def test_a_request_goes_out_as_given_and_connections_are_used_again() -> None:
    seen: list[bytes] = []
    connections: list[object] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        while not reader.at_eof():
            try:
                seen.append(await read_request(reader))
            except asyncio.IncompleteReadError:
                break
            writer.write(HEAD + b"content-length: 2\r\n\r\nok")
        writer.close()

    async def run() -> None:
        async with engine(answer) as url, client() as calls:
            for _ in range(3):
                response = await calls.open(f"{url}/v1/a%2Fb?c=%20", content=b"{}", headers={"x-one": "1"})
                assert await response.aread() == b"ok"
                assert (b"X-Odd-CASE", b"1") in response.headers.raw
            direct = await calls.post(f"{url}/v1/x", content=b"{}", timeout=5)
            assert direct.text == "ok"
            await calls.post(f"{url}/v1/x", content=b"{}")

    asyncio.run(run())
    first = seen[0].split(b"\r\n")
    assert first[0] == b"POST /v1/a%2Fb?c=%20 HTTP/1.1"
    names = sorted(line.split(b":")[0].lower() for line in first[1:] if b":" in line)
    assert names == [b"content-length", b"host", b"x-one"]  # nothing of aiohttp's own
    assert not any(b"cookie" in request.lower() for request in seen)  # each answer sets one
    assert len(seen) == 5
    assert len(connections) == 1


@pytest.mark.parametrize("size", [0, 1, 2**20, 2**20 + 1, 3 * 2**20])
def test_a_body_of_any_size_goes_out_whole_and_without_a_warning(size: int) -> None:
    seen: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await read_request(reader))
        writer.write(HEAD + b"content-length: 2\r\n\r\nok")
        writer.close()

    async def run() -> None:
        async with engine(answer) as url, client() as calls:
            assert await (await calls.open(url, content=b"x" * size, headers={})).aread() == b"ok"

    asyncio.run(run())
    head, _, sent = seen[0].partition(b"\r\n\r\n")
    assert sent == b"x" * size
    names = sorted(line.split(b":")[0].lower() for line in head.split(b"\r\n")[1:])
    assert names == [b"content-length", b"host"]


def test_chunks_come_as_they_are_sent_and_leaving_closes_the_connection() -> None:
    left = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n3\r\none\r\n")
        assert await reader.read() == b""  # the client hung up, though the stream has no end
        left.set()
        writer.close()

    async def run() -> None:
        async with engine(answer) as url, client() as calls:
            response = await calls.open(url, content=b"{}", headers={})
            async for data in response.aiter_bytes():
                assert data == b"one"
                break
            await response.aclose()
            await asyncio.wait_for(left.wait(), 20)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (b"", httpx.RemoteProtocolError),
        (HEAD + b"content-length: 9\r\n\r\nhalf", httpx.RemoteProtocolError),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n3\r\none\r\n", httpx.RemoteProtocolError),
        (b"no http\r\n\r\n", httpx.TransportError),
    ],
)
def test_what_breaks_off_is_an_error_of_httpx_and_is_sent_once(
    sent: bytes, error: type[httpx.TransportError]
) -> None:
    requests = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal requests
        await read_request(reader)
        requests += 1
        writer.write(sent)
        writer.close()

    async def run() -> None:
        async with engine(answer) as url, client() as calls:
            with pytest.raises(error):
                await (await calls.open(url, content=b"{}", headers={})).aread()

    asyncio.run(run())
    assert requests == 1


def test_a_stream_that_falls_silent_is_a_timeout_however_often_it_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(upstream, "WATCH_S", 0.1)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n3\r\none\r\n")
        await asyncio.sleep(0.5)
        writer.write(b"3\r\ntwo\r\n")
        await reader.read()
        writer.close()

    async def run() -> None:
        async with engine(answer) as url, client(read_s=0.9) as calls:
            response = await calls.open(url, content=b"{}", headers={})
            pieces = response.aiter_bytes()
            assert [await anext(pieces), await anext(pieces)] == [b"one", b"two"]
            with pytest.raises(httpx.ReadTimeout):
                await asyncio.wait_for(anext(pieces), 20)

    asyncio.run(run())


@pytest.mark.parametrize("hangs_up", [True, False])
def test_a_stream_that_goes_on_with_what_is_no_chunk_breaks_off(hangs_up: bool) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n3\r\none\r\n")
        await go_on.wait()
        writer.write(b"no length\r\n")
        if not hangs_up:
            await reader.read()
        writer.close()

    go_on = asyncio.Event()

    async def run() -> None:
        async with engine(answer) as url, client() as calls:
            response = await calls.open(url, content=b"{}", headers={})
            pieces = response.aiter_bytes()
            assert await anext(pieces) == b"one"
            go_on.set()
            with pytest.raises(httpx.RemoteProtocolError):
                await asyncio.wait_for(anext(pieces), 20)

    asyncio.run(run())


def test_a_silent_engine_and_one_that_is_not_there_are_told_apart() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async def run() -> None:
        async with engine(answer) as url, client(read_s=0.2) as calls:
            with pytest.raises(httpx.ReadTimeout):
                await calls.open(url, content=b"{}", headers={})
            with socket.socket() as unused:
                unused.bind(("127.0.0.1", 0))
                with pytest.raises(httpx.ConnectError):
                    await calls.open(f"http://127.0.0.1:{unused.getsockname()[1]}", content=b"{}", headers={})

    asyncio.run(run())
