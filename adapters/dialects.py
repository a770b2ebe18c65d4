"""Which dialect tells of a span: the first row of the table that fits.

Knows how foreign dialects can be recognised, so that a call that can't be read is
counted instead of overlooked. Reading is each dialect's own file.
"""

import json
from collections.abc import Callable
from typing import Final

from spangrad.adapters import otel_genai
from spangrad.adapters.otel_genai import CALL_OPERATIONS, DIALECT_OTEL, DIALECT_SPANGRAD
from spangrad.adapters.reading import Reading
from spangrad.store.records import Span
from spangrad.tracer import conventions as c

NO_DIALECT: Final = "no dialect"
"""A model call, told in a way that spangrad does not read."""

READERS: Final[dict[str, Callable[[Span], Reading]]] = {
    DIALECT_SPANGRAD: otel_genai.read,
    DIALECT_OTEL: otel_genai.read,
}
"""Dialect -> reader. A new dialect is one file, one row here, and one test in `recognise`."""

FOREIGN_MARKS: Final = {
    "openinference.span.kind": ("LLM",),
    "langfuse.observation.type": ("generation",),
    "mlflow.spanType": ('"CHAT_MODEL"', '"LLM"', "CHAT_MODEL", "LLM"),
    "langsmith.span.kind": ("llm",),
    "llm.request.type": ("chat", "completion"),
}
"""Attributes that only another dialect writes, and their values on a model call."""
FOREIGN_SCOPES: Final = (
    "openinference.",
    "langfuse-sdk",
    "langsmith",
    "litellm",
    "logfire",
    "pydantic-ai",
    "opentelemetry.instrumentation.openai.v1",
    "opentelemetry.instrumentation.langchain",
    "vllm",
)
FOREIGN_CALL_NAMES: Final = ("litellm_request", "llm_request")
FOREIGN_PREFIXES: Final = ("gen_ai.prompt.0.", "traceloop.")


def recognise(span: Span) -> str | None:
    """The dialect of a model-call span; `NO_DIALECT` for one nobody here reads; None for other spans."""
    operation = span.attributes.get(c.OPERATION_NAME)
    is_call = isinstance(operation, str) and operation in CALL_OPERATIONS
    if otel_genai.is_spangrad(span):
        return DIALECT_SPANGRAD if is_call else None
    if _is_foreign(span):
        return NO_DIALECT if is_call or _is_foreign_call(span) else None
    if not is_call:
        return None
    is_otel = c.PROVIDER_NAME in span.attributes or _has_messages(span)
    return DIALECT_OTEL if is_otel else NO_DIALECT


def _has_messages(span: Span) -> bool:
    """Whether the span has messages as the conventions 1.37 have them; others know the name, not the form."""
    for name in (c.INPUT_MESSAGES, c.OUTPUT_MESSAGES):
        value = span.attributes.get(name)
        try:
            messages = json.loads(value) if isinstance(value, str) else value
        except (ValueError, RecursionError):
            continue
        if isinstance(messages, list) and messages and all(map(_is_message, messages)):
            return True
    return False


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and "role" in value and isinstance(value.get("parts"), list)


def _is_foreign(span: Span) -> bool:
    if span.scope.startswith(FOREIGN_SCOPES) or any(mark in span.attributes for mark in FOREIGN_MARKS):
        return True
    return any(key.startswith(FOREIGN_PREFIXES) for key in span.attributes)


def _is_foreign_call(span: Span) -> bool:
    marks = FOREIGN_MARKS.items()
    return span.name in FOREIGN_CALL_NAMES or any(span.attributes.get(k) in values for k, values in marks)
