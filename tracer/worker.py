"""The thread that turns what was captured into spans and hands them to the exporter.

Knows queues and threads; it does not know what the items are. Invariants:
* `put` neither blocks nor raises, and may be called from `__del__` and from signal handlers. It wakes nobody:
  a thread that wants the interpreter makes each system call of the agent's slower until it gets it.
* The queue is bounded in items and bytes. When it is full the newest item is dropped and counted; that
  is said at most every 30 s, and once more at the end.
* A child process made by fork starts with an empty queue and its own thread; what the parent captured is
  the parent's to export.
* What is in the queue, or in a batch on its way, is in the journal, if there is one and it has room.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from opentelemetry.sdk.trace import ReadableSpan

from spangrad.tracer.exporter import Exporter
from spangrad.tracer.journal import Journal
from spangrad.tracer.periodically import Periodically

logger = logging.getLogger(__name__)

MAX_ITEMS = 16_384
MAX_BYTES = 256 * 2**20
_BATCH_ITEMS = 256
_PAUSE_S = 0.2
"""Between two looks into the queue; doubles while nothing comes."""
_IDLE_S = 1.0
"""Longest pause, and how often what waits on disk is sent while nothing comes."""
_PATIENCE_S = 0.5
_RECOVER_EVERY_S = 10.0


class Item(Protocol):
    """Something that becomes a span."""

    @property
    def size_bytes(self) -> int:
        """Memory that it holds on to."""
        ...


T = TypeVar("T", bound=Item)


class Worker(Generic[T]):
    """Drains a bounded queue into `exporter`, in batches, on a thread of its own."""

    def __init__(
        self,
        exporter: Exporter,
        finish: Callable[[T], ReadableSpan | None],
        *,
        journal: Journal[T] | None = None,
        max_items: int = MAX_ITEMS,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        """`finish` makes a span of an item, or nothing, on the worker's thread."""
        self.exporter = exporter
        exporter.make_room = self._give_up_journal
        self.journal = journal
        self.dropped: int
        """Items that did not fit into the queue."""
        self.broken: int
        """Items of which no span could be made."""
        self._finish = finish
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._said = Periodically()
        self._told: int
        self._queue: deque[tuple[T, int | None]]
        self._asked: queue.SimpleQueue[threading.Event | None]
        """Who waits for the queue to be empty; None: nobody, but it is to be emptied now."""
        self._is_ending: bool
        self._is_filling: bool
        """Half full, and the thread knows."""
        self._lock: threading.RLock
        self._items_in: int
        self._items_out: int
        self._bytes_in: int
        self._bytes_out: int
        self._thread: threading.Thread | None
        self._own_process()

    @property
    def waiting(self) -> int:
        """Items in the queue, or in the batch that is being exported."""
        return self._items_in - self._items_out

    def put(self, item: T) -> None:
        """Take an item, or drop and count it."""
        size = item.size_bytes
        with self._lock:  # reentrant: a garbage collection may end a stream in here
            items, held_bytes = self._items_in - self._items_out, self._bytes_in - self._bytes_out
            is_full = items >= self._max_items or held_bytes + size > self._max_bytes
            if is_full:
                self.dropped += 1
            else:
                self._keep(item, size)
            if not self._is_filling and (2 * items >= self._max_items or 2 * held_bytes >= self._max_bytes):
                self._is_filling = True
                self._asked.put(None)
        # Logging takes locks, too, which another thread may hold that is about to put something.
        if is_full and self._said.due():
            self._told = self.dropped
            logger.warning("the export queue is full: %d spans lost so far", self.dropped)
        if self._thread is None:
            self.start()

    def _keep(self, item: T, size: int) -> None:
        self._items_in += 1
        self._bytes_in += size
        half = self.journal.append(item) if self.journal is not None else None
        self._queue.append((item, half))

    def start(self) -> None:
        """Start the thread, unless it runs."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="spangrad-export", daemon=True)
                self._thread.start()

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything put so far is delivered or on disk. Returns False if time ran out."""
        if self._thread is None:
            return True
        done = threading.Event()
        self._asked.put(done)
        return done.wait(timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Flush for the last time and end the thread. What the hub does not take in time goes to disk."""
        deadline = time.monotonic() + timeout_s
        self.exporter.close_soon(timeout_s / 2)
        flushed = self.flush(timeout_s)
        if self._thread is not None:
            self._is_ending = True
            self._asked.put(None)
            self._thread.join(max(0.0, deadline - time.monotonic()))
        # Else the next process recovers it; something waits if a signal came in the middle of `put`.
        if flushed and not self.waiting:
            self.close_journal()
        lost = self.dropped + self.broken + self.exporter.lost_spans
        if self.exporter.says_losses and lost > self._told + self.broken + self.exporter.told_spans:
            problem = self.exporter.problem or "the export queue was full"
            logger.warning("spangrad lost %d spans (model calls, steps, rollouts): %s", lost, problem)
        if not flushed:
            logger.warning("spangrad could not write the last spans in time")
        return flushed

    def close_journal(self) -> None:
        """Keep no journal any more, and remove what is there."""
        with self._lock:
            if self.journal is not None:
                self.journal.close()

    def _give_up_journal(self) -> None:
        """The disk is full: the journal's room is worth more to spans that are to stay."""
        if self._lock.acquire(timeout=_PATIENCE_S):  # as in `_export`
            try:
                self.close_journal()
            finally:
                self._lock.release()

    def after_fork_in_child(self) -> None:
        """Forget the parent's items, losses, locks and thread."""
        self._own_process()
        if self.journal is not None:
            self.journal.after_fork_in_child()

    def _own_process(self) -> None:
        self.dropped = self.broken = self._told = 0
        self.exporter.lost_spans = self.exporter.told_spans = 0
        self._queue = deque()
        self._asked = queue.SimpleQueue()
        self._is_ending = False
        self._is_filling = False
        self._lock = threading.RLock()
        self._thread = None
        self._items_in = self._items_out = 0
        self._bytes_in = self._bytes_out = 0
        self._recover_at = 0.0

    def _run(self) -> None:
        self._drain()
        pause_s, idle_s = _PAUSE_S, 0.0
        is_last = False
        while not is_last:
            try:
                done = self._asked.get(timeout=pause_s)
            except queue.Empty:
                done = None
            is_last = self._is_ending
            left = len(self._queue)
            is_idle = done is None and not left
            self._is_filling = False
            while left > 0:  # what comes meanwhile is not what `done` waits for
                batch = [self._queue.popleft() for _ in range(min(left, _BATCH_ITEMS))]
                self._export(batch)
                left -= len(batch)
            if done is not None:
                done.set()
            idle_s = idle_s + pause_s if is_idle else 0.0
            if idle_s >= _IDLE_S:
                idle_s = 0.0
                self._drain()
            # What is in no journal is lost with the process: it must not wait for long.
            longest_s = _IDLE_S if self.journal is not None and self.journal.is_kept else _PAUSE_S
            pause_s = min(2 * pause_s, longest_s) if is_idle else _PAUSE_S

    def _drain(self) -> None:
        """Send what waits on disk; now and then also what killed processes have left."""
        try:
            if time.monotonic() >= self._recover_at:
                self._recover_at = time.monotonic() + _RECOVER_EVERY_S
                self.exporter.recover()
            self.exporter.drain()
        except Exception:  # the boundary: what waits on disk must not end the thread
            if self._said.due():
                logger.warning("what waits on disk could not be sent", exc_info=True)

    def _export(self, batch: list[tuple[T, int | None]]) -> None:
        spans = []
        for item, _ in batch:
            try:
                span = self._finish(item)
            except Exception:  # the boundary: one bad item must not end the thread
                self.broken += 1
                logger.warning("no span could be made of a captured call", exc_info=True)
            else:
                if span is not None:
                    spans.append(span)
        try:
            if spans:
                self.exporter.export(spans)
        except Exception:  # the boundary, as above
            self.broken += len(spans)
            logger.warning("export failed", exc_info=True)
        self._items_out += len(batch)
        self._bytes_out += sum(item.size_bytes for item, _ in batch)
        self._say_journal_problem()
        # A signal handler that waits for this thread may have come over one that holds the lock.
        if self.journal is not None and self._lock.acquire(timeout=_PATIENCE_S):
            try:
                self.journal.release([half for _, half in batch])
            finally:
                self._lock.release()

    def _say_journal_problem(self) -> None:
        """Say why there is no journal, unless the spool is in the same trouble and has said so."""
        if self.journal is not None and self.journal.problem is not None:
            problem, self.journal.problem = self.journal.problem, None
            if not self.exporter.lost_spans:
                logger.warning("%s: SIGKILL can cost calls that have just ended", problem)
