"""LangChain's messages, however they were dumped -> OpenAI chat messages.

Knows the constructor dump (`{"lc": 1, "kwargs": ...}`), the plain dump (`{"type": "human", ...}`) and
messages that have OpenAI's roles and LangChain's tool calls. A message in OpenAI's form passes as it is.

Invariants:
* arguments that LangChain parsed are dumped again and that is noted; where it kept the model's string, the
  string is taken;
* what LangChain adds for itself (its ids, response metadata) is no part of the message.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from spangrad.adapters.messages import ARGUMENTS_RESERIALISED, RESULTS_RESERIALISED
from spangrad.errors import DialectError

ROLES: Final = {
    "human": "user",
    "HumanMessage": "user",
    "HumanMessageChunk": "user",
    "ai": "assistant",
    "AIMessage": "assistant",
    "AIMessageChunk": "assistant",
    "SystemMessage": "system",
    "ToolMessage": "tool",
    "FunctionMessage": "function",
}
"""LangChain's types and classes -> roles."""
_OWN: Final = frozenset(
    {"type", "id", "additional_kwargs", "response_metadata", "usage_metadata", "invalid_tool_calls"}
    | {"artifact", "status", "example", "chunk_position", "tool_call_chunks"}
)
"""Fields that LangChain adds for itself."""


def fields_of(recorded: Any) -> Mapping[str, Any]:
    """The fields of a dumped message, whichever way it was dumped.

    Raises:
        DialectError: It is no object.
    """
    if not isinstance(recorded, Mapping):
        raise DialectError(f"a message is {type(recorded).__name__}; expected an object")
    name = recorded.get("id")
    if recorded.get("type") == "constructor" and isinstance(recorded.get("kwargs"), Mapping):
        kind = name[-1] if isinstance(name, Sequence) and name else None
        return {"type": kind, **recorded["kwargs"]}
    if isinstance(recorded.get("data"), Mapping) and recorded.get("type") in ROLES:
        return {"type": recorded["type"], **recorded["data"]}
    return recorded


def openai_message(recorded: Any, notes: list[str]) -> dict[str, Any]:
    """One message in OpenAI's form.

    Args:
        recorded: A message as LangChain or OpenAI has it.
        notes: Receives a sentence for every way in which text is no longer what it was.

    Raises:
        DialectError: It has no role.
    """
    fields = fields_of(recorded)
    told = fields.get("role") or fields.get("type")
    role = ROLES.get(told, told) if isinstance(told, str) else None
    if role is None:
        raise DialectError(f"a message has no role; its fields are {sorted(map(str, fields))!r:.200}")
    message = {key: value for key, value in fields.items() if key not in _OWN and value is not None}
    more = fields.get("additional_kwargs")
    more = more if isinstance(more, Mapping) else {}
    message |= {key: more[key] for key in ("refusal", "reasoning_content") if more.get(key) is not None}
    message["role"] = role
    message["content"] = _content(fields.get("content"), role, notes)
    calls = _tool_calls(fields, more, notes)
    message.pop("tool_calls", None)
    if calls:
        message["tool_calls"] = calls
        message["content"] = _without_calls(message["content"])
    if role == "tool":
        message.pop("name", None)  # which no chat API takes
    return message


def openai_messages(recorded: Any, notes: list[str]) -> list[dict[str, Any]]:
    """Messages in OpenAI's form; a list of one such list is taken for it.

    Raises:
        DialectError: It is no list of messages, or of several prompts at once.
    """
    if not isinstance(recorded, list):
        raise DialectError(f"messages are {type(recorded).__name__}; expected a list")
    if recorded and all(isinstance(batch, list) for batch in recorded):
        if len(recorded) > 1:
            raise DialectError(f"{len(recorded)} prompts in one call; expected one")
        recorded = recorded[0]
    return [openai_message(message, notes) for message in recorded]


def _content(content: Any, role: str, notes: list[str]) -> Any:
    if content is None or isinstance(content, (str, list)):
        return content
    if RESULTS_RESERIALISED not in notes and role == "tool":
        notes.append(RESULTS_RESERIALISED)
    return json.dumps(content, ensure_ascii=False) if role == "tool" else [content]


def _without_calls(content: Any) -> Any:
    """Content without Anthropic's blocks that say what `tool_calls` says."""
    if not isinstance(content, list):
        return content
    return [part for part in content if not (isinstance(part, Mapping) and part.get("type") == "tool_use")]


def _tool_calls(fields: Mapping[str, Any], more: Mapping[str, Any], notes: list[str]) -> list[Any]:
    calls, raw = _list(fields.get("tool_calls")), _list(more.get("tool_calls"))
    broken = _list(fields.get("invalid_tool_calls"))
    if raw and len(raw) == len(calls) + len(broken):
        return raw
    return [_tool_call(call, notes) for call in [*calls, *broken]]


def _tool_call(call: Any, notes: list[str]) -> Any:
    if not isinstance(call, Mapping) or "args" not in call:
        return call
    arguments = call["args"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments if arguments is not None else {}, ensure_ascii=False)
        if ARGUMENTS_RESERIALISED not in notes:
            notes.append(ARGUMENTS_RESERIALISED)
    function = {"name": call.get("name"), "arguments": arguments}
    return {"id": call.get("id"), "type": "function", "function": function}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
