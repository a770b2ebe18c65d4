"""Files of rewards into a real store: where rows belong, what gives none, and the same file twice."""

import json

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spangrad.adapters import ingest
from spangrad.adapters.calls import calls_of
from spangrad.adapters.exports.ids import trace_id as hashed
from spangrad.adapters.scoring.reward_files import put_reward_files
from spangrad.adapters.scoring.reward_rows import COLUMNS, parse
from spangrad.errors import DialectError
from spangrad.store.file_store import FileStore
from spangrad.store.otlp import encode_request
from spangrad.store.records import Reward, RewardAuthor, Rollout
from spangrad.tracer import conventions as c
from tests.adapters.building import span, text_attributes
from tests.adapters.captured import FIXTURES
from tests.adapters.junk import JSON, JUNK

NEVER = "f" * 32


def spans_of(rollout_id, trace, names=("root", "call"), attempt=0):
    """A rollout: a root and a call below it, whose response is `r-<trace>`."""
    own = {c.ROLLOUT_ID: rollout_id, c.ATTEMPT: attempt}
    root, call = names
    return [
        span(root, trace=trace, attributes=own, kind=1),
        span(call, trace=trace, parent=root, attributes=text_attributes(**{c.RESPONSE_ID: f"r-{trace}"})),
    ]


@pytest.fixture
def store(tmp_path):
    with FileStore(tmp_path / "store.duckdb") as opened:
        opened.put_otlp(encode_request([*spans_of("one", "1"), *spans_of("two", "2")]))
        yield opened


def written(tmp_path, *rows):
    file = tmp_path / "rewards.jsonl"
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return file


def told(store):
    return [(r.rollout_id, r.call_id, r.name, r.value, r.explanation) for r in store.rewards()]


def test_a_row_is_about_its_rollout_or_the_rollout_of_its_trace(store, tmp_path):
    root, _ = spans_of("one", "1")
    file = written(
        tmp_path,
        {"rollout_id": "one", "value": 1, "explanation": "why"},
        {"trace_id": root.trace_id.upper(), "name": "by trace", "value": 0.5},
        {"trace_id": root.trace_id, "rollout_id": "one", "name": "by both", "value": True},
        {"trace_id": root.trace_id, "span_id": root.span_id, "name": "by root", "value": -2},
        {"rollout_id": "two", "value": 0},
    )
    report = put_reward_files([file], store)
    assert (report.rows, report.rewards, report.new_rewards, report.left_out) == (5, 5, 5, ())
    assert report.by_name == {"reward": 2, "by trace": 1, "by both": 1, "by root": 1}
    assert told(store) == [
        ("one", None, "reward", 1.0, "why"),
        ("one", None, "by trace", 0.5, None),
        ("one", None, "by both", 1.0, None),
        ("one", None, "by root", -2.0, None),
        ("two", None, "reward", 0.0, None),
    ]
    assert {(reward.author, reward.attempt) for reward in store.rewards()} == {(RewardAuthor.OPERATOR, 0)}


def test_a_row_is_about_a_call_by_its_span_its_id_or_its_response(store, tmp_path):
    root, call = spans_of("one", "1")
    call_id = f"{call.trace_id}-{call.span_id}"
    file = written(
        tmp_path,
        {"trace_id": call.trace_id, "span_id": call.span_id, "name": "1", "value": 1},
        {"rollout_id": "one", "span_id": call.span_id, "name": "2", "value": 1},
        {"call_id": call_id, "name": "3", "value": 1},
        {"rollout_id": "one", "call_id": call_id, "name": "4", "value": 1},
        {"rollout_id": "one", "response_id": "r-1", "name": "5", "value": 1},
        {"trace_id": call.trace_id, "response_id": "r-1", "name": "6", "value": 1},
        {"call_id": f"{root.trace_id}-{root.span_id}", "name": "7", "value": 1},
    )
    assert put_reward_files([file], store).left_out == ()
    assert [(r.name, r.call_id) for r in store.rewards()] == [
        *((str(number), call_id) for number in range(1, 7)),
        ("7", f"{root.trace_id}-{root.span_id}"),
    ]


def test_a_trace_of_several_rollouts_needs_a_rollout_of_it_or_a_span(store, tmp_path):
    first, second = spans_of("a", "3"), spans_of("b", "3", names=("root b", "call b"))
    store.put_otlp(encode_request([*first, *second]))
    trace = first[0].trace_id
    file = written(
        tmp_path,
        {"trace_id": trace, "value": 1},
        {"trace_id": trace, "rollout_id": "a", "value": 2},
        {"trace_id": trace, "span_id": second[0].span_id, "value": 3},
        {"trace_id": trace, "rollout_id": "one", "value": 4},
    )
    report = put_reward_files([file], store)
    assert [(one.line, one.reason) for one in report.left_out] == [
        (1, "several rollouts in the trace"),
        (4, "rollout_id and trace_id are of different rollouts"),
    ]
    assert [(r.rollout_id, r.call_id, r.value) for r in store.rewards()] == [
        ("a", None, 2.0),
        ("b", None, 3.0),
    ]


def test_what_gives_no_reward_is_counted_and_shown_by_line(store, tmp_path):
    root, call = spans_of("one", "1")
    rows = [
        {"rollout_id": "one", "value": 1},
        {"rollout_id": "nosuch", "value": 1},
        {"trace_id": NEVER, "value": 1},
        {"rollout_id": "one", "span_id": "f" * 16, "value": 1},
        {"trace_id": root.trace_id, "span_id": "f" * 16, "value": 1},
        {"rollout_id": "two", "trace_id": root.trace_id, "value": 1},
        {"rollout_id": "one", "response_id": "r-2", "value": 1},
        {"call_id": "not-one", "value": 1},
        {"call_id": f"{call.trace_id}-{call.span_id}", "trace_id": NEVER, "value": 1},
        {"value": 1},
        {"rollout_id": "one"},
        {"rollout_id": "one", "value": None},
        {"rollout_id": "one", "value": "1"},
        {"rollout_id": "one", "value": [1]},
        '{"rollout_id": "one", "value": NaN}',
        '{"rollout_id": "one", "value": 1e999}',
        {"rollout_id": "one", "value": 10**400},
        {"rollout_id": 7, "value": 1},
        {"rollout_id": "one", "value": 1, "name": ""},
        {"rollout_id": "one", "value": 1, "explanation": "\ud800"},
        {"rollout_id": "one", "value": 1, "attempt": -1},
        '{"rollout_id": "one", "val',
        "[1, 2]",
        {"rollout_id": "one", "value": 2, "name": "last", "author": "evaluator"},
    ]
    file = written(tmp_path, *rows)
    report = put_reward_files([file], store)
    assert [(one.line, one.reason) for one in report.left_out] == [
        (2, "no such rollout"),
        (3, "no such trace"),
        (4, "no such span"),
        (5, "no such span"),
        (6, "rollout_id and trace_id are of different rollouts"),
        (7, "no call with that response_id"),
        (8, "call_id is not trace-span"),
        (9, "call_id is not trace-span"),
        (10, "neither rollout_id, trace_id nor call_id"),
        *((line, "no value") for line in (11, 12)),
        *((line, "value is no finite number") for line in (13, 14, 15, 16, 17)),
        *((line, "a column of the wrong type") for line in (18, 19, 20, 21)),
        *((line, "broken row") for line in (22, 23)),
    ]
    assert report.left_out_by_reason["value is no finite number"] == 5
    assert {one.path for one in report.left_out} == {str(file)}
    assert report.left_out[0].detail == "nosuch"
    assert (report.rows, report.rewards, report.new_rewards) == (24, 2, 2)
    assert report.unread_columns == {"author": 1}
    assert [(name, value) for _, _, name, value, _ in told(store)] == [("reward", 1.0), ("last", 2.0)]
    assert store.rewards()[1].author is RewardAuthor.OPERATOR


def test_the_same_file_twice_stores_once_and_the_last_row_about_a_thing_counts(store, tmp_path):
    file = written(
        tmp_path,
        {"rollout_id": "one", "value": 0},
        {"rollout_id": "one", "value": 1},
        {"rollout_id": "one", "value": 0.25, "time_ns": 5},
        {"rollout_id": "one", "value": 0.5, "time_ns": 6},
    )
    report = put_reward_files([file], store)
    assert (report.rewards, report.corrected, report.new_rewards) == (4, 1, 3)
    assert put_reward_files([file], store).new_rewards == 0
    assert put_reward_files([file, file], store).new_rewards == 0
    assert [reward.value for reward in store.rewards()] == [0.25, 0.5, 1.0]
    changed = written(tmp_path, {"rollout_id": "one", "value": 3})
    assert put_reward_files([changed], store).new_rewards == 1
    assert [reward.value for reward in store.rewards()][-1] == 3.0


def test_what_the_store_tells_of_rewards_can_be_given_to_another_store(store, tmp_path):
    store.put_rewards([Reward("one", 0.5, name="a"), Reward("two", 1.0, explanation="why")])
    file = written(tmp_path, *store.query("SELECT * FROM rewards ORDER BY name"))
    with FileStore(tmp_path / "other.duckdb") as other:
        other.put_otlp(encode_request([*spans_of("one", "1"), *spans_of("two", "2")]))
        assert put_reward_files([file], other).new_rewards == 2
        assert other.rewards() == store.rewards()


def test_rows_of_parquet_and_of_an_array_name_their_reward_by_default(store, tmp_path):
    rows = [{"rollout_id": "one", "value": 1.0}, {"rollout_id": "two", "value": None}]
    parquet, array = tmp_path / "r.parquet", tmp_path / "r.json"
    pq.write_table(pa.Table.from_pylist(rows), parquet)
    array.write_text(json.dumps(rows, indent=2))
    report = put_reward_files([parquet, array], store, name="quality")
    assert (report.files, report.rows, report.new_rewards, report.corrected) == (2, 4, 1, 1)
    assert [(one.line, one.reason) for one in report.left_out] == [(6, "no value"), (2, "no value")]
    assert told(store) == [("one", None, "quality", 1.0, None)]


def test_a_trace_is_named_as_its_own_system_names_it_and_may_be_in_a_session(tmp_path):
    with FileStore(tmp_path / "foreign.duckdb") as store:
        ingest([FIXTURES / "genai_openai" / "multi_turn.otlp.jsonl"], store)
        store.put_otlp(encode_request([span("x", trace=hashed("run 7"), attributes=text_attributes())]))
        (rollout,) = store.rollouts()
        (call, *_) = calls_of(store, [rollout.rollout_id])
        file = written(
            tmp_path,
            {"trace_id": call.trace_id, "value": 1},
            {"trace_id": call.trace_id, "response_id": call.response_id, "value": 2},
            {"trace_id": "run 7", "value": 3},
        )
        assert put_reward_files([file], store).left_out == ()
        assert [(r.rollout_id, r.call_id, r.value) for r in store.rewards()] == [
            (rollout.rollout_id, call.call_id, 1.0),  # that trace is a part of the rollout
            (rollout.rollout_id, call.call_id, 2.0),
            (hashed("run 7"), None, 3.0),
        ]


def test_a_rollout_without_spans_and_an_earlier_attempt_can_be_rewarded(store, tmp_path):
    store.enqueue([Rollout("queued")])
    store.put_otlp(encode_request(spans_of("one", "3", attempt=4)))
    rows = [{"rollout_id": "queued", "value": 1}, {"rollout_id": "one", "attempt": 3, "value": 1}]
    assert put_reward_files([written(tmp_path, *rows)], store).left_out == ()
    assert [(r.rollout_id, r.attempt) for r in store.rewards()] == [("queued", 0), ("one", 3)]


def test_more_rows_than_are_looked_up_at_once(store, tmp_path):
    rows = [{"rollout_id": "one", "name": f"n{number}", "value": number} for number in range(2500)]
    report = put_reward_files([written(tmp_path, *rows)], store)
    assert (report.rewards, report.new_rewards) == (2500, 2500)


def test_a_file_that_can_not_be_opened_is_said_and_nothing_is_written(store, tmp_path):
    good = written(tmp_path, {"rollout_id": "one", "value": 1})
    with pytest.raises(DialectError, match=r"rewards from .*nosuch.*: No such file.*; expected JSON lines"):
        put_reward_files([good, tmp_path / "nosuch.jsonl"], store)
    assert store.rewards() == []


@pytest.mark.parametrize("separator", [",", "\t"])
def test_a_table_of_separated_values_is_said_once_with_what_is_read(store, tmp_path, separator):
    file = tmp_path / "rewards.txt"
    file.write_text("".join(f"{separator.join(row)}\n" for row in (("rollout_id", "value"), ("one", "1"))))
    looks = (
        "can't read rewards from .*rewards.txt.*: it looks like .*-separated values.*; expected JSON lines"
    )
    with pytest.raises(DialectError, match=looks):
        put_reward_files([file], store)
    assert list(store.rewards()) == []


def test_junk_in_any_column_is_a_reward_or_left_out_and_harms_no_other_row(store, tmp_path):
    call = spans_of("one", "1")[1]
    good = {
        "rollout_id": "one",
        "trace_id": call.trace_id,
        "span_id": call.span_id,
        "call_id": f"{call.trace_id}-{call.span_id}",
        "response_id": "r-1",
        "name": "n",
        "value": 1,
        "explanation": "why",
        "attempt": 0,
        "time_ns": 1,
    }
    junk = [value for value in JUNK if not isinstance(value, bytes)]
    rows = [{**good, column: value} for column in good for value in junk]
    report = put_reward_files([written(tmp_path, *rows, {**good, "name": "last"})], store)
    assert report.rows == len(rows) + 1
    assert report.rewards + len(report.left_out) == report.rows
    assert report.rewards > len(good)
    assert "last" in {reward.name for reward in store.rewards()}


@given(JSON, st.sampled_from(COLUMNS))
def test_no_row_breaks_the_parser(value, column):
    assert parse("f", 1, {"rollout_id": "one", "value": 1, column: value}, "reward") is not None


def test_a_reward_of_an_attempt_that_has_not_begun_is_left_out(store, tmp_path):
    store.put_otlp(encode_request(spans_of("two", "3", attempt=2)))
    root, _ = spans_of("one", "1")
    file = written(
        tmp_path,
        {"rollout_id": "one", "value": 1, "attempt": 0},
        {"rollout_id": "one", "value": 1, "attempt": 7},
        {"trace_id": root.trace_id, "value": 1, "attempt": 1},
        {"rollout_id": "two", "value": 1, "attempt": 1},
        {"rollout_id": "two", "value": 1, "attempt": 2},
        {"rollout_id": "two", "value": 1, "attempt": 3},
    )
    report = put_reward_files([file], store)
    assert [(one.line, one.reason) for one in report.left_out] == [
        (line, "no such attempt of the rollout") for line in (2, 3, 6)
    ]
    assert sorted((reward.rollout_id, reward.attempt) for reward in store.rewards()) == [
        *(("one", 0), ("two", 1), ("two", 2))
    ]
