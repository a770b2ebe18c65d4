"""Dialect: LangSmith's runs, as its OpenTelemetry exporter tells them; runs of its exports, too.

Knows LangSmith's attributes, what its wrappers put into inputs and outputs, and LangChain's results;
exchanges and LangChain's messages are read elsewhere.

Invariants:
* only runs of the kind `llm` are calls: prompts and retrievers have a call's operation name and are none;
* ids and logprobs are those of the response that the wrapper of OpenAI's client keeps whole;
* a reply that a traced function returned in one piece is whole, though nothing tells its finish reason;
* the environment that LangSmith copies into metadata says nothing of a call.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from spangrad.adapters.dialects.decoding import Decoder, finish_reason
from spangrad.adapters.dialects.dialect import Dialect, Names
from spangrad.adapters.exchanges import read_exchange
from spangrad.adapters.langchain import fields_of, openai_message, openai_messages
from spangrad.adapters.model_call import Purpose
from spangrad.adapters.reading import Reading, text
from spangrad.errors import DialectError
from spangrad.store.records import Span
from spangrad.tracer import conventions as c

NAME: Final = "langsmith"
SCOPE: Final = "langsmith"
KIND: Final = "langsmith.span.kind"
PROMPT: Final = "gen_ai.prompt"
COMPLETION: Final = "gen_ai.completion"
METADATA: Final = "langsmith.metadata."
STREAMING: Final = "langsmith.request.streaming"
INVOCATION: Final = "langsmith.invocation_params"
"""Where a run of an export keeps what LangChain asked; the exporter has it in the metadata only."""
NEW_TOKEN: Final = "new_token"
"""Event of a run that was streamed."""

LLM: Final = "llm"
EMBEDDING: Final = "embedding"
THREAD_KEYS: Final = ("thread_id", "conversation_id", "session_id")
"""Metadata that makes runs a thread, the narrowest first."""
_PARAMETERS: Final = (
    *("temperature", "top_p", "top_k", "max_tokens", "max_completion_tokens", "seed", "stop", "n"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "min_p", "logit_bias"),
    *("response_format", "tool_choice", "extra_body", "reasoning_effort"),
)
_TOLD_BY_LANGCHAIN: Final = {
    "temperature": "ls_temperature",
    "max_tokens": "ls_max_tokens",
    "stop": "ls_stop",
}
_NO_PARAMETERS: Final = frozenset({"messages", "prompts", "input", "instructions", "system", "functions"})
_RESULTS: Final = ("choices", "generations", "object", "stop_reason", "finish_reason")
"""Keys of outputs of which the finish reason is known, if there is one."""
_REPLY_KEYS: Final = frozenset({"content", "tool_calls", "role"})


def wrote(span: Span) -> bool:
    """Whether LangSmith's exporter wrote the span, or one of its exports has it as a run."""
    return span.scope == SCOPE or KIND in span.attributes


def is_call(span: Span) -> bool:
    """Whether the run asked a model."""
    return span.attributes.get(KIND) in (LLM, EMBEDDING)


def read(span: Span) -> Reading:
    """Read a run of a model."""
    attributes = span.attributes
    decoder = Decoder(span)
    inputs, outputs = decoder.json(PROMPT), decoder.json(COMPLETION)
    is_embedding = attributes.get(KIND) == EMBEDDING
    request = _request(inputs, decoder)
    response = None if is_embedding else _response(outputs, decoder)
    reading = read_exchange(NAME, span, request, response)
    error = _error(span)
    is_streamed = _is_streamed(span, inputs)
    told = names(span)
    return replace(
        reading,
        model=text(attributes, c.REQUEST_MODEL)
        or reading.model
        or text(attributes, f"{METADATA}ls_model_name"),
        response_id=reading.response_id or text(attributes, c.RESPONSE_ID),
        keeps_tools=isinstance(inputs, Mapping) and _is_of_client(inputs),
        usage=_usage(outputs, attributes) or reading.usage,
        choices=() if error is not None and not _says_something(reading) else reading.choices,
        is_streamed=is_streamed,
        is_whole=not is_streamed and _is_of_function(outputs),
        agent_name=told.agent,
        step_name=told.step,
        step_index=told.step_index,
        conversation_id=told.conversation,
        purpose=Purpose.EMBEDDING if is_embedding else reading.purpose,
        error=error,
        faults=(*decoder.faults, *reading.faults),
        notes=(*reading.notes, *decoder.notes),
    )


def names(span: Span) -> Names:
    """What a run's metadata names, for the calls below it."""
    attributes = span.attributes
    step = attributes.get(f"{METADATA}langgraph_step")
    return Names(
        agent=text(attributes, f"{METADATA}lc_agent_name"),
        step=text(attributes, f"{METADATA}langgraph_node"),
        step_index=step if isinstance(step, int) else None,
        conversation=thread_of(attributes, METADATA),
    )


def thread_of(metadata: Mapping[str, Any], prefix: str = "") -> str | None:
    """The thread that metadata names."""
    told = (text(metadata, prefix + key) for key in THREAD_KEYS)
    return next((name for name in told if name), None)


def _request(inputs: Any, decoder: Decoder) -> dict[str, Any]:
    """The request in OpenAI's form."""
    request = _parameters(decoder)
    if not isinstance(inputs, Mapping):
        return request
    told = inputs.get("messages")
    if _is_of_client(inputs):  # the arguments of a client's call, whole
        request |= {key: value for key, value in inputs.items() if key not in _NO_PARAMETERS}
        if "functions" in inputs:
            request.setdefault("tools", inputs["functions"])
    prompts = inputs.get("prompts")
    if told is not None:
        _put_messages(request, inputs, decoder)
    elif isinstance(prompts, list) and len(prompts) == 1:
        request["prompt"] = prompts[0]
    elif isinstance(inputs.get("input"), list):
        request |= {"input": inputs["input"], "instructions": inputs.get("instructions")}
    elif isinstance(given := inputs.get("input", inputs.get("prompt")), str):
        system = inputs.get("instructions")
        request["messages"] = [{"role": "system", "content": system}] if isinstance(system, str) else []
        request["messages"].append({"role": "user", "content": given})
    return request


def _is_of_client(inputs: Mapping[str, Any]) -> bool:
    return isinstance(inputs.get("model"), str)


def _is_of_function(outputs: Any) -> bool:
    """Whether the reply is what a function returned that the user traced: it has no finish reason."""
    return isinstance(outputs, Mapping) and outputs.keys().isdisjoint(_RESULTS)


def _says_something(reading: Reading) -> bool:
    return any(choice.message.get(key) for choice in reading.choices for key in ("content", "tool_calls"))


def _put_messages(request: dict[str, Any], inputs: Mapping[str, Any], decoder: Decoder) -> None:
    try:
        request["messages"] = openai_messages(inputs["messages"], decoder.notes)
    except DialectError as error:
        decoder.faults.append(f"unreadable: {PROMPT}: {error}")
        return
    if isinstance(system := inputs.get("system"), (str, list)):  # Anthropic's client
        request["messages"].insert(0, {"role": "system", "content": system})


def _parameters(decoder: Decoder) -> dict[str, Any]:
    """What LangChain asked beside the messages."""
    attributes = decoder.attributes
    told = decoder.json(INVOCATION)
    asked = {key: told[key] for key in _PARAMETERS if key in told} if isinstance(told, Mapping) else {}
    for key in _PARAMETERS:
        name = METADATA + key
        if key not in asked and name in attributes:
            value = attributes[name]
            is_json = isinstance(value, str) and value[:1] in ("{", "[")
            asked[key] = decoder.json(name) if is_json else value
    for key, name in _TOLD_BY_LANGCHAIN.items():
        if key not in asked and METADATA + name in attributes:
            asked[key] = attributes[METADATA + name]
    asked = {key: value for key, value in asked.items() if value is not None}
    if "max_completion_tokens" in asked:
        asked["max_tokens"] = asked.pop("max_completion_tokens")
    tools = decoder.json(c.TOOL_DEFINITIONS)
    if tools is None and isinstance(told, Mapping):
        tools = told.get("tools")
    if tools:
        asked["tools"] = tools
    return asked


def _response(outputs: Any, decoder: Decoder) -> dict[str, Any] | None:
    """The response in OpenAI's form."""
    if not isinstance(outputs, Mapping):
        return None
    if isinstance(outputs.get("choices"), list):
        return dict(outputs)
    if isinstance(outputs.get("output"), list) and outputs.get("object") == "response":
        return dict(outputs)
    try:
        if isinstance(outputs.get("generations"), list):
            return _result(outputs, decoder.notes)
        reply = _reply(outputs)
        if reply is None:
            return None
        end = outputs.get("stop_reason") or outputs.get("finish_reason")
        message = openai_message({"role": "assistant", **reply}, decoder.notes)
    except DialectError as error:
        decoder.faults.append(f"unreadable: {COMPLETION}: {error}")
        return None
    end = finish_reason(end) if isinstance(end, str) else None
    return {"id": outputs.get("id"), "choices": [{"index": 0, "finish_reason": end, "message": message}]}


def _reply(outputs: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The message in outputs of a function that the user traced."""
    told = outputs.get("output", outputs.get("message"))
    messages = outputs.get("messages")
    if isinstance(messages, list) and messages:
        told = messages[-1]
    if isinstance(told, str):
        return {"content": told}
    if isinstance(told, Mapping):
        return fields_of(told)
    return outputs if _REPLY_KEYS & outputs.keys() else None


def _result(outputs: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """LangChain's `LLMResult` as a response."""
    batches = outputs["generations"]
    batch = batches[0] if batches and isinstance(batches[0], list) else batches
    choices: list[dict[str, Any]] = []
    for index, generation in enumerate(batch):
        if not isinstance(generation, Mapping):
            raise DialectError(f"generation {index} is {type(generation).__name__}; expected an object")
        fields = fields_of(generation["message"]) if generation.get("message") is not None else {}
        told = _mapping(fields.get("response_metadata")) | _mapping(generation.get("generation_info"))
        end = told.get("finish_reason") or told.get("stop_reason")
        plain = {"role": "assistant", "content": generation.get("text")}
        message = openai_message(fields, notes) if fields else plain
        choices.append(
            {
                "index": index,
                "finish_reason": finish_reason(end) if isinstance(end, str) else None,
                "message": message,
            }
        )
    first = _first_fields(batch)
    told = _mapping(first.get("response_metadata")) | _mapping(outputs.get("llm_output"))
    return {"id": told.get("id"), "model": told.get("model_name"), "choices": choices}


def _first_fields(batch: list[Any]) -> Mapping[str, Any]:
    message = batch[0].get("message") if batch else None
    return fields_of(message) if isinstance(message, Mapping) else {}


def _mapping(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}


def _usage(outputs: Any, attributes: Mapping[str, Any]) -> dict[str, int]:
    told = _mapping(_usage_metadata(outputs))
    inner = _mapping(told.get("input_token_details"))
    counts: dict[str, Any] = {
        "input_tokens": told.get("input_tokens", attributes.get(c.INPUT_TOKENS)),
        "output_tokens": told.get("output_tokens", attributes.get(c.OUTPUT_TOKENS)),
        "cache_read_tokens": inner.get("cache_read"),
        "cache_creation_tokens": inner.get("cache_creation"),
        "reasoning_tokens": _mapping(told.get("output_token_details")).get("reasoning"),
    }
    return {
        key: value for key, value in counts.items() if isinstance(value, int) and not isinstance(value, bool)
    }


def _usage_metadata(outputs: Any) -> Any:
    outputs = _mapping(outputs)
    if "usage_metadata" in outputs:
        return outputs["usage_metadata"]
    batches = outputs.get("generations")
    batch = batches[0] if isinstance(batches, list) and batches else None
    generation = batch[0] if isinstance(batch, list) and batch else batch
    message = _mapping(generation).get("message")
    return fields_of(message).get("usage_metadata") if isinstance(message, Mapping) else None


def _is_streamed(span: Span, inputs: Any) -> bool:
    told = span.attributes.get(STREAMING) or _mapping(inputs).get("stream")
    return bool(told) or any(event.name == NEW_TOKEN for event in span.events)


def _error(span: Span) -> str | None:
    if span.status_code != 2:
        return None
    told = (event.attributes.get("exception.message") for event in span.events if event.name == "exception")
    message = span.status_message or next((text for text in told if isinstance(text, str)), "")
    return message.partition("Traceback (most recent call last)")[0].strip()[:500] or "error"


LANGSMITH: Final = Dialect(NAME, wrote, is_call, read, names)
