"""The bounded queue between the agent and the exporter."""

import logging
import resource
import threading
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanContext

from spangrad.tracer.exporter import SpoolExporter
from spangrad.tracer.hub_exporter import HubExporter
from spangrad.tracer.journal import Journal
from spangrad.tracer.recovery import head_of, span_record
from spangrad.tracer.runtime import EndedSpan
from spangrad.tracer.worker import Worker
from tests.tracer.recording import spans_of_store
from tests.tracer.stub_server import HubServer
from tests.waiting import wait_until


def ended(number: int, size_bytes: int = 1) -> EndedSpan:
    context = SpanContext(number + 1, number + 1, is_remote=False)
    return EndedSpan(ReadableSpan(f"span {number}", context, start_time=1, end_time=2), size_bytes)


def span_of(item: EndedSpan) -> ReadableSpan:
    return item.span


@pytest.mark.parametrize("bound", [{"max_items": 3}, {"max_bytes": 3}])
def test_a_full_queue_drops_the_newest_counts_and_says_so(
    hub: HubServer, tmp_path: Path, caplog: pytest.LogCaptureFixture, bound: dict[str, Any]
) -> None:
    hub.hold = threading.Event()
    worker = Worker(HubExporter(hub.url, spool_dir=tmp_path, timeout_s=30), span_of, **bound)
    with caplog.at_level(logging.WARNING):
        for number in range(10):
            worker.put(ended(number))
        hub.hold.set()
        assert worker.close(30)
    said = [record.getMessage() for record in caplog.records]
    assert [span.name for span in hub.spans()] == ["span 0", "span 1", "span 2"]
    assert worker.dropped == 7
    assert said[0] == "the export queue is full: 1 spans lost so far"
    assert said[-1] == "spangrad lost 7 spans (model calls, steps, rollouts): the export queue was full"
    assert len(said) == 2


def test_a_disk_without_room_for_a_batch_takes_the_spans_that_fit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    exporter = SpoolExporter(tmp_path / "s")
    worker = Worker(exporter, span_of)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with caplog.at_level(logging.WARNING):
            for number in range(10):
                worker.put(ended(number))
            worker.put(EndedSpan(ReadableSpan("x" * 1000, ended(10).span.context, start_time=1, end_time=2)))
            assert worker.close(30)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(span.name for span in spans_of_store(tmp_path / "s")) == [f"span {n}" for n in range(10)]
    assert exporter.lost_spans == 1
    (record,) = caplog.records
    assert record.getMessage().endswith("can't be written (File too large): 1 spans lost so far")


def test_a_full_disk_costs_the_journal_before_a_span(tmp_path: Path) -> None:
    exporter = SpoolExporter(tmp_path / "s")
    folder = exporter.folder
    kept: Journal[EndedSpan] = Journal(
        folder, head_of(Resource({}), "1"), lambda item: span_record(item.span)
    )
    worker = Worker(exporter, span_of, journal=kept)
    worker.put(ended(0))
    assert len(list(folder.glob("*.journal"))) == 1
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        assert worker.flush(30)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(folder.iterdir()) == []
    worker.put(ended(1))
    assert worker.close(30)
    assert [span.name for span in spans_of_store(tmp_path / "s")] == ["span 1"]
    assert exporter.lost_spans == 1


def test_a_child_made_by_fork_does_not_count_its_parents_losses(tmp_path: Path) -> None:
    worker = Worker(SpoolExporter(tmp_path / "s"), span_of, max_items=0)
    worker.put(ended(0))
    worker.exporter.lost_spans = 1
    worker.after_fork_in_child()
    assert (worker.dropped, worker.exporter.lost_spans) == (0, 0)
    assert worker.close(30)


def test_space_comes_back_when_a_batch_is_gone(tmp_path: Path) -> None:
    worker = Worker(SpoolExporter(tmp_path / "s"), span_of, max_bytes=10)
    for number in range(5):
        worker.put(ended(number, size_bytes=10))
        assert worker.flush(30)
    assert worker.dropped == 0
    assert worker.close(30)
    assert len(spans_of_store(tmp_path / "s")) == 5


def test_one_item_that_breaks_costs_only_itself(tmp_path: Path) -> None:
    def finish(item: EndedSpan) -> ReadableSpan:
        if item.span.name == "span 1":
            raise ValueError("bad")
        return item.span

    worker = Worker(SpoolExporter(tmp_path / "s"), finish)
    for number in range(3):
        worker.put(ended(number))
    assert worker.flush(30)
    assert worker.broken == 1
    assert worker.close(30)
    assert [span.name for span in spans_of_store(tmp_path / "s")] == ["span 0", "span 2"]


def test_what_can_not_be_sent_from_disk_does_not_end_the_thread(tmp_path: Path) -> None:
    class Torn(SpoolExporter):
        def drain(self, *, at_once: bool = False) -> int:
            raise RuntimeError("torn")

    worker = Worker(Torn(tmp_path / "s"), span_of)
    worker.start()
    worker.put(ended(0))
    assert worker.close(30)
    assert len(spans_of_store(tmp_path / "s")) == 1


def test_it_exports_without_being_asked(tmp_path: Path) -> None:
    worker = Worker(SpoolExporter(tmp_path / "s"), span_of)
    worker.put(ended(0))
    wait_until(lambda: (tmp_path / "s.spool").exists() and list((tmp_path / "s.spool").iterdir()))
    assert worker.close(30)


def test_an_item_whose_put_a_signal_handler_interrupts_stays_in_the_journal(tmp_path: Path) -> None:
    exporter = SpoolExporter(tmp_path / "s")
    journal: Journal[EndedSpan] = Journal(
        exporter.folder, head_of(Resource.get_empty(), ""), lambda item: span_record(item.span)
    )
    worker = Worker(exporter, span_of, journal=journal)
    worker.put(ended(0))

    class Interrupted(deque[Any]):
        def append(self, entry: Any) -> None:
            assert worker.close(30)  # as on SIGTERM, in the middle of `put`
            super().append(entry)

    worker._queue = Interrupted(worker._queue)
    worker.put(ended(1))
    assert list(exporter.folder.glob("*.journal"))
    journal.after_fork_in_child()  # lets go of the lock, as the end of the process does
    exporter.recover()
    assert {span.name for span in spans_of_store(tmp_path / "s")} == {"span 0", "span 1"}


def test_nothing_is_said_while_the_lock_is_held(tmp_path: Path) -> None:
    """A thread that writes a log may hold the handler's lock and put something meanwhile."""
    worker = Worker(SpoolExporter(tmp_path / "s"), span_of, max_items=0)
    held: list[bool] = []

    def look() -> None:
        taken = worker._lock.acquire(blocking=False)
        held.append(not taken)
        if taken:
            worker._lock.release()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            other = threading.Thread(target=look)
            other.start()
            other.join()

    handler = Handler()
    logging.getLogger("spangrad").addHandler(handler)
    try:
        worker.put(ended(0))
    finally:
        logging.getLogger("spangrad").removeHandler(handler)
    assert held == [False]
    assert worker.close(30)
