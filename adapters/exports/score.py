"""Score: what a foreign system says that a trace, or one span of it, was worth."""

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from tempfile import SpooledTemporaryFile
from typing import Final

_IN_MEMORY: Final = 2**20
"""Bytes of scores beyond which they are in a file."""


@dataclass(frozen=True, slots=True)
class Score:
    """One score, feedback or evaluation as it was exported."""

    trace_id: str | None
    """32 hex digits, as in the spans of the same export. None: for a whole session."""
    span_id: str | None
    """16 hex digits. None: for the whole trace."""
    name: str
    value: float | None
    """None: only a label was given."""
    label: str | None
    explanation: str | None
    author: str | None
    """Who gave it, as the export tells. The store goes by the key of whoever brings it in."""
    time_ns: int | None
    """Unix time, ns; None: not told."""
    source: str
    """Format that it came in."""
    session_id: str | None = None
    """The session that it is for, where it is for no trace."""
    project: str | None = None
    """The project that the session is of."""


class Scores:
    """Scores in order of arrival, in little memory however many they are."""

    def __init__(self) -> None:
        """There are none."""
        self._file = SpooledTemporaryFile(_IN_MEMORY)  # noqa: SIM115
        self._count = self._end = 0

    def add(self, scores: Sequence[Score]) -> None:
        """Add the scores of a row."""
        if scores:
            pickle.dump(scores, self._file)
            self._count += len(scores)
            self._end = self._file.tell()

    def __iter__(self) -> Iterator[Score]:
        """All of them. Nothing is to be added meanwhile."""
        self._file.seek(0)
        while self._file.tell() < self._end:
            yield from pickle.load(self._file)

    def __len__(self) -> int:
        """How many there are."""
        return self._count

    def close(self) -> None:
        """Remove them."""
        self._file.close()
