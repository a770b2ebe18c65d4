"""Dialect: OpenLLMetry (Traceloop) up to 0.4x, an attribute for every field of every message.

`gen_ai.prompt.N.*`, `gen_ai.completion.N.*` and `llm.request.functions.N.*`. Arguments
are the model's string. An SDK keeps 128 attributes of a span and drops the oldest
first, so that a long conversation loses its beginning: such a call is unusable, also
where the exporter does not tell how many were dropped.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from spangrad.adapters.dialects.decoding import Decoder, finish_reason
from spangrad.adapters.dialects.dialect import Dialect
from spangrad.adapters.dialects.openai_chat import chat_message, tool_call
from spangrad.adapters.dialects.openllmetry import OTHERS, with_names
from spangrad.adapters.dialects.otel_genai import is_call as is_conventions_call
from spangrad.adapters.dialects.otel_genai import read_as
from spangrad.adapters.messages import NO_CHAT_FORM
from spangrad.adapters.model_call import Choice, Purpose
from spangrad.adapters.reading import Reading, parsed, text, whole_number
from spangrad.adapters.scrubbing import scrubbed
from spangrad.errors import DialectError
from spangrad.store.records import Span
from spangrad.tracer import conventions as c

NAME: Final = "openllmetry_legacy"
PROMPT: Final = "gen_ai.prompt"
COMPLETION: Final = "gen_ai.completion"
FUNCTIONS: Final = "llm.request.functions"
REQUEST_TYPE: Final = "llm.request.type"
CALL_TYPES: Final = ("chat", "completion", "embedding")
ROLES: Final = {"human": "user", "ai": "assistant"}
_MARK: Final = re.compile(
    r"gen_ai\.(prompt|completion)\.\d+\.(role|content|user|finish_reason|tool_calls\..+)"
)
_SAMPLING: Final = {
    "frequency_penalty": "llm.frequency_penalty",
    "presence_penalty": "llm.presence_penalty",
    "top_k": "llm.top_k",
    "stop": "llm.chat.stop_sequences",
}
_USAGE: Final = {
    "input_tokens": "gen_ai.usage.prompt_tokens",
    "output_tokens": "gen_ai.usage.completion_tokens",
    "cache_read_tokens": "gen_ai.usage.cache_read_input_tokens",
    "cache_creation_tokens": "gen_ai.usage.cache_creation_input_tokens",
}

Table = Mapping[int, Mapping[str, Any]]
"""The flat attributes below one name: index -> rest of the name -> value."""


def wrote(span: Span) -> bool:
    """Whether a span is told in this dialect."""
    if span.scope.startswith(OTHERS) or c.INPUT_MESSAGES in span.attributes:
        return False
    return REQUEST_TYPE in span.attributes or any(map(_MARK.fullmatch, span.attributes))


def is_call(span: Span) -> bool:
    """Whether the span is a call; a name of the operation may have been dropped before its messages."""
    if REQUEST_TYPE in span.attributes:
        return span.attributes[REQUEST_TYPE] in CALL_TYPES
    return is_conventions_call(span) or any(map(_MARK.fullmatch, span.attributes))


def read(span: Span) -> Reading:
    """Read a call span of this dialect."""
    told, decoder = read_as(NAME, span), Decoder(span)
    attributes = span.attributes
    messages = _messages(_table(attributes, PROMPT), decoder)
    choices = _choices(_table(attributes, COMPLETION), decoder)
    counts = {key: whole_number(attributes, name) for key, name in _USAGE.items()}
    is_embedding = attributes.get(REQUEST_TYPE) == "embedding"
    reading = replace(
        told,
        messages=[] if is_embedding else messages,
        choices=choices or told.choices,
        tools=_tools(span, decoder) or told.tools,
        sampling={key: attributes[name] for key, name in _SAMPLING.items() if name in attributes}
        | dict(told.sampling),
        usage={key: count for key, count in counts.items() if count is not None} | dict(told.usage),
        purpose=Purpose.EMBEDDING if is_embedding else told.purpose,
        faults=(
            *told.faults,
            *decoder.faults,
            *scrubbed(messages, "message"),
            *scrubbed([choice.message for choice in choices], "choice"),
        ),
        notes=(*told.notes, *decoder.notes),
    )
    return with_names(reading)


def _table(attributes: Mapping[str, Any], name: str) -> Table:
    """What is below `name`, by index, in order of the index."""
    found: dict[int, dict[str, Any]] = {}
    for key, value in attributes.items():
        if not key.startswith(f"{name}."):
            continue
        index, _, rest = key[len(name) + 1 :].partition(".")
        if rest and len(index) <= 6 and index.isascii() and index.isdigit():
            found.setdefault(int(index), {})[rest] = value
    return dict(sorted(found.items()))


def _first_missing(table: Table) -> int | None:
    """The first index that is not there though a later one is."""
    return next((at for at, index in enumerate(table) if at != index), None)


def _messages(table: Table, decoder: Decoder) -> list[dict[str, Any]]:
    if (missing := _first_missing(table)) is not None:
        decoder.faults.append(
            f"messages are missing: {PROMPT}.{missing} is not on the span, {PROMPT}.{max(table)} is; "
            "raise OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT (128 by default)"
        )
    messages = []
    for index, fields in table.items():
        role = _role(
            fields, "assistant" if any(name.startswith("tool_calls.") for name in fields) else "user"
        )
        if "role" not in fields and "user" not in fields:
            decoder.faults.append(f"messages are missing: {PROMPT}.{index} has lost its role")
        if "user" in fields and "content" not in fields:  # a text completion's prompt
            decoder.notes.append(f"{NO_CHAT_FORM}: 'prompt of a text completion'")
            fields = {**fields, "content": fields["user"]}
        if (message := _message(f"{PROMPT}.{index}", fields, role, decoder)) is not None:
            messages.append(message)
    return messages


def _choices(table: Table, decoder: Decoder) -> list[Choice]:
    choices = []
    for index, fields in table.items():
        message = _message(f"{COMPLETION}.{index}", fields, "assistant", decoder)
        finish = fields.get("finish_reason")
        choices.append(
            Choice(
                message=message or {"role": "assistant", "content": None},
                finish_reason=finish_reason(finish) if isinstance(finish, str) else None,
            )
        )
    return choices


def _role(fields: Mapping[str, Any], otherwise: str) -> str:
    role = fields.get("role")
    return ROLES.get(role, role) if isinstance(role, str) and role not in ("", "unknown") else otherwise


def _message(where: str, fields: Mapping[str, Any], role: str, decoder: Decoder) -> dict[str, Any] | None:
    calls = _table(fields, "tool_calls")
    recorded = {
        "role": _role(fields, role),
        "content": _content(fields.get("content"), role),
        "tool_call_id": fields.get("tool_call_id"),
        "refusal": fields.get("refusal"),
    }
    if reasoning := text(fields, "reasoning"):
        recorded["reasoning"] = reasoning
    try:
        message = chat_message(recorded, role, decoder.notes)
        if calls:
            message["tool_calls"] = [tool_call(call, decoder.notes) for call in calls.values()]
    except DialectError as error:
        decoder.faults.append(f"unreadable: {where}: {error}")
        return None
    if (missing := _first_missing(calls)) is not None:
        decoder.faults.append(f"messages are missing: {where} has lost its tool call {missing}")
    return message


def _content(value: Any, role: str) -> Any:
    """A list of parts was written as JSON; a tool's result that looks like one is its text."""
    if role not in ("user", "system") or not isinstance(value, str) or not value.startswith("[{"):
        return value
    parts = parsed(value)
    if parts is value:
        return value
    known = ("text", "image_url", "input_audio", "file")
    is_content = all(isinstance(part, dict) and part.get("type") in known for part in parts)
    return parts if is_content else value


def _tools(span: Span, decoder: Decoder) -> Sequence[dict[str, Any]]:
    tools, table = [], _table(span.attributes, FUNCTIONS)
    for index, fields in table.items():
        if (name := text(fields, "name")) is None:
            decoder.faults.append(f"tools are missing: {FUNCTIONS}.{index} has lost its name")
            continue
        function: dict[str, Any] = {"name": name}
        if (description := text(fields, "description")) is not None:
            function["description"] = description
        parameters = Decoder(replace(span, attributes=fields))
        if (schema := parameters.json("parameters")) is not None:
            function["parameters"] = schema
        decoder.faults.extend(f"{fault} of {FUNCTIONS}.{index}" for fault in parameters.faults)
        tools.append({"type": "function", "function": function})
    if (missing := _first_missing(table)) is not None:
        decoder.faults.append(f"tools are missing: {FUNCTIONS}.{missing} is not on the span")
    return tools


OPENLLMETRY_LEGACY: Final = Dialect(NAME, wrote, is_call, read)
