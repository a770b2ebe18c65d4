"""The thread that turns what was captured into spans and hands them to the exporter.

Knows queues and threads; it does not know what the items are. Invariants:
* `put` neither blocks nor raises, and may be called from `__del__` and from signal handlers.
* The queue is bounded in items and bytes. When it is full the newest item is dropped and counted; that
  is said at most every 30 s, and once more at the end.
* A child process made by fork starts with an empty queue and its own thread; what the parent captured is
  the parent's to export.
* What is in the queue, or in a batch on its way, is in the journal, if there is one and it has room.
"""

import contextlib
import logging
import queue
import threading
import time
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
_LINGER_S = 0.2
_IDLE_S = 1.0
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
        self.journal = journal
        self.dropped = 0
        """Items that did not fit into the queue."""
        self.broken = 0
        """Items of which no span could be made."""
        self._finish = finish
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._said = Periodically()
        self._queue: queue.SimpleQueue[tuple[T, int | None] | threading.Event | None]
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
            if items >= self._max_items or held_bytes + size > self._max_bytes:
                self.dropped += 1
                if self._said.due():
                    logger.warning("the export queue is full: %d model calls lost so far", self.dropped)
                return
            self._items_in += 1
            self._bytes_in += size
            half = self.journal.append(item) if self.journal is not None else None
        self._queue.put((item, half))
        if self._thread is None:
            self.start()

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
        self._hurry.put(None)
        self._queue.put(done)
        return done.wait(timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Flush for the last time and end the thread. What the hub does not take in time goes to disk."""
        deadline = time.monotonic() + timeout_s
        self.exporter.close_soon(timeout_s / 2)
        flushed = self.flush(timeout_s)
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(max(0.0, deadline - time.monotonic()))
        if flushed:  # else the next process recovers it
            self.close_journal()
        lost = self.dropped + self.broken
        if lost or self.exporter.dropped or not flushed:
            logger.warning(
                "spangrad lost %d model calls and %d batches%s",
                lost,
                self.exporter.dropped,
                "" if flushed else "; the last ones could not be written in time",
            )
        return flushed

    def close_journal(self) -> None:
        """Keep no journal any more, and remove what is there."""
        with self._lock:
            if self.journal is not None:
                self.journal.close()

    def after_fork_in_child(self) -> None:
        """Forget the parent's items, locks and thread."""
        self._own_process()
        if self.journal is not None:
            self.journal.after_fork_in_child()

    def _own_process(self) -> None:
        self._queue = queue.SimpleQueue()
        self._lock = threading.RLock()
        self._thread = None
        self._items_in = self._items_out = 0
        self._bytes_in = self._bytes_out = 0
        self._recover_at = 0.0
        self._hurry: queue.SimpleQueue[None] = queue.SimpleQueue()

    def _run(self) -> None:
        items = self._queue
        self._drain()
        is_last = False
        while not is_last:
            try:
                entry = items.get(timeout=_IDLE_S)
            except queue.Empty:
                self._drain()
                continue
            if entry is not None and not isinstance(entry, threading.Event):
                self._linger()
            batch: list[tuple[T, int | None]] = []
            waiting: list[threading.Event] = []
            while True:
                if entry is None:
                    is_last = True
                elif isinstance(entry, threading.Event):
                    waiting.append(entry)
                else:
                    batch.append(entry)
                if is_last or len(batch) >= _BATCH_ITEMS:
                    break
                try:
                    entry = items.get_nowait()
                except queue.Empty:
                    break
            self._export(batch)
            if waiting:
                self._wait_again()
            for done in waiting:
                done.set()

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

    def _wait_again(self) -> None:
        """Forget that somebody was in a hurry."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._hurry.get_nowait()

    def _linger(self) -> None:
        """Give a batch time to grow, unless somebody waits.

        The thread sleeps through it: each time that it wakes it takes the interpreter from the agent.
        """
        with contextlib.suppress(queue.Empty):
            self._hurry.get(timeout=_LINGER_S)

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
        if self.journal is not None:
            with self._lock:
                self.journal.release([half for _, half in batch])
