"""Traces that changed -> their calls and rollouts, in the tables that SQL asks.

Orchestration alone: what a call is, `calls.py` says, which traces are one rollout, `sessions.py`, and which
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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from threading import Event
from typing import TYPE_CHECKING, Final

from spangrad.adapters.calls import calls_from_spans, record_calls
from spangrad.adapters.dialects import NO_DIALECT, recognise
from spangrad.adapters.grading import reason_kind
from spangrad.adapters.model_call import ModelCall, Purpose
from spangrad.adapters.sessions import Rule, join_sessions
from spangrad.adapters.trace_faults import count_faults
from spangrad.errors import SpangradError
from spangrad.store.base import Store
from spangrad.store.faults import Faults, Outcome
from spangrad.store.records import LogRecord, Span, UnreadTrace

if TYPE_CHECKING:
    from spangrad.store.file_store import FileStore

logger = logging.getLogger(__name__)

UNREADABLE: Final = "traces on which a reader failed; the log says how"
QUIET_S: Final = 3.0
"""A trace is read when nothing came of it for so long: its spans are likely to be complete."""
TRACES_AT_ONCE: Final = 200
FIRST_TRACES: Final = 20
CONTENT_AT_ONCE: Final = 16 * 2**20
"""Characters of attributes that are read at a time, about; one trace may be longer."""
PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 60.0
LAST_S: Final = 3.0
"""How long a hub that stops goes on reading what is left."""


@dataclass(slots=True)
class Accounts:
    """What traces told."""

    traces: int = 0
    calls: int = 0
    """Model calls, those in an unknown dialect not included."""
    embeddings: int = 0
    """Calls that made embeddings; they count nowhere else."""
    unclaimed_logs: int = 0
    """Log records that no span in the store claims."""
    unreadable: int = 0
    """Traces on which a reader failed."""
    by_dialect: Counter[str] = field(default_factory=Counter)
    """Calls by dialect; `no dialect` counts call spans that nobody here reads."""
    by_grade: Counter[str] = field(default_factory=Counter)
    by_reason: Counter[str] = field(default_factory=Counter)
    joined_by: Counter[Rule] = field(default_factory=Counter)
    faults: Faults = field(default_factory=Faults)
    """What is odd in them: times, parents, sizes, calls in an unknown dialect."""


def account_unread(store: Store) -> Accounts:
    """Read all traces that are unread by now, whatever their rollouts wait for."""
    reader, until_ns = _Reader(store), time.time_ns()
    while batch := [one for one in store.unread_traces(limit=reader.size) if one.changed_ns <= until_ns]:
        reader.read([one.trace_id for one in batch], batch)
    return reader.told


def account_rollouts(store: Store, rollout_ids: Sequence[str]) -> Accounts:
    """Read the unread traces of rollouts that have ended."""
    reader = _Reader(store)
    unread = iter(store.unread_traces(rollout_ids=rollout_ids))
    while batch := list(islice(unread, reader.size)):
        reader.read([one.trace_id for one in batch], batch)
    return reader.told


def account_traces(store: Store, trace_ids: Iterable[str]) -> Accounts:
    """Read these traces, and count also what somebody else has read of them meanwhile."""
    reader = _Reader(store)
    rest = iter(trace_ids)
    while wanted := list(islice(rest, reader.size)):
        reader.read(wanted, store.unread_traces(trace_ids=wanted))
    return reader.told


def keep_accounts(store: "FileStore", stop: Event, *, quiet_s: float = QUIET_S) -> None:
    """Read traces that nothing came of for `quiet_s`, until the event is set; then the rest, for a moment.

    Reading rests as long as it took, so that it never takes the machine from those who send.
    """
    reader, pause_s = _Reader(store), 0.0
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

    def __init__(self, store: Store) -> None:
        self.told = Accounts()
        self.size = FIRST_TRACES
        """How many traces to read next."""
        self._store = store

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

    def _read(self, trace_ids: Sequence[str], unread: Sequence[UnreadTrace]) -> None:
        rollouts = sorted({rollout_id for one in unread for rollout_id in one.rollout_ids})
        spans = list(self._store.spans(rollouts, trace_ids=trace_ids))
        records = list(self._store.logs(rollouts or None, trace_ids=trace_ids))
        calls = calls_from_spans(spans, records)
        changed: dict[str, int] = {one.trace_id: one.changed_ns for one in unread}
        if changed:
            others = {span.trace_id for span in spans}.difference(trace_ids)
            read = {**dict.fromkeys(others), **changed}
            record_calls(self._store, [call for call in calls if call.trace_id in read], read)
        joined = join_sessions(self._store, calls)
        if changed:
            self._store.mark_read(changed)
        self._count(set(trace_ids), spans, records, calls)
        self.told.joined_by += joined
        fitting = len(trace_ids) * CONTENT_AT_ONCE // max(_content(spans, records), 1)
        self.size = max(1, min(fitting, 4 * self.size, TRACES_AT_ONCE))

    def _count(
        self,
        wanted: set[str],
        spans: Sequence[Span],
        records: Sequence[LogRecord],
        calls: Sequence[ModelCall],
    ) -> None:
        known = {(span.trace_id, span.span_id) for span in spans}
        told, own = self.told, [call for call in calls if call.trace_id in wanted]
        told.traces += len(wanted)
        told.unclaimed_logs += sum(
            log.trace_id in wanted and (log.trace_id, log.span_id) not in known for log in records
        )
        own_spans = [span for span in spans if span.trace_id in wanted]
        strays = [span for span in own_spans if recognise(span) == NO_DIALECT]
        if strays:
            told.by_dialect[NO_DIALECT] += len(strays)
        count_faults(own_spans, strays, told.faults)
        sampled = [call for call in own if call.purpose is not Purpose.EMBEDDING]
        told.embeddings += len(own) - len(sampled)
        told.calls += len(sampled)
        for call in sampled:
            told.by_dialect[call.dialect] += 1
            told.by_grade[str(call.grade)] += 1
            told.by_reason.update({reason_kind(reason) for reason in call.grade_reasons})


def _content(spans: Iterable[Span], records: Iterable[LogRecord]) -> int:
    """About how many characters these hold."""
    values: Iterator[object] = (value for span in spans for value in span.attributes.values())
    told = sum(len(value) for value in values if isinstance(value, str | bytes))
    return told + sum(len(str(record.body)) for record in records)
