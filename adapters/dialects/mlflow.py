"""Dialect: MLflow's traces, as attributes of OTel spans.

Every attribute's value is JSON, also where it is a string. Knows the exchange that MLflow's OpenAI
integration keeps (`mlflow.spanInputs`, `mlflow.spanOutputs`) and what its LangChain callback makes of one.

Invariants:
* a stream is read from its chunks (`mlflow.chunk.item.N` events), ids and logprobs too. What MLflow adds
  them up to ends with `stop` and has no tool calls, whatever the stream had; so without all of its chunks
  there is no reply to trust.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from spangrad.adapters.dialects.decoding import finish_reason
from spangrad.adapters.dialects.dialect import Dialect
from spangrad.adapters.exchanges import assembled, read_exchange
from spangrad.adapters.messages import ARGUMENTS_RESERIALISED
from spangrad.adapters.model_call import Purpose
from spangrad.adapters.reading import Reading, parsed
from spangrad.store.records import Span

DIALECT: Final = "mlflow"
SPAN_TYPE: Final = "mlflow.spanType"
INPUTS: Final = "mlflow.spanInputs"
OUTPUTS: Final = "mlflow.spanOutputs"
FORMAT: Final = "mlflow.message.format"
MODEL: Final = "mlflow.llm.model"
TOOLS: Final = "mlflow.chat.tools"
USAGE: Final = "mlflow.chat.tokenUsage"
SESSION: Final = "mlflow.trace.session"
"""Metadata of a trace; an import of MLflow's dictionaries puts it on every span."""
METADATA: Final = "metadata"
"""LangChain's."""
PARAMETERS: Final = "invocation_params"
"""What LangChain asked for."""
CHUNK: Final = "mlflow.chunk.item."
CHUNK_VALUE: Final = "mlflow.chunk.value"
CHUNKS_MISSING: Final = "chunks of the stream are missing"
UNKNOWN_FORM: Final = "a form that is not read"
_CALLS: Final = frozenset({"CHAT_MODEL", "LLM", "EMBEDDING"})
MAX_DEPTH: Final = 8
"""How deep in a node's output a message is looked for."""
_USAGE: Final = {
    "input_tokens": "input_tokens",
    "output_tokens": "output_tokens",
    "cache_read_tokens": "cache_read_input_tokens",
    "cache_creation_tokens": "cache_creation_input_tokens",
}
_LANGCHAIN_ONLY: Final = frozenset({"_type", "model_name", "stream_usage"})


def wrote(span: Span) -> bool:
    """Whether MLflow wrote the span."""
    return SPAN_TYPE in span.attributes


def is_call(span: Span) -> bool:
    """Whether the span is of a type that calls a model."""
    kind = parsed(span.attributes.get(SPAN_TYPE))
    return isinstance(kind, str) and kind in _CALLS


def read(span: Span) -> Reading:
    """Read a call span of MLflow's."""
    told = _Told(span)
    inputs, outputs = told.json(INPUTS), told.json(OUTPUTS)
    metadata = told.json(METADATA)
    if told.json(FORMAT) == "langchain":
        reading = _read_langchain(span, told, inputs, outputs)
    else:
        reading = _read_openai(span, told, inputs, outputs)
    named = metadata if isinstance(metadata, Mapping) else {}
    step = named.get("langgraph_step")
    return replace(
        reading,
        model=reading.model or _text(told.json(MODEL)),
        usage=reading.usage or _usage(told.json(USAGE)),
        tools=reading.tools or _tools(told.json(TOOLS)),
        keeps_tools=told.json(FORMAT) != "langchain",
        purpose=Purpose.EMBEDDING if told.json(SPAN_TYPE) == "EMBEDDING" else reading.purpose,
        conversation_id=reading.conversation_id
        or _text(told.json(SESSION))
        or _text(named.get("session_id"))
        or _text(named.get("thread_id")),
        agent_name=reading.agent_name or _text(named.get("lc_agent_name")),
        step_name=reading.step_name or _text(named.get("langgraph_node")),
        step_index=reading.step_index if reading.step_index is not None else _number(step),
        error=_error(span),
        faults=(*told.faults, *reading.faults),
    )


def with_parent(reading: Reading, parent: Span) -> Reading:
    """LangChain's finish reason and response id: they are on the message that the node above gave back."""
    outputs = parsed(parent.attributes.get(OUTPUTS))
    if len(reading.choices) != 1 or reading.choices[0].finish_reason is not None:
        return reading
    reply = reading.choices[0].message
    same = [m for m in _given_back(outputs) if _key(m.get("content"), m) == _key(reply.get("content"), reply)]
    told = same[0].get("response_metadata") if len(same) == 1 else None
    if not isinstance(told, Mapping):
        return reading
    choice = replace(reading.choices[0], finish_reason=finish_reason(_text(told.get("finish_reason"))))
    return replace(reading, choices=(choice,), response_id=reading.response_id or _text(told.get("id")))


def _given_back(outputs: Any, depth: int = 0) -> Iterator[Mapping[str, Any]]:
    """LangChain's messages of the assistant in a node's output."""
    if depth > MAX_DEPTH:
        return
    if isinstance(outputs, Mapping):
        if outputs.get("type") in ("ai", "AIMessageChunk"):
            yield outputs
        else:
            for value in outputs.values():
                yield from _given_back(value, depth + 1)
    elif isinstance(outputs, list):
        for value in outputs:
            yield from _given_back(value, depth + 1)


def _key(content: Any, message: Mapping[str, Any]) -> Any:
    calls = _listed(message.get("tool_calls"))
    return content or None, [call.get("id") for call in calls if isinstance(call, Mapping)]


def _read_openai(span: Span, told: "_Told", inputs: Any, outputs: Any) -> Reading:
    request = inputs if isinstance(inputs, Mapping) else {}
    response = outputs if isinstance(outputs, Mapping) else None
    if request.get("stream") is True and response is not None:
        return _read_stream(span, request, response)
    reading = read_exchange(DIALECT, span, request, response)
    is_known = request.keys() & {"messages", "input", "prompt"} and (
        response is None or response.keys() & {"choices", "output", "data"}
    )
    if is_known or span.status_code == 2 or told.faults:
        return reading
    form = _text(told.json(FORMAT)) or "none that MLflow names"
    return replace(reading, faults=(*reading.faults, f"{UNKNOWN_FORM}: {form}"))


def _read_stream(span: Span, request: Mapping[str, Any], response: Mapping[str, Any]) -> Reading:
    chunks = _chunks(span)
    count = request.get("n")
    is_chat = all("choices" in chunk for chunk in chunks or ())
    whole = assembled(chunks, count if isinstance(count, int) else 1) if chunks and is_chat else None
    if whole is None:
        is_responses = response.get("object") == "response"
        reading = read_exchange(DIALECT, span, request, response)
        faults = () if is_responses else (f"{CHUNKS_MISSING}: without them the reply is not known",)
        return replace(reading, is_streamed=True, faults=(*reading.faults, *faults))
    return read_exchange(DIALECT, span, request, whole.body, is_stream_complete=whole.is_complete)


def _chunks(span: Span) -> list[Mapping[str, Any]] | None:
    """The chunks of a stream in their order; None if one is not there or can't be read."""
    by_number: dict[int, Mapping[str, Any]] = {}
    for event in span.events:
        number = event.name.removeprefix(CHUNK)
        if number != event.name and number.isascii() and number.isdigit():
            value = parsed(event.attributes.get(CHUNK_VALUE))
            if not isinstance(value, Mapping):
                return None
            by_number[int(number)] = value
    chunks = [by_number[number] for number in sorted(by_number)]
    is_whole = bool(chunks) and max(by_number) == len(chunks) - 1 and span.dropped_events == 0
    return chunks if is_whole else None


def _read_langchain(span: Span, told: "_Told", inputs: Any, outputs: Any) -> Reading:
    """What MLflow's callback makes of LangChain's messages: OpenAI's form, with every key that there is."""
    parameters = told.json(PARAMETERS)
    asked = parameters if isinstance(parameters, Mapping) else {}
    given = inputs if isinstance(inputs, Mapping) else {}
    request = {
        **{key: value for key, value in asked.items() if key not in _LANGCHAIN_ONLY},
        "messages": [_without_nulls(message) for message in _listed(given.get("messages"))],
    }
    if "model" not in request and isinstance(asked.get("model_name"), str):
        request["model"] = asked["model_name"]
    replies = [choice for choice in _listed(outputs.get("choices") if isinstance(outputs, Mapping) else None)]
    choices = [
        {**choice, "index": index, "message": _without_nulls(choice.get("message"))}
        for index, choice in enumerate(replies)
        if isinstance(choice, Mapping)
    ]
    reading = read_exchange(DIALECT, span, request, {"choices": choices} if choices else None)
    messages = (*reading.messages, *(choice.message for choice in reading.choices))
    dumped = [ARGUMENTS_RESERIALISED] if any(message.get("tool_calls") for message in messages) else []
    is_streamed = reading.is_streamed or asked.get("stream") is True
    return replace(reading, is_streamed=is_streamed, notes=(*reading.notes, *dumped))


def _without_nulls(message: Any) -> Any:
    if not isinstance(message, Mapping):
        return message
    return {key: value for key, value in message.items() if value is not None or key == "content"}


def _error(span: Span) -> str | None:
    """MLflow leaves the status' message empty and tells of the exception in an event."""
    if span.status_code != 2:
        return None
    for event in span.events:
        if event.name == "exception":
            told = (event.attributes.get("exception.type"), event.attributes.get("exception.message"))
            if any(told):
                return ": ".join(str(part) for part in told if part)
    return span.status_message or "error"


@dataclass(slots=True)
class _Told:
    """Attributes of a span, their JSON undone once."""

    span: Span
    faults: list[str]

    def __init__(self, span: Span) -> None:
        self.span = span
        self.faults = []

    def json(self, name: str) -> Any:
        """The value; what is said in the call's own attributes and is no JSON is a fault."""
        value = self.span.attributes.get(name)
        decoded = parsed(value)
        if decoded is value and isinstance(value, str) and value[:1] in ("{", "[", '"'):
            fault = f"invalid JSON: {name} can't be parsed"
            if name in (INPUTS, OUTPUTS) and fault not in self.faults:
                self.faults.append(fault)
            return None
        return decoded


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()


def _usage(value: Any) -> dict[str, int]:
    told = value if isinstance(value, Mapping) else {}
    counts = {key: _number(told.get(name)) for key, name in _USAGE.items()}
    return {key: count for key, count in counts.items() if count is not None}


def _tools(value: Any) -> Sequence[Mapping[str, Any]]:
    return [tool for tool in _listed(value) if isinstance(tool, Mapping)]


MLFLOW: Final = Dialect(DIALECT, wrote, is_call, read, with_parent=with_parent)
