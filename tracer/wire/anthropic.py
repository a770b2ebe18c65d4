"""Attributes of Anthropic `/messages` calls, whole and streamed.

Knows Anthropic's API. Invariants:
* This route has no token ids. Tool arguments of a whole reply arrive as an object, so their original
  characters are not known; the object is recorded as such. A stream gives the characters.
* A block that is not text, thinking, a tool call, a tool result or a medium is a part of its own type.
* Input tokens are all of the prompt's, those read from or written to a cache included.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from spangrad.tracer import conventions as c
from spangrad.tracer.wire import media
from spangrad.tracer.wire.chat import (
    Attributes,
    clean,
    dumps,
    identity_attributes,
    put_messages,
    request_attributes,
    usage_attributes,
)
from spangrad.tracer.wire.streams import Assembled, add_fields, objects

_USAGE = {
    "input_tokens": c.INPUT_TOKENS,
    "output_tokens": c.OUTPUT_TOKENS,
    "cache_read_input_tokens": c.CACHE_READ_TOKENS,
    "cache_creation_input_tokens": c.CACHE_CREATION_TOKENS,
}
_PLACED = ("messages", "system", "tool_choice", "stop_sequences")
_GROWING = ("text", "thinking", "signature", "content")


def messages_request(request: Mapping[str, Any], dropped: dict[str, str]) -> Attributes:
    """What an Anthropic client asked."""
    rest = {key: value for key, value in request.items() if key not in _PLACED}
    if "stop_sequences" in request:
        rest["stop"] = request["stop_sequences"]
    attributes = request_attributes(rest)
    turns = [{"role": item.get("role"), "parts": _parts(item.get("content"))} for item in request["messages"]]
    if request.get("system"):
        turns.insert(0, {"role": "system", "parts": _parts(request["system"])})
    put_messages(attributes, turns, dropped)
    tool_choice = request.get("tool_choice")
    if isinstance(tool_choice, Mapping):
        extra = json.loads(attributes.get(c.REQUEST_EXTRA, "{}"))
        attributes[c.REQUEST_EXTRA] = dumps(extra | {"tool_choice": tool_choice})
        if tool_choice.get("type") in ("any", "tool"):
            attributes[c.CONSTRAINED] = True
    config = request.get("output_config")
    if request.get("output_format") or (isinstance(config, Mapping) and config.get("format")):
        attributes[c.CONSTRAINED] = True
    return attributes


def messages_response(
    response: Mapping[str, Any], dropped: dict[str, str], request: Mapping[str, Any] | None = None
) -> Attributes:
    """What an Anthropic server answered."""
    reason = str(response.get("stop_reason") or "")
    message = {"role": "assistant", "parts": _parts(response.get("content")), "finish_reason": reason}
    attributes = identity_attributes(response) | {
        c.RESPONSE_FINISH_REASONS: [clean(reason)],
        c.OUTPUT_MESSAGES: dumps([message]),
    }
    attributes |= usage_attributes(response.get("usage"), _USAGE)
    if c.INPUT_TOKENS in attributes:
        cached = (attributes.get(name, 0) for name in (c.CACHE_READ_TOKENS, c.CACHE_CREATION_TOKENS))
        attributes[c.INPUT_TOKENS] += sum(cached)
    return attributes


def assemble_messages(body: bytes, choice_count: int = 1) -> Assembled:
    """Add up a streamed `/messages` response."""
    result = Assembled()
    blocks: dict[int, dict[str, Any]] = {}
    arguments: dict[int, str] = {}
    for event in objects(body, result):
        index = event.get("index", 0)
        match event.get("type"):
            case "message_start":
                result.body.update(event.get("message") or {})
            case "content_block_start":
                blocks[index] = dict(event.get("content_block") or {})
            case "content_block_delta":
                _add_delta(blocks.setdefault(index, {}), event.get("delta") or {})
                if isinstance(piece := (event.get("delta") or {}).get("partial_json"), str):
                    arguments[index] = arguments.get(index, "") + piece
            case "message_delta":
                result.body.update(event.get("delta") or {})
                result.body["usage"] = (result.body.get("usage") or {}) | (event.get("usage") or {})
            case "message_stop":
                result.is_complete = result.error is None and bool(result.body.get("stop_reason"))
            case "error":
                result.error = event.get("error") or {"message": "failed"}
                result.is_complete = False
    for index, text in arguments.items():
        if text:
            blocks[index]["input"] = text  # the characters that the model wrote
    result.body["content"] = [blocks[index] for index in sorted(blocks)]
    return result


def _add_delta(block: dict[str, Any], delta: Mapping[str, Any]) -> None:
    if "citation" in delta:
        block["citations"] = [*(block.get("citations") or ()), delta["citation"]]
    add_fields(block, {key: delta[key] for key in _GROWING if key in delta}, added=_GROWING)


def _parts(content: Any) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "content": content}]
    if not isinstance(content, Sequence):
        return []
    return [_part(part) for part in content]


def _part(part: Any) -> dict[str, Any]:
    if not isinstance(part, Mapping):
        return {"type": "unknown", "content": part}
    match part.get("type"):
        case "text":
            citations = {"citations": part["citations"]} if part.get("citations") else {}
            return {"type": "text", "content": part.get("text")} | citations
        case "thinking":
            signature = {"signature": part["signature"]} if part.get("signature") else {}
            return {"type": "reasoning", "content": part.get("thinking")} | signature
        case "redacted_thinking":
            return {"type": "reasoning_encrypted", "data": part.get("data")}
        case "image" | "document" if isinstance(part.get("source"), Mapping):
            return _medium(part, part["source"])
        case "tool_use":
            return {
                "type": "tool_call",
                "id": part.get("id"),
                "name": part.get("name"),
                "arguments": part.get("input"),
            }
        case "tool_result":
            result = {
                "type": "tool_call_response",
                "id": part.get("tool_use_id"),
                "response": media.without_data(part.get("content")),
            }
            return result | ({"is_error": True} if part.get("is_error") else {})
    return dict(media.without_data(part))


def _medium(part: Mapping[str, Any], source: Mapping[str, Any]) -> dict[str, Any]:
    modality = "image" if part["type"] == "image" else "file"
    match source.get("type"):
        case "base64":
            return media.blob(source.get("data"), modality, source.get("media_type"))
        case "url":
            return media.by_url(source.get("url"), modality)
        case "file":
            return media.by_id(source.get("file_id"), modality)
    return dict(media.without_data(part))
