"""Attributes of `/responses` (OpenAI) and `/messages` (Anthropic) calls: text only.

These routes have no token ids. Tool arguments of `/messages` arrive as an object, so their original
characters are not known; the object is recorded as such. What is not text, a tool call or a tool
result is kept as a part of its own type.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from spangrad.tracer import conventions as c
from spangrad.tracer.wire.chat import Attributes, clean, dumps, request_attributes
from spangrad.tracer.wire.streams import Assembled, events


def messages_request(request: Mapping[str, Any]) -> Attributes:
    """What an Anthropic client asked."""
    rest = {key: value for key, value in request.items() if key not in ("messages", "system", "tool_choice")}
    if "stop_sequences" in rest:
        rest["stop"] = rest.pop("stop_sequences")
    attributes = request_attributes(rest)
    turns = [{"role": item.get("role"), "parts": _parts(item.get("content"))} for item in request["messages"]]
    if request.get("system"):
        turns.insert(0, {"role": "system", "parts": _parts(request["system"])})
    attributes[c.INPUT_MESSAGES] = dumps(turns)
    tool_choice = request.get("tool_choice")
    if isinstance(tool_choice, Mapping) and tool_choice.get("type") in ("any", "tool"):
        attributes[c.CONSTRAINED] = True
    return attributes


def messages_response(response: Mapping[str, Any]) -> Attributes:
    """What an Anthropic server answered."""
    usage = response.get("usage") or {}
    return _response(response, _parts(response.get("content")), str(response.get("stop_reason") or ""), usage)


def assemble_messages(body: bytes) -> Assembled:
    """Add up a streamed `/messages` response."""
    result = Assembled()
    blocks: dict[int, dict[str, Any]] = {}
    arguments: dict[int, str] = {}
    for _, data in events(body):
        event = json.loads(data)
        kind = event.get("type")
        if kind == "message_start":
            result.body.update(event["message"])
        elif kind == "content_block_start":
            blocks[event["index"]] = dict(event["content_block"])
        elif kind == "content_block_delta":
            delta, block = event["delta"], blocks[event["index"]]
            for key in ("text", "thinking"):
                if key in delta:
                    block[key] = block.get(key, "") + delta[key]
            if "partial_json" in delta:
                arguments[event["index"]] = arguments.get(event["index"], "") + delta["partial_json"]
        elif kind == "message_delta":
            result.body.update(event.get("delta") or {})
            result.body["usage"] = (result.body.get("usage") or {}) | (event.get("usage") or {})
        elif kind == "message_stop":
            result.is_complete = True
        elif kind == "error":
            result.error = event.get("error") or {}
    for index, text in arguments.items():
        blocks[index]["input"] = text  # the characters that the model wrote
    result.body["content"] = [blocks[index] for index in sorted(blocks)]
    return result


def responses_request(request: Mapping[str, Any]) -> Attributes:
    """What a client of the Responses API asked."""
    rest = {key: value for key, value in request.items() if key not in ("input", "instructions")}
    if "max_output_tokens" in rest:
        rest["max_tokens"] = rest.pop("max_output_tokens")
    attributes = request_attributes(rest)
    given = request.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given or []
    turns = [_item(item) for item in items]
    if request.get("instructions"):
        turns.insert(0, {"role": "system", "parts": [{"type": "text", "content": request["instructions"]}]})
    attributes[c.INPUT_MESSAGES] = dumps(turns)
    return attributes


def responses_response(response: Mapping[str, Any]) -> Attributes:
    """What a Responses server answered."""
    parts = [part for item in response.get("output") or () for part in _item(item)["parts"]]
    return _response(response, parts, str(response.get("status") or ""), response.get("usage") or {})


def assemble_responses(body: bytes) -> Assembled:
    """The response that the last event of a streamed `/responses` call carries whole."""
    result = Assembled()
    for _, data in events(body):
        if data.strip() == b"[DONE]":
            continue
        event = json.loads(data)
        if isinstance(event.get("response"), dict):
            result.body = event["response"]
        if event.get("type") in ("response.completed", "response.incomplete"):
            result.is_complete = True
        elif event.get("type") in ("error", "response.failed"):
            result.error = event.get("error") or result.body.get("error") or {"message": "failed"}
    return result


def _response(
    response: Mapping[str, Any], parts: list[dict[str, Any]], reason: str, usage: Mapping[str, Any]
) -> Attributes:
    attributes: Attributes = {
        c.RESPONSE_FINISH_REASONS: [clean(reason)],
        c.OUTPUT_MESSAGES: dumps([{"role": "assistant", "parts": parts, "finish_reason": reason}]),
    }
    for key, name in (("id", c.RESPONSE_ID), ("model", c.RESPONSE_MODEL)):
        if isinstance(response.get(key), str):
            attributes[name] = clean(response[key])
    for key, name in (("input_tokens", c.INPUT_TOKENS), ("output_tokens", c.OUTPUT_TOKENS)):
        if isinstance(usage.get(key), int):
            attributes[name] = usage[key]
    return attributes


def _item(item: Mapping[str, Any]) -> dict[str, Any]:
    kind = item.get("type") or "message"
    if kind == "message":
        return {"role": item.get("role"), "parts": _parts(item.get("content"))}
    if kind == "function_call":
        call = {
            "type": "tool_call",
            "id": item.get("call_id"),
            "name": item.get("name"),
            "arguments": item.get("arguments"),
        }
        return {"role": "assistant", "parts": [call]}
    if kind == "function_call_output":
        response = {
            "type": "tool_call_response",
            "id": item.get("call_id"),
            "response": item.get("output"),
        }
        return {"role": "tool", "parts": [response]}
    return {"role": "assistant", "parts": [dict(item)]}


def _parts(content: Any) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "content": content}]
    if not isinstance(content, Sequence):
        return []
    return [_part(part) for part in content]


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    kind = part.get("type")
    if kind in ("text", "input_text", "output_text"):
        return {"type": "text", "content": part.get("text")}
    if kind == "thinking":
        return {"type": "reasoning", "content": part.get("thinking")}
    if kind == "tool_use":
        return {
            "type": "tool_call",
            "id": part.get("id"),
            "name": part.get("name"),
            "arguments": part.get("input"),
        }
    if kind == "tool_result":
        return {
            "type": "tool_call_response",
            "id": part.get("tool_use_id"),
            "response": part.get("content"),
        }
    return dict(part)
