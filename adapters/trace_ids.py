"""Trace ids in order of arrival, each once, in little memory however many they are."""

import sqlite3
from collections.abc import Collection, Iterable, Iterator

_ADD = "INSERT INTO ids (id, has_span) VALUES (?, ?) ON CONFLICT (id) DO UPDATE SET has_span = has_span OR ?2"


class TraceIds(Collection[str]):
    """A growing set; what does not fit into some megabytes is in a file that ends with it."""

    def __init__(self) -> None:
        """It is empty."""
        self._ids = sqlite3.connect("", isolation_level=None)
        self._ids.execute("PRAGMA journal_mode = OFF")
        self._ids.execute("CREATE TABLE ids (number INTEGER PRIMARY KEY, id BLOB UNIQUE, has_span INTEGER)")

    def add(self, ids: Iterable[bytes], *, has_span: bool) -> None:
        """Add ids of which spans (or only log records) came."""
        self._ids.executemany(_ADD, [(trace_id, has_span) for trace_id in dict.fromkeys(ids)])

    def with_spans(self) -> int:
        """Of how many there was a span."""
        return int(self._ids.execute("SELECT count(*) FROM ids WHERE has_span").fetchone()[0])

    def __iter__(self) -> Iterator[str]:
        """The ids as hex digits. Nothing is to be added meanwhile."""
        for (trace_id,) in self._ids.execute("SELECT id FROM ids ORDER BY number"):
            yield trace_id.hex()

    def __contains__(self, trace_id: object) -> bool:
        """Whether an id, as hex digits, was added."""
        found = self._ids.execute("SELECT 1 FROM ids WHERE id = ?", [bytes.fromhex(str(trace_id))])
        return found.fetchone() is not None

    def __len__(self) -> int:
        """How many there are."""
        return int(self._ids.execute("SELECT count(*) FROM ids").fetchone()[0])

    def close(self) -> None:
        """Remove it."""
        self._ids.close()
