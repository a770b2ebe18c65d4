"""Messages in the forms that readers of datasets take.

Knows messages in OpenAI's chat form; knows no rollouts and no rows. What a form has no word for raises
`NoForm`: nothing is left out of a text that is trained.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from spangrad.adapters.datasets.conversation import Message

Row = dict[str, Any]

_OPENAI_KEYS: Final[Mapping[str, Sequence[str]]] = {
    "system": ("content", "name"),
    "user": ("content", "name"),
    "assistant": ("content", "name", "tool_calls", "refusal"),
    "tool": ("content", "tool_call_id"),
}
"""Role -> keys that the fine-tuning API takes; it refuses a file with any other."""
_OPENAI_PARTS: Final = ("text", "image_url", "refusal")


class NoForm(ValueError):
    """Something has no form in that dataset; the text says what."""


def openai_message(message: Message, *, weight: int | None = None) -> Row:
    """A message as OpenAI's fine-tuning takes it; reasoning has no place there and is left out."""
    role = "system" if message.get("role") == "developer" else str(message.get("role"))
    if role not in _OPENAI_KEYS:
        raise NoForm(f"a message has role {role!r:.40}")
    found: Row = {"role": role}
    for key in _OPENAI_KEYS[role]:
        if (value := message.get(key)) is not None:
            found[key] = value
    if "content" in found and not isinstance(found["content"], str):
        _check_parts(found["content"], _OPENAI_PARTS)
    found.pop("tool_calls", None)
    if role == "assistant" and (calls := tool_calls_of(message)):
        found["tool_calls"] = [_openai_call(call) for call in calls]
    if role == "tool" and "tool_call_id" not in found:
        raise NoForm("a tool's result names no call")
    if role != "assistant" or not found.get("tool_calls"):
        found.setdefault("content", "")
    return found if weight is None else {**found, "weight": weight}


def template_message(message: Message) -> Row:
    """A message as chat templates of Hugging Face take it: arguments are objects, reasoning is told.

    Reasoning is under `reasoning_content`, where the templates of Qwen, DeepSeek and GLM look for it.
    """
    told: Row = {"role": str(message.get("role"))}
    for key in ("content", "name", "tool_call_id"):
        if message.get(key) is not None:
            told[key] = message[key]
    if not isinstance(told.setdefault("content", ""), str):
        _check_parts(told["content"], _OPENAI_PARTS)
    if message.get("reasoning"):
        told["reasoning_content"] = message["reasoning"]
    if message.get("refusal") and not told["content"]:
        told["content"] = message["refusal"]
    if calls := tool_calls_of(message):
        told["tool_calls"] = [_template_call(call) for call in calls]
    return told


def text_of(message: Message) -> str:
    """The content of a message that is nothing but text."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None:
        return str(message.get("refusal") or "")
    _check_parts(content, ("text",))
    return "".join(str(part["text"]) for part in content)


def tool_calls_of(message: Message) -> list[Any]:
    """The tool calls of a message."""
    calls = message.get("tool_calls") or []
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise NoForm("tool calls are no list")
    return list(calls)


def name_of(call: Any) -> str:
    """The function that a tool call names."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise NoForm("a tool call names no function")
    return str(function["name"])


def arguments_of(call: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a tool call as an object."""
    arguments = call["function"].get("arguments")
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        raise NoForm("arguments of a tool call are no JSON") from None
    if parsed is None or parsed == "":
        return {}
    if not isinstance(parsed, Mapping):
        raise NoForm("arguments of a tool call are no JSON object")
    return dict(parsed)


def _template_call(call: Any) -> Row:
    function = {"name": name_of(call), "arguments": arguments_of(call)}
    return {**({"id": call["id"]} if call.get("id") else {}), "type": "function", "function": function}


def _openai_call(call: Any) -> Row:
    name = name_of(call)
    if not isinstance(call.get("id"), str):
        raise NoForm("a tool call has no id")
    arguments = call["function"].get("arguments")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments if arguments is not None else {}, ensure_ascii=False)
    return {"id": call["id"], "type": "function", "function": {"name": name, "arguments": arguments}}


def _check_parts(content: Any, kinds: Sequence[str]) -> None:
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise NoForm(f"content is {type(content).__name__}")
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind not in kinds or (kind == "text" and not isinstance(part.get("text"), str)):
            raise NoForm(f"a message has a part of type {kind!r:.40}")
