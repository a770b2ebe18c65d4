"""Which dialect tells of a span: the first of the list that wrote it.

Knows their order alone; how a dialect is known is its own file's business. A model call that none of them
wrote is counted instead of overlooked.
"""

import re
from collections.abc import Mapping
from typing import Final

from spangrad.adapters.dialects.agent_lightning import AGENT_LIGHTNING
from spangrad.adapters.dialects.dialect import Dialect
from spangrad.adapters.dialects.genai_events import GENAI_EVENTS
from spangrad.adapters.dialects.genai_generic import GENAI_GENERIC
from spangrad.adapters.dialects.genai_legacy import GENAI_LEGACY
from spangrad.adapters.dialects.imported import PLAIN_CHAT
from spangrad.adapters.dialects.langfuse import LANGFUSE
from spangrad.adapters.dialects.langsmith import LANGSMITH
from spangrad.adapters.dialects.litellm import LITELLM
from spangrad.adapters.dialects.logfire import LOGFIRE, PYDANTIC_AI
from spangrad.adapters.dialects.mlflow import MLFLOW
from spangrad.adapters.dialects.openinference import OPENINFERENCE
from spangrad.adapters.dialects.openllmetry import OPENLLMETRY
from spangrad.adapters.dialects.openllmetry_legacy import OPENLLMETRY_LEGACY
from spangrad.adapters.dialects.otel_genai import OTEL_GENAI, SPANGRAD, is_call
from spangrad.adapters.dialects.vllm_server import VLLM_SERVER
from spangrad.store.records import Span
from spangrad.tracer.conventions import OPERATION_NAME

_MODEL: Final = re.compile(r"(?:^|[._])model(?:[._]?(?:id|name))?$")
_CONTENT: Final = re.compile("prompt|completion|messages|tokens")

NO_DIALECT: Final = "no dialect"
"""A model call, told in a way that spangrad does not read."""

MARKED: Final[tuple[Dialect, ...]] = (
    # Marks that only they have.
    *(SPANGRAD, PLAIN_CHAT, AGENT_LIGHTNING, OPENINFERENCE, LANGFUSE, MLFLOW, LANGSMITH, LITELLM),
    *(LOGFIRE, PYDANTIC_AI, VLLM_SERVER),
    # The conventions of one year or another; the ones above use them, too.
    *(OPENLLMETRY_LEGACY, OPENLLMETRY),
)
OF_CALLS: Final[tuple[Dialect, ...]] = (GENAI_LEGACY, GENAI_EVENTS, GENAI_GENERIC, OTEL_GENAI)
"""They wrote nothing but what the conventions call a call."""
IN_ORDER: Final[tuple[Dialect, ...]] = (*MARKED, *OF_CALLS)
"""A new dialect is one file and one row here."""
DIALECTS: Final[Mapping[str, Dialect]] = {each.name: each for each in IN_ORDER}


def recognise(span: Span) -> str | None:
    """The dialect of a model-call span; `NO_DIALECT` for one nobody here reads; None for other spans."""
    for dialect in MARKED:
        if dialect.wrote(span):
            return dialect.name if dialect.is_call(span) else None
    if not is_call(span):
        return NO_DIALECT if looks_like_a_call(span) else None
    return next((dialect.name for dialect in OF_CALLS if dialect.wrote(span)), NO_DIALECT)


def looks_like_a_call(span: Span) -> bool:
    """Whether a span that names no operation has a model and a prompt, reply or tokens, in any words."""
    keys = span.attributes.keys()
    if OPERATION_NAME in keys or not any("model" in key and _MODEL.search(key) for key in keys):
        return False
    return any(map(_CONTENT.search, keys))
