"""How long a span and its texts may be.

Invariants: what no hub would take is left out of a span, and named; a text that is cut ends with a whole
word, for a rule can't tell the half of a secret from any other word.
"""

from typing import Any

MAX_SPAN_BYTES = 32 * 2**20
"""Half of what a hub takes in one request."""

_TEXTS = (str, bytes)
_WORD_CHARS = 200
"""A longer word is cut in its middle."""


def cut(text: str, limit: int) -> str:
    """At most `limit` characters of a text."""
    if len(text) <= limit or text[limit].isspace():
        return text[:limit]
    end = limit
    while end > max(0, limit - _WORD_CHARS) and not text[end - 1].isspace():
        end -= 1
    return text[:end].rstrip()


def shorten(attributes: dict[str, Any], dropped: dict[str, str]) -> None:
    """Leave out the longest attributes of a span that no hub would take."""
    if 4 * sum([len(value) for value in attributes.values() if isinstance(value, _TEXTS)]) <= MAX_SPAN_BYTES:
        return
    texts = {name: value for name, value in attributes.items() if isinstance(value, _TEXTS)}
    sizes = {
        name: len(value.encode("utf-8", "replace")) if isinstance(value, str) else len(value)
        for name, value in texts.items()
    }
    while (total := sum(sizes.values())) > MAX_SPAN_BYTES:
        longest = max(sizes, key=lambda name: sizes[name])
        del attributes[longest]
        dropped[longest] = f"too long: {sizes.pop(longest)} of {total} bytes; a span holds {MAX_SPAN_BYTES}"
