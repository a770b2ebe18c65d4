"""One thread that writes all spans, many batches a commit.

A commit costs milliseconds whatever its size, so batches that arrive while one is being
written wait and go into the next commit together. Knows futures and batches; knows no HTTP.

Invariants: a future has a result only after its batch is on disk; a batch that the store
refuses does not take others with it; what waits is bounded.
"""

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from spangrad.errors import StoreError, StoreFullError
from spangrad.store.records import Span

MAX_GROUP = 64
MAX_WAITING_BYTES = 256 * 2**20

PutBatches = Callable[[Sequence[Sequence[Span]]], list[int]]


@dataclass(slots=True)
class _Job:
    spans: Sequence[Span]
    size_bytes: int
    done: "Future[int]" = field(default_factory=Future)


class GroupWriter:
    """Commits waiting batches together, in order of arrival."""

    def __init__(self, put_batches: PutBatches) -> None:
        """Start the thread."""
        self._put_batches = put_batches
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting_bytes = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="spangrad-writer", daemon=True)
        self._thread.start()

    def submit(self, spans: Sequence[Span], size_bytes: int) -> "Future[int] | None":
        """A future of how many spans were new; None if too much waits already."""
        job = _Job(spans, size_bytes)
        with self._lock:
            if self._is_closed or (
                self._waiting_bytes and self._waiting_bytes + size_bytes > MAX_WAITING_BYTES
            ):
                return None
            self._waiting_bytes += size_bytes
            self._jobs.put(job)
        return job.done

    def close(self) -> None:
        """Write what waits, then stop."""
        with self._lock:
            self._is_closed = True
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while True:
            group, is_last = self._next_group()
            if group:
                self._write(group)
            if is_last:
                return

    def _next_group(self) -> tuple[list[_Job], bool]:
        group: list[_Job] = []
        job = self._jobs.get()
        while job is not None:
            group.append(job)
            if len(group) == MAX_GROUP:
                return group, False
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                return group, False
        return group, True

    def _write(self, group: list[_Job]) -> None:
        outcomes: list[int | Exception]
        try:
            outcomes = list(self._put_batches([job.spans for job in group]))
        except StoreFullError as error:
            outcomes = [error] * len(group)
        except Exception:
            # One batch may have spoiled it for all: find out which.
            outcomes = [self._write_alone(job) for job in group]
        with self._lock:
            self._waiting_bytes -= sum(job.size_bytes for job in group)
        for job, outcome in zip(group, outcomes, strict=True):
            if isinstance(outcome, Exception):
                job.done.set_exception(outcome)
            else:
                job.done.set_result(outcome)

    def _write_alone(self, job: _Job) -> int | Exception:
        try:
            return self._put_batches([job.spans])[0]
        except StoreError as error:
            return error
        except Exception as error:
            return StoreError(f"a batch of {len(job.spans)} spans could not be stored: {error!r}")
