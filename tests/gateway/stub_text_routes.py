"""The stub's routes without token ids, in vLLM 0.32's JSON: /v1/responses, /v1/messages, /v1/embeddings.

The words that steer a reply are those of `stub_engine`.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

if TYPE_CHECKING:
    from tests.gateway.stub_engine import StubEngine

Event = dict[str, Any]
TOOL_INPUT = {"city": "Orléans"}


class TextRoutes:
    """Handlers that share a stub's state."""

    def __init__(self, engine: "StubEngine") -> None:
        self._engine = engine

    def routes(self) -> list[Route]:
        return [
            Route("/v1/messages", self.messages, methods=["POST"]),
            Route("/v1/messages/count_tokens", self.count_tokens, methods=["POST"]),
            Route("/v1/responses", self.responses, methods=["POST"]),
            Route("/v1/responses/{response_id}", self.stored_response),
            Route("/v1/responses/{response_id}/cancel", self.stored_response, methods=["POST"]),
            Route("/v1/embeddings", self.embeddings, methods=["POST"]),
        ]

    async def messages(self, request: Request) -> Response:
        body = await self._body(request)
        text = body["messages"][-1]["content"]
        if "FAIL" in text:
            error = {"type": "BadRequestError", "message": "context too long"}
            return JSONResponse({"type": "error", "error": error}, 400)
        if body.get("stream"):
            return self._streamed(_message_events(body, text), text)
        if "HOLD" in text:
            await self._engine.hold(request)
        stop = {"stop_reason": _stop_reason(body, text)} if "ABORT" not in text else {}
        message = {"id": "chatcmpl-7", "type": "message", "role": "assistant", "content": _blocks(body, text)}
        usage = {"input_tokens": 3, "output_tokens": len(text.split()) + 1}
        return JSONResponse({**message, "model": body["model"], **stop, "usage": usage})

    async def count_tokens(self, request: Request) -> Response:
        body = await self._body(request)
        counted = {"input_tokens": len(json.dumps(body["messages"]))}
        return JSONResponse({**counted, "context_management": {"original_input_tokens": 3}})

    async def responses(self, request: Request) -> Response:
        body = await self._body(request)
        text = body["input"] if isinstance(body["input"], str) else str(body["input"][-1].get("content"))
        if "FAIL" in text:
            error = {"message": "context too long", "type": "BadRequestError", "param": None, "code": 400}
            return JSONResponse({"error": error}, 400)
        if body.get("stream"):
            return self._streamed(_response_events(body, text), text)
        if "HOLD" in text:
            await self._engine.hold(request)
        status = "cancelled" if "ABORT" in text else "completed"
        return JSONResponse(_response(body, _items(body, text), status))

    async def stored_response(self, request: Request) -> Response:
        if not self._engine.keeps_responses:
            return JSONResponse({"error": {"message": "not found", "type": "NotFoundError"}}, 404)
        if request.query_params.get("stream") == "true":
            return StreamingResponse(self._held_events(), media_type="text/event-stream")
        answer = {"id": request.path_params["response_id"], "object": "response", "method": request.method}
        return JSONResponse(answer)

    async def _held_events(self) -> AsyncIterator[str]:
        yield 'event: response.created\ndata: {"type": "response.created"}\n\n'
        await self._engine.released()
        yield 'event: response.completed\ndata: {"type": "response.completed"}\n\n'

    async def embeddings(self, request: Request) -> Response:
        body = await self._body(request)
        inputs = body["input"] if isinstance(body["input"], list) else [body["input"]]
        vector: Any = "AACAPwAAAEA=" if body.get("encoding_format") == "base64" else [1.0, 2.0, 1e-05]
        data = [{"index": at, "object": "embedding", "embedding": vector} for at in range(len(inputs))]
        usage = {"prompt_tokens": 4, "total_tokens": 4, "completion_tokens": 0, "prompt_tokens_details": None}
        head = {"id": "embd-1", "object": "list", "created": 1, "model": body["model"]}
        return JSONResponse({**head, "data": data, "usage": usage})

    async def _body(self, request: Request) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(await request.body())
        self._engine.requests.append(body)
        self._engine.headers.append(dict(request.headers))
        return body

    def _streamed(self, events: Iterable[Event], text: str) -> Response:
        return StreamingResponse(self._paced(events, text), media_type="text/event-stream")

    async def _paced(self, events: Iterable[Event], text: str) -> AsyncIterator[str]:
        deltas = 0
        try:
            for event in events:
                yield f"event: {event['type']}\ndata: {_dumps(event)}\n\n"
                deltas += event["type"].endswith("delta")
                if deltas == 1 and ("HOLD" in text or "LONG" in text):
                    await self._engine.released()
                if deltas == 2 and "BREAK" in text:
                    await asyncio.sleep(0)  # what was written goes out first
                    raise ConnectionAbortedError("stub cuts the connection")
                if deltas == 2 and "ERROR" in text:
                    error = {"type": "internal_error", "message": "engine core died"}
                    yield f"event: error\ndata: {_dumps({'type': 'error', 'error': error})}\n\n"
                    return
        except (asyncio.CancelledError, GeneratorExit):
            self._engine.cancelled += 1
            raise


def _dumps(event: Event) -> str:
    return json.dumps(event, ensure_ascii=False, separators=(",", ":"))


def _words(text: str) -> list[str]:
    return [f"{word} " for word in text.split()]


def _uses_tool(body: dict[str, Any], text: str) -> bool:
    return bool(body.get("tools")) and "TOOL" in text


def _stop_reason(body: dict[str, Any], text: str) -> str | None:
    if "ABORT" in text:
        return None
    return "tool_use" if _uses_tool(body, text) else "end_turn"


def _blocks(body: dict[str, Any], text: str) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if body.get("thinking"):
        blocks.append({"type": "thinking", "thinking": "hm", "signature": "5f"})
    if _uses_tool(body, text):
        return [*blocks, {"type": "tool_use", "id": "call_1", "name": "look", "input": TOOL_INPUT}]
    return [*blocks, {"type": "text", "text": "".join(_words(text))}]


def _message_events(body: dict[str, Any], text: str) -> Iterable[Event]:
    head = {"id": "chatcmpl-7", "type": "message", "role": "assistant", "content": [], "model": body["model"]}
    usage = {"input_tokens": 3, "output_tokens": 0}
    message = {**head, "stop_reason": None, "stop_sequence": None, "usage": usage}
    yield {"type": "message_start", "message": message}
    for index, block in enumerate(_blocks(body, text)):
        kind = block["type"]
        empty: dict[str, Any] = {**block, "input": {}} if kind == "tool_use" else {kind: ""}
        yield {"type": "content_block_start", "content_block": {"type": kind, **empty}, "index": index}
        for delta in _block_deltas(block):
            yield {"type": "content_block_delta", "delta": delta, "index": index}
        yield {"type": "content_block_stop", "index": index}
    stop = {"stop_reason": _stop_reason(body, text), "stop_sequence": None}
    usage = {"input_tokens": 3, "output_tokens": len(text.split()) + 1}
    yield {"type": "message_delta", "delta": stop, "usage": usage}
    yield {"type": "message_stop"}


def _block_deltas(block: dict[str, Any]) -> Iterable[Event]:
    if block["type"] == "thinking":
        yield {"type": "thinking_delta", "thinking": block["thinking"]}
        yield {"type": "signature_delta", "signature": block["signature"]}
    elif block["type"] == "tool_use":
        for piece in ('{"city":', ' "Orléans"', "}"):
            yield {"type": "input_json_delta", "partial_json": piece}
    else:
        for word in _words(block["text"]):
            yield {"type": "text_delta", "text": word}


def _items(body: dict[str, Any], text: str) -> list[dict[str, Any]]:
    if _uses_tool(body, text):
        call = {"arguments": '{"city": "Orléans"}', "call_id": "call_1", "name": "look"}
        return [{**call, "type": "function_call", "id": "fc_1", "status": "completed"}]
    part: dict[str, Any] = {
        "annotations": [],
        "text": "".join(_words(text)),
        "type": "output_text",
        "logprobs": None,
    }
    item = {"id": "msg_1", "content": [part], "role": "assistant", "status": "completed", "type": "message"}
    return [item]


def _response(body: dict[str, Any], items: list[dict[str, Any]], status: str) -> dict[str, Any]:
    usage = {
        "input_tokens": 3,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": 4,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 7,
    }
    return {
        "id": "resp_1",
        "created_at": 1,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "metadata": None,
        "model": body["model"],
        "object": "response",
        "output": items,
        "parallel_tool_calls": True,
        "temperature": 1.0,
        "tool_choice": "auto",
        "tools": body.get("tools") or [],
        "top_p": 1.0,
        "background": False,
        "status": status,
        "usage": None if status == "in_progress" else usage,
        "error": None,
    }


def _response_events(body: dict[str, Any], text: str) -> Iterable[Event]:
    begun = _response(body, [], "in_progress")
    (item,) = _items(body, text)
    at = {"item_id": item["id"], "output_index": 0}
    events: list[Event] = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
    ]
    if item["type"] == "function_call":
        empty = {**item, "arguments": "", "status": "in_progress"}
        pieces = ('{"city":', ' "Orléans"', "}")
        kind = "response.function_call_arguments"
        deltas = [{"type": f"{kind}.delta", "delta": piece, **at} for piece in pieces]
        done = [{"type": f"{kind}.done", "arguments": item["arguments"], "name": "look", **at}]
    else:
        empty = {**item, "content": [], "status": "in_progress"}
        (part,) = item["content"]
        at["content_index"] = 0
        added = {"type": "response.content_part.added", "part": {**part, "text": ""}, **at}
        kind = "response.output_text"
        pieces_of_text = [{"type": f"{kind}.delta", "delta": word, "logprobs": []} for word in _words(text)]
        deltas = [added, *({**piece, **at} for piece in pieces_of_text)]
        done = [
            {"type": f"{kind}.done", "text": part["text"], "logprobs": [], **at},
            {"type": "response.content_part.done", "part": part, **at},
        ]
    events.append({"type": "response.output_item.added", "item": empty, "output_index": 0})
    events += [*deltas, *done, {"type": "response.output_item.done", "item": item, "output_index": 0}]
    status = "cancelled" if "ABORT" in text else "completed"
    events.append({"type": "response.completed", "response": _response(body, [item], status)})
    return [{**event, "sequence_number": number} for number, event in enumerate(events)]
