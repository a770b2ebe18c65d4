"""`HubClient`: the store of a hub, over HTTP.

Knows the hub's paths and how its errors become exceptions again; knows no DuckDB.
Invariants: what may be repeated is tried again for a few seconds while no hub answers;
a claim or requeue is repeated only if the hub can't have seen it; an answer that no hub gives is said
to be that.
"""

import logging
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Final, Self

import httpx

from spangrad.errors import HubUnreachableError, RequestTooLargeError, SpangradError, StoreError
from spangrad.store.encoding import decode_json, encode_json
from spangrad.store.faults import FAULTS_HEADER, Faults, faults_from_text
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
from spangrad.store.wire import (
    LOGS_TYPE,
    SPANS_TYPE,
    error_from_wire,
    logs_from_frames,
    record_from_wire,
    record_to_wire,
    records_from_wire,
    spans_from_frames,
)

logger = logging.getLogger(__name__)

RETRY_S: Final = 5.0
TOO_LARGE: Final = 413
_FIRST_PAUSE_S: Final = 0.05
_LAST_PAUSE_S: Final = 1.0


class HubClient:
    """The store of a hub. Implements `spangrad.store.base.Store`; safe to use from several threads."""

    def __init__(
        self, url: str, key: str | None = None, timeout_s: float = 30.0, *, retry_s: float = RETRY_S
    ) -> None:
        """Nothing is sent yet.

        Args:
            url: Of the hub, such as "http://127.0.0.1:4318".
            key: One of the hub's keys; its role decides what is allowed.
            timeout_s: How long to wait for an answer.
            retry_s: How long to keep trying while no hub answers.
        """
        self.url = url.rstrip("/")
        self._retry_s = retry_s
        self._timeout_s = timeout_s
        self._http = httpx.Client(
            base_url=self.url,
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=timeout_s,
            trust_env=False,
        )

    def put_otlp(self, request: bytes, faults: Faults | None = None) -> int:
        """Store an OTLP `ExportTraceServiceRequest` (protobuf). Returns how many spans were new.

        What was not stored, or not as it came, is counted in `faults`, or said in a warning.
        """
        return self._put("/v1/traces", request, "x-spangrad-new-spans", faults)

    def put_logs(self, request: bytes, faults: Faults | None = None) -> int:
        """Store an OTLP `ExportLogsServiceRequest` (protobuf). Returns how many records were new.

        What was not stored, or not as it came, is counted in `faults`, or said in a warning.
        """
        return self._put("/v1/logs", request, "x-spangrad-new-logs", faults)

    def enqueue(self, rollouts: Sequence[Rollout]) -> int:
        """Add rollouts to the queue; those whose id is known are left alone. Returns how many were new."""
        return int(self._call("enqueue", {"rollouts": [record_to_wire(rollout) for rollout in rollouts]}))

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
        arguments = {
            "worker": worker,
            "limit": limit,
            "lease_s": lease_s,
            "run_id": run_id,
            "split": split,
            "policy_version": policy_version,
        }
        return records_from_wire(Rollout, self._call("claim", arguments, is_repeatable=False))

    def heartbeat(
        self, rollouts: Sequence[tuple[str, int]], *, worker: str, lease_s: float = 60.0
    ) -> list[str]:
        """Extend leases of (rollout_id, attempt). Returns the ids that are no longer this worker's."""
        pairs = [list(pair) for pair in rollouts]
        return list(self._call("heartbeat", {"rollouts": pairs, "worker": worker, "lease_s": lease_s}))

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
        arguments = {
            "rollout_id": rollout_id,
            "attempt": attempt,
            "status": str(status),
            "output": output,
            "error_type": error_type,
            "error": error,
            "retry": retry,
        }
        if free:
            arguments["free"] = True
        self._call("finish", arguments)

    def finish_many(self, endings: Sequence[Ending]) -> list[str]:
        """End several attempts at once, each as `finish` does. Returns the ids whose lease was lost."""
        return list(self._call("finish_many", {"endings": [record_to_wire(ending) for ending in endings]}))

    def give_up(self, rollout_ids: Sequence[str], *, error_type: str, error: str) -> int:
        """End queued and running rollouts as failed, whoever has them. Returns how many.

        Ended rollouts are left alone, and so are those known from spans only. A worker that has one
        learns of it by its next heartbeat; what it says of it then is refused.
        """
        arguments = {"rollout_ids": list(rollout_ids), "error_type": error_type, "error": error}
        return int(self._call("give_up", arguments))

    def requeue(self, rollout_ids: Sequence[str]) -> int:
        """Queue ended rollouts that no update consumed again, as the next attempt. Returns how many.

        What belongs to earlier attempts stays and no longer counts. Consumed, queued and running
        rollouts are left alone, and so are those known from spans only.
        """
        arguments = {"rollout_ids": list(rollout_ids)}
        return int(self._call("requeue", arguments, is_repeatable=False))

    def put_rewards(self, rewards: Sequence[Reward]) -> int:
        """Store rewards; the author comes from the caller's key. Returns how many were stored."""
        return int(self._call("put_rewards", {"rewards": [record_to_wire(reward) for reward in rewards]}))

    def reward_author(self) -> RewardAuthor:
        """Whose rewards those are that this store is given here: what the key says."""
        return RewardAuthor(self._call("reward_author", {}))

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
        arguments = {
            "rollout_ids": None if rollout_ids is None else list(rollout_ids),
            "run_id": run_id,
            "group_ids": None if group_ids is None else list(group_ids),
            "split": split,
            "status": None if status is None else str(status),
            "limit": limit,
        }
        return records_from_wire(Rollout, self._call("rollouts", arguments))

    def rewards(self, rollout_ids: Sequence[str] | None = None) -> list[Reward]:
        """Rewards of these rollouts (all without), in order of time."""
        arguments = {"rollout_ids": None if rollout_ids is None else list(rollout_ids)}
        return records_from_wire(Reward, self._call("rewards", arguments))

    def spans(
        self, rollout_ids: Sequence[str] | None = None, *, trace_ids: Sequence[str] | None = None
    ) -> Iterable[Span]:
        """Spans of these rollouts or traces (all without), ordered by (trace, start time)."""
        arguments = {
            "rollout_ids": None if rollout_ids is None else list(rollout_ids),
            "trace_ids": None if trace_ids is None else list(trace_ids),
        }
        pieces = self._stream("/api/spans", arguments, SPANS_TYPE)
        return spans_from_frames(pieces)

    def logs(
        self, rollout_ids: Sequence[str] | None = None, *, trace_ids: Sequence[str] | None = None
    ) -> Iterable[LogRecord]:
        """Log records of the spans of these rollouts, or of these traces (all without), by (trace, time)."""
        arguments = {
            "rollout_ids": None if rollout_ids is None else list(rollout_ids),
            "trace_ids": None if trace_ids is None else list(trace_ids),
        }
        return logs_from_frames(self._stream("/api/logs", arguments, LOGS_TYPE))

    def commit_update(self, update: Update) -> bool:
        """Record an update and mark its rollouts consumed, in one transaction.

        Returns False if exactly this (run_id, update_index) was committed before. Raises StoreError
        if the index leaves a gap or a rollout was consumed by another update.
        """
        return bool(self._call("commit_update", {"update": record_to_wire(update)}))

    def last_update(self, run_id: str) -> Update | None:
        """The update with the highest index of a run."""
        found = self._call("last_update", {"run_id": run_id})
        return None if found is None else record_from_wire(Update, found)

    def updates(self, run_id: str | None = None, *, update_index: int | None = None) -> list[Update]:
        """Updates that match every given filter, in order."""
        arguments: dict[str, Any] = {"run_id": run_id}
        if update_index is not None:
            arguments["update_index"] = update_index
        return records_from_wire(Update, self._call("updates", arguments))

    def put_policy(self, policy: Policy) -> None:
        """Record a published version."""
        self._call("put_policy", {"policy": record_to_wire(policy)})

    def policies(self, run_id: str | None = None) -> list[Policy]:
        """Published versions, in order."""
        return records_from_wire(Policy, self._call("policies", {"run_id": run_id}))

    def decide(self, decision: PolicyDecision) -> bool:
        """Record what was decided about a published version. Returns False if it was recorded before."""
        stamped = replace(decision, time_ns=decision.time_ns or time.time_ns())
        return bool(self._call("decide", {"decision": record_to_wire(stamped)}))

    def decisions(self, run_id: str | None = None) -> list[PolicyDecision]:
        """Decisions about the versions of a run (all without), in order."""
        return records_from_wire(PolicyDecision, self._call("decisions", {"run_id": run_id}))

    def put_metrics(self, run_id: str, update_index: int, metrics: Mapping[str, float]) -> None:
        """Add numbers to a committed update, those of its publish, say; a known name is replaced."""
        arguments = {"run_id": run_id, "update_index": update_index, "metrics": dict(metrics)}
        self._call("put_metrics", arguments)

    def put_events(self, events: Sequence[RunEvent]) -> int:
        """Record what monitors saw in committed updates; of an update and monitor the first stands.

        Returns how many nobody had recorded before.
        """
        return int(self._call("put_events", {"events": [record_to_wire(event) for event in events]}))

    def events(self, run_id: str | None = None) -> list[RunEvent]:
        """What monitors saw, in order of updates."""
        return records_from_wire(RunEvent, self._call("events", {"run_id": run_id}))

    def put_calls(
        self,
        rows: Sequence[Mapping[str, Any]],
        *,
        read: Mapping[str, int | None] | None = None,
        unknown: Sequence[Mapping[str, Any]] = (),
    ) -> int:
        """Store summaries of model calls: columns of the table `calls`, replaced by `call_id`.

        With `read`, what `unread_traces` said of each trace that was read, these are all its calls, and
        `unknown` those in an unknown dialect (columns of `unknown_calls`): others are removed, and a trace
        that changed meanwhile is left as it is. Returns how many rows of `calls` are new or changed.
        """
        arguments: dict[str, Any] = {"rows": [dict(row) for row in rows]}
        if read is not None:
            arguments["read"] = dict(read)
        if unknown:
            arguments["unknown"] = [dict(row) for row in unknown]
        return int(self._call("put_calls", arguments))

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
        arguments = {
            "trace_ids": None if trace_ids is None else list(trace_ids),
            "rollout_ids": None if rollout_ids is None else list(rollout_ids),
            "quiet_s": quiet_s,
            "limit": limit,
        }
        return records_from_wire(UnreadTrace, self._call("unread_traces", arguments))

    def mark_read(self, traces: Mapping[str, int]) -> int:
        """Say that these traces are in `calls` as they were at their `changed_ns`.

        Returns how many are so still. Evaluations that waited for it become rewards.
        """
        return int(self._call("mark_read", {"traces": dict(traces)}))

    def set_sessions(self, groups: Sequence[Mapping[str, str | None]]) -> int:
        """Make each group of traces a rollout, whatever they were joined to before; trace id -> why.

        Returns how many traces were given to a rollout, or moved to another one.
        """
        return int(self._call("set_sessions", {"groups": [dict(group) for group in groups]}))

    def put_call_keys(self, rows: Sequence[Mapping[str, Any]]) -> int:
        """Store what later calls can be joined by: columns of the table `call_keys`."""
        return int(self._call("put_call_keys", {"rows": [dict(row) for row in rows]}))

    def related_accounts(self, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Stored calls that may be accounts of a given one (`given_id`): `trace_id`, `trace_ids`, `rules`."""
        return list(self._call("related_accounts", {"rows": [dict(row) for row in rows]}))

    def related_call_keys(self, trace_ids: Sequence[str], limit: int) -> list[dict[str, Any]]:
        """Keys of the calls of these traces and of all that may be of one rollout with any, and so on."""
        return list(self._call("related_call_keys", {"trace_ids": list(trace_ids), "limit": limit}))

    def query(
        self,
        sql: str,
        parameters: Sequence[Any] | Mapping[str, Any] = (),
        *,
        row_limit: int = 10_000,
        timeout_s: float = 20.0,
    ) -> list[dict[str, Any]]:
        """Run one read-only SQL statement. Raises StoreError beyond `row_limit` rows or `timeout_s`."""
        given = dict(parameters) if isinstance(parameters, Mapping) else list(parameters)
        arguments = {"sql": sql, "parameters": given, "row_limit": row_limit, "timeout_s": timeout_s}
        return list(self._call("query", arguments))

    @contextmanager
    def query_arrow(
        self, sql: str, parameters: Sequence[Any] | Mapping[str, Any] = (), *, timeout_s: float = 600.0
    ) -> Iterator[Any]:
        """Run one read-only SQL statement; its answer is a `pyarrow.RecordBatchReader`.

        For any number of rows, with exact types, while it is computed. StoreError beyond `timeout_s`.
        """
        from spangrad.store.arrow import ARROW_TYPE, answer_from_ipc

        given = dict(parameters) if isinstance(parameters, Mapping) else list(parameters)
        arguments = {"sql": sql, "parameters": given, "timeout_s": timeout_s}
        pieces = self._stream("/api/query", arguments, ARROW_TYPE, timeout_s=timeout_s + self._timeout_s)
        with closing(pieces):
            yield answer_from_ipc(pieces)

    def stats(self) -> dict[str, int]:
        """Rows of each table, and `size_bytes` of the file with its log."""
        return dict(self._call("stats", {}))

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        """The client itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()

    def _put(self, path: str, request: bytes, header: str, faults: Faults | None) -> int:
        response = self._send(path, request, headers={"content-type": "application/x-protobuf"})
        count = response.headers.get(header, "")
        if not count.isdecimal():
            raise _no_hub(self.url, response.text)
        if told := response.headers.get(FAULTS_HEADER):
            found = faults_from_text(told)
            if faults is not None:
                faults.merge(found)
            else:
                logger.warning("%s kept not all as it was: %s", self.url, found.told())
        return int(count)

    def _stream(
        self, path: str, arguments: Mapping[str, Any], content_type: str, *, timeout_s: float | None = None
    ) -> Generator[bytes, None, None]:
        response = self._send(
            path,
            encode_json(arguments).encode(),
            headers={"accept": content_type},
            is_streamed=True,
            timeout_s=timeout_s,
        )
        try:
            if response.headers.get("content-type") != content_type:
                raise _no_hub(self.url, response.read().decode(errors="replace"))
            yield from response.iter_bytes()
        except httpx.TransportError as error:
            raise _unreachable(self.url, error) from error
        finally:
            response.close()

    def _call(self, name: str, arguments: Mapping[str, Any], *, is_repeatable: bool = True) -> Any:
        body = encode_json(arguments).encode()
        response = self._send(f"/api/{name}", body, is_repeatable=is_repeatable)
        try:
            return decode_json(response.text)["result"]
        except (ValueError, KeyError, TypeError) as error:
            raise _no_hub(self.url, response.text) from error

    def _send(
        self,
        path: str,
        body: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        is_repeatable: bool = True,
        is_streamed: bool = False,
        timeout_s: float | None = None,
    ) -> httpx.Response:
        timeout = httpx.Timeout(self._timeout_s, read=self._timeout_s if timeout_s is None else timeout_s)
        deadline = time.monotonic() + self._retry_s
        pause_s = _FIRST_PAUSE_S
        while True:
            request = self._http.build_request("POST", path, content=body, headers=headers, timeout=timeout)
            try:
                response = self._http.send(request, stream=is_streamed)
                break
            except httpx.TransportError as error:
                was_not_sent = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
                may_repeat = was_not_sent or (is_repeatable and not isinstance(error, httpx.TimeoutException))
                if not may_repeat or time.monotonic() + pause_s > deadline:
                    raise _unreachable(self.url, error) from error
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)
        if response.status_code != 200:
            response.read()
            raise _error_from(response, self.url)
        return response


def _unreachable(url: str, error: Exception) -> HubUnreachableError:
    reason = str(error) or type(error).__name__
    return HubUnreachableError(f"no hub at {url!r} answers ({reason}); start one with `spangrad hub`")


def _no_hub(url: str, answer: str) -> HubUnreachableError:
    return HubUnreachableError(
        f"what answers at {url!r} is no spangrad hub (it said {answer[:80]!r}); "
        "check the address, or start a hub with `spangrad hub`"
    )


def _error_from(response: httpx.Response, url: str) -> SpangradError:
    try:
        data = response.json()
        kind = RequestTooLargeError.__name__ if response.status_code == TOO_LARGE else data["error"]
        return error_from_wire(kind, str(data["message"]))
    except (ValueError, KeyError, TypeError):
        return StoreError(
            f"{url!r} answered {response.status_code}, and not like a hub: {response.text[:200]!r}"
        )
