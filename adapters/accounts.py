"""Traces that changed -> their calls and rollouts, in the tables that SQL asks.

Orchestration alone: what is read of a trace, and of what is related to it, `settling.py` says, and which
traces are to be read, the store (`unread_traces`).

Invariants:
* a trace that changes while it is read is read again, and an older reading never replaces a newer one;
* a trace that names a rollout is read with all of that rollout: a call may be told in several of its traces;
* a trace that can't be read costs no other, and is not tried again before it changes;
* memory is that of some traces at a time.
"""

import logging
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from threading import Event
from typing import TYPE_CHECKING, Final

from spangrad.adapters.counting import Counts, count_told
from spangrad.adapters.dialects import NO_DIALECT
from spangrad.adapters.sessions import GUESSED, Rule
from spangrad.adapters.settling import settle_calls, settle_sessions
from spangrad.adapters.trace_faults import count_faults
from spangrad.adapters.trace_ids import TraceIds
from spangrad.errors import SpangradError
from spangrad.store.base import Store
from spangrad.store.faults import Faults, Outcome
from spangrad.store.records import LogRecord, Span, UnreadTrace
from spangrad.tracer.periodically import Periodically

if TYPE_CHECKING:
    from spangrad.store.file_store import FileStore

logger = logging.getLogger(__name__)

UNREADABLE: Final = "traces on which a reader failed; the log says how"
QUIET_S: Final = 3.0
"""A trace is read when nothing came of it for so long: its spans are likely to be complete."""
TRACES_AT_ONCE: Final = 200
JOINED_AT_ONCE: Final = 2000
FIRST_TRACES: Final = 20
CONTENT_AT_ONCE: Final = 16 * 2**20
"""Characters of attributes that are read at a time, about; one trace may be longer."""
PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 60.0
SCOPES_TOLD: Final = 5
LONGEST_SCOPE: Final = 80
LAST_S: Final = 3.0
"""How long a hub that stops goes on reading what is left."""


@dataclass(slots=True)
class Accounts(Counts):
    """What traces told."""

    traces: int = 0
    unclaimed_logs: int = 0
    """Log records that no span in the store claims."""
    unreadable: int = 0
    """Traces on which a reader failed."""
    faults: Faults = field(default_factory=Faults)
    """What is odd in them: times, parents, sizes, calls in an unknown dialect."""


def account_unread(store: Store) -> Accounts:
    """Read all traces that are unread by now, whatever their rollouts wait for."""
    ids, until_ns = TraceIds(), time.time_ns()
    reader = _Reader(store, ids)
    while batch := [one for one in store.unread_traces(limit=reader.size) if one.changed_ns <= until_ns]:
        ids.add((bytes.fromhex(one.trace_id) for one in batch), has_span=True)
        reader.read([one.trace_id for one in batch], batch)
    return reader.end()


def account_rollouts(store: Store, rollout_ids: Sequence[str]) -> Accounts:
    """Read the unread traces of rollouts that have ended."""
    found = store.unread_traces(rollout_ids=rollout_ids)
    reader, unread = _Reader(store, [one.trace_id for one in found]), iter(found)
    while batch := list(islice(unread, reader.size)):
        reader.read([one.trace_id for one in batch], batch)
    return reader.end()


def account_traces(store: Store, trace_ids: Collection[str], rules: Sequence[Rule] = GUESSED) -> Accounts:
    """Read these traces, to be joined by these rules, whoever else has read them meanwhile."""
    reader = _Reader(store, trace_ids, rules, JOINED_AT_ONCE)
    rest = iter(trace_ids)
    while wanted := list(islice(rest, reader.size)):
        reader.read(wanted, store.unread_traces(trace_ids=wanted))
    return reader.end()


def keep_accounts(store: "FileStore", stop: Event, *, quiet_s: float = QUIET_S) -> None:
    """Read traces that nothing came of for `quiet_s`, until the event is set; then the rest, for a moment.

    Reading rests as long as it took, so that it never takes the machine from those who send.
    """
    reader, pause_s = _Reader(store, ()), 0.0
    while not stop.wait(pause_s) and not store.is_invalidated:
        began = time.monotonic()
        try:
            batch = store.unread_traces(quiet_s=quiet_s, limit=reader.size)
            reader.read([one.trace_id for one in batch], batch)
        except SpangradError as error:
            logger.warning("traces can't be read now and are tried again: %s", error)
            pause_s = min(max(2 * pause_s, PAUSE_S), LONGEST_PAUSE_S)
        else:
            pause_s = time.monotonic() - began if batch else PAUSE_S
        reader.tell_unread_calls()
    deadline = time.monotonic() + LAST_S
    while not store.is_invalidated and time.monotonic() < deadline:
        try:
            batch = store.unread_traces(limit=reader.size)
            if not batch:
                return
            reader.read([one.trace_id for one in batch], batch)
        except SpangradError as error:
            logger.warning("traces can't be read now; they are when the store is opened again: %s", error)
            return


class _Reader:
    """Reads batches of traces, as many at a time as keep memory small."""

    def __init__(
        self,
        store: Store,
        trace_ids: Collection[str],
        rules: Sequence[Rule] | None = None,
        joined_at_once: int = 1,
    ) -> None:
        self.told = Accounts()
        self.size = FIRST_TRACES
        """How many traces to read next."""
        self._store = store
        self._trace_ids = trace_ids
        """What is counted in the end."""
        self._rules = rules
        self._joined_at_once = joined_at_once
        self._unread_calls = Counter[str]()
        """By scope, those in no known dialect that were not told yet."""
        self._said = Periodically()
        self._waiting: dict[str, int | None] = {}
        """Traces whose calls are recorded, and that have to find their rollouts: when they changed."""

    def read(self, trace_ids: Sequence[str], unread: Sequence[UnreadTrace]) -> None:
        """Read traces, and write what those of them that are `unread` tell."""
        if not trace_ids:
            return
        try:
            self._read(trace_ids, unread)
        except SpangradError:
            raise
        except Exception:  # boundary: whatever a recorder wrote
            if len(trace_ids) > 1:
                middle = len(trace_ids) // 2
                for part in (trace_ids[:middle], trace_ids[middle:]):
                    self.read(part, [one for one in unread if one.trace_id in set(part)])
                return
            logger.exception("trace %s can't be read; its spans are stored", trace_ids[0])
            self.told.unreadable += 1
            self.told.faults.add(UNREADABLE, Outcome.KEPT, f"trace {trace_ids[0]}")
            self._store.mark_read({one.trace_id: one.changed_ns for one in unread})

    def tell_unread_calls(self) -> None:
        """Log, every 30 s at most, of which scopes there are model calls that nobody reads."""
        if self._unread_calls and self._said.due():
            for scope, count in self._unread_calls.most_common():
                logger.warning(
                    "what looks like model calls of scope %r is in no known dialect (%d since the last such"
                    " line): the spans are stored, no call is made of them, so no report counts them",
                    scope,
                    count,
                )
            self._unread_calls.clear()

    def end(self) -> Accounts:
        """Find the rollouts of what waits for them. Returns what all traces told."""
        self._join()
        return count_told(self._store, self._trace_ids, self.told) if self.told.traces else self.told

    def _read(self, trace_ids: Sequence[str], unread: Sequence[UnreadTrace]) -> None:
        spans, records, strays = settle_calls(self._store, trace_ids, self._rules, unread, self._waiting)
        self._waiting |= dict.fromkeys(trace_ids) | {one.trace_id: one.changed_ns for one in unread}
        wanted = set(trace_ids)
        self._count(wanted, spans, records, [span for span in strays if span.trace_id in wanted])
        if len(self._waiting) >= self._joined_at_once:
            self._join()
        fitting = len(trace_ids) * CONTENT_AT_ONCE // max(_content(spans, records), 1)
        self.size = max(1, min(fitting, 4 * self.size, TRACES_AT_ONCE))

    def _join(self) -> None:
        if self._waiting:
            settle_sessions(self._store, list(self._waiting))
        if changed := {trace_id: when for trace_id, when in self._waiting.items() if when is not None}:
            self._store.mark_read(changed)
        self._waiting.clear()

    def _count(
        self, wanted: set[str], spans: Sequence[Span], records: Sequence[LogRecord], strays: Sequence[Span]
    ) -> None:
        known = {(span.trace_id, span.span_id) for span in spans}
        told = self.told
        told.traces += len(wanted)
        told.unclaimed_logs += sum(
            log.trace_id in wanted and (log.trace_id, log.span_id) not in known for log in records
        )
        own_spans = [span for span in spans if span.trace_id in wanted]
        if strays:
            told.by_dialect[NO_DIALECT] += len(strays)
        for span in strays:
            scope = (span.scope or "")[:LONGEST_SCOPE]
            if scope in self._unread_calls or len(self._unread_calls) < SCOPES_TOLD:
                self._unread_calls[scope] += 1
        count_faults(own_spans, strays, told.faults)


def _content(spans: Iterable[Span], records: Iterable[LogRecord]) -> int:
    """About how many characters these hold."""
    values: Iterator[object] = (value for span in spans for value in span.attributes.values())
    told = sum(len(value) for value in values if isinstance(value, str | bytes))
    return told + sum(len(str(record.body)) for record in records)
