"""A server that answers with what a test gives it, one after the other, the last one again and again."""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Answer:
    body: bytes = b""
    status: int = 200
    content_type: str = "application/json"
    is_cut: bool = False
    """The connection ends before the body that was announced is over."""
    waits: bool = False
    """Nothing comes, not even headers, until `Canned.go` is set."""


@dataclass
class Canned:
    url: str
    answers: Sequence[Answer]
    asked: list[bytes] = field(default_factory=list)
    go: threading.Event = field(default_factory=threading.Event)


def whole(reply: Any, status: int = 200) -> Answer:
    return Answer(json.dumps(reply).encode(), status)


def stream(*chunks: Any, done: bool = True, is_cut: bool = False) -> Answer:
    body = b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks)
    return Answer(body + (b"data: [DONE]\n\n" if done else b""), 200, "text/event-stream", is_cut)


def chunk(delta: Any = None, *, finish: str | None = None, **more: Any) -> dict[str, Any]:
    """One chunk of a streamed chat completion; `more` goes to its choice."""
    choice = {"index": 0, "delta": delta or {}, "finish_reason": finish} | more
    return {"id": "c-1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}


def completion(content: str, **more: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": content}
    choice = {"index": 0, "message": message, "finish_reason": "stop"} | more
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    reply = {"id": "c-1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
    return reply | {"usage": usage}


@contextmanager
def serving(*answers: Answer) -> Iterator[Canned]:
    canned = Canned("", answers)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            self.send_error(404)

        def do_POST(self) -> None:
            canned.asked.append(self.rfile.read(int(self.headers["content-length"])))
            answer = canned.answers[min(len(canned.asked), len(canned.answers)) - 1]
            if answer.waits:
                canned.go.wait(30)
            self.send_response(answer.status)
            self.send_header("content-type", answer.content_type)
            self.send_header("retry-after-ms", "1")
            self.send_header("content-length", str(len(answer.body) + 1000 * answer.is_cut))
            self.end_headers()
            self.wfile.write(answer.body)
            self.close_connection = self.close_connection or answer.is_cut

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    canned.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield canned
    finally:
        canned.go.set()
        server.shutdown()
        server.server_close()
        thread.join()
