"""Decode requests whose messages repeat those of an earlier one, without decoding them again.

Call k of an agent repeats the messages of calls 1..k-1. `Reader` knows the last conversations by their text
and decodes only what comes after the part that it has seen; `once` keeps on a message what was made of it.
So what a call costs grows with what is new in it, and with copying bytes.

Knows JSON text and the key `messages`; it does not know what a message is. Invariants:
* `Reader.read` gives what `json.loads` gives, or fails as it does.
* What it gives is shared between calls: nobody changes it.
* What is remembered is bounded in conversations and in characters.
"""

import json
import re
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")

MAX_CONVERSATIONS = 16
MAX_CHARS = 16 * 2**20
"""Of all conversations together; a longer request is not remembered."""
MAX_READERS = 64
_OF_A_ROLLOUT = (4, 2**19)
"""Conversations and characters that the reader of one rollout remembers."""
# JSON's white space, which is less than `\s`.
_ARRAY = re.compile(r'"messages"[ \t\n\r]*:[ \t\n\r]*\[[ \t\n\r]*')
_NEXT = re.compile(r"[ \t\n\r]*(?:(,)[ \t\n\r]*|\])")
_IN_PLACE = 0
"""Stands for the messages in the text around them: an empty array may be another `messages`, which counts."""
_decode = json.JSONDecoder().raw_decode


class RepeatedObject(dict[str, Any]):
    """A JSON object that may come again, with what was made of it."""

    __slots__ = ("made",)
    made: dict[Any, Any]


class RepeatedArray(list[Any]):
    """The same for an array."""

    __slots__ = ("made",)
    made: dict[Any, Any]


def once(make: Callable[[Any], T], value: Any) -> T:
    """`make(value)`, made only once for a value that repeats. `make` is a pure function of a module."""
    if not isinstance(value, RepeatedObject | RepeatedArray):
        return make(value)
    made = value.made
    if make not in made:
        made[make] = make(value)
    found: T = made[make]
    return found


@dataclass(slots=True)
class _Conversation:
    text: str
    start: int
    """Where the first message begins."""
    ends: list[int]
    """Where each message ends."""
    messages: list[Any]
    around: str
    """The request without its messages."""
    fields: dict[str, Any]

    def matches(self, text: str) -> int:
        """How many messages `text` begins with."""
        if not text.startswith(self.text[: self.ends[0]]):
            return 0
        if text.startswith(self.text[: self.ends[-1]]):
            return len(self.ends)
        differs = range(len(self.ends))
        return bisect_left(differs, True, key=lambda i: not text.startswith(self.text[: self.ends[i]]))


class Reader:
    """Decodes requests one after the other; for one thread."""

    def __init__(self, max_conversations: int = MAX_CONVERSATIONS, max_chars: int = MAX_CHARS) -> None:
        """Know no conversation, and later so many that have so many characters together."""
        self._known: list[_Conversation] = []
        self._max_conversations = max_conversations
        self._max_chars = max_chars

    def read(self, body: bytes) -> dict[str, Any]:
        """The request as a dict. Raises ValueError and what else `json.loads` and `dict` raise."""
        found = self._read_conversation(body)
        return dict(json.loads(body)) if found is None else found

    def _read_conversation(self, body: bytes) -> dict[str, Any] | None:
        """None: this is not the plain case, or it can't be read."""
        try:
            text = body.decode()
            known, count = self._longest(text)
            start = known.start if known is not None else _start(text)
            if start is None:
                return None
            messages = known.messages[:count] if known is not None else []
            ends = known.ends[:count] if known is not None else []
            closed = _add_messages(text, start, messages, ends)
            around = f"{text[:start]}{_IN_PLACE}{text[closed - 1 :]}"
            if known is not None and around == known.around:
                fields = known.fields
            else:
                fields = {key: _repeated(value) for key, value in json.loads(around).items()}
        except (ValueError, RecursionError):
            return None
        if fields.get("messages") != [_IN_PLACE] or not ends:
            return None
        new = _Conversation(text, start, ends, messages, around, fields)
        self._remember(new, known if known is not None and count == len(known.ends) else None)
        return fields | {"messages": messages}

    def _longest(self, text: str) -> tuple[_Conversation | None, int]:
        best, most = None, 0
        for known in reversed(self._known):
            count = known.matches(text)
            if count > most:
                best, most = known, count
            if count == len(known.ends):
                break
        return best, most

    def _remember(self, new: _Conversation, replaced: _Conversation | None) -> None:
        self._known = [known for known in self._known if known is not replaced]
        self._known.append(new)
        chars = sum(len(known.text) for known in self._known)
        while len(self._known) > self._max_conversations or chars > self._max_chars:
            chars -= len(self._known[0].text)
            del self._known[0]


class Readers:
    """A reader for each rollout of many, so that none looks through the others' conversations."""

    def __init__(self) -> None:
        """Know no rollout."""
        self._readers: OrderedDict[str | None, Reader] = OrderedDict()

    def of(self, rollout_id: str | None) -> Reader:
        """The reader of a rollout; those that were not asked for longest make way."""
        reader = self._readers.get(rollout_id)
        if reader is None:
            reader = self._readers[rollout_id] = Reader(*_OF_A_ROLLOUT)
            if len(self._readers) > MAX_READERS:
                self._readers.popitem(last=False)
        self._readers.move_to_end(rollout_id)
        return reader


def _start(text: str) -> int | None:
    """Where the first message of a request begins, if the key `messages` is the request's own."""
    array = _ARRAY.search(text)
    if array is None:
        return None
    before = text[: array.start()].rstrip().removesuffix(",")
    # Whole with one more bracket, so the key is one of the outermost object's.
    return array.end() if isinstance(json.loads(before + "}"), dict) else None


def _add_messages(text: str, start: int, messages: list[Any], ends: list[int]) -> int:
    """Decode the messages that follow those in `messages`; returns the end of their array."""
    at = start
    if ends:
        at = ends[-1]
    elif text.startswith("]", at):
        return at + 1
    while True:
        if ends:
            mark = _NEXT.match(text, at)
            if mark is None:
                raise ValueError(f"no comma at {at}")
            if mark[1] is None:
                return mark.end()
            at = mark.end()
        message, at = _decode(text, at)
        messages.append(_repeated(message))
        ends.append(at)


def _repeated(value: Any) -> Any:
    repeated: RepeatedObject | RepeatedArray
    if isinstance(value, dict):
        repeated = RepeatedObject(value)
    elif isinstance(value, list):
        repeated = RepeatedArray(value)
    else:
        return value
    repeated.made = {}
    return repeated
