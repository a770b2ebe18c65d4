"""What the readers of all dialects share: decoding attributes without trusting them, one spelling of words.

Knows JSON and packed bytes in attributes; it does not know which attributes a dialect has.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, TypeVar

from spangrad.adapters.dialects.growing import growing_messages
from spangrad.adapters.messages import chat_messages
from spangrad.adapters.packed import Packed, any_negative, packed_ints
from spangrad.errors import DialectError
from spangrad.store.records import Span

T = TypeVar("T")

FINISHES_DIFFER: Final = "finish reasons contradict each other"
FINISH_REASONS: Final = {
    "": None,
    "tool_call": "tool_calls",
    "completed": "stop",  # Responses API
    "max_output_tokens": "length",
    "end_turn": "stop",  # Anthropic
    "stop_sequence": "stop",
    "tool_use": "tool_calls",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "refusal": "content_filter",
}
"""Other spellings -> OpenAI's."""

FAILED_FINISHES: Final = frozenset(
    {"error", "abort", "cancelled", "content_filter", "failed", "incomplete", "queued", "in_progress"}
    | {"insufficient_system_resource"}  # DeepSeek
    | {"safety", "recitation", "blocklist", "prohibited_content", "spii", "malformed_function_call", "other"}
)  # Gemini
"""Finish reasons of replies that are not what the policy sampled. `length` is not among them: a
reply cut by its token limit was still sampled exactly."""


def finish_reason(told: str | None) -> str | None:
    """A finish reason in OpenAI's spelling; None if none was told."""
    return None if told is None else FINISH_REASONS.get(told, told)


class Decoder:
    """Decodes attributes of one span and remembers what went wrong."""

    __slots__ = ("attributes", "faults", "notes", "token_losses")

    def __init__(self, span: Span) -> None:
        """Decode this span's attributes."""
        self.attributes = span.attributes
        self.faults: list[str] = []
        self.notes: list[str] = []
        self.token_losses: list[str] = []

    def json(self, name: str) -> Any:
        """The attribute, parsed if it is a JSON string; None if absent or broken."""
        value = self.attributes.get(name)
        if not isinstance(value, str):
            return value
        try:
            return json.loads(value)
        except (ValueError, RecursionError) as error:
            self.faults.append(f"invalid JSON: {name} can't be parsed ({error})")
            return None

    def convert(self, name: str, conversion: Callable[[Any], T]) -> T | None:
        """The attribute, parsed and converted; a shape that can't be read is a fault."""
        return self.converted(name, self.json(name), conversion)

    def converted(self, name: str, value: Any, conversion: Callable[[Any], T]) -> T | None:
        """What the attribute holds, converted; a shape that can't be read is a fault."""
        if value is None:
            return None
        try:
            return conversion(value)
        except (DialectError, TypeError, ValueError, RecursionError) as error:  # bytes have no JSON
            self.faults.append(f"unreadable: {name}: {error}")
            return None

    def messages(self, name: str) -> list[dict[str, Any]] | None:
        """The attribute as chat messages; a shape that can't be read is a fault."""
        value = self.attributes.get(name)
        if isinstance(value, str):
            with suppress(ValueError, TypeError, RecursionError, DialectError):  # told below
                return growing_messages(value, self.notes)
        return self.convert(name, lambda recorded: chat_messages(recorded, self.notes))

    def unpack(self, name: str, unpacking: Callable[[bytes], T]) -> T | None:
        """The packed attribute as what it holds."""
        value = self.attributes.get(name)
        if value is None:
            return None
        try:
            return unpacking(value)
        except (ValueError, TypeError) as error:
            self.faults.append(f"unreadable: {name}: {error}")
            return None

    def token_ids(self, name: str) -> Packed[int] | None:
        """The packed attribute as token ids; None, and told, if one is negative: padding, and no id."""
        ids = self.unpack(name, packed_ints)
        if ids is not None and any_negative(ids):
            lowest = min(ids)
            self.token_losses.append(f"a token id is negative: {name} has {lowest} at {ids.index(lowest)}")
            return None
        return ids
