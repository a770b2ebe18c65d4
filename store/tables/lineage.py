"""Which spans are new, and whose rollout they belong to.

Spans arrive in the order they end: children before parents, spread over batches. Only
some carry `spangrad.rollout.id`; the others belong to the rollout of their nearest
ancestor. Keeps recently active traces in memory, loads others from the file.

Invariants:

* a (trace_id, span_id) is new once;
* when the last missing ancestor has arrived, every span below it has its rollout id,
  whatever the order of arrival;
* memory is bounded; forgetting a trace costs a look-up, never correctness.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import duckdb

from spangrad.store.records import Span
from spangrad.store.tables.rows import looked_up

CACHED_SPANS = 100_000

STORED_COLUMNS: Final = "trace_id, span_id, parent_span_id, rollout_id, attempt"

Key = tuple[str, str]
"""(trace_id, span_id)."""
Owner = tuple[str, int | None]
"""(rollout_id, attempt)."""
Stored = tuple[str, str, str | None, str | None, int | None]
"""(trace_id, span_id, parent_span_id, rollout_id, attempt)."""
Archived = Callable[[duckdb.DuckDBPyConnection, Sequence[str]], list[Stored]]
"""The spans of traces that are in the archive."""


@dataclass(slots=True)
class _Node:
    parent: str | None
    owner: Owner | None


@dataclass(slots=True)
class _Trace:
    nodes: dict[str, _Node] = field(default_factory=dict)
    unowned: set[str] = field(default_factory=set)
    has_owned: bool = False

    def add(self, span_id: str, parent: str | None, owner: Owner | None) -> None:
        self.nodes[span_id] = _Node(parent, owner)
        if owner is None:
            self.unowned.add(span_id)
        else:
            self.has_owned = True

    def settle(self) -> dict[str, Owner]:
        """Give owners to what has an owned ancestor; returns what changed."""
        settled: dict[str, Owner] = {}
        if not self.has_owned:
            return settled
        for span_id in list(self.unowned):
            path: list[str] = []
            seen: set[str] = set()
            link: str | None = span_id
            while link is not None and link in self.nodes and link not in seen:
                owner = self.nodes[link].owner
                if owner is not None:
                    for below in path:
                        self.nodes[below].owner = owner
                        settled[below] = owner
                    break
                seen.add(link)
                path.append(link)
                link = self.nodes[link].parent
        self.unowned -= settled.keys()
        return settled


@dataclass(frozen=True, slots=True)
class Admission:
    """Outcome for a batch of spans."""

    is_new: Sequence[bool]
    """One per span given: False for a repeat."""
    owners: dict[Key, Owner]
    """Owners of new spans that have one."""
    settled_earlier: dict[Key, Owner]
    """Spans stored before that have an owner now."""


class Lineage:
    """Memory of the traces that are active."""

    def __init__(self, archived: Archived | None = None) -> None:
        """Start knowing nothing; traces load, from the archive too, when a span of theirs arrives."""
        self._archived = archived
        self.forget()

    def forget(self) -> None:
        """Drop everything: after a transaction that did not commit."""
        self._traces: OrderedDict[str, _Trace] = OrderedDict()
        self._size = 0

    def admit(self, con: duckdb.DuckDBPyConnection, spans: Sequence[Span]) -> Admission:
        """Sort a batch into new and known spans, and find owners."""
        self._load(con, {span.trace_id for span in spans})
        is_new: list[bool] = []
        added: set[Key] = set()
        gained: set[str] = set()
        for span in spans:
            trace = self._traces[span.trace_id]
            fresh = span.span_id not in trace.nodes
            is_new.append(fresh)
            if fresh:
                owner = (span.rollout_id, span.attempt) if span.rollout_id else None
                trace.add(span.span_id, span.parent_span_id, owner)
                added.add((span.trace_id, span.span_id))
                gained.add(span.trace_id)
        self._size += len(added)
        settled = {
            (trace_id, span_id): owner
            for trace_id in gained
            for span_id, owner in self._traces[trace_id].settle().items()
        }
        owners = {key: owner for key in added if (owner := self._traces[key[0]].nodes[key[1]].owner)}
        self._evict()
        earlier = {key: owner for key, owner in settled.items() if key not in added}
        return Admission(is_new, owners, earlier)

    def _load(self, con: duckdb.DuckDBPyConnection, trace_ids: Iterable[str]) -> None:
        unknown: list[str] = []
        for trace_id in trace_ids:
            if trace_id in self._traces:
                self._traces.move_to_end(trace_id)
            else:
                unknown.append(trace_id)
                self._traces[trace_id] = _Trace()
        archived = self._archived(con, unknown) if self._archived and unknown else []
        for trace_id, span_id, parent, rollout_id, attempt in [*_stored(con, unknown), *archived]:
            self._traces[trace_id].add(span_id, parent, (rollout_id, attempt) if rollout_id else None)
            self._size += 1

    def _evict(self) -> None:
        while self._size > CACHED_SPANS and self._traces:
            _, trace = self._traces.popitem(last=False)
            self._size -= len(trace.nodes)


def _stored(con: duckdb.DuckDBPyConnection, trace_ids: Sequence[str]) -> list[Stored]:
    select = f"SELECT {STORED_COLUMNS} FROM spans WHERE trace_id IN"
    return [
        row
        for marks, some in looked_up(trace_ids)
        for row in con.execute(f"{select} {marks}", some).fetchall()
    ]
