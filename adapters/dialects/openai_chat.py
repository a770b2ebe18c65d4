"""Messages that a recorder kept in OpenAI's chat form -> the same form, checked.

Knows one message and one tool call; it does not know in which attribute or event they
were. A shape that can't be read raises `DialectError`.

Invariant: arguments that are a string stay that string; what had to be serialised is noted.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from spangrad.adapters.messages import ARGUMENTS_RESERIALISED, NO_CHAT_FORM
from spangrad.errors import DialectError

OPTIONAL: Final = ("name", "refusal", "reasoning", "reasoning_content")
"""Further keys of a message; those that are empty are left out."""


def chat_message(recorded: Any, role: str, notes: list[str]) -> dict[str, Any]:
    """One message. `role` is the one to use where the message names none.

    Raises:
        DialectError: The message has another shape.
    """
    if not isinstance(recorded, Mapping):
        raise DialectError(f"a message is {type(recorded).__name__}; expected an object")
    named = recorded.get("role")
    told = named if isinstance(named, str) and named else role
    message: dict[str, Any] = {"role": told, "content": _content(recorded.get("content"), notes)}
    if (calls := recorded.get("tool_calls")) is not None:
        if not isinstance(calls, Sequence) or isinstance(calls, (str, bytes)):
            raise DialectError(f"tool calls are {type(calls).__name__}; expected a list")
        if calls:
            message["tool_calls"] = [tool_call(call, notes) for call in calls]
    if told == "tool":
        message["content"] = message["content"] if message["content"] is not None else ""
        message["tool_call_id"] = recorded.get("tool_call_id", recorded.get("id"))
    return message | {key: recorded[key] for key in OPTIONAL if recorded.get(key)}


def tool_call(recorded: Any, notes: list[str]) -> dict[str, Any]:
    """One tool call, wrapped (`function`) or flat.

    Raises:
        DialectError: The tool call has another shape.
    """
    if not isinstance(recorded, Mapping):
        raise DialectError(f"a tool call is {type(recorded).__name__}; expected an object")
    function = recorded.get("function", recorded)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DialectError("a tool call names no function; expected `function.name`")
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments if arguments is not None else {}, ensure_ascii=False, default=repr)
        _note(notes, ARGUMENTS_RESERIALISED)
    return {
        "id": recorded.get("id"),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _content(recorded: Any, notes: list[str]) -> Any:
    if recorded is None or isinstance(recorded, str):
        return recorded
    if not isinstance(recorded, Sequence) or isinstance(recorded, bytes):
        raise DialectError(f"content is {type(recorded).__name__}; expected a text or a list of parts")
    for part in recorded:
        if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
            raise DialectError("a part of the content has no type; expected an object with a type")
        if part["type"] not in ("text", "image_url", "input_audio", "file", "refusal"):
            _note(notes, f"{NO_CHAT_FORM}: {part['type']!r}")
    return [dict(part) for part in recorded]


def _note(notes: list[str], sentence: str) -> None:
    if sentence not in notes:
        notes.append(sentence)
