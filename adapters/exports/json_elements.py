"""The elements of a JSON array in a stream, one at a time.

Knows JSON's syntax; knows no meaning. Invariants: no more is in memory than one element and a chunk; an
element that is no JSON costs only itself, as long as its brackets and quotes are in pairs.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, Final

CHUNK_BYTES: Final = 2**20
_DECODER: Final = json.JSONDecoder()
_BLANK: Final = re.compile(r"[\s,]*")
_MARK: Final = re.compile(r'[{}\[\],"]')
_ESCAPED_BYTE: Final = re.compile("[\udc80-\udcff]")
_STRING: Final = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)


@dataclass(frozen=True, slots=True)
class NotJson:
    """An element that could not be parsed."""

    reason: str


class Elements:
    """Iterates over (line, value) of the elements of an array."""

    def __init__(self, file: BinaryIO, after: bytes) -> None:
        """Of the array in `file` that begins behind the bytes `after`, which begin at the next non-blank."""
        self._file = file
        self._bytes = b""
        self._is_ended = False
        self._text = ""
        self._position = 0
        self._line = 1
        self._read()
        start = len(self._text) - len(self._text.lstrip())
        self._skip_to(start + len(after.decode("utf-8", "surrogateescape")))

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        """The elements up to the end of the array, or of the stream, which is said to be cut off then."""
        while True:
            self._skip_blank()
            if self._position >= len(self._text):
                yield self._line, NotJson("cut short: the list has no end")
                return
            if self._text[self._position] == "]":
                return
            line = self._line
            yield line, self._element()

    def skip_object(self) -> None:
        """Go behind the object that the array is in."""
        self._skip_to(min(self._position + 1, len(self._text)))
        while True:
            end = self._end(is_one=False)
            if end is not None:
                self._skip_to(end + 1)
                return
            if self._is_ended:
                self._skip_to(len(self._text))
                return
            self._read()

    def lines_behind(self) -> Iterator[tuple[int, bytes]]:
        """(line, text) of what is behind the array, or the object, as far as it is not blank."""
        if self._text.startswith("]", self._position):
            self._skip_to(self._position + 1)
        while True:
            end = self._text.find("\n", self._position)
            if end < 0 and not self._is_ended:
                self._read()
                continue
            end = len(self._text) if end < 0 else end
            text = self._text[self._position : end].encode("utf-8", "surrogateescape")
            if text.strip():
                yield self._line, text
            self._skip_to(min(end + 1, len(self._text)))
            if self._is_ended and self._position >= len(self._text):
                return

    def _element(self) -> Any:
        size = CHUNK_BYTES
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._position)
            except (ValueError, RecursionError) as error:
                found = self._end()
                if found is None and not self._is_ended:
                    self._read(size)
                    size *= 2  # or an element of many chunks would be parsed once for each
                    continue
                end = len(self._text) if found is None else found
                value = NotJson(f"invalid JSON: {error}")
            else:
                if end == len(self._text) and not self._is_ended:  # a number may go on
                    self._read(size)
                    continue
            if not isinstance(value, NotJson) and not _is_utf8(self._text[self._position : end]):
                value = NotJson("no UTF-8")
            self._skip_to(max(end, self._position + 1))
            return value

    def _end(self, *, is_one: bool = True) -> int | None:
        """Where the element at the position ends, by its brackets; None if that is not in memory.

        With `is_one` false, where the object or array that it is in ends.
        """
        depth, at = 0, self._position
        while mark := _MARK.search(self._text, at):
            at = mark.end()
            match mark.group():
                case '"':
                    string = _STRING.match(self._text, mark.start())
                    if string is None:
                        return None
                    at = string.end()
                case "{" | "[":
                    depth += 1
                case ",":
                    if depth == 0 and is_one:
                        return mark.start()
                case _:
                    if depth == 0:
                        return mark.start()
                    depth -= 1
        return None

    def _skip_blank(self) -> None:
        while True:
            blank = _BLANK.match(self._text, self._position)
            self._skip_to(blank.end() if blank else self._position)
            if self._position < len(self._text) or self._is_ended:
                return
            self._read()

    def _skip_to(self, position: int) -> None:
        self._line += self._text.count("\n", self._position, position)
        self._position = position

    def _read(self, size: int = CHUNK_BYTES) -> None:
        chunk = self._bytes + self._file.read(size)
        self._is_ended = len(chunk) - len(self._bytes) == 0
        keep = 0 if self._is_ended else _incomplete(chunk)
        self._bytes = chunk[len(chunk) - keep :]
        text = chunk[: len(chunk) - keep].decode("utf-8", "surrogateescape")
        self._text = self._text[self._position :] + text
        self._position = 0


def _incomplete(chunk: bytes) -> int:
    """How many bytes at the end are the beginning of a character whose rest is not there."""
    for count in range(1, min(4, len(chunk) + 1)):
        byte = chunk[-count]
        if byte & 0xC0 == 0xC0:
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return count if count < length else 0
        if byte < 0x80:
            return 0
    return 0


def _is_utf8(text: str) -> bool:
    return text.isascii() or _ESCAPED_BYTE.search(text) is None
