"""Both ends of a gateway, as programs: an engine that costs next to nothing, and clients that put load on it.

    python tests/bench/gateway_load.py engine                       prints its URL, serves until stdin ends
    python tests/bench/gateway_load.py hub                          the same; takes spans, keeps nothing
    python tests/bench/gateway_load.py load URL --calls 1000 ...    prints one line of JSON

Standard library only, and HTTP/1.1 by hand: what is measured is the gateway, not its neighbours.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from typing import Any
from urllib.parse import urlsplit

PROMPT_TOKENS, REPLY_TOKENS = 200, 50
CHUNKS = 16
"""Pieces of a streamed reply."""


def request_body(*, stream: bool, delay_s: float) -> bytes:
    """A call of ten messages; `user` tells the engine how long it takes."""
    roles = ("user", "assistant")
    messages = [{"role": roles[turn % 2], "content": "some text of a turn " * 10} for turn in range(10)]
    body = {"model": "stub", "messages": messages, "temperature": 0.7, "user": f"{delay_s:.6f}"}
    return json.dumps(body | ({"stream": True} if stream else {}), separators=(",", ":")).encode()


def _reply(*, ids: bool) -> dict[str, Any]:
    numbers = random.Random(3)
    sampled = [numbers.randrange(150_000) for _ in range(REPLY_TOKENS)]
    content = [
        {"token": "word", "logprob": -0.1, "bytes": [119, 111, 114, 100], "top_logprobs": []} for _ in sampled
    ]
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "stub",
        "prompt_token_ids": [numbers.randrange(150_000) for _ in range(PROMPT_TOKENS)] if ids else None,
        "choices": [
            {
                "index": 0,
                "finish_reason": "stop",
                "token_ids": sampled if ids else None,
                "message": {"role": "assistant", "content": "word " * REPLY_TOKENS},
                "logprobs": {"content": content} if ids else None,
            }
        ],
        "usage": {
            "prompt_tokens": PROMPT_TOKENS,
            "completion_tokens": REPLY_TOKENS,
            "total_tokens": PROMPT_TOKENS + REPLY_TOKENS,
        },
    }


def _chunks(*, ids: bool) -> list[bytes]:
    whole = _reply(ids=ids)
    choice = whole["choices"][0]
    base = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "stub"}
    per_chunk = -(-REPLY_TOKENS // CHUNKS)
    events: list[dict[str, Any]] = []
    for start in range(0, REPLY_TOKENS, per_chunk):
        end = start + per_chunk
        delta: dict[str, Any] = {"content": "word " * (min(end, REPLY_TOKENS) - start)}
        part: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": None}
        if ids:
            part["token_ids"] = choice["token_ids"][start:end]
            part["logprobs"] = {"content": choice["logprobs"]["content"][start:end]}
        event = base | {"choices": [part]}
        if not start:
            delta["role"] = "assistant"
            if ids:
                event["prompt_token_ids"] = whole["prompt_token_ids"]
        events.append(event)
    events.append(base | {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    return [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events] + [b"data: [DONE]\n\n"]


def _whole(body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


def _chunked(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


REPLIES = {ids: _whole(json.dumps(_reply(ids=ids)).encode()) for ids in (False, True)}
STREAMS = {ids: [_chunked(chunk) for chunk in _chunks(ids=ids)] for ids in (False, True)}
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
VERSION = _whole(b'{"weight_version":"3"}')


class Engine(asyncio.Protocol):
    """One connection. A stream's first chunk comes after the delay, the others spread over as much again."""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._received = b""

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, rest = self._received.partition(b"\r\n\r\n")
        if not found:
            return
        length = _content_length(head)
        if len(rest) < length:
            return
        self._received = rest[length:]
        if head.startswith(b"GET"):
            self._transport.write(VERSION)
            return
        ids = b'"return_token_ids":true' in rest.replace(b" ", b"")
        at = rest.rfind(b'"user":"')
        delay_s = float(rest[at + 8 : rest.index(b'"', at + 8)]) if at >= 0 else 0.0
        loop = asyncio.get_running_loop()
        if b'"stream":true' not in rest:
            self._later(loop, delay_s, REPLIES[ids])
            return
        chunks = STREAMS[ids]
        self._later(loop, delay_s, STREAM_HEAD + chunks[0])
        for index, chunk in enumerate(chunks[1:], 1):
            self._later(loop, delay_s * (1 + index / len(chunks)), chunk)
        self._later(loop, 2 * delay_s + 1e-4, b"0\r\n\r\n")

    def _later(self, loop: asyncio.AbstractEventLoop, delay_s: float, data: bytes) -> None:
        if delay_s:
            loop.call_later(delay_s, self._transport.write, data)
        else:
            self._transport.write(data)


def _content_length(head: bytes) -> int:
    lower = head.lower()
    at = lower.find(b"content-length:")
    return int(lower[at + 15 :].partition(b"\r\n")[0]) if at >= 0 else 0


async def serve(protocol: type[asyncio.Protocol]) -> None:
    """Serve until stdin ends."""
    server = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


class _Hub(asyncio.Protocol):
    """A connection of a hub that takes everything and keeps nothing."""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._head = b""
        self._missing: int | None = None

    def data_received(self, data: bytes) -> None:
        if self._missing is None:
            self._head += data
            head, found, data = self._head.partition(b"\r\n\r\n")
            if not found:
                return
            self._missing = _content_length(head)
        self._missing -= len(data)
        if self._missing <= 0:
            self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            self._head, self._missing = b"", None


async def _client(url: str, count: int, delays: list[float], stream: bool, found: list[float]) -> None:
    """Make calls one after the other; adds what each took beyond the engine's own delay."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    for index in range(count):
        delay_s = delays[index % len(delays)]
        body = request_body(stream=stream, delay_s=delay_s)
        head = (
            f"POST {parts.path}/v1/chat/completions HTTP/1.1\r\nhost: {parts.netloc}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
            "accept: */*\r\nauthorization: Bearer x\r\nuser-agent: bench\r\n\r\n"
        )
        started = time.perf_counter()
        writer.write(head.encode() + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        if not answer.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"the gateway answered {answer[:200]!r}")
        if stream:
            size = int(await reader.readline(), 16)
            took = time.perf_counter() - started
            while size:
                await reader.readexactly(size + 2)
                size = int(await reader.readline(), 16)
            await reader.readline()
        else:
            await reader.readexactly(_content_length(answer))
            took = time.perf_counter() - started
        found.append(took - delay_s)
    writer.close()


async def load(url: str, calls: int, concurrency: int, delay_s: float, stream: bool) -> dict[str, Any]:
    """Put load on `url`; latencies in milliseconds are without the engine's own delay."""
    spread = random.Random(5)
    found: list[float] = []
    delays = [[delay_s * spread.uniform(0.5, 1.5) for _ in range(50)] for _ in range(concurrency)]
    started = time.perf_counter()
    await asyncio.gather(
        *(_client(url, calls // concurrency, delays[i], stream, found) for i in range(concurrency))
    )
    took = time.perf_counter() - started
    found.sort()
    at = {name: found[min(len(found) - 1, int(share * len(found)))] for name, share in SHARES.items()}
    return {"calls": len(found), "per_s": len(found) / took, **{name: at[name] * 1e3 for name in at}}


SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["engine", "hub", "load"])
    parser.add_argument("url", nargs="?", default="")
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--delay-s", type=float, default=0.0)
    parser.add_argument("--stream", action="store_true")
    options = parser.parse_args()
    if options.role != "load":
        asyncio.run(serve(Engine if options.role == "engine" else _Hub))
        return
    given = (options.url.rstrip("/"), options.calls, options.concurrency, options.delay_s, options.stream)
    print(json.dumps(asyncio.run(load(*given))))


if __name__ == "__main__":
    main()
