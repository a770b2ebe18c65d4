"""Dialects: Logfire's own instrumentations of model clients, and pydantic-ai.

Both write the OTel GenAI conventions. Logfire gives lists as JSON text, parses the arguments of tool calls,
and tells of a stream in two spans: the request, which ends at once, and a span of no length in which the
reply is, elsewhere in the trace. Older versions kept the request as it was and of the response the
message, without a reason why it ended. pydantic-ai keeps arguments as the text they were and names the tools
without a wrapper.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from spangrad.adapters.dialects.decoding import Decoder
from spangrad.adapters.dialects.dialect import Dialect
from spangrad.adapters.dialects.otel_genai import SYSTEM_INSTRUCTIONS, is_call, read_as
from spangrad.adapters.exchanges import read_exchange
from spangrad.adapters.reading import Reading
from spangrad.store.records import Span
from spangrad.tracer import conventions as c

DIALECT_LOGFIRE: Final = "logfire"
DIALECT_PYDANTIC_AI: Final = "pydantic_ai"

SPAN_TYPE: Final = "logfire.span_type"
"""`log` on the span that has a stream's reply."""
DURATION: Final = "duration"
"""Seconds from the first chunk to the last."""
SCRUBBED: Final = "logfire.scrubbed"
"""JSON: `[{"path": ["attributes", NAME, ...], "matched_substring": ...}]`."""
FIRST_CHUNK: Final = "gen_ai.client.operation.time_to_first_chunk"
"""On pydantic-ai's streams."""
REQUEST_PARAMETERS: Final = "model_request_parameters"
"""JSON of pydantic-ai's request: tools, output mode."""
REQUEST_DATA: Final = "request_data"
RESPONSE_DATA: Final = "response_data"
"""JSON of what older versions kept of an exchange."""
UNKNOWN_FORM: Final = "a form that is not read"
_CLIENTS: Final = ("logfire.openai", "logfire.anthropic")
CONTENT: Final = (c.INPUT_MESSAGES, c.OUTPUT_MESSAGES, SYSTEM_INSTRUCTIONS, c.TOOL_DEFINITIONS)


def is_logfire(span: Span) -> bool:
    """Whether one of Logfire's instrumentations wrote the span."""
    return span.scope == "logfire" or span.scope.startswith("logfire.")


def is_pydantic_ai(span: Span) -> bool:
    """Whether pydantic-ai wrote the span."""
    return span.scope == "pydantic-ai"


def is_logfire_call(span: Span) -> bool:
    """Whether a span of Logfire's is a call, or a part of one."""
    return is_call(span) or (span.scope in _CLIENTS and REQUEST_DATA in span.attributes)


def read_logfire(span: Span) -> Reading:
    """Read a call of Logfire's: a whole one, a stream's request, or a stream's reply."""
    reading = read_as(DIALECT_LOGFIRE, span) if is_call(span) else _read_older(span)
    redacted = tuple(dict.fromkeys((*reading.redacted, *_scrubbed(span))))
    if span.attributes.get(SPAN_TYPE) == "log":
        return replace(reading, redacted=redacted, is_streamed=True, is_part=True, began_ns=_began(span))
    is_request = not reading.choices and reading.error is None
    return replace(reading, redacted=redacted, is_streamed=reading.is_streamed or is_request)


def read_pydantic_ai(span: Span) -> Reading:
    """Read a call of pydantic-ai's."""
    reading = read_as(DIALECT_PYDANTIC_AI, span)
    reading = replace(reading, is_streamed=reading.is_streamed or FIRST_CHUNK in span.attributes)
    if reading.tools or REQUEST_PARAMETERS not in span.attributes:
        return reading
    return replace(reading, tools=_declared_tools(Decoder(span).json(REQUEST_PARAMETERS)), keeps_tools=True)


def _read_older(span: Span) -> Reading:
    """Read what versions kept that did not write the conventions yet."""
    decoder = Decoder(span)
    asked, told = decoder.json(REQUEST_DATA), decoder.json(RESPONSE_DATA)
    request = asked if isinstance(asked, Mapping) else {}
    response = told if isinstance(told, Mapping) else {}
    message, model = response.get("message"), span.attributes.get(c.RESPONSE_MODEL)
    choices = {"choices": [{"index": 0, "message": message}]} if isinstance(message, Mapping) else {}
    exchange = {**response, **choices, "model": model} if response else None
    reading = read_exchange(DIALECT_LOGFIRE, span, request, exchange)
    is_known = span.scope == "logfire.openai" and request.keys() & {"messages", "input", "prompt"}
    form = () if is_known else (f"{UNKNOWN_FORM}: {span.scope} before the conventions",)
    faults = (*decoder.faults, *reading.faults, *form)
    return replace(reading, keeps_tools=bool(request), error=_failure(span), faults=faults)


def _failure(span: Span) -> str | None:
    return span.status_message or "error" if span.status_code == 2 else None


def _began(span: Span) -> int:
    duration = span.attributes.get(DURATION)
    if isinstance(duration, int | float) and 0 <= duration < 1e9:
        return span.start_ns - int(duration * 1e9)
    return span.start_ns


def _scrubbed(span: Span) -> Sequence[str]:
    """Names of the attributes with content out of which Logfire took text."""
    told = Decoder(span).json(SCRUBBED)
    paths = [item.get("path") for item in told if isinstance(item, Mapping)] if isinstance(told, list) else []
    names = [path[1] for path in paths if isinstance(path, list) and len(path) > 1]
    return [name for name in names if name in CONTENT]


def _declared_tools(parameters: Any) -> Sequence[Mapping[str, Any]]:
    declared = parameters.get("function_tools") if isinstance(parameters, Mapping) else None
    tools = [tool for tool in declared if isinstance(tool, Mapping)] if isinstance(declared, list) else []
    return [{"type": "function", "function": _function(tool)} for tool in tools]


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    named = {"name": tool.get("name"), "description": tool.get("description")}
    return {
        **{key: value for key, value in named.items() if value is not None},
        "parameters": tool.get("parameters_json_schema"),
    }


LOGFIRE: Final = Dialect(DIALECT_LOGFIRE, is_logfire, is_logfire_call, read_logfire)
PYDANTIC_AI: Final = Dialect(DIALECT_PYDANTIC_AI, is_pydantic_ai, is_call, read_pydantic_ai)
