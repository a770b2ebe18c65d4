"""Dialect: the spans that vLLM's own server writes (`--otlp-traces-endpoint`).

They are no calls: no message, no model, no reply. What they do say, how the engine
sampled and how many tokens it counted, is for the call that they served; see
`server_spans.py`. vLLM leaves out what is 0, so that a temperature which is not there
is not known.
"""

from typing import Final

from spangrad.adapters.dialects.dialect import Dialect
from spangrad.adapters.reading import Reading, text, whole_number
from spangrad.store.records import Span

NAME: Final = "vllm_server"
SCOPE: Final = "vllm"
SPAN_NAME: Final = "llm_request"
SERVER: Final = 2
REQUEST_ID: Final = "gen_ai.request.id"
USAGE: Final = {
    "input_tokens": "gen_ai.usage.prompt_tokens",
    "output_tokens": "gen_ai.usage.completion_tokens",
}
SAMPLING: Final = {"temperature": "gen_ai.request.temperature", "top_p": "gen_ai.request.top_p"}
"""Parameters that the engine used, whether or not the request named them. Its `max_tokens` is not among
them: it is what the context left over where the request named none."""


def wrote(span: Span) -> bool:
    """Whether vLLM's server wrote the span."""
    is_named = span.name == SPAN_NAME and span.kind == SERVER
    return is_named or span.scope == SCOPE or span.scope.startswith(f"{SCOPE}.")


def is_call(span: Span) -> bool:
    """Never: the client's span, or the gateway's, is the call."""
    return False


def read(span: Span) -> Reading:
    """What a server's span says of the request that it served."""
    counts = {key: whole_number(span.attributes, name) for key, name in USAGE.items()}
    sampling = {key: span.attributes.get(name) for key, name in SAMPLING.items()}
    return Reading(
        span=span,
        dialect=NAME,
        response_id=text(span.attributes, REQUEST_ID),
        usage={key: count for key, count in counts.items() if count is not None},
        sampling={key: value for key, value in sampling.items() if isinstance(value, (int, float))},
    )


VLLM_SERVER: Final = Dialect(NAME, wrote, is_call, read)
