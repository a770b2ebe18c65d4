"""Dialect: OTel GenAI up to 1.36, an event for every message.

`gen_ai.{system,user,assistant,tool}.message` and `gen_ai.choice`, log records or
events of the span; their order is the order of the messages. Bodies are OpenAI's
messages, arguments the model's string. Tools are not recorded.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from spangrad.adapters.dialects.decoding import finish_reason
from spangrad.adapters.dialects.dialect import Dialect
from spangrad.adapters.dialects.genai_events import CONTENT
from spangrad.adapters.dialects.openai_chat import chat_message
from spangrad.adapters.dialects.otel_genai import is_call, read_as
from spangrad.adapters.log_events import BODY
from spangrad.adapters.model_call import Choice
from spangrad.adapters.reading import Reading, parsed
from spangrad.adapters.scrubbing import scrubbed
from spangrad.errors import DialectError
from spangrad.store.records import Span, SpanEvent
from spangrad.tracer import conventions as c

NAME: Final = "otel_genai_legacy"
SCOPE: Final = "opentelemetry.instrumentation."
SYSTEM: Final = "gen_ai.system"
ROLES: Final = {f"gen_ai.{role}.message": role for role in ("system", "user", "assistant", "tool")}
CHOICE: Final = "gen_ai.choice"
EVENT_CONTENT: Final = "gen_ai.event.content"
"""Attribute with the body as JSON, where the event is the span's own."""
_CAPTURE: Final = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT=true"
NO_RECORDS: Final = (
    "content is not on the span, nor in a log record: this recorder writes messages as log records; ingest "
    "them together with its spans"
)
NOT_CAPTURED: Final = f"content was not captured: record with {_CAPTURE}"
TEXT_BESIDE_CALLS: Final = (
    "text beside tool calls may be missing: this recorder leaves it out of earlier turns"
)


def wrote(span: Span) -> bool:
    """Whether a call's messages are events of these names, or should have been."""
    if not is_call(span) or any(name in span.attributes for name in CONTENT):
        return False
    if any(event.name in ROLES or event.name == CHOICE for event in span.events):
        return True
    is_old = SYSTEM in span.attributes and c.PROVIDER_NAME not in span.attributes
    return is_old and span.scope.startswith(SCOPE)


@dataclass(slots=True)
class _Told:
    messages: list[dict[str, Any]] = field(default_factory=list)
    choices: dict[int, Choice] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    is_captured: bool = False
    """Any event has text or arguments."""


def read(span: Span) -> Reading:
    """Read a call span of this dialect together with its events."""
    reading, told = read_as(NAME, span), _Told()
    for event in span.events:
        if event.name in ROLES or event.name == CHOICE:
            try:
                _add(event, told)
            except DialectError as error:
                told.faults.append(f"unreadable: {event.name}: {error}")
    choices = [told.choices[index] for index in sorted(told.choices)]
    if reading.error is None and not told.faults:
        told.faults += _missing(told, len(reading.choices))
    return replace(
        reading,
        messages=told.messages,
        choices=choices or reading.choices,
        faults=(
            *reading.faults,
            *told.faults,
            *scrubbed(told.messages, "message"),
            *scrubbed([choice.message for choice in choices], "choice"),
        ),
        notes=(*reading.notes, *told.notes),
    )


def _missing(told: _Told, finished: int) -> list[str]:
    """What should have been in events and is not; `finished` counts the span's finish reasons."""
    if not told.messages and not told.choices:
        return [NO_RECORDS]
    if not told.is_captured:
        return [NOT_CAPTURED]
    if not told.messages:
        return [f"{NO_RECORDS}: there is a {CHOICE} and no message"]
    if sorted(told.choices) != list(range(max(len(told.choices), finished, 1))):
        return [f"{NO_RECORDS}: there is {CHOICE} {sorted(told.choices)} of {max(finished, 1)}"]
    return []


def _add(event: SpanEvent, told: _Told) -> None:
    if event.dropped_attributes:
        told.faults.append(f"attributes were dropped: {event.dropped_attributes} of {event.name}")
    body = _body(event)
    if event.name == CHOICE:
        index, finish = body.get("index", len(told.choices)), body.get("finish_reason")
        if not isinstance(index, int) or index in told.choices:
            raise DialectError(f"a choice has index {index!r}; expected a number of its own")
        message = chat_message(_unpacked(body.get("message", body)), "assistant", told.notes)
        told.choices[index] = Choice(
            message={**message, "role": "assistant"},
            finish_reason=finish_reason(finish) if isinstance(finish, str) else None,
        )
    else:
        message = chat_message(_unpacked(body), ROLES[event.name], told.notes)
        told.messages.append(message)
        if message.get("tool_calls") and not message["content"] and TEXT_BESIDE_CALLS not in told.notes:
            told.notes.append(TEXT_BESIDE_CALLS)
    calls = message.get("tool_calls", ())
    has_arguments = any(call["function"]["arguments"] != "{}" for call in calls)
    told.is_captured = told.is_captured or has_arguments or bool(message["content"])


def _unpacked(message: Any) -> Any:
    """A message that may be JSON text, as may its tool calls: attributes of events hold no objects."""
    message = parsed(message)
    if isinstance(message, Mapping) and isinstance(message.get("tool_calls"), str):
        return {**message, "tool_calls": parsed(message["tool_calls"])}
    return message


def _body(event: SpanEvent) -> Mapping[str, Any]:
    body = event.attributes.get(BODY)
    if body is None and EVENT_CONTENT in event.attributes:
        body = event.attributes[EVENT_CONTENT]
        try:
            body = json.loads(body) if isinstance(body, str) else body
        except (ValueError, RecursionError) as error:
            raise DialectError(f"{EVENT_CONTENT} is no JSON ({error})") from None
    if body is None:
        body = event.attributes
    if not isinstance(body, Mapping):
        raise DialectError(f"the body is {type(body).__name__}; expected an object")
    return body


GENAI_LEGACY: Final = Dialect(NAME, wrote, is_call, read)
