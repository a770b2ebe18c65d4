"""OpenAI chat messages as OTel GenAI message parts.

    {"role", "content", "tool_calls", ...}  ->  {"role", "parts": [{"type": ..}, ..], ...}

Invariants:
* Nothing is parsed that the model wrote: tool-call arguments stay the string they were.
* `content: null` gives no text part, `content: ""` gives an empty one.
* Keys that have no place in the conventions stay on the message under their own name.
* Reasoning that a server tells in several forms at once is one part.
* Images, sound and files are references (`media.py`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from spangrad.tracer.wire import media

_REASONING = frozenset({"reasoning", "reasoning_content", "reasoning_details", "thinking_blocks"})
_RARE = frozenset({"tool_calls", "function_call", "refusal", "audio", "images"})
_PLACED = frozenset({"role", "content", "tool_call_id", "name"}) | _REASONING | _RARE
_BY_URL = {"image_url": "image", "video_url": "video", "audio_url": "audio"}


def input_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """One request message."""
    role = message.get("role")
    if role in ("tool", "function"):
        response = {
            "type": "tool_call_response",
            "id": message.get("tool_call_id"),
            "response": media.without_data(message.get("content")),
        }
        parts = [response]
    else:
        parts = message_parts(message)
    named: dict[str, Any] = {"role": role, "parts": parts}
    if message.get("name") is not None:
        named["name"] = message["name"]
    return named | _unplaced(message)


def output_message(message: Mapping[str, Any], finish_reason: str | None) -> dict[str, Any]:
    """The message of one choice."""
    return {
        "role": message.get("role") or "assistant",
        "parts": message_parts(message),
        "finish_reason": finish_reason,
    }


def message_parts(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Reasoning, content and tool calls of a message, in this order."""
    parts = [] if message.keys().isdisjoint(_REASONING) else _reasoning(message)
    content = message.get("content")
    if isinstance(content, str):
        parts.append({"type": "text", "content": content})
    elif isinstance(content, Sequence):
        parts.extend(content_part(part) for part in content)
    if message.keys().isdisjoint(_RARE):
        return parts
    if isinstance(message.get("refusal"), str):
        parts.append({"type": "refusal", "content": message["refusal"]})
    parts.extend(content_part(image) for image in _listed(message.get("images")))
    if isinstance(message.get("audio"), Mapping):
        parts.append(_spoken(message["audio"]))
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


def content_part(part: Any) -> dict[str, Any]:
    """One part of a message's content."""
    if isinstance(part, str):
        return {"type": "text", "content": part}
    if not isinstance(part, Mapping):
        return {"type": "unknown", "content": part}
    kind = part.get("type")
    if kind in ("text", "refusal"):
        return {"type": kind, "content": part.get("text") if kind == "text" else part.get("refusal")}
    if kind in _BY_URL:
        place = part.get(kind)
        return media.by_url(place.get("url") if isinstance(place, Mapping) else place, _BY_URL[kind])
    if kind == "input_audio" and isinstance(part.get("input_audio"), Mapping):
        sound = part["input_audio"]
        return media.blob(sound.get("data"), "audio", f"audio/{sound.get('format')}")
    if kind == "file" and isinstance(part.get("file"), Mapping):
        return _file(part["file"])
    return dict(media.without_data(part))


def _file(file: Mapping[str, Any]) -> dict[str, Any]:
    data = file.get("file_data")
    if data is None:
        return media.by_id(file.get("file_id"), "file")
    found = media.by_url(data, "file") if str(data).startswith("data:") else media.blob(data, "file", None)
    return found | ({"name": file["filename"]} if file.get("filename") else {})


def _spoken(audio: Mapping[str, Any]) -> dict[str, Any]:
    """A reply that was spoken, or in a request the id of one."""
    if audio.get("data") is None:
        return media.by_id(audio.get("id"), "audio")
    return media.blob(audio["data"], "audio", None) | {"transcript": audio.get("transcript")}


def _reasoning(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What was thought: as text if a server gives it as text, else from the blocks of other APIs."""
    for key in ("reasoning", "reasoning_content"):
        if isinstance(message.get(key), str) and message[key]:
            return [{"type": "reasoning", "content": message[key]}]
    blocks = _listed(message.get("thinking_blocks")) or _listed(message.get("reasoning_details"))
    return [part for block in blocks if isinstance(block, Mapping) for part in _thought(block)]


def _thought(block: Mapping[str, Any]) -> list[dict[str, Any]]:
    match block.get("type"):
        case "thinking":
            return [{"type": "reasoning", "content": block.get("thinking")} | _signature(block)]
        case "reasoning.text":
            return [{"type": "reasoning", "content": block.get("text")} | _signature(block)]
        case "reasoning.summary":
            return [{"type": "reasoning_summary", "content": block.get("summary")}]
        case "redacted_thinking" | "reasoning.encrypted":
            return [{"type": "reasoning_encrypted", "data": block.get("data")}]
    return [dict(media.without_data(block))]


def _signature(block: Mapping[str, Any]) -> dict[str, Any]:
    return {"signature": block["signature"]} if block.get("signature") else {}


def _tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping):  # a kind of tool that has no function
        custom = call.get("custom")
        if isinstance(custom, Mapping):
            return custom_tool_call(call.get("id"), custom)
        return {"type": str(call.get("type"))} | dict(media.without_data(call))
    return {
        "type": "tool_call",
        "id": call.get("id"),
        "name": function.get("name"),
        "arguments": function.get("arguments"),
    }


def custom_tool_call(call_id: Any, custom: Mapping[str, Any]) -> dict[str, Any]:
    """A call of a tool that takes free text in place of JSON."""
    return {
        "type": "custom_tool_call",
        "id": call_id,
        "name": custom.get("name"),
        "input": custom.get("input"),
    }


def _unplaced(message: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: media.without_data(value)
        for key, value in message.items()
        if key not in _PLACED and value is not None
    }


def _listed(value: Any) -> Sequence[Any]:
    if value is None:
        return ()
    return value if isinstance(value, Sequence) and not isinstance(value, str | bytes) else ()
