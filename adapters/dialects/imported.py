"""Dialects of calls that come out of exports without spans of their own: plain chat, Agent Lightning 1.0.

`exports/` writes such calls as spans in the conventions' attributes; here is what their readings add.
"""

from dataclasses import replace
from typing import Final

from spangrad.adapters.dialects.dialect import Dialect
from spangrad.adapters.dialects.otel_genai import is_call, read_as
from spangrad.adapters.reading import Reading
from spangrad.store.records import Span

SCOPE_PLAIN_CHAT: Final = "spangrad.exports.plain_chat"
CONVERSATION: Final = "spangrad.exports.conversation"
"""Attribute, True: the call is a message of a conversation that somebody wrote down."""
FINISH_NOT_TOLD: Final = "finish reasons are not told: a conversation was written down"


def is_plain_chat(span: Span) -> bool:
    """Whether a span was made of a row of plain chat."""
    return span.scope == SCOPE_PLAIN_CHAT


def read_plain_chat(span: Span) -> Reading:
    """Read such a span: a request as it was sent, or a conversation that somebody wrote down."""
    reading = read_as("plain_chat", span)
    if span.attributes.get(CONVERSATION) is True:
        return replace(reading, notes=(*reading.notes, FINISH_NOT_TOLD))
    return replace(reading, keeps_tools=True)


PLAIN_CHAT: Final = Dialect("plain_chat", is_plain_chat, is_call, read_plain_chat)
