"""What every store can do: `FileStore` (embedded DuckDB) and `HubClient` (HTTP) alike."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from spangrad.store.faults import Faults
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
)


class Store(Protocol):
    """A place for spans, rollouts, rewards, policies and updates.

    Every write is durable when the method returns, and idempotent: the same write
    twice is stored once. Methods raise `StoreError` or one of its subclasses.
    """

    def put_otlp(self, request: bytes, faults: Faults | None = None) -> int:
        """Store an OTLP `ExportTraceServiceRequest` (protobuf). Returns how many spans were new.

        What was not stored, or not as it came, is counted in `faults`.
        """
        ...

    def put_logs(self, request: bytes, faults: Faults | None = None) -> int:
        """Store an OTLP `ExportLogsServiceRequest` (protobuf). Returns how many records were new.

        What was not stored, or not as it came, is counted in `faults`.
        """
        ...

    def enqueue(self, rollouts: Sequence[Rollout]) -> int:
        """Add rollouts to the queue; those whose id is known are left alone. Returns how many were new."""
        ...

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
        ...

    def heartbeat(
        self, rollouts: Sequence[tuple[str, int]], *, worker: str, lease_s: float = 60.0
    ) -> list[str]:
        """Extend leases of (rollout_id, attempt). Returns the ids that are no longer this worker's."""
        ...

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
        ...

    def finish_many(self, endings: Sequence[Ending]) -> list[str]:
        """End several attempts at once, each as `finish` does. Returns the ids whose lease was lost."""
        ...

    def give_up(self, rollout_ids: Sequence[str], *, error_type: str, error: str) -> int:
        """End queued and running rollouts as failed, whoever has them. Returns how many.

        Ended rollouts are left alone, and so are those known from spans only. A worker that has one
        learns of it by its next heartbeat; what it says of it then is refused.
        """
        ...

    def requeue(self, rollout_ids: Sequence[str]) -> int:
        """Queue ended rollouts that no update consumed again, as the next attempt. Returns how many.

        What belongs to earlier attempts stays and no longer counts. Consumed, queued and running
        rollouts are left alone, and so are those known from spans only.
        """
        ...

    def put_rewards(self, rewards: Sequence[Reward]) -> int:
        """Store rewards; the author comes from the caller's key. Returns how many were stored."""
        ...

    def reward_author(self) -> RewardAuthor:
        """Whose rewards those are that this store is given here: what the key says."""
        ...

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
        ...

    def rewards(self, rollout_ids: Sequence[str] | None = None) -> list[Reward]:
        """Rewards of these rollouts (all without), in order of time."""
        ...

    def spans(
        self, rollout_ids: Sequence[str] | None = None, *, trace_ids: Sequence[str] | None = None
    ) -> Iterable[Span]:
        """Spans of these rollouts or traces (all without), ordered by (trace, start time)."""
        ...

    def logs(
        self, rollout_ids: Sequence[str] | None = None, *, trace_ids: Sequence[str] | None = None
    ) -> Iterable[LogRecord]:
        """Log records of the spans of these rollouts, or of these traces (all without), by (trace, time)."""
        ...

    def put_calls(
        self,
        rows: Sequence[Mapping[str, Any]],
        *,
        read: Mapping[str, int | None] | None = None,
        unknown: Sequence[Mapping[str, Any]] = (),
    ) -> int:
        """Store summaries of calls: columns of the table `calls`; a later one replaces an earlier one.

        With `read`, what `unread_traces` said of each trace that was read, these are all its calls, and
        `unknown` those in an unknown dialect (columns of `unknown_calls`): others are removed, and a trace
        that changed meanwhile is left as it is. Returns how many rows of `calls` are new or changed.
        """
        ...

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
        ...

    def mark_read(self, traces: Mapping[str, int]) -> int:
        """Say that these traces are in `calls` as they were at their `changed_ns`.

        Returns how many are so still. Evaluations that waited for it become rewards.
        """
        ...

    def set_sessions(self, groups: Sequence[Mapping[str, str | None]]) -> int:
        """Make each group of traces a rollout, whatever they were joined to before.

        For traces of which no span names a rollout; a group is trace id -> why it is joined, or not. The
        rollout's id is its earliest trace's. Returns how many traces were given to a rollout, or moved to
        another one.
        """
        ...

    def put_call_keys(self, rows: Sequence[Mapping[str, Any]]) -> int:
        """Store what later calls can be joined by: columns of the table `call_keys`."""
        ...

    def related_accounts(self, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Stored calls that may be accounts of a given one (`given_id`): `trace_id`, `trace_ids`, `rules`."""
        ...

    def related_call_keys(self, trace_ids: Sequence[str], limit: int) -> list[dict[str, Any]]:
        """Keys of the calls of these traces and of all that may be of one rollout with any, and so on.

        No further ones are looked for once there are more than `limit`.
        """
        ...

    def put_metrics(self, run_id: str, update_index: int, metrics: Mapping[str, float]) -> None:
        """Add numbers to a committed update, those of its publish, say; a known name is replaced."""
        ...

    def put_events(self, events: Sequence[RunEvent]) -> int:
        """Record what monitors saw in committed updates; of an update and monitor the first stands.

        Returns how many nobody had recorded before.
        """
        ...

    def events(self, run_id: str | None = None) -> list[RunEvent]:
        """What monitors saw, in order of updates."""
        ...

    def commit_update(self, update: Update) -> bool:
        """Record an update and mark its rollouts consumed, if it consumes, in one transaction.

        Returns False if exactly this (run_id, update_index) was committed before. Raises StoreError
        if the index leaves a gap or a rollout was consumed by another update.
        """
        ...

    def last_update(self, run_id: str) -> Update | None:
        """The update with the highest index of a run."""
        ...

    def updates(self, run_id: str | None = None, *, update_index: int | None = None) -> list[Update]:
        """Updates that match every given filter, in order."""
        ...

    def put_policy(self, policy: Policy) -> None:
        """Record a published version."""
        ...

    def policies(self, run_id: str | None = None) -> list[Policy]:
        """Published versions, in order."""
        ...

    def decide(self, decision: PolicyDecision) -> bool:
        """Record what was decided about a published version. Returns False if it was recorded before.

        Raises StoreError if there is no such version, or the decision does not fit those before it:
        a trainer promotes what has an evaluation, and rolls back to what is promoted.
        """
        ...

    def decisions(self, run_id: str | None = None) -> list[PolicyDecision]:
        """Decisions about the versions of a run (all without), in order."""
        ...

    def query(self, sql: str, parameters: Sequence[Any] | Mapping[str, Any] = ()) -> list[dict[str, Any]]:
        """Run one read-only SQL statement."""
        ...

    def query_arrow(
        self, sql: str, parameters: Sequence[Any] | Mapping[str, Any] = ()
    ) -> AbstractContextManager[Any]:
        """Run one read-only SQL statement; its answer is a `pyarrow.RecordBatchReader`."""
        ...

    def close(self) -> None:
        """Release the file or connection."""
        ...
