"""Which dialect tells of a span: the first of the list that wrote it.

Knows also how dialects that nobody here reads can be recognised, so that their calls
are counted instead of overlooked. Reading is each dialect's own file.
"""

from collections.abc import Mapping
from typing import Final

from spangrad.adapters.dialects.dialect import Dialect
from spangrad.adapters.dialects.otel_genai import OTEL_GENAI, SPANGRAD, is_call
from spangrad.store.records import Span

NO_DIALECT: Final = "no dialect"
"""A model call, told in a way that spangrad does not read."""

BEFORE_FOREIGN: Final[tuple[Dialect, ...]] = (SPANGRAD,)
"""Dialects with marks that only they have. A new dialect is one file and one row here."""
AFTER_FOREIGN: Final[tuple[Dialect, ...]] = (OTEL_GENAI,)
"""Dialects of the conventions, which others use and change."""
DIALECTS: Final[Mapping[str, Dialect]] = {each.name: each for each in BEFORE_FOREIGN + AFTER_FOREIGN}

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
    for dialect in BEFORE_FOREIGN:
        if dialect.wrote(span):
            return dialect.name if dialect.is_call(span) else None
    if _is_foreign(span):
        return NO_DIALECT if is_call(span) or _is_foreign_call(span) else None
    for dialect in AFTER_FOREIGN:
        if dialect.wrote(span):
            return dialect.name if dialect.is_call(span) else None
    return NO_DIALECT if is_call(span) else None


def _is_foreign(span: Span) -> bool:
    if span.scope.startswith(FOREIGN_SCOPES) or any(mark in span.attributes for mark in FOREIGN_MARKS):
        return True
    return any(key.startswith(FOREIGN_PREFIXES) for key in span.attributes)


def _is_foreign_call(span: Span) -> bool:
    marks = FOREIGN_MARKS.items()
    return span.name in FOREIGN_CALL_NAMES or any(span.attributes.get(k) in values for k, values in marks)
