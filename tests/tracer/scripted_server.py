"""An HTTP server that answers with what a test has scripted for a path, and remembers what it was asked."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Answer:
    """One response; a `body` of bytes is a stream of events."""

    body: Any
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class ScriptedServer:
    url: str
    answers: dict[str, list[Answer]] = field(default_factory=dict)
    """Path -> answers in turn; the last one stays."""
    asked: list[tuple[str, Any]] = field(default_factory=list)

    def answer(self, path: str, *answers: Answer) -> None:
        self.answers[path] = list(answers)

    def next_answer(self, path: str) -> Answer:
        left = self.answers.get(path) or [Answer({"error": {"message": f"nothing for {path}"}}, 404)]
        return left.pop(0) if len(left) > 1 else left[0]


def _handler(server: ScriptedServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            path = self.path.partition("?")[0]
            server.asked.append((path, json.loads(body)))
            answer = server.next_answer(path)
            is_stream = isinstance(answer.body, bytes)
            payload = answer.body if is_stream else json.dumps(answer.body).encode()
            self.send_response(answer.status)
            self.send_header("content-type", "text/event-stream" if is_stream else "application/json")
            self.send_header("content-length", str(len(payload)))
            self.send_header("connection", "close")  # clients that are never closed leave no socket open
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(payload)

    return Handler


@contextmanager
def scripted_server() -> Iterator[ScriptedServer]:
    server = ScriptedServer("")
    http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(server))
    http.daemon_threads = True
    server.url = f"http://127.0.0.1:{http.server_address[1]}"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
