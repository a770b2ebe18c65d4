"""`FileStore`: the store in this process, one DuckDB file.

Knows how the table modules make up a store, and the spool folder beside the file. Knows
no HTTP. Safe to call from several threads: writes take turns, reads see a snapshot.
"""

import logging
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from spangrad.errors import LeaseLostError, StoreError
from spangrad.store.faults import Faults, Outcome
from spangrad.store.otlp import encode_request, records_of, spans_of
from spangrad.store.records import (
    Ending,
    LogRecord,
    Policy,
    PolicyDecision,
    Reward,
    RewardAuthor,
    Rollout,
    RolloutStatus,
    RunEvent,
    Span,
    UnreadTrace,
    Update,
    event_name,
)
from spangrad.store.requests import logs_request, trace_request
from spangrad.store.schema import TABLES
from spangrad.store.tables import call_keys, claims, ledger, queue, sessions, unread
from spangrad.store.tables.database import OUTAGES, Database, store_error
from spangrad.store.tables.decisions import insert_decision, select_decisions
from spangrad.store.tables.evaluations import reward_by_records, reward_by_traces
from spangrad.store.tables.logs import insert_logs, read_logs
from spangrad.store.tables.outcomes import settle_outcomes
from spangrad.store.tables.query import ARROW_TIMEOUT_S, ROW_LIMIT, TIMEOUT_S, run_arrow_query, run_query
from spangrad.store.tables.rewards import put_rewards, select_rewards
from spangrad.store.tables.span_rewards import reward_by_events
from spangrad.store.tables.spans import SpanWriter, differing, read_spans
from spangrad.tracer.conventions import REWARD_EVENT
from spangrad.tracer.journal import recover
from spangrad.tracer.spool import Spool

logger = logging.getLogger(__name__)

UNSTORABLE = "spans that the store can not hold"
OTHER_CONTENT = "the id of an earlier span, with other content"
UNENDED = "the id of a span that was stored before it had ended; a new store takes it whole"


def check_file(path: str | os.PathLike[str]) -> None:
    """Raise StoreError if there is something at this path that can't be opened as a store; makes nothing."""
    file = Path(path)
    try:
        # A full disk leaves files without a byte.
        is_there = file.exists() and (file.is_dir() or file.stat().st_size > 0)
    except OSError as error:
        raise store_error(error, file) from error
    if is_there:
        FileStore(file, read_only=True).close()


class FileStore:
    """A store in one DuckDB file. Implements `spangrad.store.base.Store`."""

    def __init__(self, path: str | os.PathLike[str], *, read_only: bool = False) -> None:
        """Open the file, made if need be, and take in what waits in its spool folder.

        Raises StoreLockedError if another process holds it, SchemaVersionError if a newer
        spangrad wrote it. With `read_only` the file stays as it is, others can read it meanwhile,
        and the spool folder waits; `open_to_read` takes that in before.
        """
        self.path = Path(path).absolute()
        self._database = Database(path, read_only=read_only)
        self._writer = SpanWriter(self._database)
        self._floors: queue.Floors = {}
        self.put_aside = 0
        """How many spans and spooled records could not be stored and are in `<path>.rejected` instead."""
        self._aside_lock = threading.Lock()
        if not read_only:
            try:
                self.drain()
            except BaseException:
                self.close()
                raise

    @property
    def database(self) -> Database:
        """The open file, for what works on its tables: `store/archive`."""
        return self._database

    # spans

    def put_otlp(self, request: bytes, faults: Faults | None = None) -> int:
        """Store an OTLP `ExportTraceServiceRequest` (protobuf). Returns how many spans were new.

        What was not stored, or not as it came, is counted in `faults`, or said in a warning.
        """
        message, found = trace_request(request)
        spans = spans_of(message)
        new, put_aside = self.take_in(spans)
        if put_aside:
            found.add(UNSTORABLE, Outcome.LEFT_OUT, f"they are in {self._rejected.name!r}", put_aside)
        if new + put_aside < len(spans):
            found.merge(self.conflicts(spans))
        _tell(found, faults)
        return new

    def conflicts(self, spans: Sequence[Span]) -> Faults:
        """Which of these spans, given before, have the id of an earlier one and other content."""
        faults = Faults()
        for span, known in differing(self._database, spans):
            kind = UNENDED if known.end_ns <= known.start_ns < span.end_ns else OTHER_CONTENT
            faults.add(kind, Outcome.LEFT_OUT, f"span {span.span_id} {span.name!r} of trace {span.trace_id}")
        return faults

    def put_batches(self, batches: Sequence[Sequence[Span]]) -> list[int]:
        """Store several batches in one transaction. Returns how many spans of each were new."""
        return self._writer.put(batches)

    def take_in(self, spans: Sequence[Span]) -> tuple[int, int]:
        """Store spans, whatever some of them are like. Returns how many were new, and how many put aside.

        A span that can't be stored costs no other: it is put into `<path>.rejected`, as OTLP. An
        outage (disk, memory, lock) raises, and the same spans can be given again.
        """
        self._database.check_writable()
        try:
            return self.put_batches([spans])[0], 0
        except OUTAGES:
            raise
        except StoreError as error:
            if len(spans) == 1:
                what = f"span {spans[0].span_id} of trace {spans[0].trace_id}"
                self._put_aside(encode_request(spans), what, error)
                return 0, 1
            middle = len(spans) // 2
            first, second = self.take_in(spans[:middle]), self.take_in(spans[middle:])
            return first[0] + second[0], first[1] + second[1]

    @property
    def _rejected(self) -> Path:
        """Where spans go that can not be stored."""
        return rejected_file(self.path)

    @property
    def is_invalidated(self) -> bool:
        """Whether DuckDB met a fatal error: nothing works until the store is opened anew."""
        return self._database.is_invalidated

    def spans(
        self, rollout_ids: Sequence[str] | None = None, *, trace_ids: Sequence[str] | None = None
    ) -> Iterable[Span]:
        """Spans of these rollouts or traces (all without), ordered by (trace, start time)."""
        return read_spans(self._database, rollout_ids, trace_ids)

    def put_logs(
        self,
        request: bytes,
        faults: Faults | None = None,
        *,
        author: RewardAuthor = RewardAuthor.OPERATOR,
    ) -> int:
        """Store an OTLP `ExportLogsServiceRequest` (protobuf). Returns how many records were new.

        What was not stored, or not as it came, is counted in `faults`, or said in a warning.
        """
        message, found = logs_request(request)
        _tell(found, faults)
        records = records_of(message)
        with self._database.transaction() as con:
            new = insert_logs(con, records, author, self._database.partitions)
            judging = [log_id for log_id, record in new.items() if event_name(record) == REWARD_EVENT]
            told = [record for record in records if event_name(record) != REWARD_EVENT]
            named = (record.trace_id for record in told if record.trace_id is not None)
            unread.touch(con, named, self._database.stamp())
            if judging:
                self._writer.await_judged()
                judged = [new[log_id].trace_id or "" for log_id in judging]
                with self._database.partitions.united(con, judged):
                    reward_by_records(con, judging)
            return len(new)

    def logs(
        self, rollout_ids: Sequence[str] | None = None, *, trace_ids: Sequence[str] | None = None
    ) -> Iterable[LogRecord]:
        """Log records of the spans of these rollouts, or of these traces (all without), by (trace, time)."""
        return read_logs(self._database, rollout_ids, trace_ids)

    def drain(self) -> int:
        """Take in what tracers have spooled beside the file. Returns how many records.

        A record that can't be stored is put into `<path>.rejected`; an outage (disk, memory, lock)
        raises, and the records stay where they are.
        """
        self._database.check_writable()
        folder = spool_folder(self.path)
        if not folder.is_dir():
            return 0
        spool = Spool(folder)
        recover(spool)  # what killed tracers had not spooled yet
        return spool.drain(self._put_spooled)

    def _put_spooled(self, record: bytes) -> None:
        try:
            message, found = trace_request(record)
            self.take_in(spans_of(message))
            if found.count(Outcome.LEFT_OUT):
                raise StoreError(found.told())
        except (*OUTAGES, MemoryError):
            raise
        except Exception as error:  # boundary: it must not hold up the records behind it
            self._put_aside(record, f"a spooled record of {len(record)} bytes", error)

    def _put_aside(self, record: bytes, what: str, error: Exception) -> None:
        rejected = self._rejected
        try:
            with self._aside_lock, rejected.open("ab") as file:
                file.write(record)
                file.flush()
                os.fsync(file.fileno())
                self.put_aside += 1
        except OSError as failure:
            raise store_error(failure, rejected) from failure
        logger.warning(
            "%s could not be stored and is in %s now (%d so far): %s", what, rejected, self.put_aside, error
        )

    # queue

    def enqueue(self, rollouts: Sequence[Rollout]) -> int:
        """Add rollouts to the queue; those whose id is known are left alone. Returns how many were new."""
        with self._database.transaction() as con:
            return queue.enqueue(con, rollouts, self._floors)

    def claim(
        self,
        *,
        worker: str,
        limit: int = 1,
        lease_s: float = 60.0,
        run_id: str | None = None,
        split: str | None = None,
        policy_version: int | None = None,
    ) -> list[Rollout]:
        """Claim queued rollouts, oldest first; a claim whose lease ran out counts as queued, attempt + 1."""
        with self._database.transaction() as con:
            return claims.claim(
                con,
                worker=worker,
                limit=limit,
                lease_s=lease_s,
                run_id=run_id,
                split=split,
                policy_version=policy_version,
                floors=self._floors,
            )

    def heartbeat(
        self, rollouts: Sequence[tuple[str, int]], *, worker: str, lease_s: float = 60.0
    ) -> list[str]:
        """Extend leases of (rollout_id, attempt). Returns the ids that are no longer this worker's."""
        with self._database.transaction() as con:
            return claims.heartbeat(con, rollouts, worker=worker, lease_s=lease_s)

    def finish(
        self,
        rollout_id: str,
        attempt: int,
        *,
        status: RolloutStatus = RolloutStatus.SUCCEEDED,
        output: Any = None,
        error_type: str | None = None,
        error: str | None = None,
        retry: bool = False,
        free: bool = False,
    ) -> None:
        """End an attempt; `retry` requeues while attempts are left, with `free` without using one up.

        `free` is for attempts that failed through no fault of their own. Raises LeaseLostError if the
        attempt is not the current one. The same again changes nothing.
        """
        ending = Ending(rollout_id, attempt, RolloutStatus(status), output, error_type, error, retry, free)
        if self.finish_many([ending]):
            now = self.rollouts(rollout_ids=[rollout_id])[0]
            raise LeaseLostError(
                f"rollout {rollout_id!r}: attempt {attempt} was to be finished, but attempt {now.attempt} is"
                f" {now.status}; drop this result, somebody else has the rollout"
            )

    def finish_many(self, endings: Sequence[Ending]) -> list[str]:
        """End several attempts in one transaction. Returns the ids whose attempt is not the current one."""
        with self._database.transaction() as con:
            return queue.finish(con, endings)

    def give_up(self, rollout_ids: Sequence[str], *, error_type: str, error: str) -> int:
        """End queued and running rollouts as failed, whoever has them. Returns how many.

        Ended rollouts are left alone, and so are those known from spans only. A worker that has one
        learns of it by its next heartbeat; what it says of it then is refused.
        """
        with self._database.transaction() as con:
            return queue.give_up(con, rollout_ids, error_type=error_type, error=error)

    def requeue(self, rollout_ids: Sequence[str]) -> int:
        """Queue ended rollouts that no update consumed again, as the next attempt. Returns how many.

        What belongs to earlier attempts stays and no longer counts. Consumed, queued and running
        rollouts are left alone, and so are those known from spans only.
        """
        with self._database.transaction() as con:
            self._floors.clear()
            return queue.requeue(con, rollout_ids)

    def rollouts(
        self,
        *,
        rollout_ids: Sequence[str] | None = None,
        run_id: str | None = None,
        group_ids: Sequence[str] | None = None,
        split: str | None = None,
        status: RolloutStatus | None = None,
        limit: int | None = None,
    ) -> list[Rollout]:
        """Rollouts that match every given filter, in order of enqueueing."""
        with self._database.snapshot() as con:
            return queue.select_rollouts(
                con,
                rollout_ids=rollout_ids,
                run_id=run_id,
                group_ids=group_ids,
                split=split,
                status=status,
                limit=limit,
            )

    # rewards

    def put_rewards(self, rewards: Sequence[Reward], *, author: RewardAuthor = RewardAuthor.OPERATOR) -> int:
        """Store rewards; whoever holds the file is the operator. Returns how many were new."""
        traces = [reward.trace_id for reward in rewards if reward.trace_id is not None]
        with self._database.transaction() as con, self._database.partitions.united(con, traces):
            return put_rewards(con, rewards, author)

    def reward_author(self) -> RewardAuthor:
        """Whose rewards those are that this store is given here: whoever holds the file is the operator."""
        return RewardAuthor.OPERATOR

    def rewards(self, rollout_ids: Sequence[str] | None = None) -> list[Reward]:
        """Rewards of these rollouts (all without), in order of time."""
        with self._database.snapshot() as con:
            return select_rewards(con, rollout_ids)

    # updates, policies, calls

    def commit_update(self, update: Update) -> bool:
        """Record an update and mark its rollouts consumed, in one transaction.

        Returns False if exactly this (run_id, update_index) was committed before. Raises StoreError
        if the index leaves a gap or a rollout was consumed by another update.
        """
        with self._database.transaction() as con:
            return ledger.commit_update(con, update)

    def last_update(self, run_id: str) -> Update | None:
        """The update with the highest index of a run."""
        with self._database.snapshot() as con:
            found = ledger.select_updates(con, run_id, only_last=True)
        return found[0] if found else None

    def updates(self, run_id: str | None = None, *, update_index: int | None = None) -> list[Update]:
        """Updates that match every given filter, in order."""
        with self._database.snapshot() as con:
            return ledger.select_updates(con, run_id, update_index=update_index)

    def put_policy(self, policy: Policy) -> None:
        """Record a published version."""
        with self._database.transaction() as con:
            ledger.put_policy(con, policy)

    def policies(self, run_id: str | None = None) -> list[Policy]:
        """Published versions, in order."""
        with self._database.snapshot() as con:
            return ledger.select_policies(con, run_id)

    def decide(self, decision: PolicyDecision) -> bool:
        """Record what was decided about a published version. Returns False if it was recorded before."""
        with self._database.transaction() as con:
            return insert_decision(con, decision)

    def decisions(self, run_id: str | None = None) -> list[PolicyDecision]:
        """Decisions about the versions of a run (all without), in order."""
        with self._database.snapshot() as con:
            return select_decisions(con, run_id)

    def put_metrics(self, run_id: str, update_index: int, metrics: Mapping[str, float]) -> None:
        """Add numbers to a committed update, those of its publish, say; a known name is replaced."""
        with self._database.transaction() as con:
            ledger.put_metrics(con, run_id, update_index, metrics)

    def put_events(self, events: Sequence[RunEvent]) -> int:
        """Record what monitors saw in committed updates; of an update and monitor the first stands.

        Returns how many nobody had recorded before.
        """
        with self._database.transaction() as con:
            return ledger.put_events(con, events)

    def events(self, run_id: str | None = None) -> list[RunEvent]:
        """What monitors saw, in order of updates."""
        with self._database.snapshot() as con:
            return ledger.select_events(con, run_id)

    def put_calls(
        self,
        rows: Sequence[Mapping[str, Any]],
        *,
        read: Mapping[str, int | None] | None = None,
        unknown: Sequence[Mapping[str, Any]] = (),
    ) -> int:
        """Store summaries of model calls: columns of the table `calls`, replaced by `call_id`.

        With `read`, what `unread_traces` said of each trace that was read, these are all its calls, and
        `unknown` those in an unknown dialect (columns of `unknown_calls`): others are removed, a trace that
        changed meanwhile is left as it is, and rollouts that nothing but spans of other recorders tell of
        have ended. Returns how many rows of `calls` are new or changed.
        """
        with self._database.transaction() as con:
            changed = ledger.put_calls(con, rows, read, unknown)
            if read:
                with self._database.partitions.united(con, list(read)):
                    settle_outcomes(con, read)
            return changed

    def unread_traces(
        self,
        *,
        trace_ids: Sequence[str] | None = None,
        rollout_ids: Sequence[str] | None = None,
        quiet_s: float | None = None,
        limit: int | None = None,
    ) -> list[UnreadTrace]:
        """Traces that changed since their calls were written, the longest unchanged first.

        Those that match every given filter; with `quiet_s` only those that nothing came of for so long, and
        whose rollout nobody waits for.
        """
        with self._database.snapshot() as con:
            self._database.partitions.unite_unread(con)
            return unread.select_unread(
                con, trace_ids=trace_ids, rollout_ids=rollout_ids, quiet_s=quiet_s, limit=limit
            )

    def mark_read(self, traces: Mapping[str, int]) -> int:
        """Say that these traces are in `calls` as they were at their `changed_ns`.

        Returns how many are so still. Evaluations that waited for it become rewards.
        """
        with self._database.transaction() as con:
            done = unread.mark_read(con, traces)
            with self._database.partitions.united(con, done):
                if done and self._writer.are_judged(con):
                    reward_by_traces(con, done)
                reward_by_events(con, done)
            return len(done)

    # sessions

    def set_sessions(self, groups: Sequence[Mapping[str, str | None]]) -> int:
        """Make each group of traces a rollout, whatever they were joined to before.

        For traces of which no span names a rollout; a group is trace id -> why it is joined, or not. The
        rollout's id is its earliest trace's. Returns how many traces were given to a rollout, or moved to
        another one.
        """
        with self._database.transaction() as con:
            given = [trace_id for group in groups for trace_id in group]
            with self._database.partitions.united(con, [*given, *sessions.joined(con, given)]):
                return sessions.set_sessions(con, groups)

    def put_call_keys(self, rows: Sequence[Mapping[str, Any]]) -> int:
        """Store what later calls can be joined by: columns of the table `call_keys`."""
        with self._database.transaction() as con:
            return call_keys.put_call_keys(con, rows)

    def related_accounts(self, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Stored calls that may be accounts of a given one (`given_id`): `trace_id`, `trace_ids`, `rules`."""
        with self._database.snapshot() as con:
            return call_keys.related_accounts(con, rows)

    def related_call_keys(self, trace_ids: Sequence[str], limit: int) -> list[dict[str, Any]]:
        """Keys of the calls of these traces and of all that may be of one rollout with any, and so on.

        No further ones are looked for once there are more than `limit`.
        """
        with self._database.snapshot() as con:
            return call_keys.related_call_keys(con, trace_ids, limit)

    # questions

    def query(
        self,
        sql: str,
        parameters: Sequence[Any] | Mapping[str, Any] = (),
        *,
        row_limit: int = ROW_LIMIT,
        timeout_s: float = TIMEOUT_S,
    ) -> list[dict[str, Any]]:
        """Run one read-only SQL statement. Raises StoreError beyond `row_limit` rows or `timeout_s`."""
        return run_query(self._database, sql, parameters, row_limit=row_limit, timeout_s=timeout_s)

    def query_arrow(
        self,
        sql: str,
        parameters: Sequence[Any] | Mapping[str, Any] = (),
        *,
        timeout_s: float = ARROW_TIMEOUT_S,
    ) -> AbstractContextManager[Any]:
        """Run one read-only SQL statement; its answer is a `pyarrow.RecordBatchReader`.

        For any number of rows, with exact types, while it is computed. StoreError beyond `timeout_s`.
        """
        return run_arrow_query(self._database, sql, parameters, timeout_s=timeout_s)

    def stats(self) -> dict[str, int]:
        """Rows of each table, and `size_bytes` of the file with its log."""
        with self._database.snapshot() as con:
            counts = " UNION ALL ".join(f"SELECT '{t.name}', count(*) FROM {t.name}" for t in TABLES)
            stats = dict(con.execute(counts).fetchall())
        files = (self.path, self.path.with_name(self.path.name + ".wal"))
        return stats | {"size_bytes": sum(file.stat().st_size for file in files if file.exists())}

    def close(self) -> None:
        """Fold the log into the file and release it. Harmless when repeated."""
        self._database.close()

    def __enter__(self) -> Self:
        """The store itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()


def _tell(found: Faults, faults: Faults | None) -> None:
    if faults is not None:
        faults.merge(found)
    elif found:
        logger.warning("of what came not all was kept as it was: %s", found.told())


def spool_folder(path: str | os.PathLike[str]) -> Path:
    """Where tracers put spans that a store's file is to take in."""
    file = Path(path).absolute()
    return file.with_name(file.name + ".spool")


def rejected_file(path: Path) -> Path:
    """Where spans are put that a store's file can't hold."""
    return path.with_name(path.name + ".rejected")
