"""What fails on the store's side loses no span: it is 503, or only the span that is to blame is put aside."""

import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from starlette.testclient import TestClient

from spangrad.errors import DatabaseFailedError, StoreError
from spangrad.store.file_store import FileStore
from spangrad.store.hub import create_app
from spangrad.store.otlp import decode_request
from spangrad.store.records import Rollout, Span
from spangrad.store.tables import database
from spangrad.store.writer import GroupWriter
from spangrad.tracer import conventions as names
from spangrad.tracer.hub_exporter import HubExporter
from spangrad.tracer.spool import Spool
from tests.store.building import conversation, new_trace, request, span


@contextmanager
def hub_on(store: FileStore) -> Iterator[TestClient]:
    with TestClient(create_app(store), base_url="http://127.0.0.1", raise_server_exceptions=False) as http:
        yield http


@contextmanager
def replaced(file: Path, other: int) -> Iterator[None]:
    """Have what this process writes to an open file go to another one."""
    (open_fd,) = [int(fd) for fd in os.listdir("/proc/self/fd") if leads_to(fd, file)]
    kept = os.dup(open_fd)
    os.dup2(other, open_fd)
    os.close(other)
    yield
    os.dup2(kept, open_fd)
    os.close(kept)


def leads_to(fd: str, file: Path) -> bool:
    return os.path.realpath(f"/proc/self/fd/{fd}") == str(file.resolve())


def that_can_not_grow(file: Path) -> int:
    """A copy of a file whose disk refuses every further byte, and not because it is full."""
    fd = os.memfd_create("copy", os.MFD_ALLOW_SEALING)
    os.write(fd, file.read_bytes())
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    return fd


def large_request() -> bytes:
    return request([span(new_trace(), attributes={"x": str(i) + "y" * 2**21}) for i in range(10)])


def test_a_disk_that_fails_is_503_and_the_same_batch_is_taken_later(tmp_path: Path) -> None:
    path, body = tmp_path / "s.duckdb", request(conversation(new_trace(), "r", 3))
    with hub_on(store := FileStore(path)) as http:
        assert http.post("/v1/traces", content=request([span(new_trace())])).status_code == 200
        log = path.with_name("s.duckdb.wal")
        with replaced(log, that_can_not_grow(log)):
            answers = [http.post("/v1/traces", content=body)]
            answers.append(http.post("/api/enqueue", json={"rollouts": [{"rollout_id": "a"}]}))
            with pytest.raises(DatabaseFailedError, match="Could not write"):
                store.enqueue([Rollout("a")])
        assert [(a.status_code, a.headers["retry-after"]) for a in answers] == [(503, "1")] * 2
        again = http.post("/v1/traces", content=body)
        assert (again.status_code, again.headers["x-spangrad-new-spans"]) == (200, "3")
        assert not path.with_name("s.duckdb.rejected").exists()


def test_an_outage_is_logged_when_it_begins_and_when_it_is_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "s.duckdb"
    with caplog.at_level("INFO", "spangrad.store.hub"), hub_on(FileStore(path)) as http:
        assert http.post("/v1/traces", content=request([span(new_trace())])).status_code == 200
        log = path.with_name("s.duckdb.wal")
        with replaced(log, that_can_not_grow(log)):
            for _ in range(3):
                assert http.post("/v1/traces", content=request([span(new_trace())])).status_code == 503
        for _ in range(2):
            assert http.post("/v1/traces", content=request([span(new_trace())])).status_code == 200
    first, last = [record.getMessage() for record in caplog.records if record.name == "spangrad.store.hub"]
    assert first.startswith(f"senders get 503 and are to try again: {str(path)!r}: ")
    assert last == "spans are stored again"


def test_memory_that_runs_out_is_503_and_costs_no_later_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "MEMORY_LIMIT", "20MB")
    with hub_on(FileStore(tmp_path / "s.duckdb")) as http:
        answer = http.post("/v1/traces", content=large_request())
        assert answer.status_code == 503 and "memory" in answer.json()["message"]
        assert http.post("/v1/traces", content=request([span(new_trace())])).status_code == 200
    assert [file.name for file in tmp_path.iterdir()] == ["s.duckdb"]


class Broken(FileStore):
    """A store with a mistake in its code."""

    def put_batches(self, batches: Sequence[Sequence[Span]]) -> list[int]:
        raise KeyError("a mistake of ours")

    def stats(self) -> dict[str, int]:
        raise KeyError("a mistake of ours")


def test_an_error_that_nobody_expected_is_503(tmp_path: Path) -> None:
    with hub_on(Broken(tmp_path / "s.duckdb")) as http:
        for path, body in (("/v1/traces", request([span(new_trace())])), ("/api/stats", b"{}")):
            answer = http.post(path, content=body)
            assert (answer.status_code, answer.json()["error"]) == (503, "StoreError")
            assert "a mistake of ours" in answer.json()["message"]


def test_a_closed_store_is_503(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "s.duckdb")
    with hub_on(store) as http:
        store.close()
        assert http.post("/v1/traces", content=request([span(new_trace())])).status_code == 503


@pytest.mark.parametrize(
    "sql",
    [
        "SELEC 1",
        "SELECT * FROM nowhere",
        "SELECT 'a'::INT",
        "SELECT * FROM glob('/*')",
        "SELECT error('database has been invalidated')",
        "WITH x AS (DELETE FROM spans RETURNING *) SELECT * FROM x",
    ],
)
def test_a_question_that_can_never_be_answered_is_400(tmp_path: Path, sql: str) -> None:
    with hub_on(FileStore(tmp_path / "s.duckdb")) as http:
        assert http.post("/api/query", json={"sql": sql}).status_code == 400
        assert http.get("/healthz").status_code == 200


HUB_WITH_A_FAILING_DISK = """
import os, sys
from pathlib import Path
from spangrad.store.serve import serve
from tests.store.test_store_outages import leads_to
path = Path(sys.argv[1])
def ready(url):
    (fd,) = [int(fd) for fd in os.listdir("/proc/self/fd") if leads_to(fd, path)]
    os.dup2(os.open("/dev/null", os.O_RDONLY), fd)  # the log grows, and can't be folded into the file
    print(url, flush=True)
serve(path, port=0, on_ready=ready)
"""


@pytest.mark.slow
def test_a_fatal_error_of_the_database_ends_the_hub_with_an_error_and_loses_no_span(tmp_path: Path) -> None:
    path = tmp_path / "s.duckdb"
    with subprocess.Popen(
        [sys.executable, "-c", HUB_WITH_A_FAILING_DISK, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as hub:
        assert hub.stdout and hub.stderr
        url = hub.stdout.readline().strip()
        assert url, hub.stderr.read()
        exporter = HubExporter(url, spool_dir=tmp_path / "spool", timeout_s=30)
        assert exporter.export_request(large_request())
        assert not exporter.is_waiting
        assert exporter.export_request(large_request())
        assert exporter.is_waiting and exporter.lost_spans == 0
        assert hub.wait(60) == 1
        assert (
            "met a fatal error; what was acknowledged is in it, so start the hub again" in hub.stderr.read()
        )
    with FileStore(path) as store:
        assert exporter.spool.drain(store.put_otlp) == 1
        assert store.stats()["spans"] == 20
    exporter.shutdown()


# one that can't be stored


def unfit() -> Span:
    """A span whose attempt fits into no column."""
    return replace(span(new_trace(), rollout="bad"), attempt=2**31)


def test_a_span_that_can_not_be_stored_is_put_aside_and_costs_no_other(tmp_path: Path) -> None:
    path, bad = tmp_path / "s.duckdb", unfit()
    good = [span(new_trace()) for _ in range(6)]
    with FileStore(path) as store:
        with pytest.raises(StoreError, match="'attempt' of 'spans', which is INTEGER"):
            store.put_batches([[*good, bad]])
        assert store.stats()["spans"] == 0
        assert store.take_in([*good[:4], bad, *good[4:]]) == (6, 1)
        assert store.take_in([]) == (0, 0)
        assert {one.span_id for one in store.spans()} == {one.span_id for one in good}
        assert store.put_aside == 1
    ((aside,), _) = decode_request(path.with_name("s.duckdb.rejected").read_bytes())
    assert aside.span_id == bad.span_id
    with FileStore(path, read_only=True) as store:
        for write in (store.drain, lambda: store.take_in([bad])):
            with pytest.raises(StoreError, match="read_only"):
                write()


def test_the_hub_keeps_the_other_spans_of_a_batch_and_says_how_many_it_rejects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(names, "MAX_ATTEMPT", 2**40)  # lets through what no column can hold
    bad = span(new_trace(), rollout="bad", attempt=2**31)
    with hub_on(store := FileStore(tmp_path / "s.duckdb")) as http:
        answer = http.post("/v1/traces", content=request([span(new_trace()), bad, span(new_trace())]))
        assert (answer.status_code, answer.headers["x-spangrad-new-spans"]) == (200, "2")
        assert ExportTraceServiceResponse.FromString(answer.content).partial_success.rejected_spans == 1
        assert store.put_aside == 1
    assert bad.span_id in caplog.text and "s.duckdb.rejected" in caplog.text


def test_a_spooled_record_that_can_not_be_stored_blocks_neither_the_others_nor_the_opening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s.duckdb"
    bad = span(new_trace(), rollout="bad", attempt=2**31)
    spool = Spool(f"{path}.spool")
    for record in (request([bad, span(new_trace())]), request(conversation(new_trace(), "r", 3))):
        assert spool.append(record)
    with monkeypatch.context() as patched:
        patched.setattr(names, "MAX_ATTEMPT", 2**40)  # lets through what no column can hold
        with FileStore(path) as store:
            assert store.stats()["spans"] == 4
            assert (store.put_aside, spool.size_bytes()) == (1, 0)
    with FileStore(path) as store:  # once the reason is gone it can be given again
        assert store.put_otlp(path.with_name("s.duckdb.rejected").read_bytes()) == 1


def test_a_spooled_record_with_a_bad_span_is_put_aside_beside_its_good_ones(tmp_path: Path) -> None:
    path, good = tmp_path / "s.duckdb", span(new_trace())
    record = request([good, replace(good, trace_id="00" * 16)])
    Spool(f"{path}.spool").append(record)
    with FileStore(path) as store:
        assert [one.span_id for one in store.spans()] == [good.span_id]
        assert store.put_aside == 1
    assert path.with_name("s.duckdb.rejected").read_bytes() == record


def test_a_mistake_in_our_code_does_not_block_the_opening(tmp_path: Path) -> None:
    path, record = tmp_path / "s.duckdb", request([span(new_trace())])
    Spool(f"{path}.spool").append(record)
    Broken(path).close()
    assert path.with_name("s.duckdb.rejected").read_bytes() == record


def test_an_outage_leaves_spooled_records_where_they_are(tmp_path: Path) -> None:
    path, record = tmp_path / "s.duckdb", request([span(new_trace())])
    spool = Spool(f"{path}.spool")
    with FileStore(path) as store:
        store.enqueue([Rollout("a")])
        log = path.with_name("s.duckdb.wal")
        spool.append(record)
        with replaced(log, that_can_not_grow(log)), pytest.raises(DatabaseFailedError):
            store.drain()
        assert spool.size_bytes() > 0 and store.put_aside == 0
        assert store.drain() == 1


@pytest.mark.parametrize("attempt", [10**6, 2**31 - 1, 2**31, 2**62])
def test_an_attempt_beyond_belief_is_left_out_and_its_span_is_stored(tmp_path: Path, attempt: int) -> None:
    path = tmp_path / "s.duckdb"
    odd, highest = span(new_trace(), rollout="odd"), span(new_trace(), rollout="high", attempt=10**6 - 1)
    odd = replace(odd, attributes={**odd.attributes, names.ATTEMPT: attempt})
    Spool(f"{path}.spool").append(request([odd, highest, *conversation(new_trace(), "r", 2)]))
    with FileStore(path) as store:
        (found,) = store.spans(["odd"])
        assert (found.attempt, found.attributes) == (None, odd.attributes)
        attempts = {r.rollout_id: (r.attempt, r.max_attempts) for r in store.rollouts()}
        assert attempts == {"odd": (0, 1), "high": (10**6 - 1, 10**6), "r": (0, 1)}
        assert store.put_aside == 0


def test_attempts_beyond_belief_that_are_stored_already_can_be_counted_on(tmp_path: Path) -> None:
    parent = replace(span(new_trace(), rollout="old"), attempt=2**31 - 1)
    with FileStore(tmp_path / "s.duckdb") as store:
        assert store.put_batches([[parent, span(parent.trace_id, parent=parent.span_id)]]) == [2]
        with pytest.raises(StoreError, match="'a' may have 1000001 attempts"):
            store.enqueue([Rollout("a", max_attempts=10**6 + 1)])


# the writer's thread


def test_a_batch_that_nobody_waits_for_any_more_does_not_end_the_writer(tmp_path: Path) -> None:
    is_writing, go_on = threading.Event(), threading.Event()
    with FileStore(tmp_path / "s.duckdb") as store:

        def put(batches: Sequence[Sequence[Span]]) -> list[int]:
            is_writing.set()
            assert go_on.wait(30)
            return store.put_batches(batches)

        writer = GroupWriter(put, store.take_in)
        jobs = [submitted(writer, conversation(new_trace(), "r0", 1))]
        assert is_writing.wait(30)
        jobs += [submitted(writer, conversation(new_trace(), f"r{i}", i + 1)) for i in range(1, 3)]
        assert [jobs[0].cancel(), jobs[1].cancel()] == [False, True]  # the first is being written
        go_on.set()
        assert (jobs[0].result(30), jobs[2].result(30)) == ((1, 0), (3, 0))
        assert submitted(writer, conversation(new_trace(), "last", 1)).result(30) == (1, 0)
        writer.close()
        assert sorted({str(one.rollout_id) for one in store.spans()}) == ["last", "r0", "r2"]


def test_an_error_of_one_batch_is_its_own_and_the_writer_lives_on(tmp_path: Path) -> None:
    with FileStore(tmp_path / "s.duckdb") as store:

        def take_in(spans: Sequence[Span]) -> tuple[int, int]:
            if spans[0].rollout_id == "bad":
                raise KeyError("a mistake of ours")
            return store.take_in(spans)

        writer = GroupWriter(store.put_batches, take_in)
        bad, good = submitted(writer, [unfit()]), submitted(writer, conversation(new_trace(), "r", 2))
        with pytest.raises(KeyError, match="a mistake of ours"):
            bad.result(30)
        assert good.result(30) == (2, 0)
        assert submitted(writer, conversation(new_trace(), "q", 2)).result(30) == (2, 0)
        writer.close()


def submitted(writer: GroupWriter, spans: Sequence[Span]) -> Any:
    job = writer.submit(spans, 1)
    assert job is not None
    return job


FULL_AT_ONCE = """
import resource, sys
from spangrad.errors import StoreFullError
from spangrad.store.file_store import FileStore
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))
try:
    FileStore(sys.argv[1])
except StoreFullError as error:
    print(error)
"""


def test_a_disk_that_is_full_when_a_store_is_made_leaves_no_half_of_one(tmp_path: Path) -> None:
    path = tmp_path / "s.duckdb"
    done = subprocess.run([sys.executable, "-c", FULL_AT_ONCE, str(path)], capture_output=True, text=True)
    assert "no space left" in done.stdout, done.stderr
    assert not path.exists()
    FileStore(path).close()
