"""Serve a Python function as an OpenAI-compatible chat model.

For scripted experts: an unmodified agent talks to the script as it would to a model, and
its traces are recorded like any other. Knows the wire format; knows no task and no policy.

Invariants: an identical conversation gets the count of its earlier requests, so that a
function that draws from (seed, conversation, count) gives the same set of replies in every
run. A function that raises `ValueError` answers 400 with the error's text.
"""

import hashlib
import json
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from spangrad.errors import PortInUseError

Message = Mapping[str, Any]
Reply = Callable[[Sequence[Message], int], Mapping[str, Any]]
"""`reply(messages, asked_before)`: the next message, in OpenAI chat form."""


def create_app(reply: Reply) -> Starlette:
    """The routes `/v1/chat/completions` (without streaming) and `/v1/models`."""
    asked: Counter[str] = Counter()

    async def complete(request: Request) -> JSONResponse:
        body = await request.json()
        if body.get("stream"):
            return _refuse("a scripted model can't stream; ask without stream=true")
        conversation = conversation_digest(body["messages"])
        number = asked[conversation]
        asked[conversation] += 1
        try:
            message = reply(body["messages"], number)
        except ValueError as error:
            return _refuse(str(error))
        finish_reason = "tool_calls" if message.get("tool_calls") else "stop"
        return JSONResponse(
            {
                "id": f"scripted-{len(asked)}-{number}",
                "object": "chat.completion",
                "created": 0,
                "model": body.get("model", "scripted"),
                "choices": [{"index": 0, "message": dict(message), "finish_reason": finish_reason}],
                "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
            }
        )

    async def models(_: Request) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [{"id": "scripted", "object": "model"}]})

    return Starlette(
        routes=[Route("/v1/chat/completions", complete, methods=["POST"]), Route("/v1/models", models)]
    )


@contextmanager
def serve_model(reply: Reply, *, port: int = 0, host: str = "127.0.0.1") -> Iterator[str]:
    """Serve `reply` from a thread until the block ends; gives the base URL (`http://.../v1`).

    Raises:
        PortInUseError: The address is taken. Port 0 takes any free one.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise PortInUseError(f"{host}:{port} is taken; choose another port, or 0 for any free one") from error
    listener.listen(128)
    config = uvicorn.Config(
        create_app(reply), lifespan="off", ws="none", log_level="warning", access_log=False
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True, name="scripted")
    thread.start()
    try:
        yield f"http://{host}:{listener.getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        thread.join(timeout=10)
        listener.close()


def conversation_digest(messages: Sequence[Message], *salt: int) -> str:
    """64 hex digits that depend on a conversation and on `salt`; ids of tool calls do not count."""
    visible = [_without_ids(message) for message in messages]
    return hashlib.sha256(json.dumps([*salt, visible]).encode()).hexdigest()


def tool_call(name: str, arguments: Mapping[str, Any], call_id: str) -> dict[str, Any]:
    """An assistant's message that calls one tool, in OpenAI chat form."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    call = {"id": call_id, "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def _without_ids(message: Message) -> list[Any]:
    calls = [call["function"] for call in message.get("tool_calls") or []]
    return [
        message["role"],
        message.get("content") or "",
        [[call["name"], call["arguments"]] for call in calls],
    ]


def _refuse(text: str) -> JSONResponse:
    return JSONResponse({"error": {"message": text, "type": "invalid_request_error"}}, status_code=400)
