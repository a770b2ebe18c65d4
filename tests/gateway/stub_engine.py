"""A real HTTP server with vLLM 0.32's JSON: what tests put behind a gateway.

The last message's words are the reply's tokens; a few words steer it:

  TOOL   one tool call, opened by a control token without visible text
  HOLD   waits for `release` (before the reply, or after a stream's first token)
  LONG   a stream never comes to its end
  FAIL   400 with an engine's error
  BREAK  the connection is cut after a stream's second token
  ABORT  finish reason `abort`
  ERROR  an error event after a stream's second token, then [DONE], as vLLM does it
  ODD    a whole reply whose only choice is null
  SHORT  one token id fewer than logprobs
  CUT    finish reason `length`, and no token that ends the turn

Run as a program it prints its port and serves until it is killed.
"""

import asyncio
import json
import socket
import threading
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.gateway.stub_text_routes import TextRoutes

END_OF_TURN = 2


@dataclass
class StubEngine:
    """State of one stub, shared with the test that started it."""

    url: str = ""
    version: Any = "3"
    weight_info_status: int = 200
    health_status: int = 200
    served: str = "stub"
    adapters: list[str] = field(default_factory=list)
    """Names, in the order in which they were loaded."""
    models_status: int = 200
    asked_models: int = 0
    tell_models: threading.Event = field(default_factory=threading.Event)
    has_template: bool = False
    """It has /tokenize, and renders chats with `template_ids`."""
    takes_ids: bool = True
    """It takes prompt ids beside messages, as vLLM does since 0.30 or so."""
    keeps_responses: bool = True
    refuses: bool = False
    """It answers 503 to chats, after a HOLD, as a server that is not ready does."""
    rendered: list[dict[str, Any]] = field(default_factory=list)
    release: threading.Event = field(default_factory=threading.Event)
    tell_version: threading.Event = field(default_factory=threading.Event)
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    queries: list[str] = field(default_factory=list)
    asked_versions: int = 0
    server_info: Any = None
    """None: it is not in development mode."""
    server_info_status: int = 200
    asked_settings: int = 0
    tell_settings: threading.Event = field(default_factory=threading.Event)
    reply_headers: dict[str, str] = field(default_factory=dict)
    cancelled: int = 0

    def __post_init__(self) -> None:
        self.tell_version.set()
        self.tell_settings.set()
        self.tell_models.set()

    def reset(self) -> None:
        """Forget everything but the address; what still waits for the old events may go on."""
        self.release.set()
        self.tell_version.set()
        self.tell_settings.set()
        self.tell_models.set()
        self.__init__(url=self.url)  # type: ignore[misc]

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/v1/completions", self.complete, methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/tokenize", self.tokenize, methods=["POST"]),
                Route("/health", self.health),
                Route("/weight_info", self.weight_info),
                Route("/server_info", self.settings),
                Route("/pause", self.health, methods=["POST"]),
                *TextRoutes(self).routes(),
            ]
        )

    async def health(self, request: Request) -> Response:
        return Response(status_code=self.health_status)

    async def models(self, request: Request) -> Response:
        self.asked_models += 1
        await asyncio.to_thread(self.tell_models.wait, 20.0)
        entries: list[dict[str, Any]] = [{"id": self.served, "object": "model"}]
        entries += [{"id": name, "object": "model", "parent": self.served} for name in self.adapters]
        return JSONResponse({"object": "list", "data": entries}, self.models_status)

    async def weight_info(self, request: Request) -> Response:
        self.asked_versions += 1
        await asyncio.to_thread(self.tell_version.wait, 20.0)
        if self.weight_info_status != 200:
            return Response(status_code=self.weight_info_status)
        return JSONResponse({"weight_version": self.version})

    async def settings(self, request: Request) -> Response:
        self.asked_settings += 1
        assert request.query_params["config_format"] == "json"
        await asyncio.to_thread(self.tell_settings.wait, 20.0)
        if self.server_info is None:
            return Response(status_code=404)
        return JSONResponse(self.server_info, self.server_info_status)

    async def released(self) -> None:
        await asyncio.to_thread(self.release.wait, 20.0)

    async def chat(self, request: Request) -> Response:
        body = await self._body(request)
        text = body["messages"][-1]["content"] or ""
        if body.get("model") not in (self.served, *self.adapters) and "-v" in str(body.get("model")):
            return JSONResponse({"error": {"message": "no such model", "code": 404}}, 404)
        if "FAIL" in text:
            error = {"message": "context too long", "type": "BadRequestError", "param": None, "code": 400}
            return JSONResponse({"error": error}, 400)
        tokens = tokens_of(text, tools=bool(body.get("tools")))
        given = (body.get("kv_transfer_params") or {}).get("prompt_token_ids") if self.takes_ids else None
        prompt = given or (template_ids(body) if self.has_template else prompt_ids(body["messages"]))
        if body.get("stream"):
            return StreamingResponse(
                self._watched(self._chunks(body, text, tokens, prompt)), media_type="text/event-stream"
            )
        if "HOLD" in text:
            await self.hold(request)
        if self.refuses:
            return Response(status_code=503)
        reply = chat_reply(body, text, tokens, prompt)
        reply = reply | {"choices": [None]} if "ODD" in text else reply
        return JSONResponse(reply, headers=self.reply_headers)

    async def tokenize(self, request: Request) -> Response:
        body = json.loads(await request.body())
        self.rendered.append(body)
        if not self.has_template:
            return Response(status_code=404)
        ids = template_ids(body)
        return JSONResponse({"count": len(ids), "max_model_len": 4096, "tokens": ids, "token_strs": None})

    async def complete(self, request: Request) -> Response:
        body = await self._body(request)
        tokens = tokens_of(body["prompt"], tools=False)
        echoed = body["prompt"] if body.get("echo") and not body.get("return_token_ids") else ""
        choice = {
            "index": 0,
            "text": echoed + "".join(token.text for token in tokens),
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
            "prompt_logprobs": None,
            "token_ids": None,
            "prompt_token_ids": None,
        }
        if body.get("return_token_ids"):
            choice["token_ids"] = [token.id for token in tokens]
            choice["prompt_token_ids"] = [7, 8, 9]
        if body.get("logprobs") is not None:
            choice["logprobs"] = {
                "text_offset": [],
                "token_logprobs": [token.logprob for token in tokens],
                "tokens": [token.text for token in tokens],
                "top_logprobs": [],
            }
        reply = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": body["model"]}
        return JSONResponse({**reply, "choices": [choice], "usage": usage([7, 8, 9], tokens, 1)})

    async def _body(self, request: Request) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(await request.body())
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        self.queries.append(request.url.query)
        return body

    async def hold(self, request: Request) -> None:
        waiting = asyncio.ensure_future(self.released())
        while not waiting.done():
            if await request.is_disconnected():
                self.cancelled += 1
                self.release.set()
            await asyncio.wait({waiting}, timeout=0.02)

    async def _watched(self, chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[str]:
        try:
            async for chunk in chunks:
                yield f"data: {json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n"
            yield "data: [DONE]\n\n"
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled += 1
            raise

    async def _chunks(
        self, body: dict[str, Any], text: str, tokens: list["Token"], prompt: list[int]
    ) -> AsyncIterator[dict[str, Any]]:
        wants_ids, wants_logprobs = bool(body.get("return_token_ids")), bool(body.get("logprobs"))
        base = {
            "id": response_id(body),
            "object": "chat.completion.chunk",
            "created": 1,
            "model": body["model"],
        }
        count = body.get("n") or 1
        for index in range(count):
            delta = {"role": "assistant", "content": ""}
            first = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            ids = prompt if wants_ids else None
            yield {**base, "choices": [first], "prompt_token_ids": ids, "prompt_text": None}
        for position, token in enumerate(tokens):
            for index in range(count):
                last = position == len(tokens) - 1
                if token.delta == {} and not (last or wants_ids or wants_logprobs):
                    continue
                choice: dict[str, Any] = {"index": index, "delta": token.delta}
                choice["logprobs"] = {"content": [token.logprob_item()]} if wants_logprobs else None
                choice["finish_reason"] = finish_reason(text, tokens) if last else None
                if last:
                    choice["stop_reason"] = None
                choice["token_ids"] = [token.id] if wants_ids else None
                yield {**base, "choices": [choice]}
            if position == 0 and "HOLD" in text:
                await self.released()
            if position == 1 and "BREAK" in text:
                await asyncio.sleep(0)  # what was written goes out first
                raise ConnectionAbortedError("stub cuts the connection")
            if position == 1 and "ERROR" in text:
                error = {"message": "engine core died", "type": "InternalServerError", "param": None}
                yield {"error": {**error, "code": 500}}
                return
            if position == 1 and "LONG" in text:
                await self.released()
        if (body.get("stream_options") or {}).get("include_usage"):
            yield {**base, "choices": [], "usage": usage(prompt, tokens, count)}


@dataclass(frozen=True)
class Token:
    id: int
    text: str
    delta: dict[str, Any]

    @property
    def logprob(self) -> float:
        return -(self.id % 997) / 500

    def logprob_item(self) -> dict[str, Any]:
        item = {"token": self.text, "logprob": self.logprob, "bytes": list(self.text.encode())}
        return {**item, "top_logprobs": []}


def tokens_of(text: str, *, tools: bool) -> list[Token]:
    """The reply's tokens with the stream delta of each."""
    if tools and "TOOL" in text:
        return list(_tool_tokens())
    words = [f"{word} " for word in text.split()]
    tokens = [Token(token_id(word), word, {"content": word}) for word in words]
    return tokens if "CUT" in text else [*tokens, Token(END_OF_TURN, "<end>", {})]


def _tool_tokens() -> Iterator[Token]:
    yield Token(5, "<tool_call>", {})
    function = {"name": "look", "arguments": ""}
    opening = {"index": 0, "id": "call_1", "type": "function", "function": function}
    yield Token(token_id("look"), "look", {"tool_calls": [opening]})
    for piece in ('{"city":', ' "Orléans"', "}"):
        delta = {"tool_calls": [{"index": 0, "function": {"arguments": piece}}]}
        yield Token(token_id(piece), piece, delta)
    yield Token(END_OF_TURN, "<end>", {})


TOOL_ARGUMENTS = '{"city": "Orléans"}'


def token_id(text: str) -> int:
    return 10 + zlib.crc32(text.encode()) % 50_000


def prompt_ids(messages: list[dict[str, Any]]) -> list[int]:
    return [token_id(json.dumps(message, sort_keys=True)) for message in messages] + [1]


def template_ids(body: dict[str, Any]) -> list[int]:
    """A chat as ids: every text is one token, so a reply of several is never what was sampled."""
    ids: list[int] = []
    for message in body["messages"]:
        content = json.dumps([message.get("content") or "", message.get("tool_calls") or []])
        ids += [token_id(message["role"]), token_id(content), END_OF_TURN, 3]
    return ids + ([4] if body.get("add_generation_prompt", True) else [])


def finish_reason(text: str, tokens: list[Token]) -> str:
    if "ABORT" in text:
        return "abort"
    if "CUT" in text:
        return "length"
    return "tool_calls" if tokens[0].text == "<tool_call>" else "stop"


def response_id(body: dict[str, Any]) -> str:
    return f"chatcmpl-{zlib.crc32(json.dumps(body['messages']).encode()):08x}"


def usage(prompt: list[int], tokens: list[Token], count: int) -> dict[str, Any]:
    told = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens) * count}
    return {**told, "total_tokens": sum(told.values()), "prompt_tokens_details": None}


def chat_reply(body: dict[str, Any], text: str, tokens: list[Token], prompt: list[int]) -> dict[str, Any]:
    content = "".join(token.delta.get("content", "") for token in tokens)
    message: dict[str, Any] = {"role": "assistant", "content": content or None, "refusal": None}
    if finish_reason(text, tokens) == "tool_calls":
        function = {"name": "look", "arguments": TOOL_ARGUMENTS}
        message["tool_calls"] = [{"id": "call_1", "type": "function", "function": function}]
    ids = [token.id for token in tokens]
    if "SHORT" in text:
        ids = ids[:-1]
    choices = [
        {
            "index": index,
            "message": message,
            "logprobs": {"content": [t.logprob_item() for t in tokens]} if body.get("logprobs") else None,
            "finish_reason": finish_reason(text, tokens),
            "stop_reason": None,
            "token_ids": ids if body.get("return_token_ids") else None,
            "routed_experts": None,
        }
        for index in range(body.get("n") or 1)
    ]
    return {
        "id": response_id(body),
        "object": "chat.completion",
        "created": 1,
        "model": body["model"],
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": "vllm-0.32.0-stub",
        "usage": usage(prompt, tokens, body.get("n") or 1),
        "prompt_logprobs": None,
        "prompt_token_ids": prompt if body.get("return_token_ids") else None,
        "kv_transfer_params": None,
    }


@contextmanager
def stub_engine(port: int = 0) -> Iterator[StubEngine]:
    """Serve a stub in a thread; 0 picks a free port."""
    engine = StubEngine()
    listener = socket.create_server(("127.0.0.1", port))
    engine.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = _server(engine)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield engine
    finally:
        engine.reset()
        server.should_exit = True
        thread.join()


def _server(engine: StubEngine) -> uvicorn.Server:
    config = uvicorn.Config(
        engine.app(), log_config=None, access_log=False, ws="none", timeout_graceful_shutdown=2
    )
    return uvicorn.Server(config)


if __name__ == "__main__":
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    _server(StubEngine()).run(sockets=[listener])
