"""Which traces changed since their calls were written: noted with the change, gone only as they were."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest

from spangrad.errors import StoreError
from spangrad.store.file_store import FileStore
from spangrad.store.migrations import MIGRATIONS
from spangrad.store.otlp import encode_logs
from spangrad.store.reading import open_to_read
from spangrad.store.records import LogRecord, Rollout
from spangrad.tracer import conventions as names
from tests.store.building import new_trace, request, span


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileStore]:
    with FileStore(tmp_path / "s.duckdb") as opened:
        yield opened


def record(trace_id: str | None, event: str = "gen_ai.user.message") -> LogRecord:
    return LogRecord(trace_id, "00" * 8 if trace_id else None, 5, 5, event, body="hi")


def row(trace_id: str, span_id: str, **more: Any) -> dict[str, Any]:
    return {
        "call_id": f"{trace_id}-{span_id}",
        "rollout_id": None,
        "attempt": 0,
        "trace_id": trace_id,
        "span_id": span_id,
        "dialect": "otel_genai",
        "model": "m",
        "grade": "text",
        "grade_reasons": ["no token ids"],
        "finish_reason": "stop",
        "purpose": "agent",
        "step_name": None,
        "start_ns": 1,
        "end_ns": 2,
        "prompt_tokens": None,
        "sampled_tokens": None,
        "policy_version": None,
        "step_index": None,
        "state_key": None,
        "purpose_reason": None,
        **more,
    }


def unread(store: FileStore, **filters: Any) -> dict[str, int]:
    return {one.trace_id: one.changed_ns for one in store.unread_traces(**filters)}


def written(store: FileStore) -> set[str]:
    return {found["span_id"] for found in store.query("SELECT span_id FROM calls")}


def test_spans_and_log_records_make_their_traces_unread(store: FileStore) -> None:
    told, logged = new_trace(), new_trace()
    store.put_otlp(request([span(told)]))
    store.put_logs(encode_logs([record(logged), record(None)]))
    assert list(unread(store)) == [told, logged]
    assert list(unread(store, limit=1)) == [told]
    assert list(unread(store, trace_ids=[logged, new_trace()])) == [logged]


def test_an_evaluation_changes_no_call(store: FileStore) -> None:
    store.put_logs(encode_logs([record(new_trace(), names.REWARD_EVENT)]))
    assert unread(store) == {}


def test_a_batch_that_was_refused_makes_nothing_unread(store: FileStore) -> None:
    spans = [span(new_trace()), span(new_trace(), start_ns=2**64)]
    with pytest.raises((StoreError, ValueError)):
        store.put_batches([spans])
    assert unread(store) == {}


def test_a_trace_stays_if_it_changed_while_it_was_read(store: FileStore) -> None:
    first = span(new_trace())
    store.put_otlp(request([first]))
    seen = unread(store)
    store.put_otlp(request([span(first.trace_id)]))
    assert store.mark_read(seen) == 0
    assert store.mark_read(unread(store)) == 1
    assert unread(store) == {}


def test_what_was_sent_again_is_read_again(store: FileStore) -> None:
    body = request([span(new_trace())])
    store.put_otlp(body)
    store.mark_read(unread(store))
    assert store.put_otlp(body) == 0
    assert len(unread(store)) == 1


def test_calls_of_a_trace_are_those_that_were_read_last(store: FileStore) -> None:
    trace = new_trace()
    store.put_otlp(request([span(trace)]))
    rows = [row(trace, "a"), row(trace, "b")]
    assert store.put_calls(rows, read=unread(store)) == 2
    assert (
        store.put_calls([row(trace, "a"), row(trace, "c")], read=unread(store)) == 1
    )  # `a` is there as it is
    assert written(store) == {"a", "c"}
    assert store.put_calls([], read=unread(store)) == 0
    assert written(store) == set()


def test_an_older_reading_never_replaces_a_newer_one(store: FileStore) -> None:
    trace = new_trace()
    store.put_otlp(request([span(trace)]))
    old = unread(store)
    store.put_otlp(request([span(trace)]))
    new = unread(store)
    stray = {"trace_id": trace, "span_id": "cd" * 8, "scope": "old", "attributes": "acme.model"}
    assert store.put_calls([row(trace, "old")], read=old, unknown=[stray]) == 0
    assert store.put_calls([row(trace, "new")], read=new, unknown=[stray | {"scope": "new"}]) == 1
    assert store.query("SELECT scope FROM unknown_calls") == [{"scope": "new"}]
    store.mark_read(new)
    assert store.put_calls([row(trace, "old")], read=new) == 0  # somebody else has read it
    assert store.put_calls([row(trace, "again")], read={trace: None}) == 1
    assert written(store) == {"again"}


def test_a_quiet_trace_is_read_unless_a_rollout_is_waited_for(store: FileStore) -> None:
    store.enqueue([Rollout("r")])
    store.put_otlp(request([span("ab" * 16, rollout="r", attempt=0), span("cd" * 16, rollout="seen")]))
    assert set(unread(store)) == {"ab" * 16, "cd" * 16}
    assert unread(store, quiet_s=60.0) == {}
    assert list(unread(store, quiet_s=0.0)) == ["cd" * 16]
    assert list(unread(store, rollout_ids=["r"])) == ["ab" * 16]
    store.claim(worker="w")
    assert list(unread(store, quiet_s=0.0)) == ["cd" * 16]
    store.finish("r", 0)
    assert list(unread(store, quiet_s=0.0)) == ["ab" * 16, "cd" * 16]
    assert [list(one.rollout_ids) for one in store.unread_traces()] == [["r"], ["seen"]]


def test_traces_of_an_older_store_that_have_no_calls_are_unread(tmp_path: Path) -> None:
    path = tmp_path / "s.duckdb"
    read, other = new_trace(), new_trace()
    with FileStore(path) as store:
        store.put_otlp(request([span(read), span(other)]))
        store.put_calls([row(read, "a")])
    with duckdb.connect(str(path)) as con:
        con.execute("DROP TABLE unread_traces")
        next(step for step in MIGRATIONS if step.__name__.endswith("_unread_traces"))(con)
    with FileStore(path, read_only=True) as store:
        assert list(unread(store)) == [other]


def test_a_reader_has_what_is_unread_read_before(tmp_path: Path) -> None:
    path = tmp_path / "s.duckdb"
    seen: list[list[str]] = []

    def read_traces(store: FileStore) -> None:
        seen.append(list(unread(store)))
        store.mark_read(unread(store))

    trace = new_trace()
    with FileStore(path) as store:
        store.put_otlp(request([span(trace)]))
    with open_to_read(path) as store:
        assert list(unread(store)) == [trace]
    for _ in range(2):
        with open_to_read(path, read_traces=read_traces) as store:
            assert unread(store) == {}
            with pytest.raises(StoreError, match="read_only"):
                store.mark_read({})
    assert seen == [[trace]]


def test_what_is_unread_waits_while_another_reads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "s.duckdb"
    with FileStore(path) as store:
        store.put_otlp(request([span(new_trace())]))
    path.chmod(0o644)
    with open_to_read(path, read_traces=lambda store: store.mark_read({})) as store:
        assert len(unread(store)) == 1
    assert caplog.text == ""
