"""A threaded stand-in for vLLM's chat route, and one for a hub. Real HTTP, synthetic content.

The first word of the first user message says what happens; `text_of(message)` is what is answered.
Token ids are one per word, logprobs -0.5, -0.75, -1.0, ... and both come only if they were asked for.
"""

import gzip
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

PROMPT_IDS = [1, 70000, 2, 151643]
ARGUMENTS = '{"city": "Zürich",  "days":2}'
"""As a model may write it: with spaces that no serialiser would keep."""


MESSAGE: dict[str, Any] = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": "policy",
    "content": [
        {"type": "thinking", "thinking": "Look it up.", "signature": "s"},
        {"type": "text", "text": "One moment."},
        {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Oslo"}},
    ],
    "stop_reason": "tool_use",
    "stop_sequence": None,
    "usage": {"input_tokens": 4, "output_tokens": 5},
}
_STARTED = MESSAGE | {"content": [], "stop_reason": None, "usage": {"input_tokens": 4, "output_tokens": 0}}
_BLOCKS: list[dict[str, Any]] = [
    {"type": "thinking", "thinking": "", "signature": ""},
    {"type": "text", "text": ""},
    {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {}},
]
_DELTAS: list[tuple[int, dict[str, Any]]] = [
    (0, {"type": "thinking_delta", "thinking": "Look it up."}),
    (0, {"type": "signature_delta", "signature": "s"}),
    (1, {"type": "text_delta", "text": "One "}),
    (1, {"type": "text_delta", "text": "moment."}),
    (2, {"type": "input_json_delta", "partial_json": '{"city": '}),
    (2, {"type": "input_json_delta", "partial_json": ' "Oslo"}'}),
]
MESSAGE_EVENTS: list[dict[str, Any]] = [
    {"type": "message_start", "message": _STARTED},
    *({"type": "content_block_start", "index": index, "content_block": b} for index, b in enumerate(_BLOCKS)),
    *({"type": "content_block_delta", "index": index, "delta": delta} for index, delta in _DELTAS),
    *({"type": "content_block_stop", "index": index} for index in range(3)),
    {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 5}},
    {"type": "message_stop"},
]
RESPONSE: dict[str, Any] = {
    "id": "resp_1",
    "object": "response",
    "created_at": 1,
    "status": "completed",
    "model": "policy",
    "output": [
        {
            "type": "message",
            "id": "m_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "One moment.", "annotations": []}],
        },
        {"type": "function_call", "id": "f_1", "call_id": "call_1", "name": "f", "arguments": ARGUMENTS},
    ],
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
    "usage": {"input_tokens": 4, "output_tokens": 5, "total_tokens": 9},
}
RESPONSE_EVENTS: list[dict[str, Any]] = [
    {"type": "response.created", "sequence_number": 0, "response": RESPONSE | {"output": []}},
    {"type": "response.completed", "sequence_number": 1, "response": RESPONSE},
]


def reply_words(first_word: str) -> list[str]:
    return ["You", " said", f" {first_word}", ".", "<|im_end|>"]


def sampled_ids(words: list[str]) -> list[int]:
    return [100 + index for index in range(len(words))]


def logprobs(words: list[str]) -> list[float]:
    return [-0.5 - 0.25 * index for index in range(len(words))]


@dataclass
class Seen:
    """One request that reached the server."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass
class ModelServer:
    url: str
    seen: list[Seen] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)
    """A GATED stream waits for it after its second chunk."""
    failures: dict[str, int] = field(default_factory=dict)

    def prompts(self) -> list[str]:
        return [_first_user(seen.body) for seen in self.seen]


def _first_user(body: dict[str, Any]) -> str:
    return next((str(m["content"]) for m in body.get("messages", ()) if m["role"] == "user"), "")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def reply(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in ({"content_type": "application/json"} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _model_handler(server: ModelServer) -> type[_Handler]:
    class Handler(_Handler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            server.seen.append(
                Seen(self.path, {name.lower(): value for name, value in self.headers.items()}, body)
            )
            if self.path.endswith(("/messages", "/responses")):
                self.other_route(body)
                return
            prompt = _first_user(body)
            word = prompt.split(" ")[0]
            if word == "RATE" and server.failures.setdefault(prompt, 0) < 1:
                server.failures[prompt] += 1
                self.reply(429, b'{"error": {"message": "slow down"}}', retry_after_ms="1")
            elif word == "FAIL":
                self.reply(500, b'{"error": {"message": "the engine died"}}')
            elif body.get("stream"):
                self.stream(word, body)
            else:
                payload = json.dumps(_completion(word, body)).encode()
                if word == "GZIP":
                    self.reply(200, gzip.compress(payload), content_encoding="gzip")
                else:
                    self.reply(200, payload)

        def other_route(self, body: dict[str, Any]) -> None:
            events = MESSAGE_EVENTS if self.path.endswith("/messages") else RESPONSE_EVENTS
            if not body.get("stream"):
                whole = MESSAGE if self.path.endswith("/messages") else RESPONSE
                self.reply(200, json.dumps(whole).encode())
                return
            lines = [f"event: {event['type']}\r\ndata: {json.dumps(event)}\r\n\r\n" for event in events]
            self.reply(200, "".join(lines).encode(), content_type="text/event-stream")

        def stream(self, word: str, body: dict[str, Any]) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/event-stream; charset=utf-8")
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            chunks = _chunks(word, body)
            if word == "CUT":
                chunks = chunks[:3]
            try:
                for index, chunk in enumerate(chunks):
                    if word == "GATED" and index == 2:
                        server.gate.wait(30)
                    self.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
                if word != "CUT":
                    self.write(b"data: [DONE]\n\n")
                self.wfile.write(b"0\r\n\r\n")
                self.wfile.flush()
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True

        def write(self, data: bytes) -> None:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            self.wfile.flush()

    return Handler


def _message(word: str, body: dict[str, Any]) -> tuple[dict[str, Any], str]:
    if word == "TOOL" and not any(m["role"] == "tool" for m in body["messages"]):
        function = {"name": "get_weather", "arguments": ARGUMENTS}
        call = {"id": "call_1", "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}, "tool_calls"
    return {"role": "assistant", "content": "".join(reply_words(word)[:-1])}, "stop"


def _completion(word: str, body: dict[str, Any]) -> dict[str, Any]:
    words = reply_words(word)
    message, reason = _message(word, body)
    choice: dict[str, Any] = {"message": message, "finish_reason": reason, "logprobs": None}
    if body.get("logprobs"):
        choice["logprobs"] = {"content": _logprob_items(words, 0)}
    if body.get("return_token_ids"):
        choice["token_ids"] = sampled_ids(words)
    count = body.get("n") or 1
    response = {
        "id": f"chatcmpl-{word}",
        "object": "chat.completion",
        "created": 1,
        "model": body["model"],
        "choices": [choice | {"index": index} for index in range(count)],
        "usage": {"prompt_tokens": 4, "completion_tokens": 5 * count, "total_tokens": 4 + 5 * count},
    }
    if body.get("return_token_ids"):
        response["prompt_token_ids"] = PROMPT_IDS
    return response


def _chunks(word: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    words = reply_words(word)
    message, reason = _message(word, body)
    base = {
        "id": f"chatcmpl-{word}",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": body["model"],
    }
    deltas: list[dict[str, Any]]
    if message.get("tool_calls"):
        call = message["tool_calls"][0] | {"index": 0}
        head = call | {"function": {"name": "get_weather", "arguments": ""}}
        pieces = [ARGUMENTS[:5], ARGUMENTS[5:14], ARGUMENTS[14:]]
        deltas = [{"tool_calls": [head]}] + [
            {"tool_calls": [{"index": 0, "function": {"arguments": piece}}]} for piece in pieces
        ]
    else:
        deltas = [{"content": text} for text in words[:-1]]
    chunks = []
    for index, delta in enumerate([*deltas, {}]):
        choice: dict[str, Any] = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        if index == len(deltas):
            choice["finish_reason"] = reason
        if body.get("logprobs"):
            choice["logprobs"] = {"content": _logprob_items(words[index : index + 1], index)}
        if body.get("return_token_ids"):
            choice["token_ids"] = sampled_ids(words)[index : index + 1]
        chunks.append(base | {"choices": [choice]})
    role: dict[str, Any] = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    first = base | {"choices": [role]}
    if body.get("return_token_ids"):
        first["prompt_token_ids"] = PROMPT_IDS
    usage = {"prompt_tokens": 4, "completion_tokens": 5, "total_tokens": 9}
    return [first, *chunks, base | {"choices": [], "usage": usage}]


def _logprob_items(words: list[str], first: int) -> list[dict[str, Any]]:
    return [
        {"token": word, "logprob": -0.5 - 0.25 * (first + index), "bytes": None, "top_logprobs": []}
        for index, word in enumerate(words)
    ]


@dataclass
class HubServer:
    url: str
    status: int = 200
    says: bytes = b""
    """Body of every answer that is not 200."""
    fails_at: bytes | None = None
    """A batch with these bytes in it is answered with 500."""
    takes_s: float = 0.0
    """How long it works on a batch."""
    hold: threading.Event | None = None
    """While set to an Event, answers wait for it."""
    keys: list[str | None] = field(default_factory=list)
    requests: list[bytes] = field(default_factory=list)
    """What was answered with 200."""
    refused: int = 0
    rejects: int = 0
    """Spans that it says, with 200, it rejects of every batch."""
    max_bytes: int = 2**30
    """A longer request is answered with 413, as collectors do."""

    def spans(self) -> list[Any]:
        return [
            span
            for request in self.requests
            for resource in ExportTraceServiceRequest.FromString(request).resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


def _hub_handler(hub: HubServer) -> type[_Handler]:
    class Handler(_Handler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if hub.hold is not None:
                hub.hold.wait(30)
            time.sleep(hub.takes_s)
            hub.keys.append(self.headers.get("authorization"))
            if self.path != "/v1/traces" or self.headers["content-type"] != "application/x-protobuf":
                self.reply(404, b"")
            elif len(body) > hub.max_bytes:
                hub.refused += 1
                self.reply(413, b"")
            elif hub.fails_at is not None and hub.fails_at in body:
                hub.refused += 1
                self.reply(500, b"a bug")
            elif hub.status == 200:
                hub.requests.append(body)
                partial = ExportTracePartialSuccess(rejected_spans=hub.rejects) if hub.rejects else None
                self.reply(200, ExportTraceServiceResponse(partial_success=partial).SerializeToString())
            else:
                hub.refused += 1
                self.reply(hub.status, hub.says)

    return Handler


class _Server(ThreadingHTTPServer):
    request_queue_size = 128
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients of these tests hang up on purpose."""


@contextmanager
def _serving(server: _Server) -> Iterator[None]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def model_server() -> Iterator[ModelServer]:
    model = ModelServer("")
    http = _Server(("127.0.0.1", 0), _model_handler(model))
    model.url = f"http://127.0.0.1:{http.server_address[1]}/v1"
    with _serving(http):
        yield model
        model.gate.set()


@contextmanager
def hub_server(port: int = 0) -> Iterator[HubServer]:
    hub = HubServer("")
    http = _Server(("127.0.0.1", port), _hub_handler(hub))
    hub.url = f"http://127.0.0.1:{http.server_address[1]}"
    with _serving(http):
        yield hub
