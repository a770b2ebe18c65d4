"""Score: what a foreign system says that a trace, or one span of it, was worth."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
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
        self._count = 0

    def add(self, scores: Iterable[Score]) -> None:
        """Add the scores of a row."""
        for score in scores:
            self._file.write(json.dumps(astuple(score)).encode() + b"\n")
            self._count += 1

    def __iter__(self) -> Iterator[Score]:
        """All of them. Nothing is to be added meanwhile."""
        self._file.seek(0)
        for line in self._file:
            yield Score(*json.loads(line))

    def __len__(self) -> int:
        """How many there are."""
        return self._count

    def close(self) -> None:
        """Remove them."""
        self._file.close()
