"""Dialect: Langfuse's SDK, its wrapper of OpenAI's client and its LangChain handler; rows of exports, too.

Knows Langfuse's attributes; exchanges and LangChain's messages are read elsewhere.

Invariants:
* parameters that the wrapper makes up for what the request leaves out are left out again;
* tool definitions that the LangChain handler puts among the messages are tools, not messages;
* a reply that came in one piece is whole, though Langfuse keeps no finish reason of it; one that was
  streamed and has none was left early;
* text that begins as JSON of a message and does not parse was cut, and is no reply.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from spangrad.adapters.dialects.decoding import Decoder, finish_reason
from spangrad.adapters.dialects.dialect import Dialect, Names
from spangrad.adapters.exchanges import read_exchange
from spangrad.adapters.langchain import openai_messages
from spangrad.adapters.model_call import Choice, Purpose
from spangrad.adapters.reading import Reading, parsed, text
from spangrad.errors import DialectError
from spangrad.store.records import Span

NAME: Final = "langfuse"
TYPE: Final = "langfuse.observation.type"
INPUT: Final = "langfuse.observation.input"
OUTPUT: Final = "langfuse.observation.output"
MODEL: Final = "langfuse.observation.model.name"
PARAMETERS: Final = "langfuse.observation.model.parameters"
USAGE: Final = "langfuse.observation.usage_details"
LEVEL: Final = "langfuse.observation.level"
STATUS_MESSAGE: Final = "langfuse.observation.status_message"
COMPLETION_START: Final = "langfuse.observation.completion_start_time"
METADATA: Final = "langfuse.observation.metadata."
SESSION: Final = "session.id"

TRACE: Final = "trace"
TRACE_SPAN_ID: Final = b"\0\0\0trace".hex()
"""Id of the span that tells of a trace as a whole: exports have one, and it is above no other."""
GENERATION: Final = "generation"
EMBEDDING: Final = "embedding"
INVENTED: Final = {
    "temperature": 1,
    "max_tokens": "Infinity",
    "top_p": 1,
    "frequency_penalty": 0,
    "presence_penalty": 0,
}
"""What the wrapper of OpenAI's client writes for a parameter that the request leaves out."""
_RESPONSES_ITEMS: Final = frozenset(
    {"message", "reasoning", "function_call", "function_call_output", "custom_tool_call", "item_reference"}
)
_MESSAGE_KEYS: Final = frozenset({"content", "tool_calls", "function_call"})
_MEDIUM: Final = "@@@langfuseMedia:"
_CUT: Final = ('{"role"', '{"content"', '{"tool_calls"', '{"id"', '{"tools"', '{"messages"', "[{")
"""How JSON of messages begins, where text seldom does."""


def wrote(span: Span) -> bool:
    """Whether Langfuse's SDK wrote the span, or an export has it as an observation."""
    return span.scope.startswith("langfuse-sdk") or TYPE in span.attributes


def is_call(span: Span) -> bool:
    """Whether the observation is a generation or an embedding."""
    return span.attributes.get(TYPE) in (GENERATION, EMBEDDING)


def read(span: Span) -> Reading:
    """Read a generation."""
    attributes = span.attributes
    decoder = Decoder(span)
    request: dict[str, Any] = {"model": text(attributes, MODEL), **_parameters(decoder)}
    _put_input(request, decoder, attributes)
    is_embedding = attributes.get(TYPE) == EMBEDDING
    response = None if is_embedding else _response(request, decoder, attributes)
    reading = read_exchange(NAME, span, request, response)
    usage = usage_of(decoder.json(USAGE))
    is_streamed = COMPLETION_START in attributes
    choices, is_whole = _ended(reading, metadata(attributes, "finish_reason"), usage, is_streamed=is_streamed)
    told = names(span)
    return replace(
        reading,
        choices=choices,
        usage=usage or reading.usage,
        is_streamed=is_streamed,
        is_whole=is_whole,
        agent_name=told.agent,
        step_name=told.step,
        step_index=told.step_index,
        conversation_id=told.conversation,
        purpose=Purpose.EMBEDDING if is_embedding else reading.purpose,
        error=_error(span),
        text_losses=(*reading.text_losses, *_media(attributes)),
        faults=(*decoder.faults, *reading.faults),
        notes=(*reading.notes, *decoder.notes),
    )


def names(span: Span) -> Names:
    """What an observation names for the calls below it: an agent its own name."""
    attributes = span.attributes
    step = metadata(attributes, "langgraph_step")
    is_agent = attributes.get(TYPE) == "agent"
    return Names(
        agent=span.name if is_agent else _name(attributes, "lc_agent_name"),
        step=_name(attributes, "langgraph_node"),
        step_index=step if isinstance(step, int) else None,
        conversation=_conversation(attributes),
    )


def metadata(attributes: Mapping[str, Any], key: str) -> Any:
    """An entry of the observation's metadata, which the SDK writes as JSON, even texts."""
    return parsed(attributes.get(METADATA + key))


def usage_of(told: Any) -> dict[str, int]:
    """Token counts by spangrad's names.

    Langfuse's own names count without what it counts apart (`input` without `input_cache_read`); OpenAI's
    count with it. Where a total is told, it decides.
    """
    counts = _flat(told)
    found: dict[str, int | None] = {
        "cache_read_tokens": _one_of(
            counts, "input_cache_read", "input_cached_tokens", "cached_tokens", "cache_read_input_tokens"
        ),
        "reasoning_tokens": _one_of(
            counts, "output_reasoning", "output_reasoning_tokens", "reasoning_tokens"
        ),
    }
    if "input" in counts or "output" in counts:
        apart = {
            side: sum(count for key, count in counts.items() if key.startswith(f"{side}_"))
            for side in ("input", "output")
        }
        plain = sum(counts.get(side, 0) for side in apart)
        is_whole = counts.get("total") == plain
        for side, more in apart.items():
            if side in counts:
                found[f"{side}_tokens"] = counts[side] + (0 if is_whole else more)
    else:
        found["input_tokens"] = _one_of(counts, "prompt_tokens", "input_tokens")
        found["output_tokens"] = _one_of(counts, "completion_tokens", "output_tokens")
    return {key: count for key, count in found.items() if count is not None}


def _flat(told: Any) -> dict[str, int]:
    """Counts by name, those of nested objects by their own name."""
    counts: dict[str, int] = {}
    for key, value in told.items() if isinstance(told, Mapping) else ():
        inner = value if isinstance(value, Mapping) else {key: value}
        for name, count in inner.items():
            if isinstance(count, (int, float)) and not isinstance(count, bool) and count == count // 1:
                counts[str(name)] = int(count)
    return counts


def _one_of(counts: Mapping[str, int], *names: str) -> int | None:
    return next((counts[name] for name in names if name in counts), None)


def _parameters(decoder: Decoder) -> dict[str, Any]:
    told = decoder.json(PARAMETERS)
    asked = dict(told) if isinstance(told, Mapping) else {}
    if INVENTED.keys() <= asked.keys():
        asked = {k: v for k, v in asked.items() if k not in INVENTED or v != INVENTED[k]}
    if "max_completion_tokens" in asked:
        asked.setdefault("max_tokens", asked.pop("max_completion_tokens"))
    return asked


def _put_input(request: dict[str, Any], decoder: Decoder, attributes: Mapping[str, Any]) -> None:
    """Put the observation's input into the request, in the form of the route that it was for."""
    told = _parsed(decoder, attributes, INPUT)
    if isinstance(told, Mapping) and isinstance(told.get("kwargs"), Mapping):
        told = told["kwargs"]  # of a function that is observed as a generation
    if isinstance(told, str):
        request["prompt"] = told
    elif isinstance(told, Mapping):
        tools = told.get("tools") or told.get("functions")
        if tools:
            request["tools"] = tools
        messages = told.get("messages") or told.get("input")
        _put_messages(request, messages, decoder)
    elif told is not None:
        _put_messages(request, told, decoder)


def _put_messages(request: dict[str, Any], told: Any, decoder: Decoder) -> None:
    if isinstance(told, str):
        request["prompt"] = told
    elif isinstance(told, list) and any(_is_item(message) for message in told):
        request["input"] = told
    elif told is not None:
        try:
            tools = [message["content"] for message in told if _is_definition(message)]
            rest = [message for message in told if not _is_definition(message)]
            request["messages"] = openai_messages(rest, decoder.notes)
        except (DialectError, TypeError) as error:
            decoder.faults.append(f"unreadable: {INPUT}: {error}")
            return
        if tools:
            request["tools"] = tools


def _is_item(value: Any) -> bool:
    """Whether something is an item of the Responses API, and not a message."""
    return isinstance(value, Mapping) and value.get("type") in _RESPONSES_ITEMS and "kwargs" not in value


def _is_definition(message: Any) -> bool:
    """Whether a message is a tool definition that the LangChain handler took for one."""
    if not isinstance(message, Mapping) or message.get("role") != "tool" or message.get("tool_call_id"):
        return False
    content = message.get("content")
    return isinstance(content, Mapping) and isinstance(content.get("function"), Mapping)


def _response(
    request: dict[str, Any], decoder: Decoder, attributes: Mapping[str, Any]
) -> dict[str, Any] | None:
    told = _parsed(decoder, attributes, OUTPUT)
    if told is None or told in ("", {}, []):
        return None
    items = told if isinstance(told, list) else [told]
    if isinstance(told, Mapping) and isinstance(told.get("choices"), list):
        return dict(told)
    if all(_is_item(item) for item in items):
        status = items[-1].get("status")
        request.setdefault("input", request.pop("messages", []))
        return {"object": "response", "output": items, "status": status}
    if all(isinstance(item, Mapping) and _MESSAGE_KEYS & item.keys() for item in items):
        try:
            replies = openai_messages([{"role": "assistant", **item} for item in items], decoder.notes)
        except DialectError as error:
            decoder.faults.append(f"unreadable: {OUTPUT}: {error}")
            return None
    else:
        raw = attributes[OUTPUT]
        content = raw if isinstance(raw, str) else json.dumps(raw, ensure_ascii=False, default=str)
        replies = [{"role": "assistant", "content": content}]
    if "input" in request and len(replies) == 1:
        return {"object": "response", "output": _items(replies[0])}
    return {"choices": [{"index": index, "message": reply} for index, reply in enumerate(replies)]}


def _items(reply: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A message as items of the Responses API, for a request that has such."""
    content = reply.get("content")
    parts = [{"type": "output_text", "text": content}] if isinstance(content, str) else content
    said = {"type": "message", "role": "assistant", "content": parts}
    calls = [call for call in reply.get("tool_calls") or () if isinstance(call, Mapping)]
    functions = [(call.get("id"), call.get("function")) for call in calls]
    made = [
        {"type": "function_call", "call_id": name, **(function if isinstance(function, Mapping) else {})}
        for name, function in functions
    ]
    return [said, *made] if content else made


def _parsed(decoder: Decoder, attributes: Mapping[str, Any], name: str) -> Any:
    """The attribute as JSON; as text, if it is none."""
    value = attributes.get(name)
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value[:1] in ("{", "[") or value == "null" else value
    except (ValueError, RecursionError) as error:
        if value.startswith(_CUT):
            decoder.faults.append(f"invalid JSON: {name} can't be parsed ({error})")
            return None
        return value


def _ended(
    reading: Reading, told: Any, usage: Mapping[str, int], *, is_streamed: bool
) -> tuple[tuple[Choice, ...], bool]:
    """The choices with what is known of their ends, and whether they are whole without a finish reason."""
    reason = finish_reason(told) if isinstance(told, str) else None
    if reason is None and not is_streamed and len(reading.choices) == 1 and _is_full(reading, usage):
        reason = "length"
    choices = tuple(replace(each, finish_reason=each.finish_reason or reason) for each in reading.choices)
    return choices, not is_streamed


def _is_full(reading: Reading, usage: Mapping[str, int]) -> bool:
    """Whether the reply has as many tokens as were allowed: nothing says that it came to its end."""
    limit = reading.sampling.get("max_tokens")
    count = usage.get("output_tokens")
    return isinstance(limit, int) and count is not None and count >= limit


def _media(attributes: Mapping[str, Any]) -> list[str]:
    """What is said where Langfuse put a reference in place of bytes."""
    count = sum(str(attributes.get(name, "")).count(_MEDIUM) for name in (INPUT, OUTPUT))
    return [f"bytes of images, sound or files are not kept: {count} of them"] if count else []


def _name(attributes: Mapping[str, Any], key: str) -> str | None:
    value = metadata(attributes, key)
    return value if isinstance(value, str) and value else None


def _conversation(attributes: Mapping[str, Any]) -> str | None:
    told = (_name(attributes, key) for key in ("langfuse_session_id", "thread_id"))
    return text(attributes, SESSION) or next((name for name in told if name), None)


def _error(span: Span) -> str | None:
    if span.attributes.get(LEVEL) != "ERROR" and span.status_code != 2:
        return None
    return text(span.attributes, STATUS_MESSAGE) or span.status_message or "error"


LANGFUSE: Final = Dialect(NAME, wrote, is_call, read, names, trace_span_id=TRACE_SPAN_ID)
