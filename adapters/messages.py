"""OTel GenAI message parts -> OpenAI chat messages.

Knows the two shapes and what is lost between them. Does not know spans, tokens or
chat templates.

Invariants:
* a string stays the string that was recorded: tool-call arguments are never parsed
  and dumped again when they came as text;
* whatever had to be serialised again, and whatever has no chat form and stays as it
  was, is said in `notes`: nothing is left out in silence.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from spangrad.errors import DialectError

ARGUMENTS_RESERIALISED: Final = "arguments were re-serialised"
RESULTS_RESERIALISED: Final = "tool results were re-serialised"
NO_CHAT_FORM: Final = "a part has no chat form"
"""Beginning of a note: a chat template can't render this message."""
REASONING_HIDDEN: Final = "what was thought is not known"
HIDDEN_REASONING: Final = {
    "reasoning_summary": "the server gave a summary",
    "reasoning_encrypted": "the server gave it encrypted",
}
"""Types of parts that stand for reasoning and are left out of a chat message."""
REASONING_TYPES: Final = ("reasoning", "thinking")
PLACED: Final = frozenset({"role", "parts", "name", "finish_reason"})
"""Keys of a recorded message that have a place; others stay on the message."""


def chat_messages(recorded: Any, notes: list[str]) -> list[dict[str, Any]]:
    """Turn OTel messages (`[{"role", "parts"}]`) into OpenAI chat messages.

    Args:
        recorded: The decoded attribute.
        notes: Receives a sentence for every way in which text is no longer what it was.

    Raises:
        DialectError: A message has another shape.
    """
    if not isinstance(recorded, Sequence) or isinstance(recorded, (str, bytes)):
        raise DialectError(f"messages are {type(recorded).__name__}; expected a list of messages with parts")
    chat: list[dict[str, Any]] = []
    for index, message in enumerate(recorded):
        role, parts = _role_and_parts(message, index)
        if (text := _only_text(parts, message)) is not None:
            chat.append({"role": role, "content": text})
            continue
        responses = [part for part in parts if part.get("type") == "tool_call_response"]
        rest = [part for part in parts if part.get("type") != "tool_call_response"]
        chat.extend(_tool_message(part, message, notes) for part in responses)
        if rest or not responses:
            chat.append(_plain_message(role, rest, message, notes))
    return chat


def system_messages(recorded: Any, notes: list[str]) -> list[dict[str, Any]]:
    """Turn `gen_ai.system_instructions` (parts, or a plain string) into a system message."""
    if isinstance(recorded, str):
        return [{"role": "system", "content": recorded}]
    return chat_messages([{"role": "system", "parts": recorded}], notes)


def chat_tools(recorded: Any) -> list[dict[str, Any]]:
    """Turn tool definitions, flat or wrapped, into OpenAI form."""
    if not isinstance(recorded, Sequence) or isinstance(recorded, (str, bytes)):
        raise DialectError(f"tool definitions are {type(recorded).__name__}; expected a list")
    tools: list[dict[str, Any]] = []
    for index, tool in enumerate(recorded):
        if not isinstance(tool, Mapping):
            raise DialectError(f"tool definition {index} is {type(tool).__name__}; expected an object")
        if "function" in tool:
            tools.append(dict(tool))
        else:
            flat = {key: value for key, value in tool.items() if key != "type"}
            tools.append({"type": tool.get("type", "function"), "function": flat})
    return tools


def _role_and_parts(message: Any, index: int) -> tuple[str, list[Mapping[str, Any]]]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise DialectError(f"message {index} has no role; expected an object with role and parts")
    parts = message.get("parts")
    if not isinstance(parts, Sequence) or isinstance(parts, (str, bytes)):
        raise DialectError(f"message {index} has no list of parts; expected `parts`")
    for part in parts:
        if not isinstance(part, Mapping):
            raise DialectError(
                f"message {index} has a part that is {type(part).__name__}; expected an object"
            )
    return message["role"], list(parts)


def _only_text(parts: Sequence[Mapping[str, Any]], message: Mapping[str, Any]) -> str | None:
    """The text of a message that has nothing else, as most have."""
    if len(parts) != 1 or parts[0].get("type") != "text" or message.get("name"):
        return None
    text = parts[0].get("content")
    return text if isinstance(text, str) and PLACED.issuperset(message) else None


def _plain_message(
    role: str, parts: Sequence[Mapping[str, Any]], message: Mapping[str, Any], notes: list[str]
) -> dict[str, Any]:
    contents: list[dict[str, Any]] = []
    reasoning: list[str] = []
    tool_calls: list[dict[str, Any]] = []
    refusal = None
    for part in parts:
        kind = part.get("type")
        if kind == "tool_call":
            tool_calls.append(_tool_call(part, notes))
        elif isinstance(kind, str) and kind in HIDDEN_REASONING:
            _note(notes, f"{REASONING_HIDDEN}: {HIDDEN_REASONING[kind]}")
        elif kind in REASONING_TYPES:
            reasoning.append(str(part.get("content") or ""))
        elif kind == "refusal":
            refusal = part.get("content")
        else:
            contents.append(_content(part, notes))
    chat: dict[str, Any] = {"role": role, "content": _join(contents, is_call=bool(tool_calls or refusal))}
    if reasoning:
        chat["reasoning"] = "".join(reasoning)
    if tool_calls:
        chat["tool_calls"] = tool_calls
    if refusal is not None:
        chat["refusal"] = refusal
    return chat | _unplaced(message)


def _unplaced(message: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in message.items() if key not in PLACED and value is not None}
    return kept | ({"name": message["name"]} if message.get("name") else {})


def _join(contents: list[dict[str, Any]], *, is_call: bool) -> str | list[dict[str, Any]] | None:
    if not contents:
        return None if is_call else ""
    if len(contents) == 1 and contents[0].get("type") == "text" and isinstance(contents[0].get("text"), str):
        text: str = contents[0]["text"]
        return text
    return contents


def _content(part: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    match part.get("type"):
        case "text" if isinstance(part.get("content"), str):
            return {"type": "text", "text": part["content"]}
        case "uri" if part.get("modality") == "image":
            return {"type": "image_url", "image_url": {"url": part.get("uri")}}
        case "blob" if part.get("modality") == "image" and isinstance(part.get("content"), str):
            url = f"data:{part.get('mime_type')};base64,{part.get('content')}"
            return {"type": "image_url", "image_url": {"url": url}}
        case kind:
            _note(notes, f"{NO_CHAT_FORM}: {kind!r}")
            return dict(part)


def _tool_call(part: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    arguments = part.get("arguments")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments if arguments is not None else {}, ensure_ascii=False)
        _note(notes, ARGUMENTS_RESERIALISED)
    return {
        "id": part.get("id"),
        "type": "function",
        "function": {"name": part.get("name"), "arguments": arguments},
    }


def _tool_message(part: Mapping[str, Any], message: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    content = part["response"] if "response" in part else part.get("result")
    if content is None:
        content = ""
    elif not isinstance(content, str) and not _is_text_list(content):
        content = json.dumps(content, ensure_ascii=False)
        _note(notes, RESULTS_RESERIALISED)
    return {"role": "tool", "content": content, "tool_call_id": part.get("id")} | _unplaced(message)


def _is_text_list(content: Any) -> bool:
    """OpenAI's list form of a tool result."""
    return isinstance(content, list) and all(
        isinstance(item, Mapping) and item.get("type") == "text" and isinstance(item.get("text"), str)
        for item in content
    )


def _note(notes: list[str], sentence: str) -> None:
    if sentence not in notes:
        notes.append(sentence)
