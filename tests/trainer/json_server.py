"""Servers for whatever stands in for an engine, a hub or an agent."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[str, dict[str, Any]], tuple[int, dict[str, Any]]]
"""Path and body of a request -> status and body of its answer."""


class Replying(BaseHTTPRequestHandler):
    """Reads and replies, and logs nothing."""

    def content(self) -> bytes:
        """What was sent."""
        return self.rfile.read(int(self.headers.get("content-length") or 0))

    def reply(self, said: bytes, status: int = 200) -> None:
        """Send it whole."""
        self.send_response(status)
        self.send_header("content-length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler], port: int = 0) -> Iterator[str]:
    """Serve until the end of the block; gives the address. Port 0 is a free one."""
    with ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def json_server(answer: Answer) -> Iterator[str]:
    """Serve on a port of its own; gives the address."""

    class Handler(Replying):
        def do_GET(self) -> None:
            self.do_POST()

        def do_POST(self) -> None:
            status, told = answer(self.path, json.loads(self.content() or b"null") or {})
            self.reply(json.dumps(told).encode(), status)

    with serving(Handler) as url:
        yield url
