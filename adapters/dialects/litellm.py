"""Dialect: LiteLLM's OpenTelemetry callback.

Writes two spans of equal times for a call: `litellm_request`, in words of the OTel GenAI conventions, and
below it the exchange as it was on the wire, as Python `repr`, which has anything in it for asynchronous calls
only. The second is read as a part of the first: it alone has token ids and the ids of a reply's tool calls.

On the first, tool calls and the ids that results belong to stand beside the parts of a message; those of the
reply are in `gen_ai.completion.K.function_call.*` without ids, where K numbers tool calls and not choices.
"""

import ast
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from spangrad.adapters.dialects.decoding import Decoder
from spangrad.adapters.dialects.dialect import Dialect
from spangrad.adapters.dialects.otel_genai import CALL_OPERATIONS, read_as
from spangrad.adapters.exchanges import read_exchange
from spangrad.adapters.messages import REASONING_HIDDEN
from spangrad.adapters.model_call import Purpose
from spangrad.adapters.reading import Reading, parsed, text
from spangrad.store.records import Span
from spangrad.tracer import conventions as c
from spangrad.tracer.wire.messages import content_part

DIALECT: Final = "litellm"
SCOPE: Final = "litellm"
CALL_ID: Final = "litellm.call_id"
CALL_TYPE: Final = "llm.request.type"
CALL_NAME: Final = "litellm_request"
STREAMING: Final = "llm.is_streaming"
CACHE_HIT: Final = "litellm.cache_hit"
USAGE: Final = "metadata.usage_object"
CALL_TYPES: Final = frozenset({"completion", "responses", "anthropic_messages"}) | CALL_OPERATIONS
"""Of these, `a` before them and `embedding` are the calls; reranking, speech and so on are none."""
OTHER_CALLBACKS: Final = frozenset({"openinference.span.kind", "langfuse.observation.type"})
"""Attributes of LiteLLM's callbacks for other systems, which write those systems' words."""
RAW: Final = "llm."
_ONLY_RESPONSE: Final = frozenset(
    {"id", "object", "created", "choices", "usage", "system_fingerprint", "service_tier", "metrics"}
    | {"prompt_token_ids", "prompt_logprobs", "prompt_text", "kv_transfer_params", "ec_transfer_params"}
)
NO_TOOL_CALLS: Final = "tool calls of several choices are told as one choice's"
_NOT_LITERAL: Final = (ValueError, SyntaxError, MemoryError, RecursionError, TypeError)


def wrote(span: Span) -> bool:
    """Whether this callback wrote the span, or put what it knows on a span above its own."""
    if not OTHER_CALLBACKS.isdisjoint(span.attributes):
        return False
    return span.scope == SCOPE or CALL_ID in span.attributes or span.name == CALL_NAME


def is_call(span: Span) -> bool:
    """Whether the span tells of a call: either of the two spans, the second if it has the exchange."""
    kind = text(span.attributes, CALL_TYPE) or text(span.attributes, c.OPERATION_NAME)
    if kind is None:
        return span.name == CALL_NAME or _raw_choices(span) is not None
    return kind in CALL_TYPES or kind.removeprefix("a") in CALL_TYPES or _is_embedding(span)


def read(span: Span) -> Reading:
    """Read either of a call's two spans."""
    provider = None if CALL_ID in span.attributes else _raw_choices(span)
    if provider is not None:
        return _read_raw(span, provider)
    decoder = Decoder(span)
    told = {
        c.INPUT_MESSAGES: _messages(decoder.json(c.INPUT_MESSAGES)),
        c.OUTPUT_MESSAGES: _replies(span, decoder.json(c.OUTPUT_MESSAGES)),
        c.TOOL_DEFINITIONS: _tools(span.attributes),
    }
    attributes = {**span.attributes, **{name: value for name, value in told.items() if value is not None}}
    reading = read_as(DIALECT, replace(span, attributes=attributes))
    response_id = reading.response_id if reading.response_id != text(span.attributes, CALL_ID) else None
    faults = [NO_TOOL_CALLS] if _is_ambiguous(span, decoder.json(c.OUTPUT_MESSAGES)) else []
    return replace(
        reading,
        span=span,
        response_id=response_id,
        purpose=Purpose.EMBEDDING if _is_embedding(span) else reading.purpose,
        error=_error(span, reading),
        is_streamed=reading.is_streamed or str(span.attributes.get(STREAMING)) == "True",
        is_cached=reading.is_cached or span.attributes.get(CACHE_HIT) is True,
        notes=(*reading.notes, *_hidden_reasoning(span, reading)),
        faults=(*reading.faults, *faults),
    )


def _read_raw(span: Span, provider: str) -> Reading:
    """What went over the wire: the request's keys and the response's, under one prefix."""
    told: dict[str, Any] = {}
    faults: list[str] = []
    for name, value in span.attributes.items():
        if name.startswith(provider) and value != "":
            try:
                told[name.removeprefix(provider)] = _literal(value)
            except _NOT_LITERAL as error:
                faults.append(f"unreadable: {name} is no Python literal ({error!r:.100})")
    response = {key: told[key] for key in (*_ONLY_RESPONSE, "model") if key in told}
    request = {key: value for key, value in told.items() if key not in _ONLY_RESPONSE}
    reading = read_exchange(DIALECT, span, request, response)
    return replace(reading, is_part=True, keeps_tools=True, faults=(*faults, *reading.faults))


def _raw_choices(span: Span) -> str | None:
    """The prefix `llm.PROVIDER.` of an exchange in OpenAI's form; None if the span has none."""
    for name in span.attributes:
        if name.startswith(RAW) and name.endswith(".choices"):
            prefix = name.removesuffix("choices")
            if prefix + "messages" in span.attributes or prefix + "prompt" in span.attributes:
                return prefix
    return None


def _literal(value: Any) -> Any:
    """A list or dict out of its `repr`; everything else is as it was."""
    return ast.literal_eval(value) if isinstance(value, str) and value[:1] in ("[", "{") else value


def _messages(recorded: Any) -> list[Any] | None:
    """LiteLLM's messages as the conventions have them."""
    return [_message(message) for message in recorded] if isinstance(recorded, list) else None


def _message(message: Any) -> Any:
    if not isinstance(message, Mapping) or not isinstance(message.get("parts"), list):
        return message
    parts = [_part(part) for part in message["parts"]]
    rest = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id", "id")}
    if message.get("role") in ("tool", "function"):
        content = [_plain(part) for part in parts]
        result = content[0]["text"] if len(content) == 1 and content[0].get("type") == "text" else content
        parts = [{"type": "tool_call_response", "id": message.get("tool_call_id"), "response": result}]
    calls = message.get("tool_calls")
    return {
        **rest,
        "parts": [*parts, *(_tool_call(call) for call in calls)] if isinstance(calls, list) else parts,
    }


def _part(part: Any) -> Any:
    """LiteLLM keeps parts of OpenAI's form as they are."""
    is_openai = isinstance(part, Mapping) and "content" not in part and part.get("type") != "tool_call"
    return content_part(part) if is_openai else part


def _plain(part: Any) -> dict[str, Any]:
    if isinstance(part, Mapping) and part.get("type") == "text":
        return {"type": "text", "text": part.get("content")}
    return dict(part) if isinstance(part, Mapping) else {"type": "unknown", "content": part}


def _tool_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    return {
        "type": "tool_call",
        "id": call.get("id"),
        "name": function.get("name"),
        "arguments": function.get("arguments"),
    }


def _replies(span: Span, recorded: Any) -> list[Any] | None:
    """The replies, with the tool calls of the one that made some."""
    if not isinstance(recorded, list):
        return None
    replies = [_message(message) for message in recorded]
    calls = _called(span.attributes)
    makers = [index for index, message in enumerate(recorded) if _made_calls(message)]
    if calls and len(makers) == 1:
        maker = replies[makers[0]]
        texts = [part for part in maker["parts"] if part != {"type": "text", "content": ""}]
        replies[makers[0]] = {**maker, "parts": [*texts, *calls]}
    return replies


def _made_calls(message: Any) -> bool:
    is_message = isinstance(message, Mapping) and isinstance(message.get("parts"), list)
    return is_message and message.get("finish_reason") in ("tool_calls", "function_call")


def _is_ambiguous(span: Span, recorded: Any) -> bool:
    makers = sum(map(_made_calls, recorded)) if isinstance(recorded, list) else 0
    return makers > 1 or (makers == 0 and bool(_called(span.attributes)) and not _has_calls(recorded))


def _has_calls(recorded: Any) -> bool:
    """Whether a reply has its tool calls in itself, as those of the Responses API have."""
    messages = recorded if isinstance(recorded, list) else []
    parts = [message.get("parts") for message in messages if isinstance(message, Mapping)]
    return any(
        isinstance(part, Mapping) and part.get("type") == "tool_call"
        for some in parts
        if isinstance(some, list)
        for part in some
    )


def _called(attributes: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tool calls in `gen_ai.completion.K.function_call.*`; empty arguments are left out there."""
    calls: list[dict[str, Any]] = []
    while (prefix := f"gen_ai.completion.{len(calls)}.function_call.") + "name" in attributes:
        name, arguments = attributes[prefix + "name"], attributes.get(prefix + "arguments", "")
        calls.append({"type": "tool_call", "id": None, "name": name, "arguments": arguments})
    return calls


def _tools(attributes: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The definitions in `llm.request.functions.N.*`; a tool that is no function has none."""
    prefix = "llm.request.functions."
    numbers = {name.removeprefix(prefix).split(".")[0] for name in attributes if name.startswith(prefix)}
    tools = []
    for number in sorted((n for n in numbers if n.isascii() and n.isdigit()), key=int):
        keys = {
            key: attributes.get(f"{prefix}{number}.{key}") for key in ("name", "description", "parameters")
        }
        tools.append(
            {"type": "function", "function": {k: _decoded(k, v) for k, v in keys.items() if v != ""}}
        )
    return tools or None


def _decoded(key: str, value: Any) -> Any:
    return parsed(value) if key == "parameters" else value


def _hidden_reasoning(span: Span, reading: Reading) -> Sequence[str]:
    """LiteLLM leaves out what was thought; only the usage tells."""
    try:
        usage = _literal(span.attributes.get(USAGE))
    except _NOT_LITERAL:
        return ()
    details = usage.get("completion_tokens_details") if isinstance(usage, Mapping) else None
    count = details.get("reasoning_tokens") if isinstance(details, Mapping) else None
    if not isinstance(count, int) or count <= 0 or any("reasoning" in x.message for x in reading.choices):
        return ()
    return (f"{REASONING_HIDDEN}: the recorder left out {count} tokens",)


def _error(span: Span, reading: Reading) -> str | None:
    message = text(span.attributes, "error.message")
    if reading.error is None or message is None:
        return reading.error
    return f"{text(span.attributes, c.ERROR_TYPE) or 'error'}: {message}"


def _is_embedding(span: Span) -> bool:
    kind = span.attributes.get(CALL_TYPE) or span.attributes.get(c.OPERATION_NAME)
    return kind in ("embedding", "aembedding", "embeddings", "aembeddings")


LITELLM: Final = Dialect(DIALECT, wrote, is_call, read)
