"""OpenInference's flat attributes -> messages and tools of the OpenAI API.

`llm.input_messages.3.message.tool_calls.0.tool_call.function.name` and the like. Knows these names; it
does not know which recorder wrote them, nor what is in `input.value`.

Invariants:
* arguments stay the string that was recorded;
* the numbers of messages say whether some are missing; those of tool calls do not: one recorder counts them
  through the whole conversation.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

from spangrad.errors import DialectError

INPUT_MESSAGES: Final = "llm.input_messages."
OUTPUT_MESSAGES: Final = "llm.output_messages."
TOOLS: Final = "llm.tools."
MISSING: Final = "attributes are missing"
THOUGHTS: Final = ("reasoning", "thinking")

Fields = dict[str, Any]
"""What stands behind a number in attributes' names."""


def flat_messages(attributes: Mapping[str, Any], prefix: str) -> list[dict[str, Any]]:
    """The messages below a prefix, in OpenAI's form.

    Raises:
        DialectError: A message in the middle or at the beginning is not there, or has no role.
    """
    messages: list[dict[str, Any]] = []
    for index, fields in sorted(_numbered(attributes, prefix).items()):
        if index != len(messages):
            raise DialectError(f"{MISSING}: message {len(messages)}, though {prefix}{index} is there")
        messages.append(_message(_below(fields, "message."), f"{prefix}{index}"))
    return messages


def flat_tools(attributes: Mapping[str, Any]) -> list[Any]:
    """The tools' definitions.

    Raises:
        DialectError: A definition is missing or can't be parsed.
    """
    tools: list[Any] = []
    for index, fields in sorted(_numbered(attributes, TOOLS).items()):
        if index != len(tools):
            raise DialectError(f"{MISSING}: tool {len(tools)}, though {TOOLS}{index} is there")
        schema = fields.get("tool.json_schema")
        try:
            tools.append(json.loads(schema) if isinstance(schema, str) else schema)
        except (ValueError, RecursionError) as error:
            raise DialectError(f"unreadable: {TOOLS}{index} can't be parsed ({error})") from None
        if not isinstance(tools[-1], Mapping):
            raise DialectError(
                f"unreadable: {TOOLS}{index} is {type(tools[-1]).__name__}; expected an object"
            )
    return tools


def _message(fields: Fields, where: str) -> dict[str, Any]:
    role = fields.get("role")
    if not isinstance(role, str) or not role:
        raise DialectError(f"unreadable: {where} has no role")
    message: dict[str, Any] = {"role": role, "content": fields.get("content")}
    thoughts: list[str] = []
    parts: list[dict[str, Any]] = []
    for _, content in sorted(_numbered(fields, "contents.").items()):
        part = _below(content, "message_content.")
        if part.get("type") in THOUGHTS:
            thoughts.append(str(part.get("text") or ""))
        else:
            parts.append(_part(part))
    if parts and message["content"] is None:
        message["content"] = parts
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    calls = [_tool_call(_below(f, "tool_call.")) for _, f in sorted(_numbered(fields, "tool_calls.").items())]
    if calls:
        message["tool_calls"] = calls
    elif isinstance(fields.get("function_call_name"), str):
        arguments = fields.get("function_call_arguments_json")
        message["function_call"] = {"name": fields["function_call_name"], "arguments": arguments or ""}
    for key in ("name", "tool_call_id"):
        if isinstance(fields.get(key), str):
            message[key] = fields[key]
    if role == "tool" and message["content"] is None:
        message["content"] = ""
    return message


def _part(part: Fields) -> dict[str, Any]:
    url = part.get("image.image.url")
    if isinstance(part.get("text"), str) and part.get("type") in (None, "text", "input_text", "output_text"):
        return {"type": "text", "text": part["text"]}
    if isinstance(url, str):
        return {"type": "image_url", "image_url": {"url": url}}
    return {"type": str(part.get("type")), **{k: v for k, v in part.items() if k != "type"}}


def _tool_call(fields: Fields) -> dict[str, Any]:
    arguments = fields.get("function.arguments")
    function = {"name": fields.get("function.name"), "arguments": "{}" if arguments is None else arguments}
    return {"id": fields.get("id"), "type": "function", "function": function}


def _numbered(attributes: Mapping[str, Any], prefix: str) -> dict[int, Fields]:
    """`prefix` + `3.rest` -> {3: {"rest": ...}}."""
    found: dict[int, Fields] = {}
    for name, value in attributes.items():
        if name.startswith(prefix):
            number, _, rest = name[len(prefix) :].partition(".")
            if number.isdecimal():
                found.setdefault(int(number), {})[rest] = value
    return found


def _below(fields: Fields, prefix: str) -> Fields:
    return {name[len(prefix) :]: value for name, value in fields.items() if name.startswith(prefix)}
