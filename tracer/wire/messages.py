"""OpenAI chat messages as OTel GenAI message parts.

    {"role", "content", "tool_calls", ...}  ->  {"role", "parts": [{"type": ..}, ..], ...}

Invariants:
* Nothing is parsed that the model wrote: tool-call arguments stay the string they were.
* `content: null` gives no text part, `content: ""` gives an empty one.
* Keys that have no place in the conventions stay on the message under their own name.
"""

from collections.abc import Mapping, Sequence
from typing import Any

_PLACED = frozenset(
    {"role", "content", "tool_calls", "tool_call_id", "function_call", "name", "refusal"}
    | {"reasoning", "reasoning_content"}
)


def input_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """One request message."""
    role = message.get("role")
    if role in ("tool", "function"):
        response = {
            "type": "tool_call_response",
            "id": message.get("tool_call_id"),
            "response": message.get("content"),
        }
        parts = [response]
    else:
        parts = message_parts(message)
    named: dict[str, Any] = {"role": role, "parts": parts}
    if message.get("name") is not None:
        named["name"] = message["name"]
    extra = {key: value for key, value in message.items() if key not in _PLACED and value is not None}
    return named | extra


def output_message(message: Mapping[str, Any], finish_reason: str | None) -> dict[str, Any]:
    """The message of one choice."""
    return {
        "role": message.get("role") or "assistant",
        "parts": message_parts(message),
        "finish_reason": finish_reason,
    }


def message_parts(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Reasoning, content and tool calls of a message, in this order."""
    parts: list[dict[str, Any]] = []
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    if isinstance(reasoning, str):
        parts.append({"type": "reasoning", "content": reasoning})
    content = message.get("content")
    if isinstance(content, str):
        parts.append({"type": "text", "content": content})
    elif isinstance(content, Sequence):
        parts.extend(_content_part(part) for part in content)
    if isinstance(message.get("refusal"), str):
        parts.append({"type": "refusal", "content": message["refusal"]})
    for call in message.get("tool_calls") or ():
        parts.append(_tool_call(call))
    if isinstance(message.get("function_call"), Mapping):
        function = message["function_call"]
        parts.append(
            {
                "type": "tool_call",
                "id": None,
                "name": function.get("name"),
                "arguments": function.get("arguments"),
            }
        )
    return parts


def _tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping):  # a kind of tool that has no function, such as "custom"
        return {"type": "tool_call", "id": call.get("id"), "name": call.get("type"), "arguments": dict(call)}
    return {
        "type": "tool_call",
        "id": call.get("id"),
        "name": function.get("name"),
        "arguments": function.get("arguments"),
    }


def _content_part(part: Any) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "content": part}
    if not isinstance(part, Mapping):
        return {"type": "unknown", "content": part}
    kind = part.get("type")
    if kind == "text":
        return {"type": "text", "content": part.get("text")}
    if kind == "image_url" and isinstance(part.get("image_url"), Mapping):
        return _image(str(part["image_url"].get("url")))
    return dict(part)


def _image(url: str) -> dict[str, Any]:
    head, comma, data = url.partition(",")
    if url.startswith("data:") and comma and head.endswith(";base64"):
        return {
            "type": "blob",
            "modality": "image",
            "mime_type": head[len("data:") : -len(";base64")],
            "content": data,
        }
    return {"type": "uri", "modality": "image", "uri": url}
