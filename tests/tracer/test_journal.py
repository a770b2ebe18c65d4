"""The journal's invariants, with real files; what comes of it is what would have been exported."""

import errno
import json
import logging
import marshal
import os
import stat
import tempfile
from pathlib import Path

import httpx
import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext

import spangrad
from spangrad.tracer import conventions as c
from spangrad.tracer import journal as journals
from spangrad.tracer.calls import RawCall, span_of
from spangrad.tracer.exporter import SpoolExporter
from spangrad.tracer.journal import Journal, Record, read, recover
from spangrad.tracer.otlp import encode_request, encode_span
from spangrad.tracer.recovery import call_record, head_of, requests_of, span_record
from spangrad.tracer.runtime import EndedSpan
from spangrad.tracer.spool import Spool
from spangrad.tracer.wire.repeated import Reader
from spangrad.tracer.worker import Worker
from tests.tracer.recording import calls, spans_of_store
from tests.tracer.stub_server import ModelServer

HEAD_BYTES = 64 * 2**10
SPAN = span_record(ReadableSpan("", SpanContext(1, 1, is_remote=False)))[0]


@pytest.fixture(autouse=True, params=["mapped", "written"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How records get into the file; which one it is depends on the file system."""
    types = {"mapped": frozenset({_file_system_of_tests()}), "written": frozenset[str | None]()}
    monkeypatch.setattr(journals, "_KEEPS_ITS_PROMISE", types[request.param])
    return str(request.param)


def _file_system_of_tests() -> str | None:
    with tempfile.TemporaryFile() as file:
        return journals._file_system(file.fileno())


def as_it_is(item: bytes) -> Record:
    return SPAN, item, b""


def journal(folder: Path, **more: int) -> Journal[bytes]:
    return Journal(folder, head_of(Resource.get_empty(), "9"), as_it_is, **more)


def file_of(folder: Path) -> Path:
    (path,) = folder.glob("*.journal")
    return path


def written(folder: Path) -> list[bytes]:
    return [content for _, content in read(file_of(folder).read_bytes())[1]]


def test_records_are_there_in_order_until_they_are_released(tmp_path: Path) -> None:
    kept = journal(tmp_path)
    given = [b"", b"one", bytes(70_000), b"three"]
    halves = [kept.append(item) for item in given]
    assert written(tmp_path) == given
    kept.release(halves[:2])
    assert written(tmp_path) == given
    kept.release(halves[2:])
    assert written(tmp_path) == []
    assert kept.append(b"next") is not None
    assert written(tmp_path) == [b"next"]
    kept.close()
    assert list(tmp_path.iterdir()) == []


def test_it_writes_the_way_that_the_file_system_allows(tmp_path: Path, way: str) -> None:
    kept = journal(tmp_path)
    kept.append(b"one")
    assert (kept._mapped is not None) == (way == "mapped")
    kept.close()


def test_on_a_full_disk_nothing_is_written_through_a_mapping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(journals, "_copy", full)
    kept = journal(tmp_path)
    assert kept.append(b"one") == 0  # what the disk still takes, it takes from a system call
    monkeypatch.setattr(journals, "_pwritev", lambda *_: 5)
    assert kept.append(b"two") is None
    assert (kept.skipped, written(tmp_path)) == (1, [b"one"])
    kept.close()


@pytest.mark.parametrize("rest", [b"", b"\0", b"\xff"], ids=["end of file", "zeros", "older bytes"])
def test_a_record_that_is_torn_anywhere_costs_only_itself(tmp_path: Path, rest: bytes) -> None:
    kept = journal(tmp_path)
    for item in (b"one", b"two"):
        kept.append(item)
    begin = file_of(tmp_path).stat().st_size
    kept.append(b"torn by a crash")
    data = file_of(tmp_path).read_bytes()
    for cut in range(begin, len(data)):
        torn = data[:cut] + rest * (len(data) - cut)
        if torn == data:  # it ends in zeros
            break
        assert [content for _, content in read(torn)[1]] == [b"one", b"two"]
    assert len(read(data)[1]) == 3


def test_what_was_released_does_not_come_back_behind_later_records(tmp_path: Path) -> None:
    kept = journal(tmp_path)
    kept.release([kept.append(b"old %d" % number) for number in range(5)])
    for number in range(3):  # as long as the old ones: the fourth old one begins where they end
        kept.append(b"new %d" % number)
    assert written(tmp_path) == [b"new 0", b"new 1", b"new 2"]


def test_a_full_journal_keeps_the_oldest_counts_and_is_bounded(tmp_path: Path) -> None:
    kept = journal(tmp_path, max_bytes=8000)  # 3 records of 1000 bytes in a half
    halves = [kept.append(bytes([number]) * 1000) for number in range(10)]
    assert halves == [0, 0, 0, 1, 1, 1, None, None, None, None]
    assert kept.skipped == 4
    assert [content[0] for content in written(tmp_path)] == list(range(6))
    kept.release(halves[:3])
    assert kept.append(b"x" * 1000) == 0
    assert [content[:1] for content in written(tmp_path)] == [b"\3", b"\4", b"\5", b"x"]
    kept.release([*halves, 0])
    assert kept.append(bytes(5000)) is None
    assert file_of(tmp_path).stat().st_size <= HEAD_BYTES + 8000


def test_what_is_always_busy_goes_on_from_half_to_half(tmp_path: Path) -> None:
    kept = journal(tmp_path, max_bytes=8000)
    waiting: list[int | None] = []
    for number in range(100):  # two are always waiting
        waiting.append(kept.append(b"%03d" % number * 300))
        assert written(tmp_path)[-2:] == [b"%03d" % n * 300 for n in range(max(0, number - 1), number + 1)]
        if len(waiting) > 1:
            kept.release([waiting.pop(0)])
    assert kept.skipped == 0


def test_a_folder_that_can_not_be_written_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    kept: Journal[EndedSpan] = Journal(tmp_path / "file" / "folder", {}, lambda item: (SPAN, b"", b""))
    worker = Worker(SpoolExporter(tmp_path / "s"), lambda item: item.span, journal=kept)
    ended = EndedSpan(ReadableSpan("", SpanContext(1, 1, is_remote=False), start_time=1, end_time=2))
    with caplog.at_level(logging.WARNING):
        worker.put(ended)
        worker.put(ended)
        assert worker.flush(30)
    assert [record.getMessage().partition(" (")[0] for record in caplog.records] == [
        f"no journal in {str(tmp_path / 'file' / 'folder')!r}"
    ]
    assert kept.skipped == 1 and not kept.is_kept
    assert worker.close(30)


def test_an_item_that_is_no_record_is_skipped(tmp_path: Path) -> None:
    kept: Journal[object] = Journal(tmp_path, {}, lambda item: (json.dumps(item).encode(), b"", b""))
    assert kept.append(object()) is None
    assert kept.append("good") == 0
    assert kept.skipped == 1


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_nobody_recovers_what_its_owner_holds_and_a_child_has_its_own(tmp_path: Path) -> None:
    kept = journal(tmp_path)
    kept.append(b"parent")
    child = os.fork()
    if child == 0:
        kept.after_fork_in_child()
        kept.append(b"child")
        os._exit(len(list(tmp_path.glob("*.journal"))))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    seen = sorted(tmp_path.glob("*.journal"))
    assert [stat.S_IMODE(path.stat().st_mode) for path in seen] == [0o600, 0o600]
    assert recover(Spool(tmp_path)) == 1
    assert written(tmp_path) == [b"parent"]


def test_nobody_but_the_user_who_wrote_it_recovers_a_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = journal(tmp_path)
    kept.append(b"one")
    (tmp_path / "dead.journal").write_bytes(file_of(tmp_path).read_bytes())
    kept.close()
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert recover(Spool(tmp_path)) == 0
    assert recover(Spool(tmp_path)) == 1


@pytest.mark.parametrize(
    "harm",
    [
        lambda data: b"",
        lambda data: b"no journal",
        lambda data: data.replace(b'"format": 1', b'"format": 2'),
        lambda data: data[:25] + b"?" + data[26:],
        lambda data: bytes(len(data)),
    ],
)
def test_a_journal_that_can_not_be_read_is_put_aside_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, harm: object
) -> None:
    kept = journal(tmp_path)
    kept.append(b"one")
    data = file_of(tmp_path).read_bytes()
    kept.close()
    assert callable(harm)
    (tmp_path / "dead.journal").write_bytes(harm(data))
    with caplog.at_level(logging.WARNING):
        assert recover(Spool(tmp_path)) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["dead.bad"]
    assert "is put aside as .bad" in caplog.text


def test_a_journal_of_an_earlier_start_of_the_machine_is_put_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = journal(tmp_path)
    kept.append(b"one")
    data = file_of(tmp_path).read_bytes()
    kept.close()
    (tmp_path / "dead.journal").write_bytes(data)
    monkeypatch.setattr("spangrad.tracer.journal._boot", lambda: "another")
    assert recover(Spool(tmp_path)) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["dead.bad"]


def raw_call(number: int, request: bytes | None, response: list[bytes], **more: object) -> RawCall:
    ids, named = (2**127 + number, 2**63 + number), {c.ROLLOUT_ID: Name("r-\udc80")}
    call = RawCall(*ids, None, 100 * number, "chat/completions", "h", 80, request, named)
    call.response, call.response_bytes = response, sum(map(len, response))
    call.end_ns, call.status_code, call.content_type = 7, 200, "application/json"
    for name, value in more.items():
        setattr(call, name, value)
    return call


class Name(str):
    pass


REQUEST = b'{"model": "policy", "messages": [{"role": "user", "content": "Hi"}]}'
REPLY = b'{"model": "policy", "choices": [{"index": 0, "message": {"role": "assistant", "content": "Yes."}}]}'
PARENT = SpanContext(2**127, 5, is_remote=True)


def in_one_piece(meta: bytes, first: bytes, second: bytes) -> tuple[bytes, bytes]:
    return meta, first + second


def test_a_recovered_call_is_the_span_that_its_process_would_have_made() -> None:
    given = [
        raw_call(1, REQUEST, [REPLY], is_exhausted=True),
        raw_call(2, REQUEST, [bytes([byte]) for byte in REPLY], parent=PARENT, is_exhausted=True),
        raw_call(3, None, [], status_code=None, error_type="httpx.ConnectError", port=None),
        raw_call(4, REQUEST, [REPLY], response_headers={"x-cache": "HIT"}),
        raw_call(5, REQUEST, [], response_bytes=2**40),
    ]
    resource, scope = (
        Resource({"service.name": "s", "n": (1, 2)}, "url"),
        InstrumentationScope(c.SCOPE_TRACER, "9"),
    )
    requests = Reader()
    spans = [span_of(call, resource, scope, requests) for call in given]
    other = ReadableSpan("root", PARENT, attributes={"b": b"\0"}, resource=resource, start_time=1, end_time=2)
    other._instrumentation_scope = scope
    expected = encode_request([(span, encode_span(span)) for span in [*spans, other] if span is not None])
    records = [in_one_piece(*record) for record in (*map(call_record, given), span_record(other))]
    head = json.loads(json.dumps(head_of(resource, "9")))
    assert list(requests_of(head, records)) == [expected]


def test_a_record_that_no_span_can_be_made_of_costs_only_itself(caplog: pytest.LogCaptureFixture) -> None:
    good = in_one_piece(*call_record(raw_call(1, REQUEST, [REPLY], is_exhausted=True)))
    bad = (marshal.dumps([1, 2]), b"")
    with caplog.at_level(logging.WARNING):
        (request,) = requests_of(head_of(Resource.get_empty(), "9"), [bad, good, bad])
    assert b"Yes." in request
    assert len(caplog.records) == 2


def test_the_end_of_recording_removes_the_file_and_a_rule_keeps_it_from_being_there(
    model: ModelServer, tmp_path: Path
) -> None:
    def ask(prompt: str) -> None:
        body = {"model": "policy", "messages": [{"role": "user", "content": prompt}]}
        httpx.post(f"{model.url}/chat/completions", json=body)

    folder = tmp_path / "s.spool"
    spangrad.init(store=tmp_path / "s")
    ask("one")
    assert len(list(folder.glob("*.journal"))) == 1
    spangrad.init(redact=True)
    assert not list(folder.glob("*.journal"))
    ask("two")
    assert not list(folder.glob("*.journal"))
    spangrad.shutdown()
    spangrad.init(store=tmp_path / "s")
    ask("three")
    assert len(list(folder.glob("*.journal"))) == 1
    spangrad.shutdown()
    assert not list(folder.glob("*.journal"))
    assert [call.prompt() for call in calls(spans_of_store(tmp_path / "s"))] == ["one", "two", "three"]
