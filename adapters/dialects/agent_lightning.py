"""Dialect: Agent Lightning, as its exports are kept: spans of 0.3 (flat AgentOps attributes), events of 1.0.

`exports/agent_lightning.py` keeps a span of 0.3 as it was, but for its lists of ids, which are packed.
AgentOps tells tool calls of a reply in spans below it: where the reply's own span has none, its text is
not all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from spangrad.adapters.dialects.decoding import finish_reason
from spangrad.adapters.dialects.dialect import Dialect
from spangrad.adapters.dialects.otel_genai import read_as
from spangrad.adapters.model_call import Choice
from spangrad.adapters.reading import Reading, text, whole_number
from spangrad.store.records import Span
from spangrad.tracer import conventions as c

SCOPE_AGENT_LIGHTNING: Final = "spangrad.exports.agent_lightning"
TOOL_CALLS_ELSEWHERE: Final = "tool calls of the reply are in other spans"
_PROMPT: Final = "gen_ai.prompt"
_COMPLETION: Final = "gen_ai.completion"
_FUNCTIONS: Final = "gen_ai.request.functions"
_CALL_MARKS: Final = (c.OPERATION_NAME, "gen_ai.request.type")
_USAGE: Final = {
    "input_tokens": "gen_ai.usage.prompt_tokens",
    "output_tokens": "gen_ai.usage.completion_tokens",
}


def is_agent_lightning(span: Span) -> bool:
    """Whether a span was made of a row of Agent Lightning's."""
    return span.scope == SCOPE_AGENT_LIGHTNING


def is_call(span: Span) -> bool:
    """Whether such a span is a model call."""
    if any(span.attributes.get(mark) in ("chat", "completion", "text_completion") for mark in _CALL_MARKS):
        return True
    return c.SAMPLED_TOKEN_IDS in span.attributes or f"{_COMPLETION}.0.role" in span.attributes


def read(span: Span) -> Reading:
    """Read a call span of Agent Lightning's."""
    reading = read_as("agent_lightning", span)
    if c.OUTPUT_MESSAGES in span.attributes or c.INPUT_MESSAGES in span.attributes:
        return reading
    attributes = span.attributes
    replies = _nested(attributes, _COMPLETION)
    choices = [
        replace(_bare(reading, index), message=_message(reply), finish_reason=_finish(reply))
        for index, reply in enumerate(replies)
    ]
    losses = list(reading.text_losses)
    if any(each.finish_reason == "tool_calls" and not each.message.get("tool_calls") for each in choices):
        losses.append(TOOL_CALLS_ELSEWHERE)
    prompt = _nested(attributes, _PROMPT)
    faults = list(reading.faults)
    if not prompt and any(key.startswith(f"{_PROMPT}.") for key in attributes):
        faults.append("the first messages of the prompt are missing")
    usage = {key: whole_number(attributes, name) for key, name in _USAGE.items()}
    return replace(
        reading,
        messages=[_message(message) for message in prompt],
        tools=[_tool(function) for function in _nested(attributes, _FUNCTIONS)],
        choices=choices or reading.choices,
        usage=reading.usage or {key: count for key, count in usage.items() if count is not None},
        is_streamed=reading.is_streamed or attributes.get("gen_ai.request.streaming") is True,
        text_losses=tuple(losses),
        faults=tuple(faults),
    )


def _bare(reading: Reading, index: int) -> Choice:
    """The ids of a choice; AgentOps keeps those of the first."""
    return reading.choices[index] if index < len(reading.choices) else Choice(message={})


def _finish(reply: Mapping[str, Any]) -> str | None:
    return finish_reason(text(reply, "finish_reason"))


def _message(told: Mapping[str, Any]) -> dict[str, Any]:
    role = told.get("role")
    message: dict[str, Any] = {
        "role": role if isinstance(role, str) else "assistant",
        "content": told.get("content"),
    }
    if calls := _nested(told, "tool_calls"):
        message["tool_calls"] = [
            {
                "id": call.get("id"),
                "type": "function",
                "function": {"name": call.get("name"), "arguments": call.get("arguments")},
            }
            for call in calls
        ]
    if isinstance(told.get("tool_call_id"), str):
        message["tool_call_id"] = told["tool_call_id"]
    return message


def _tool(function: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": dict(function)}


def _nested(attributes: Mapping[str, Any], prefix: str) -> Sequence[dict[str, Any]]:
    """The objects at `<prefix>.0.`, `<prefix>.1.`, ... up to the first that is missing."""
    found: dict[int, dict[str, Any]] = {}
    for key, value in attributes.items():
        if key.startswith(f"{prefix}."):
            index, _, name = key[len(prefix) + 1 :].partition(".")
            if index.isascii() and index.isdigit() and len(index) < 6 and name:
                found.setdefault(int(index), {})[name] = value
    return [found[index] for index in range(len(found)) if index in found] if 0 in found else []


AGENT_LIGHTNING: Final = Dialect("agent_lightning", is_agent_lightning, is_call, read)
