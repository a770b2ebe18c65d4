"""Which earlier sequence of token ids a new one goes on from, and with which it has most in common.

A compressed trie: a place is the end of an edge, and an edge a piece of the sequence that went through it
first. A search begins where the last sequences ended, not at the root: the next turn of a conversation is
compared with the turn before in one go.

Invariants:
* exact: the answers are those of comparing with every earlier sequence;
* ids are compared where they are, and never copied;
* iterative.
"""

from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

TokenIds = NDArray[np.int32]

_SIZE: Final = 4
"""Bytes of an id."""
_LAST: Final = 8
"""So many ends are tried before the root: of agents that take turns."""
_FIRST_PIECE: Final = 64
"""Ids that are compared before it is worth to compare many."""


@dataclass(frozen=True, slots=True, eq=False)
class Ids:
    """A prompt and a reply as one sequence, packed as `<i4`."""

    prompt: bytes
    reply: bytes = b""

    def __len__(self) -> int:
        """How many ids."""
        return (len(self.prompt) + len(self.reply)) // _SIZE

    @property
    def prompt_length(self) -> int:
        """How many ids the prompt has."""
        return len(self.prompt) // _SIZE

    def array(self) -> TokenIds:
        """All of them, as an array of its own."""
        return np.concatenate([np.frombuffer(part, "<i4") for part in (self.prompt, self.reply)])

    def at(self, position: int) -> bytes:
        """The packed id there."""
        start = position * _SIZE
        if start < len(self.prompt):
            return self.prompt[start : start + _SIZE]
        start -= len(self.prompt)
        return self.reply[start : start + _SIZE]

    def between(self, start: int, stop: int) -> TokenIds:
        """A piece; without a copy where it is all of the prompt, or of the reply."""
        edge = self.prompt_length
        prompt: TokenIds = np.frombuffer(self.prompt, "<i4")[start:stop]
        if stop <= edge:
            return prompt
        reply: TokenIds = np.frombuffer(self.reply, "<i4")[max(start - edge, 0) : stop - edge]
        return reply if start >= edge else np.concatenate([prompt, reply])

    def begin(self, prompt: bytes) -> bool:
        """Whether a prompt begins with all of them."""
        return prompt.startswith(self.prompt) and prompt.startswith(self.reply, len(self.prompt))


@dataclass(slots=True, eq=False)
class _Place:
    """The first `length` ids of `ids`, which begin every sequence below."""

    length: int
    ids: Ids
    number: int
    """The first sequence that went through here."""
    above: "_Place | None" = None
    ending: int | None = None
    """The first sequence that has these ids and no more."""
    below: "dict[bytes, _Place]" = field(default_factory=dict)
    """By the id that comes next."""


class Found(NamedTuple):
    """Where a sequence leaves the trie: on the edge to `place`, after `length` ids."""

    place: _Place
    length: int


class Sequences:
    """The sequences so far, each with a number."""

    def __init__(self) -> None:
        """Begin with none."""
        self._root = _Place(0, Ids(b""), -1)
        self._ends: list[_Place] = []

    def find(self, prompt: bytes) -> Found:
        """Where a prompt leaves what is known."""
        for end in self._ends:
            if not end.below and end.ids.begin(prompt):
                return Found(end, end.length)  # nothing goes on from there, so nothing has more in common
        ids = Ids(prompt)
        best, length = self._root, 0
        for end in self._ends:
            if length < min(end.length, len(ids)) and end.ids.at(length) == ids.at(length):
                common = _common(end.ids, ids, 0, min(end.length, len(ids)))
                if common > length:
                    best, length = end, common
        while best.above is not None and best.above.length >= length:
            best = best.above
        return self._walk(Found(best, length), ids)

    def beginning(self, found: Found) -> int | None:
        """The first of the longest sequences that are a beginning of what was looked for."""
        at: _Place | None = found.place if found.place.length == found.length else found.place.above
        while at is not None and at.ending is None:
            at = at.above
        return None if at is None else at.ending

    def add(self, ids: Ids, number: int, prompt_found: Found) -> tuple[int | None, int]:
        """Add a sequence whose prompt was looked for last.

        Returns an earlier one with the longest common beginning, and that beginning's length.
        """
        found = prompt_found
        if found.length == ids.prompt_length:
            found = self._walk(found, ids)
        place, length = found.place, found.length
        shared = place.number if length else None
        if length < place.length:
            place = _split(place, length)
        if length < len(ids):
            end = _Place(len(ids), ids, number, place, number)
            place.below[ids.at(length)] = end
        else:
            end = place
            end.ending = number if end.ending is None else end.ending
        others = [last for last in self._ends if last is not place and last is not end]
        self._ends = [end, *others[: _LAST - 1]]
        return shared, length

    @staticmethod
    def _walk(found: Found, ids: Ids) -> Found:
        """On from there, as far as `ids` go."""
        place, length = found.place, found.length
        while True:
            if length < place.length:
                length = _common(place.ids, ids, length, min(place.length, len(ids)))
            below = place.below.get(ids.at(length)) if place.length == length < len(ids) else None
            if below is None:
                return Found(place, length)
            place, length = below, length + 1


def _split(place: _Place, length: int) -> _Place:
    """A place of its own for a beginning of an edge."""
    above = place.above
    assert above is not None
    middle = _Place(length, place.ids, place.number, above)
    middle.below[place.ids.at(length)] = place
    above.below[place.ids.at(above.length)] = middle
    place.above = middle
    return middle


def _common(one: Ids, other: Ids, start: int, stop: int) -> int:
    """Where two sequences that agree up to `start` differ; `stop` if they don't."""
    size = _FIRST_PIECE
    while start < stop:
        end = min(start + size, stop)
        different = one.between(start, end) != other.between(start, end)
        position = int(different.argmax())
        if different[position]:
            return start + position
        start, size = end, 8 * size
    return stop
