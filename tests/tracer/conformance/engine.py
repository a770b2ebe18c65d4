"""Replays a recorded wire session to whoever asks, over real HTTP.

A session is a JSON file: exchanges, each with the request that it answers and what is sent, faults included.
An exchange is used once. Knows sessions and sockets; it does not know clients or the tracer.

Invariants:
* A request that no exchange is for gets status 599 and is in `unexpected`.
* Bytes go out as the session says: one write for each event, so that a client sees chunks as they come.
* A held reply goes on when the client hangs up or `release` is set.
"""

import gzip
import json
import select
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

POLICY_VERSION = "7"
SESSIONS = Path(__file__).parent / "sessions"


@dataclass(frozen=True)
class Seen:
    """One request that came."""

    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass
class Engine:
    """The running server's state."""

    url: str
    left: list[dict[str, Any]] = field(default_factory=list)
    """Exchanges that nobody asked for yet."""
    seen: list[Seen] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    release: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def play(self, name: str) -> None:
        """Start a session from its beginning."""
        self.release.set()
        self.left = json.loads((SESSIONS / f"{name}.json").read_text())["exchanges"]
        self.seen, self.unexpected = [], []
        self.release = threading.Event()

    def take(self, seen: Seen) -> dict[str, Any] | None:
        """The first unused exchange that this request fits."""
        try:
            request = json.loads(seen.body)
        except ValueError:
            request = {}
        with self.lock:
            self.seen.append(seen)
            for exchange in self.left:
                if seen.path.endswith(exchange["path"]) and _fits(exchange, request):
                    self.left.remove(exchange)
                    return exchange
            self.unexpected.append(f"{seen.path}: {seen.body[:2000].decode(errors='replace')}")
            return None


def _fits(exchange: Mapping[str, Any], request: Any) -> bool:
    if not _contains(request, exchange.get("match", {})):
        return False
    last = (request.get("messages") or [request.get("input", request.get("prompt"))])[-1]
    return exchange.get("says", "") in json.dumps(last, ensure_ascii=False)


def _contains(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, dict):
        return isinstance(value, dict) and all(
            key in value and _contains(value[key], item) for key, item in wanted.items()
        )
    return bool(value == wanted)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    disable_nagle_algorithm = True
    engine: Engine

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.path.endswith("/seen"):  # for clients that hang up once they were heard
            self.whole(200, str(len(self.engine.seen)).encode(), {})
            return
        status = 200 if self.path == "/weight_info" else 404
        self.whole(status, json.dumps({"weight_version": POLICY_VERSION}).encode(), {})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"] or 0))
        headers = {name.lower(): value for name, value in self.headers.items()}
        exchange = self.engine.take(Seen(self.path, headers, body))
        if exchange is None:
            self.whole(599, b'{"error": {"message": "the session has no such exchange"}}', {})
            return
        try:
            self.answer(exchange, self.engine.release)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def answer(self, exchange: dict[str, Any], release: threading.Event) -> None:
        faults = exchange.get("faults", {})
        if faults.get("hold") == "before":
            self.hold(release)
        if "events" in exchange:
            self.stream(exchange, faults, release)
            return
        headers = dict(exchange.get("headers", {}))
        body = (exchange["raw"] if "raw" in exchange else json.dumps(exchange["body"])).encode()
        if faults.get("gzip"):
            body, headers["content-encoding"] = gzip.compress(body, mtime=0), "gzip"
        if "cut_after" in faults:
            self.whole(exchange["status"], body, headers, shown=faults["cut_after"])
            self.close_connection = True
            return
        self.whole(exchange["status"], body, headers)

    def whole(self, status: int, body: bytes, headers: Mapping[str, str], shown: int | None = None) -> None:
        self.send_response(status)
        for name, value in ({"content-type": "application/json"} | dict(headers)).items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[:shown])
        self.wfile.flush()

    def stream(self, exchange: dict[str, Any], faults: dict[str, Any], release: threading.Event) -> None:
        self.send_response(exchange["status"])
        self.send_header("content-type", "text/event-stream; charset=utf-8")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        self.wfile.flush()
        for count, (name, data) in enumerate(exchange["events"]):
            if faults.get("cut_after") == count:
                self.close_connection = True
                return
            if faults.get("hold") == count:
                self.hold(release)
            text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
            event = (f"event: {name}\n" if name else "") + f"data: {text}\n\n"
            self.wfile.write(b"%x\r\n%s\r\n" % (len(event.encode()), event.encode()))
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")
        self.wfile.flush()

    def hold(self, release: threading.Event) -> None:
        while not release.wait(0.01):
            readable, _, _ = select.select([self.connection], [], [], 0)
            if readable:  # it has hung up: nothing else comes while a reply is due
                raise ConnectionResetError


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients of these sessions hang up on purpose."""


@contextmanager
def replaying() -> Iterator[Engine]:
    """Serve until the block ends; `play` says what."""
    engine = Engine("")
    server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"engine": engine}))
    engine.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield engine
    finally:
        engine.release.set()
        server.shutdown()
        server.server_close()
        thread.join()
