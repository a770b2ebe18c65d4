"""What the gateway answers itself, in the engine's place, to a call for which a rollout has no turn left.

An ordinary reply of the assistant with a fixed text and no tool call, whole or streamed, in the form of the
route: agents end on it by themselves. Or an error, where the budget has no text.

Invariant: nothing is sampled, so no reply has token ids, logprobs or a count of tokens above 0.

Knows OpenAI's and Anthropic's JSON. Knows no budgets and no spans.
"""

import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import httpx

from spangrad.tracer.gateway.http_parts import error_body
from spangrad.tracer.gateway.record import choice_count
from spangrad.tracer.gateway.rewrite import dump

STATUS: Final = 403
"""Of the error: no client tries it again."""
MAX_CHOICES: Final = 128
"""A request may ask for any number; an engine would refuse more."""
Json = dict[str, Any]
_NO_TOKENS: Final = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}


def refusal(path: str, message: str) -> httpx.Response:
    """An error as the clients of `path` read it."""
    content = dump(error_body(STATUS, "no_turn_left", message, path=path))
    return httpx.Response(STATUS, headers={"content-type": "application/json"}, content=content)


def reply(path: str, request: Any, text: str) -> httpx.Response:
    """A reply with this text to a request's JSON, streamed if it asks for a stream."""
    request = request if isinstance(request, dict) else {}
    whole, stream = _FORMS[path]
    if request.get("stream") is not True:
        headers = {"content-type": "application/json"}
        return httpx.Response(200, headers=headers, content=dump(whole(request, text)))
    events = b"".join(stream(request, text))
    return httpx.Response(200, headers={"content-type": "text/event-stream"}, content=events)


def _head(request: Mapping[str, Any], prefix: str, kind: str) -> Json:
    head = {"id": f"{prefix}-{secrets.token_hex(12)}", "object": kind, "created": int(time.time())}
    return {**head, "model": _model(request)}


def _chat(request: Mapping[str, Any], text: str) -> Json:
    message = {"role": "assistant", "content": text, "refusal": None}
    ends = {"logprobs": None, "finish_reason": "stop"}
    choices = [{"index": index, "message": message, **ends} for index in _indexes(request)]
    return {**_head(request, "chatcmpl", "chat.completion"), "choices": choices, "usage": _NO_TOKENS}


def _chat_events(request: Mapping[str, Any], text: str) -> Iterator[bytes]:
    deltas: list[tuple[Json, str | None]] = [
        ({"role": "assistant", "content": ""}, None),
        ({"content": text}, None),
        ({}, "stop"),
    ]
    head = _head(request, "chatcmpl", "chat.completion.chunk")
    for delta, reason in deltas:
        for index in _indexes(request):
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
            yield _data({**head, "choices": [choice]})
    yield from _ends(request, head)


def _completion(request: Mapping[str, Any], text: str) -> Json:
    ends = {"text": text, "logprobs": None, "finish_reason": "stop"}
    choices = [{"index": index, **ends} for index in _indexes(request)]
    return {**_head(request, "cmpl", "text_completion"), "choices": choices, "usage": _NO_TOKENS}


def _completion_events(request: Mapping[str, Any], text: str) -> Iterator[bytes]:
    whole = _completion(request, text)
    head = {name: value for name, value in whole.items() if name != "usage"}
    for choice in whole["choices"]:
        yield _data({**head, "choices": [choice]})
    yield from _ends(request, head)


def _ends(request: Mapping[str, Any], head: Json) -> Iterator[bytes]:
    options = request.get("stream_options")
    if isinstance(options, dict) and options.get("include_usage"):
        yield _data({**head, "choices": [], "usage": _NO_TOKENS})
    yield b"data: [DONE]\n\n"


def _response(request: Mapping[str, Any], text: str) -> Json:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    item = {"type": "message", "role": "assistant", "status": "completed", "content": [part]}
    usage = {
        "input_tokens": 0,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": 0,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 0,
    }
    return {
        "id": f"resp_{secrets.token_hex(12)}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "completed",
        "model": _model(request),
        "output": [{"id": f"msg_{secrets.token_hex(12)}", **item}],
        "error": None,
        "incomplete_details": None,
        "instructions": request.get("instructions"),
        "metadata": request.get("metadata") or {},
        "parallel_tool_calls": True,
        "temperature": request.get("temperature"),
        "tool_choice": request.get("tool_choice") or "auto",
        "tools": request.get("tools") or [],
        "top_p": request.get("top_p"),
        "usage": usage,
    }


def _response_events(request: Mapping[str, Any], text: str) -> Iterator[bytes]:
    done = _response(request, text)
    begun = {**done, "status": "in_progress", "output": [], "usage": None}
    (item,) = done["output"]
    (part,) = item["content"]
    at = {"item_id": item["id"], "output_index": 0, "content_index": 0}
    events: list[Json] = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
        {
            "type": "response.output_item.added",
            "output_index": 0,
            "item": {**item, "status": "in_progress", "content": []},
        },
        {"type": "response.content_part.added", **at, "part": {**part, "text": ""}},
        {"type": "response.output_text.delta", **at, "delta": text, "logprobs": []},
        {"type": "response.output_text.done", **at, "text": text, "logprobs": []},
        {"type": "response.content_part.done", **at, "part": part},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {"type": "response.completed", "response": done},
    ]
    for number, event in enumerate(events):
        yield _named({**event, "sequence_number": number})


def _message(request: Mapping[str, Any], text: str) -> Json:
    head = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant"}
    usage = {"input_tokens": 0, "output_tokens": 0}
    ends = {"stop_reason": "end_turn", "stop_sequence": None, "usage": usage}
    return {**head, "model": _model(request), "content": [{"type": "text", "text": text}], **ends}


def _message_events(request: Mapping[str, Any], text: str) -> Iterator[bytes]:
    whole = _message(request, text)
    delta = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    events: list[Json] = [
        {"type": "message_start", "message": {**whole, "content": [], "stop_reason": None}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": delta, "usage": {"output_tokens": 0}},
        {"type": "message_stop"},
    ]
    return map(_named, events)


def _indexes(request: Mapping[str, Any]) -> range:
    return range(min(choice_count(request), MAX_CHOICES))


def _model(request: Mapping[str, Any]) -> str:
    model = request.get("model")
    return model if isinstance(model, str) else ""


def _data(event: Json) -> bytes:
    return b"data: " + dump(event) + b"\n\n"


def _named(event: Json) -> bytes:
    return f"event: {event['type']}\n".encode() + _data(event)


_Whole = Callable[[Mapping[str, Any], str], Json]
_Stream = Callable[[Mapping[str, Any], str], Iterator[bytes]]
_FORMS: Final[Mapping[str, tuple[_Whole, _Stream]]] = {
    "/v1/chat/completions": (_chat, _chat_events),
    "/v1/completions": (_completion, _completion_events),
    "/v1/responses": (_response, _response_events),
    "/v1/messages": (_message, _message_events),
}
"""Path -> a whole reply, and the events of a stream."""
PATHS: Final = frozenset(_FORMS)
"""Where policies act."""
