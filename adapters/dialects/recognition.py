"""Which dialect tells of a span: the first of the list that wrote it.

Knows also how dialects that nobody here reads can be recognised, so that their calls
are counted instead of overlooked. Reading is each dialect's own file.
"""

from collections.abc import Mapping
from typing import Final

from spangrad.adapters.dialects.dialect import Dialect
from spangrad.adapters.dialects.genai_events import GENAI_EVENTS
from spangrad.adapters.dialects.genai_generic import GENAI_GENERIC
from spangrad.adapters.dialects.genai_legacy import GENAI_LEGACY
from spangrad.adapters.dialects.litellm import LITELLM
from spangrad.adapters.dialects.logfire import LOGFIRE, PYDANTIC_AI
from spangrad.adapters.dialects.mlflow import MLFLOW
from spangrad.adapters.dialects.openinference import OPENINFERENCE
from spangrad.adapters.dialects.openllmetry import OPENLLMETRY
from spangrad.adapters.dialects.openllmetry_legacy import OPENLLMETRY_LEGACY
from spangrad.adapters.dialects.otel_genai import OTEL_GENAI, SPANGRAD, is_call
from spangrad.adapters.dialects.vllm_server import VLLM_SERVER
from spangrad.store.records import Span

NO_DIALECT: Final = "no dialect"
"""A model call, told in a way that spangrad does not read."""

BEFORE_FOREIGN: Final[tuple[Dialect, ...]] = (SPANGRAD, OPENINFERENCE, MLFLOW, LITELLM, LOGFIRE, PYDANTIC_AI)
"""Dialects with marks that only they have. A new dialect is one file and one row here."""
AFTER_FOREIGN: Final[tuple[Dialect, ...]] = (
    VLLM_SERVER,
    OPENLLMETRY_LEGACY,
    OPENLLMETRY,
    GENAI_LEGACY,
    GENAI_EVENTS,
    GENAI_GENERIC,
    OTEL_GENAI,
)
"""Dialects of the conventions, which others use and change."""
DIALECTS: Final[Mapping[str, Dialect]] = {each.name: each for each in BEFORE_FOREIGN + AFTER_FOREIGN}

FOREIGN_MARKS: Final = {
    "langfuse.observation.type": ("generation",),
    "langsmith.span.kind": ("llm",),
}
"""Attributes that only another dialect writes, and their values on a model call."""
FOREIGN_SCOPES: Final = (
    "langfuse-sdk",
    "langsmith",
)
FOREIGN_CALL_NAMES: Final[tuple[str, ...]] = ()


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
    return span.scope.startswith(FOREIGN_SCOPES) or any(mark in span.attributes for mark in FOREIGN_MARKS)


def _is_foreign_call(span: Span) -> bool:
    marks = FOREIGN_MARKS.items()
    return span.name in FOREIGN_CALL_NAMES or any(span.attributes.get(k) in values for k, values in marks)
