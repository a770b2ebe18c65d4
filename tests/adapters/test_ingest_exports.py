"""Exports of other systems into a real store: spans, rewards, counts; what nobody knows is shown."""

import gzip
import json
import shutil
import tracemalloc

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

from spangrad.adapters.calls import calls_of
from spangrad.adapters.exports.rewards import put_scores
from spangrad.adapters.exports.score import Score, Scores
from spangrad.adapters.ingest import ingest
from spangrad.store.file_store import FileStore
from spangrad.store.otlp import encode_request
from tests.adapters import picnic
from tests.adapters.building import span, text_attributes
from tests.adapters.captured import FIXTURES

PLAIN = FIXTURES / "exports" / "plain_chat"
OTLP = FIXTURES / "genai_openai" / "multi_turn.otlp.jsonl"


@pytest.fixture
def store(tmp_path):
    with FileStore(tmp_path / "store.duckdb") as opened:
        yield opened


def score(trace="1", span_id=None, value: float | None = 1.0, **more):
    named = None if span_id is None else span_id.encode().hex().rjust(16, "0")
    more = {"label": None, "explanation": None, "author": None, "time_ns": 5, "name": "reward", **more}
    return Score(trace.rjust(32, "0"), named, value=value, source="test", **more)


def test_scores_wait_in_order_and_in_little_memory_however_many_they_are():
    tracemalloc.start()
    try:
        waiting, before = Scores(), tracemalloc.get_traced_memory()[0]
        for number in range(10_000):
            waiting.add([score(str(number), explanation="because " * 40), score(str(number), "a")])
            waiting.add([])
        assert tracemalloc.get_traced_memory()[0] - before < 2 * 2**20
    finally:
        tracemalloc.stop()
    assert len(waiting) == 20_000
    for _ in range(2):
        told = iter(waiting)
        assert next(told) == score("0", explanation="because " * 40)
        assert [one.trace_id for one in told][-1] == "9999".rjust(32, "0")
    waiting.close()


def test_plain_chat_is_graded_rewarded_and_stored_once(store):
    report = ingest([PLAIN], store)
    assert (report.rows, report.by_format, report.unknown_rows) == (5, {"plain_chat": 5}, 0)
    assert (report.by_dialect, report.by_grade) == ({"plain_chat": 8}, {"text": 4, "ids": 4})
    assert (report.scores, report.new_rewards, report.scores_left_out) == (1, 1, {})
    again = ingest([PLAIN], store)
    assert (again.spans, again.new_spans, again.new_rewards) == (8, 0, 0)
    stored = {call.trace_id for call in calls_of(store)}
    assert len(stored) == 2
    for trace_id in stored:
        told = [call for call in calls_of(store) if call.trace_id == trace_id]
        assert picnic.told(told) == picnic.expected()


def test_a_reward_of_a_trace_without_rollout_is_of_the_trace(store):
    ingest([PLAIN / "messages.jsonl"], store)
    [reward] = store.rewards()
    [trace_id] = {call.trace_id for call in calls_of(store)}
    assert (reward.rollout_id, reward.value, reward.call_id) == (trace_id, 1.0, None)


def test_a_score_of_a_langfuse_session_finds_the_session_that_only_rows_of_traces_name(store, tmp_path):
    named = ("observations", "traces", "scores")
    folder = FIXTURES / "exports" / "langfuse"
    observations = [json.loads(line) for line in (folder / "observations_v2.jsonl").read_text().splitlines()]
    given = json.loads((folder / "scores.jsonl").read_text().splitlines()[0])
    failed = next(row for row in observations if row["level"] == "ERROR" and not row["parent_observation_id"])
    trace_id = failed["trace_id"]
    rows = (
        [{**row, "session_id": "", "user_id": ""} for row in observations if row["trace_id"] == trace_id],
        [
            {"id": trace_id, "timestamp": failed["start_time"], "session_id": "sess-5fe2a7", "user_id": "u"}
            | {"project_id": given["project_id"], "tags": [], "public": False, "bookmarked": False}
        ],
        [{**given, "trace_id": None, "session_id": "sess-5fe2a7", "name": "reward", "value": 0.5}],
    )
    for name, some in zip(named, rows, strict=True):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    report = ingest([tmp_path], store)
    assert (report.unknown_rows, report.new_rewards, report.scores_left_out) == (0, 1, {})
    [reward] = store.rewards()
    [rollout] = store.rollouts()
    assert (reward.rollout_id, reward.value) == (trace_id, 0.5)
    assert (rollout.rollout_id, rollout.status) == (trace_id, "failed")  # the trace's row says nothing of it


def test_otlp_and_rows_in_one_file_and_a_packed_file_are_read(store, tmp_path):
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_text((PLAIN / "messages.jsonl").read_text() + OTLP.read_text())
    turned = tmp_path / "turned.jsonl"
    turned.write_text(OTLP.read_text() + (PLAIN / "messages.jsonl").read_text())
    packed = tmp_path / "packed.jsonl.gz"
    packed.write_bytes(gzip.compress(OTLP.read_bytes()))
    for file, rows in ((mixed, 1), (turned, 1), (packed, 0)):
        report = ingest([file], store)
        assert (report.rows, report.spans, report.broken) == (rows, 8 if rows else 4, ())
    assert len(list(store.spans())) == 8


def test_a_folder_of_partitions_in_parquet_is_read(store, tmp_path):
    rows = [json.loads(line) for line in (PLAIN / "request_response.jsonl").read_text().splitlines()]
    for number, row in enumerate(rows):
        folder = tmp_path / "runs" / f"day={number}"
        folder.mkdir(parents=True)
        texts = {key: [json.dumps(value)] for key, value in row.items() if isinstance(value, dict)}
        pq.write_table(pa.table({**texts, "session_id": [row["session_id"]]}), folder / "part-0.parquet")
    report = ingest([tmp_path / "runs"], store)
    assert (report.files, report.calls, report.by_grade) == (4, 4, {"ids": 4})


def test_rows_that_nobody_knows_are_counted_and_the_first_is_shown(store, tmp_path):
    file = tmp_path / "other.jsonl"
    file.write_text('{"temperature": 20}\n{"temperature": 21}\n')
    shutil.copy(PLAIN / "messages.jsonl", tmp_path / "known.jsonl")
    report = ingest([tmp_path / "known.jsonl", file], store)
    assert (report.rows, report.unknown_rows, report.broken_files) == (3, 2, 1)
    assert report.unknown_row == f'{file}:1: {{"temperature": 20}}'
    assert json.dumps(report.to_json())


def test_surrogates_and_long_numbers_are_kept_as_text(store, tmp_path):
    file = tmp_path / "chat.jsonl"
    messages = [{"role": "user", "content": "\ud800"}, {"role": "assistant", "content": "\udfff ok"}]
    file.write_text(json.dumps({"messages": messages, "big": 10**30, "session_id": "\ud800"}))
    report = ingest([file], store)
    assert (report.calls, report.broken) == (1, ())
    [call] = calls_of(store)
    assert call.choices[0].message["content"].endswith(" ok")


def test_scores_find_their_rollout_call_or_trace(store):
    spans = [
        span("root", attributes={}),
        span("call", parent="root", attributes=text_attributes()),
        span(
            "own",
            trace="2",
            rollout_id="r-1",
            attributes={"spangrad.rollout.id": "r-1", "spangrad.attempt": 2},
        ),
    ]
    store.put_otlp(encode_request(spans))
    given = [
        score(),
        score(span_id="root", name="root"),
        score(span_id="call", name="call", label="good"),
        score("2", name="own", explanation="why", label="good"),
    ]
    report = put_scores(store, given)
    assert (report.new_rewards, dict(report.left_out)) == (4, {})
    trace, call = spans[0].trace_id, f"{spans[1].trace_id}-{spans[1].span_id}"
    assert {(r.name, r.rollout_id, r.call_id, r.attempt, r.explanation) for r in store.rewards()} == {
        ("reward", trace, None, None, None),
        ("root", trace, None, None, None),
        ("call", trace, call, None, "good"),
        ("own", "r-1", None, 2, "why"),
    }
    again = put_scores(store, given)
    assert (again.new_rewards, dict(again.left_out)) == (0, {"the same score again": 4})


@pytest.mark.parametrize("time_ns", [5, None])
def test_a_score_given_twice_is_counted(store, time_ns):
    store.put_otlp(encode_request([span("root", attributes={})]))
    report = put_scores(store, [score(time_ns=time_ns), score(time_ns=time_ns), score(name="other")])
    assert (report.new_rewards, dict(report.left_out)) == (2, {"the same score again": 1})


def test_every_score_of_a_file_is_a_reward_or_counted(store, tmp_path):
    row = json.loads((PLAIN / "messages.jsonl").read_text())
    given: list[object] = ["0.5", float("nan"), {}, 0.5, None]
    lines = [
        json.dumps({**row, "session_id": f"s-{number}", "reward": value})
        for number, value in enumerate(given)
    ]
    lines.append(
        json.dumps({**row, "session_id": "s-9", "reward": 0}).replace('"reward": 0', '"reward": 1e999')
    )
    lines.append(lines[3])
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    report = ingest([tmp_path / "rows.jsonl"], store)
    assert (report.scores, report.new_rewards, report.scores_left_out) == (
        6,
        1,
        {"no number": 4, "the same score again": 1},
    )


@pytest.mark.parametrize("name", ["langfuse", "langsmith"])
def test_every_score_of_an_export_is_a_reward_or_counted(store, name):
    for _ in range(2):
        report = ingest([FIXTURES / "exports" / name], store)
        assert report.scores == report.new_rewards + sum(report.scores_left_out.values())


def test_scores_that_are_no_rewards_are_counted_by_reason(store):
    two = [
        span(name, trace="3", attributes={"spangrad.rollout.id": f"r-{name}"}, rollout_id=f"r-{name}")
        for name in ("a", "b")
    ]
    store.put_otlp(encode_request(two))
    given = [
        score(value=None, label="pass"),
        score(value=float("nan")),
        score("9"),
        score("3", span_id="zz"),
        score("3"),
        score("3", span_id="a"),
    ]
    report = put_scores(store, given)
    assert report.new_rewards == 1
    assert dict(report.left_out) == {
        "no number": 2,
        "no such trace": 1,
        "no such span": 1,
        "several rollouts in the trace": 1,
    }
