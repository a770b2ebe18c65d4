"""One thread that writes all spans, many batches a commit.

A commit costs milliseconds whatever its size, so batches that arrive while one is being
written wait and go into the next commit together. Knows futures and batches; knows no HTTP.

Invariants: a future has a result only after its batch is on disk; a batch that can't be
stored does not take others with it; what waits is bounded; the thread outlives whatever a
batch does to it, also one that nobody waits for any more.
"""

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from spangrad.errors import StoreFullError
from spangrad.store.records import Span

logger = logging.getLogger(__name__)

MAX_GROUP = 64
MAX_WAITING_BYTES = 256 * 2**20

PutBatches = Callable[[Sequence[Sequence[Span]]], list[int]]
"""Stores all or none; how many spans of each batch were new."""
Taken = tuple[int, int]
"""How many spans were new, and how many could not be stored and were put aside."""


@dataclass(slots=True)
class _Job:
    spans: Sequence[Span]
    size_bytes: int
    done: "Future[Taken]" = field(default_factory=Future)


class GroupWriter:
    """Commits waiting batches together, in order of arrival."""

    def __init__(self, put_batches: PutBatches, take_in: Callable[[Sequence[Span]], Taken]) -> None:
        """Start the thread. `take_in` gets the batches, one by one, that could not be stored together."""
        self._put_batches = put_batches
        self._take_in = take_in
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting_bytes = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="spangrad-writer", daemon=True)
        self._thread.start()

    def submit(self, spans: Sequence[Span], size_bytes: int) -> "Future[Taken] | None":
        """A future of what became of the spans; None if too much waits already.

        A future that is cancelled while it waits takes its spans out.
        """
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
        wanted = [job for job in group if job.done.set_running_or_notify_cancel()]
        outcomes = self._outcomes(wanted)
        with self._lock:
            self._waiting_bytes -= sum(job.size_bytes for job in group)
        for job, outcome in zip(wanted, outcomes, strict=True):
            if isinstance(outcome, Exception):
                job.done.set_exception(outcome)
            else:
                job.done.set_result(outcome)

    def _outcomes(self, jobs: list[_Job]) -> list[Taken | Exception]:
        try:
            return [(new, 0) for new in self._put_batches([job.spans for job in jobs])]
        except StoreFullError as error:
            return [error] * len(jobs)
        except Exception as error:
            # One batch may have spoiled it for all: find out which.
            logger.debug("%d batches could not be stored together: %s", len(jobs), error)
            return [self._write_alone(job) for job in jobs]

    def _write_alone(self, job: _Job) -> Taken | Exception:
        try:
            return self._take_in(job.spans)
        except Exception as error:  # boundary: it belongs to whoever waits for this batch
            return error
