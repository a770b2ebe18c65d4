"""Messages of calls that repeat each other: what one array begins with is not read again for the next.

Turn k of an agent shows all messages of the turns before, so reading each call's by itself takes the square
of a rollout's length. While spans are read together, the last arrays are remembered as text, with what was
made of them.

Invariants:
* what is read, and what is noted or raised, is as if each array were read by itself;
* messages that several calls show are the same objects: nobody changes them.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

from spangrad.adapters.messages import chat_messages
from spangrad.errors import DialectError

_KEPT: Final = 8
"""Arrays that are remembered: of agents that take turns."""
_BROKEN: Final = (ValueError, TypeError, RecursionError, DialectError)


@dataclass(frozen=True, slots=True)
class _Array:
    body: str
    """The text but for the last bracket."""
    messages: list[dict[str, Any]]
    notes: tuple[str, ...]


_arrays: ContextVar[list[_Array] | None] = ContextVar("arrays", default=None)


@contextmanager
def read_together() -> Iterator[None]:
    """What is read inside is remembered until the end."""
    token = _arrays.set([])
    try:
        yield
    finally:
        _arrays.reset(token)


def growing_messages(text: str, notes: list[str]) -> list[dict[str, Any]]:
    """`chat_messages` of a JSON array.

    Raises what parsing it or `chat_messages` raises.
    """
    known = _arrays.get()
    if known is None:
        return chat_messages(json.loads(text), notes)
    array = _longer(text, known)
    if array is None:
        own: list[str] = []
        messages = chat_messages(json.loads(text), own)
        array = _Array(text[:-1], messages, tuple(own))
    if text.endswith("]") and array.messages and not (known and known[0] is array):
        others = [each for each in known if not array.body.startswith(each.body)]
        known[:] = [array, *others][:_KEPT]
    if array.notes:
        notes += [note for note in array.notes if note not in notes]
    return array.messages


def _longer(text: str, known: list[_Array]) -> _Array | None:
    """The array, if it is one that is known, or begins with one."""
    for array in known:
        if text.startswith(array.body):
            rest = text[len(array.body) :]
            if rest == "]":
                return array
            if rest.startswith(","):
                own = list(array.notes)
                try:
                    messages = array.messages + chat_messages(json.loads("[" + rest[1:]), own)
                except _BROKEN:
                    return None  # read as a whole, it raises what is wrong in its own words
                return _Array(text[:-1], messages, tuple(own))
    return None
