"""Dialect: OpenLLMetry (Traceloop) since it writes JSON attributes.

The conventions' attributes with its own beside them: `traceloop.*` and whether the
call was streamed. LangGraph's names are association properties of every span.
Older versions are `openllmetry_legacy`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from spangrad.adapters.dialects.dialect import Dialect
from spangrad.adapters.dialects.otel_genai import is_call, read_as
from spangrad.adapters.model_call import Choice
from spangrad.adapters.reading import Reading, text, whole_number
from spangrad.store.records import Span

NAME: Final = "openllmetry"
MARK: Final = "traceloop."
PROPERTY: Final = "traceloop.association.properties."
SCOPES: Final = tuple(
    f"opentelemetry.instrumentation.{library}"
    for library in (
        *("openai.v1", "openai.v0", "langchain", "anthropic", "bedrock", "cohere", "groq", "ollama"),
        *("mistralai", "together", "replicate", "watsonx", "google_generativeai", "llamaindex", "crewai"),
        *("sagemaker", "transformers", "alephalpha", "writer"),
    )
)
"""Its instrumentations; OTel's own of the same libraries are called otherwise."""
OTHERS: Final = (
    "opentelemetry.instrumentation.genai.",
    "opentelemetry.util.genai.",
    "opentelemetry.instrumentation.openai_v2",
)
"""Recorders whose spans Traceloop's SDK puts its names on, too."""
IS_STREAMING: Final = ("gen_ai.is_streaming", "llm.is_streaming")
CHUNK_EVENTS: Final = ("gen_ai.content.completion.chunk", "llm.content.completion.chunk")
REASONING_TOKENS: Final = "gen_ai.usage.reasoning_tokens"


def wrote(span: Span) -> bool:
    """Whether OpenLLMetry, or an SDK of Traceloop's, wrote the span."""
    if span.scope.startswith(OTHERS):
        return False
    return span.scope in SCOPES or any(key.startswith(MARK) for key in span.attributes)


def read(span: Span) -> Reading:
    """Read a call span of this dialect."""
    return with_names(read_as(NAME, span))


def with_names(reading: Reading) -> Reading:
    """Add to a reading what both OpenLLMetry dialects tell in attributes of their own."""
    span, properties = reading.span, reading.span.attributes
    thread = text(properties, f"{PROPERTY}thread_id") or text(properties, f"{PROPERTY}session_id")
    step = text(properties, f"{PROPERTY}langgraph_node")
    usage = dict(reading.usage)
    if (thought := whole_number(properties, REASONING_TOKENS)) is not None:
        usage.setdefault("reasoning_tokens", thought)
    return replace(
        reading,
        choices=_by_assistant(reading.choices),
        usage=usage,
        agent_name=reading.agent_name or text(properties, f"{PROPERTY}lc_agent_name"),
        step_name=reading.step_name or step,
        step_index=reading.step_index
        if reading.step_name or step is None
        else whole_number(properties, f"{PROPERTY}langgraph_step"),
        conversation_id=reading.conversation_id or thread,
        is_streamed=reading.is_streamed or is_streamed(span),
    )


def is_streamed(span: Span) -> bool:
    """Whether the reply came in chunks."""
    return any(span.attributes.get(name) is True for name in IS_STREAMING) or any(
        event.name in CHUNK_EVENTS for event in span.events
    )


def _by_assistant(choices: Sequence[Choice]) -> list[Choice]:
    """A streamed reply's role is `unknown` where LangChain gave a chunk and no message."""
    return [
        replace(choice, message={**choice.message, "role": "assistant"})
        if choice.message.get("role") == "unknown"
        else choice
        for choice in choices
    ]


OPENLLMETRY: Final = Dialect(NAME, wrote, is_call, read)
