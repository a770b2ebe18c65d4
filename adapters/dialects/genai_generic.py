"""Dialect: `gen_ai.*` call spans of unknown recorders, whose messages are not those of the conventions.

OpenAI's chat form in `gen_ai.input.messages` and `gen_ai.output.messages`, or in
`gen_ai.prompt` and `gen_ai.completion`: attributes, or of the events
`gen_ai.content.prompt` and `gen_ai.content.completion` (conventions 1.27). Who wrote
it is not known, so that nothing is guessed: other forms are a fault.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from spangrad.adapters.dialects.decoding import Decoder, finish_reason
from spangrad.adapters.dialects.dialect import Dialect
from spangrad.adapters.dialects.openai_chat import chat_message
from spangrad.adapters.dialects.otel_genai import is_call, is_otel, read_as
from spangrad.adapters.model_call import Choice
from spangrad.adapters.reading import Reading, parsed
from spangrad.adapters.scrubbing import scrubbed
from spangrad.errors import DialectError
from spangrad.store.records import Span
from spangrad.tracer import conventions as c

NAME: Final = "genai_generic"
SYSTEM: Final = "gen_ai.system"
PROMPT: Final = "gen_ai.prompt"
COMPLETION: Final = "gen_ai.completion"
CONTENT_EVENTS: Final = ("gen_ai.content.prompt", "gen_ai.content.completion")
NO_CONTENT: Final = "content was not recorded: no attribute or event of the span has messages"


def wrote(span: Span) -> bool:
    """Whether a call span tells its content in one of these forms, or only what `gen_ai.system` made it."""
    if not is_call(span):
        return False
    told = _told(span)
    if PROMPT in told or COMPLETION in told or _is_chat(told.get(c.INPUT_MESSAGES)):
        return True
    return _is_chat(told.get(c.OUTPUT_MESSAGES)) or (SYSTEM in told and not is_otel(span))


def read(span: Span) -> Reading:
    """Read a call span of this dialect."""
    told = _told(span)
    asked = c.INPUT_MESSAGES if c.INPUT_MESSAGES in told else PROMPT
    given = c.OUTPUT_MESSAGES if c.OUTPUT_MESSAGES in told else COMPLETION
    content = (c.INPUT_MESSAGES, c.OUTPUT_MESSAGES, PROMPT, COMPLETION)
    without = {name: value for name, value in span.attributes.items() if name not in content}
    reading = read_as(NAME, replace(span, attributes=without))
    decoder = Decoder(replace(span, attributes=told))
    messages = decoder.convert(asked, _messages(decoder.notes)) or []
    choices = decoder.convert(given, _choices(decoder.notes)) or []
    reasons = [choice.finish_reason for choice in reading.choices]  # those of the span: it has no messages
    finished = [
        replace(choice, finish_reason=reasons[index])
        if choice.finish_reason is None and index < len(reasons)
        else choice
        for index, choice in enumerate(choices)
    ]
    faults = [*reading.faults, *decoder.faults, *scrubbed(messages, "message")]
    faults += scrubbed([choice.message for choice in choices], "choice")
    if not faults and reading.error is None and asked not in told and given not in told:
        faults.append(NO_CONTENT)
    return replace(
        reading,
        span=span,
        messages=[*reading.messages, *messages],
        choices=finished or reading.choices,
        faults=tuple(faults),
        notes=(*reading.notes, *decoder.notes),
    )


def _told(span: Span) -> Mapping[str, Any]:
    """The span's attributes, and those of its events that hold content."""
    told: dict[str, Any] = {}
    for event in span.events:
        if event.name in CONTENT_EVENTS:
            told |= {
                name: event.attributes[name] for name in (PROMPT, COMPLETION) if name in event.attributes
            }
    return told | dict(span.attributes)


def _is_chat(value: Any) -> bool:
    """Whether it is a list of messages with content and no parts."""
    messages = parsed(value)
    return isinstance(messages, list) and bool(messages) and all(map(_is_chat_message, messages))


def _is_chat_message(value: Any) -> bool:
    return (
        isinstance(value, Mapping) and "parts" not in value and ("content" in value or "tool_calls" in value)
    )


def _messages(notes: list[str]) -> Callable[[Any], list[dict[str, Any]]]:
    def convert(value: Any) -> list[dict[str, Any]]:
        value = value.get("messages", value) if isinstance(value, Mapping) else value
        if not isinstance(value, list) or not value or not all(map(_is_chat_message, value)):
            raise DialectError("the request is in no form that is known; expected a list of chat messages")
        return [chat_message(message, "user", notes) for message in value]

    return convert


def _choices(notes: list[str]) -> Callable[[Any], list[Choice]]:
    def convert(value: Any) -> list[Choice]:
        value = value.get("choices", [value]) if isinstance(value, Mapping) else value
        if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
            raise DialectError("the reply is in no form that is known; expected a list of chat messages")
        return [_choice(item, notes) for item in value]

    return convert


def _choice(item: Mapping[str, Any], notes: list[str]) -> Choice:
    finish = item.get("finish_reason")
    message = item.get("message", item)
    if not _is_chat_message(message):
        raise DialectError("a reply has no content; expected a chat message")
    return Choice(
        message={**chat_message(message, "assistant", notes), "role": "assistant"},
        finish_reason=finish_reason(finish) if isinstance(finish, str) else None,
    )


GENAI_GENERIC: Final = Dialect(NAME, wrote, is_call, read)
