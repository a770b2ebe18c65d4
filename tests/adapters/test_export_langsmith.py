"""LangSmith's exports: runs and feedback -> spans and scores."""

import json
import re
from typing import Any

import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spangrad.adapters.calls import calls_from_spans
from spangrad.adapters.exports import langsmith
from spangrad.adapters.exports.score import Score
from spangrad.store.otlp import decode_request, encode_request
from tests.adapters import picnic
from tests.adapters.captured import FIXTURES, captured
from tests.adapters.test_dialect_langfuse import JUNK
from tests.adapters.test_dialect_langsmith import CASES

FOLDER = FIXTURES / "exports" / "langsmith"
WRAPPER = "01a227ddc2af7777884ed4a86bc38e66"
LANGCHAIN = "01a227dd802a71d6ab45ad7454030303"


def rows(name):
    return [json.loads(line) for line in (FOLDER / name).read_text().splitlines()]


def table():
    (file,) = (FOLDER / "bulk").rglob("*.parquet")
    return pq.ParquetFile(file).read().to_pylist()


def posted(case):
    """The runs that the SDK posted: fields that come as parts of their own, put together."""
    runs: dict[str, dict[str, Any]] = {}
    for line in (FIXTURES / "langsmith_native" / f"{case}.raw.jsonl").read_text().splitlines():
        request = json.loads(line)
        boundary = request["ct"].partition("boundary=")[2]
        for part in request["text"].split(f"--{boundary}"):
            head, _, body = part.strip("\r\n").partition("\r\n\r\n")
            if name := re.search(r'name="(?:post|patch)\.([^".]+)(?:\.(\w+))?"', head):
                run = runs.setdefault(name[1], {})
                run.update({name[2]: json.loads(body)} if name[2] else json.loads(body))
    return list(runs.values())


def spans_of(found):
    return [span for row in found for span in langsmith.spans_of(row)]


def test_every_run_is_a_span_that_gives_the_row_back():
    found = rows("runs.jsonl")
    spans = spans_of(found)
    assert (len(found), len(spans)) == (28, 28)
    assert all(map(langsmith.is_row, found))
    assert [langsmith.original(span) for span in spans] == found
    assert [langsmith.original(span) for span in decode_request(encode_request(spans))[0]] == found


def test_times_of_parquet_come_back_as_iso_8601():
    (span, *_) = spans_of(table())
    row = table()[0]
    times = ("start_time", "end_time")
    assert langsmith.original(span) == {**row, **{name: row[name].isoformat() for name in times}}


def test_spans_of_runs_begun_in_one_millisecond_have_ids_of_their_own():
    spans = spans_of(rows("runs.jsonl"))
    assert len({(span.trace_id, span.span_id) for span in spans}) == 28
    runs = [span.attributes["langsmith.row.id"] for span in spans]
    assert len({run.replace("-", "")[:16] for run in runs}) < 28  # what LangSmith's exporter would take
    known = {(span.trace_id, span.span_id) for span in spans}
    assert all(span.parent_span_id is None or (span.trace_id, span.parent_span_id) in known for span in spans)


def test_the_time_order_names_parent_and_trace():
    found = rows("runs.jsonl")
    bare = [{k: v for k, v in row.items() if k not in ("parent_run_id", "trace_id")} for row in found]
    told = [(span.trace_id, span.span_id, span.parent_span_id) for span in spans_of(found)]
    assert [(span.trace_id, span.span_id, span.parent_span_id) for span in spans_of(bare)] == told
    assert sum(parent is None for *_, parent in told) == 4


def test_every_model_run_is_a_call_and_parquet_says_the_same():
    calls = calls_from_spans(spans_of(rows("runs.jsonl")))
    assert len(calls) == 10
    assert calls_from_spans(spans_of(table())) == calls
    expected: list[Any] = sorted(CASES["multi_turn"] + CASES["oai_multi_turn"] + CASES["fail"])
    assert sorted((call.grade, call.grade_reasons) for call in calls) == expected


@pytest.mark.parametrize(("trace_id", "amount"), [(WRAPPER, "40"), (LANGCHAIN, "40.0")])
def test_a_whole_conversation_reads_as_it_was(trace_id, amount):
    calls = [call for call in calls_from_spans(spans_of(table())) if call.trace_id == trace_id]
    assert picnic.told(calls) == picnic.expected(amount)


@pytest.mark.parametrize("case", CASES)
def test_what_the_sdk_posts_says_what_its_exporter_says(case):
    ours = calls_from_spans(spans_of(posted(case)))
    theirs = calls_from_spans(captured(f"langsmith_otel/{case}"))
    assert [(call.grade, call.grade_reasons) for call in ours] == CASES[case]
    same = (
        "messages",
        "tools",
        "choices",
        "model",
        "response_id",
        "agent_name",
        "step_name",
        "conversation_id",
    )
    for name in same:
        assert [getattr(call, name) for call in ours] == [getattr(call, name) for call in theirs], name


def test_ids_of_the_wrapped_client_are_those_of_the_response():
    for row in rows("runs.jsonl"):
        if "prompt_token_ids" not in (row["outputs"] or {}):
            continue
        (call,) = calls_from_spans(langsmith.spans_of(row))
        assert list(call.prompt_token_ids or ()) == row["outputs"]["prompt_token_ids"]
        assert list(call.choices[0].sampled_token_ids or ()) == row["outputs"]["choices"][0]["token_ids"]


def test_times_are_utc():
    (span, *_) = spans_of(rows("runs.jsonl"))  # 2026-11-29T15:12:54.447806+00:00
    assert span.start_ns == 1795965174_447806_000
    (zoned,) = langsmith.spans_of({**rows("runs.jsonl")[0], "start_time": "2026-11-29T15:12:54.447806"})
    assert zoned.start_ns == span.start_ns
    assert spans_of(table())[0].start_ns == span.start_ns


def test_a_stream_is_known_by_its_first_token():
    (row,) = posted("stream")
    (span,) = langsmith.spans_of(row)
    assert [event.name for event in span.events] == ["start", "new_token", "end"]
    row["outputs"]["generations"][0][0]["generation_info"] = None
    row["outputs"]["generations"][0][0]["message"]["kwargs"]["response_metadata"] = {}
    (call,) = calls_from_spans(langsmith.spans_of(row))
    assert call.grade_reasons == ("stream was left early: choice 0",)


def test_metadata_that_is_no_utf_8_can_be_stored():
    row = {**rows("runs.jsonl")[0], "extra": {"metadata": {"a\ud800": "b\ud800", "c": 2**70, "d": [1]}}}
    (span,) = langsmith.spans_of(row)
    ((stored,), *_) = decode_request(encode_request([span]))
    assert langsmith.original(stored) == row


def test_feedback_is_of_a_trace_or_of_a_run():
    found = rows("feedback.jsonl")
    assert all(map(langsmith.is_row, found))
    assert not spans_of(found)
    scores = [score for row in found for score in langsmith.scores_of(row)]
    common: dict[str, Any] = {"time_ns": 1795965150_000_000_000, "source": "langsmith"}
    assert scores[0] == Score(WRAPPER, None, "correctness", 1.0, None, "synthetic", "api", **common)
    assert [score.value for score in scores] == [1.0, 1.0, 0.0, 0.0]
    run = next(row for row in rows("runs.jsonl") if row.get("parent_run_id"))
    (span,) = langsmith.spans_of(run)
    row = {**found[0], "run_id": run["id"], "trace_id": run["trace_id"], "score": None, "value": "good"}
    (score,) = langsmith.scores_of(row)
    assert (score.trace_id, score.span_id, score.value, score.label) == (
        *(span.trace_id, span.span_id, None, "good"),
    )


@pytest.mark.parametrize("row", [{}, {"id": "x", "run_type": 3}, {"key": "k"}, {"messages": []}])
def test_other_rows_are_not_taken(row):
    assert not langsmith.is_row(row)
    assert not list(langsmith.spans_of(row))
    assert not list(langsmith.scores_of(row))


@given(data=st.data())
def test_junk_in_any_column_never_raises_and_is_given_back(data):
    row = dict(data.draw(st.sampled_from([*rows("runs.jsonl"), *rows("feedback.jsonl")])))
    column = data.draw(st.sampled_from(sorted(row)))
    row[column] = data.draw(JUNK.filter(lambda value: not isinstance(value, bytes) and value == value))
    list(langsmith.scores_of(row))
    for span in langsmith.spans_of(row):
        assert langsmith.original(span) == row
        decode_request(encode_request([span]))
        calls_from_spans([span])
