"""Dialect: OpenInference (Phoenix, Arize): recorders of OpenAI, LangChain, LiteLLM, OpenAI Agents and others.

Content is told twice: as flat attributes, and as JSON in `input.value` and `output.value`. That JSON is the
request and the response themselves from some recorders (openai, with token ids), a framework's own form from
others. What is the API's own form is taken; the flat attributes give the rest.

Invariants:
* a span that is broken becomes a reading with a fault, never an exception;
* ids and logprobs are copied out of the response, never made up.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

from spangrad.adapters.dialects.decoding import Decoder, finish_reason
from spangrad.adapters.dialects.dialect import Dialect, Names
from spangrad.adapters.dialects.openinference_messages import (
    INPUT_MESSAGES,
    OUTPUT_MESSAGES,
    flat_messages,
    flat_tools,
)
from spangrad.adapters.dialects.otel_genai import read_as
from spangrad.adapters.exchanges import read_exchange
from spangrad.adapters.messages import ARGUMENTS_RESERIALISED
from spangrad.adapters.reading import Reading, text, whole_number
from spangrad.errors import DialectError
from spangrad.store.records import Span
from spangrad.tracer import conventions as c

T = TypeVar("T")

NAME: Final = "openinference"
SCOPE: Final = "openinference."
SCOPE_OPENAI: Final = "openinference.instrumentation.openai"
SCOPE_LANGCHAIN: Final = "openinference.instrumentation.langchain"
SCOPE_AGENTS: Final = "openinference.instrumentation.openai_agents"
SCOPE_LITELLM: Final = "openinference.instrumentation.litellm"
KIND: Final = "openinference.span.kind"
INPUT: Final = "input.value"
OUTPUT: Final = "output.value"
PARAMETERS: Final = "llm.invocation_parameters"
METADATA: Final = "metadata"
FINISH: Final = "llm.finish_reason"
MODEL: Final = "llm.model_name"
FIRST_TOKEN: Final = "First Token Stream Event"
REDACTED: Final = "__REDACTED__"
NO_TOOLS: Final = "the recorder leaves out tool definitions"
NO_EXTRA: Final = "the recorder leaves out extra_body"
FRAMEWORK_PARAMETERS: Final = (
    *("_type", "model_name", "stream", "stream_options", "base_url", "api_base", "api_version"),
    *("timeout", "num_retries", "max_retries", "custom_llm_provider", "metadata"),
)
"""In `llm.invocation_parameters`, and no sampling parameters."""
CONTENT_VALUES: Final = (INPUT, OUTPUT, PARAMETERS)
CONTENT_PREFIXES: Final = (INPUT_MESSAGES, OUTPUT_MESSAGES, "llm.prompts", "llm.choices", "llm.tools.")


def wrote(span: Span) -> bool:
    """Whether a recorder of OpenInference wrote the span, or another in its words."""
    return span.scope.startswith(SCOPE) or KIND in span.attributes


def is_call(span: Span) -> bool:
    """Whether the span is a call to a model; those that make embeddings are."""
    return span.attributes.get(KIND) in ("LLM", "EMBEDDING")


def names(span: Span) -> Names:
    """Agent, LangGraph node and session that a span names, a call's or one above it."""
    metadata = Decoder(span).json(METADATA)
    known = metadata if isinstance(metadata, Mapping) else {}
    sessions = (text(known, key) for key in ("session_id", "thread_id", "conversation_id"))
    return Names(
        agent=text(span.attributes, "agent.name") or text(known, "lc_agent_name"),
        step=text(known, "langgraph_node"),
        step_index=whole_number(known, "langgraph_step"),
        conversation=text(span.attributes, "session.id") or next(filter(None, sessions), None),
    )


def read(span: Span) -> Reading:
    """Read a call span."""
    told = names(span)
    reading = _embedding(span) if span.attributes.get(KIND) == "EMBEDDING" else _call(span)
    return replace(
        reading,
        agent_name=reading.agent_name or told.agent,
        step_name=reading.step_name or told.step,
        step_index=told.step_index if reading.step_index is None else reading.step_index,
        conversation_id=reading.conversation_id or told.conversation,
        error=_error(span),
        redacted=(*reading.redacted, *_redacted(span.attributes)),
    )


def _embedding(span: Span) -> Reading:
    model = text(span.attributes, "embedding.model_name") or text(span.attributes, MODEL)
    told = {c.OPERATION_NAME: "embeddings", **({c.REQUEST_MODEL: model} if model else {})}
    return replace(read_as(NAME, replace(span, attributes=told)), span=span)


def _call(span: Span) -> Reading:
    account = _Account(span)
    request, response = account.request(), account.response()
    choices = response.get("choices") if response else None
    ends = [isinstance(x, Mapping) and bool(x.get("finish_reason")) for x in _listed(choices)]
    is_streamed = account.is_streamed and span.status_code != 2 and not (response or {}).get("output")
    is_complete = bool(ends) and all(ends) if is_streamed else None
    if response and "messages" in request and "choices" not in response:  # a framework's own form of a reply
        reply = read_exchange(NAME, span, {"input": ""}, response)
        reading = read_exchange(NAME, span, request, None)
        reading = replace(reading, choices=reply.choices, faults=(*reading.faults, *reply.faults))
    else:
        reading = read_exchange(NAME, span, request, response, is_stream_complete=is_complete)
    calls_tools = any(message.get("tool_calls") for message in (*reading.messages, *_replies(reading)))
    notes = [ARGUMENTS_RESERIALISED] if span.scope == SCOPE_LANGCHAIN and calls_tools else []
    losses = [NO_TOOLS] if span.scope == SCOPE_AGENTS and not reading.tools else []
    return replace(
        reading,
        model=reading.model or text(span.attributes, MODEL),
        response_id=account.response_id(),
        keeps_tools=account.is_whole_request,
        usage=reading.usage or _usage(span.attributes),
        is_streamed=account.is_streamed,
        unknown_defaults=NO_EXTRA if span.scope == SCOPE_OPENAI else reading.unknown_defaults,
        faults=(*account.faults, *reading.faults),
        notes=tuple(dict.fromkeys((*reading.notes, *notes))),
        text_losses=(*reading.text_losses, *losses),
    )


class _Account:
    """What one span tells, brought into the form of a request and a response."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self._attributes = span.attributes
        self._decoder = Decoder(span)
        self._input = self._json(INPUT)
        self._output = self._json(OUTPUT)
        parameters = self._decoder.json(PARAMETERS) if not _is_hidden(span.attributes, PARAMETERS) else None
        self._parameters = dict(parameters) if isinstance(parameters, Mapping) else {}
        self.is_streamed = (
            self._parameters.get("stream") is True
            or any(event.name == FIRST_TOKEN for event in span.events)
            or any(g.get("type") == "ChatGenerationChunk" for g in self._generations())
        )

    @property
    def faults(self) -> Sequence[str]:
        return self._decoder.faults

    @property
    def is_whole_request(self) -> bool:
        """Whether the request itself is told; LiteLLM's recorder tells its messages alone."""
        return self._span.scope == SCOPE_OPENAI and self._is_request()

    def request(self) -> dict[str, Any]:
        asked = {k: v for k, v in self._parameters.items() if k not in FRAMEWORK_PARAMETERS}
        if "model" not in asked and (model := text(self._attributes, MODEL)):
            asked["model"] = model
        if not asked.get("tools") and (tools := self._flat(flat_tools, self._attributes)):
            asked["tools"] = tools
        if self._is_request():
            return asked | {k: v for k, v in self._input.items() if k not in ("stream", "stream_options")}
        if _are_messages(self._input):
            return asked | {"messages": self._input}
        asked.pop("input", None)
        return (
            asked
            | {"messages": self._flat(flat_messages, self._attributes, INPUT_MESSAGES) or []}
            | self._previous()
        )

    def response(self) -> dict[str, Any] | None:
        output = self._output
        if isinstance(output, Mapping):
            if _listed(output.get("choices")):
                return dict(output)
            if output.get("object") == "response" and self._is_request() and "input" in self._input:
                return dict(output)
        messages = self._flat(flat_messages, self._attributes, OUTPUT_MESSAGES)
        first = _mapping(next(iter(_listed(output)), None))
        if not messages and first.get("object") == "response":  # OpenAI Agents, streamed
            return dict(first)
        if not messages or self._span.status_code == 2:
            return None
        choices: list[dict[str, Any]] = [{"index": i, "message": m} for i, m in enumerate(messages)]
        of_first = self._span.scope == SCOPE_LITELLM  # others tell the last choice's
        choices[0 if of_first else -1]["finish_reason"] = text(self._attributes, FINISH) or self._status(
            messages[-1]
        )
        for choice, generation in zip(choices, self._generations(), strict=False):
            info = _mapping(generation.get("generation_info"))
            choice["logprobs"] = info.get("logprobs")
            choice["finish_reason"] = text(info, "finish_reason") or choice.get("finish_reason")
        return {"choices": choices, "model": self._attributes.get(MODEL)}

    def response_id(self) -> str | None:
        output = self._output
        if isinstance(output, Mapping) and "generations" in output:
            first = next(iter(self._generations()), {})
            kwargs = _mapping(_mapping(first.get("message")).get("kwargs"))
            told = (output.get("llm_output"), kwargs.get("response_metadata"))
            return next((found for each in told if (found := text(_mapping(each), "id"))), None)
        if isinstance(output, Mapping):
            return text(output, "id")
        for response in _listed(output):  # OpenAI Agents
            for item in (response, *_listed(_mapping(response).get("output"))):
                if found := text(_mapping(_mapping(item).get("provider_data")), "response_id"):
                    return found
        return None

    def _json(self, name: str) -> Any:
        """The attribute parsed, if it is meant to be JSON."""
        is_json = self._attributes.get(name.replace(".value", ".mime_type")) == "application/json"
        value = self._attributes.get(name)
        looks = isinstance(value, str) and value[:1] in ("{", "[")
        if (not is_json and not looks) or _is_hidden(self._attributes, name):
            return None
        return self._decoder.json(name) if is_json else Decoder(self._span).json(name)

    def _flat(self, reader: Callable[..., T], *arguments: Any) -> T | None:
        try:
            return reader(*arguments)
        except DialectError as error:
            self._decoder.faults.append(str(error))
            return None

    def _is_request(self) -> bool:
        """Whether `input.value` is the request itself."""
        asked = self._input
        if not isinstance(asked, Mapping):
            return False
        if "messages" in asked:
            return _are_messages(asked["messages"])
        return isinstance(asked.get("model"), str) and ("input" in asked or "prompt" in asked)

    def _generations(self) -> Sequence[Mapping[str, Any]]:
        """LangChain's results of the one prompt of a run."""
        batches = _listed(_mapping(self._output).get("generations"))
        return [each for each in _listed(batches[0] if batches else None) if isinstance(each, Mapping)]

    def _status(self, message: Mapping[str, Any]) -> str | None:
        """The finish reason of a response of the Responses API."""
        responses = [self._output] if isinstance(self._output, Mapping) else _listed(self._output)
        status = text(_mapping(responses[0] if responses else None), "status")
        if status == "completed" and message.get("tool_calls"):
            return "tool_calls"
        return finish_reason(status)

    def _previous(self) -> dict[str, Any]:
        previous = text(_mapping(self._output), "previous_response_id")
        return {"previous_response_id": previous} if previous else {}


def _replies(reading: Reading) -> list[Mapping[str, Any]]:
    return [choice.message for choice in reading.choices]


def _are_messages(value: Any) -> bool:
    return bool(_listed(value)) and all(
        isinstance(m, Mapping) and isinstance(m.get("role"), str) for m in value
    )


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()


def _is_hidden(attributes: Mapping[str, Any], name: str) -> bool:
    return attributes.get(name) == REDACTED


def _redacted(attributes: Mapping[str, Any]) -> list[str]:
    """Where the recorder was told to hide text, each family of attributes once."""
    hidden = (
        name
        for name, value in attributes.items()
        if value == REDACTED and (name in CONTENT_VALUES or name.startswith(CONTENT_PREFIXES))
    )
    return list(dict.fromkeys(".".join(name.split(".")[:2]) for name in hidden))


def _error(span: Span) -> str | None:
    if span.status_code != 2:
        return None
    event = next((event for event in span.events if event.name == "exception"), None)
    told = event.attributes if event is not None else {}
    kind, message = told.get("exception.type"), told.get("exception.message")
    lines = span.status_message.strip().splitlines()
    return ": ".join(str(part) for part in (kind, message) if part) or (lines[0] if lines else "error")


def _usage(attributes: Mapping[str, Any]) -> dict[str, int]:
    prefix = "llm.token_count."
    places = {
        "input_tokens": "prompt",
        "output_tokens": "completion",
        "cache_read_tokens": "prompt_details.cache_read",
        "cache_creation_tokens": "prompt_details.cache_write",
        "reasoning_tokens": "completion_details.reasoning",
    }
    counts = {key: whole_number(attributes, prefix + name) for key, name in places.items()}
    return {key: count for key, count in counts.items() if count is not None}


OPENINFERENCE: Final = Dialect(NAME, wrote, is_call, read, names=names)
