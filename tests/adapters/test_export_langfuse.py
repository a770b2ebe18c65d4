"""Langfuse's exports: rows -> spans and scores."""

import json
import re
from datetime import datetime
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spangrad.adapters.calls import calls_from_spans
from spangrad.adapters.dialects.langfuse import TRACE_SPAN_ID
from spangrad.adapters.exports import langfuse
from spangrad.adapters.exports.score import Score
from spangrad.adapters.model_call import Grade
from spangrad.store.otlp import decode_request, encode_request
from tests.adapters import picnic
from tests.adapters.captured import FIXTURES, captured
from tests.adapters.test_dialect_langfuse import DUMPED, JUNK, NO_IDS, WHOLE

FOLDER = FIXTURES / "exports" / "langfuse"
FILES = ("observations_v2.jsonl", "api_v2_observations_page.json", "ui_export.json")
WRAPPER = "ac478c5a5ae573b8c1fe08edc473fa0c"
LANGCHAIN = "a5b3bd7e3ea08d2b9a7cac5231544ec4"


TRACE: dict[str, Any] = {  # columns as the reference of the blob export has them
    "id": WRAPPER,
    "timestamp": "2026-11-29 14:58:07.541282",
    "name": "agent",
    "environment": "default",
    "project_id": "proj-fixture",
    "metadata": {},
    "user_id": "user-9",
    "session_id": "sess-5fe2",
    "release": None,
    "version": None,
    "public": False,
    "bookmarked": False,
    "tags": ["picnic"],
    "input": "hi",
    "output": "ho",
}


def camel(row):
    return {re.sub("_(.)", lambda found: found[1].upper(), column): value for column, value in row.items()}


def without_trace(row):
    """An observation as the API's traces and the older blob export have it."""
    return {key: value for key, value in row.items() if key not in ("session_id", "user_id", "trace_name")}


def rows(name):
    text = (FOLDER / name).read_text()
    if name.endswith(".jsonl"):
        return [json.loads(line) for line in text.splitlines()]
    value = json.loads(text)
    return value["data"] if isinstance(value, dict) else value


def spans(name):
    return [span for row in rows(name) for span in langfuse.spans_of(row)]


@pytest.mark.parametrize(("name", "count"), list(zip(FILES, (48, 6, 4), strict=True)))
def test_every_observation_is_a_span_that_gives_the_row_back(name, count):
    found = rows(name)
    assert len(found) == count
    for row in found:
        assert langfuse.is_row(row)
        (span,) = langfuse.spans_of(row)
        assert langfuse.original(span) == row
        ((stored,), *_) = decode_request(encode_request([span]))
        assert langfuse.original(stored) == row


@pytest.mark.parametrize(("name", "count"), list(zip(FILES, (18, 5, 4), strict=True)))
def test_every_generation_is_a_call(name, count):
    calls = calls_from_spans(spans(name))
    assert len(calls) == count
    assert {call.dialect for call in calls} == {"langfuse"}


def test_grades_and_reasons_of_the_blob_export():
    graded = [(call.grade, call.grade_reasons) for call in calls_from_spans(spans(FILES[0]))]
    second = "finish reason was not recorded: choice 1 came in one piece"
    assert graded.count((Grade.TEXT, (NO_IDS, WHOLE))) == 5  # 4 of the wrapper, one of the lead agent
    assert graded.count((Grade.TEXT, (NO_IDS, WHOLE, DUMPED))) == 8  # 4 and 4 of LangChain's agents
    assert graded.count((Grade.TEXT, (NO_IDS,))) == 1  # streamed, with a finish reason
    assert graded.count((Grade.TEXT, (NO_IDS, WHOLE, second))) == 1  # two choices
    assert sum(grade is Grade.UNUSABLE for grade, _ in graded) == 3  # 500, 400, 404


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(("trace_id", "amount"), [(WRAPPER, "40"), (LANGCHAIN, "40.0")])
def test_a_whole_conversation_reads_as_it_was(name, trace_id, amount):
    calls = [call for call in calls_from_spans(spans(name)) if call.trace_id == trace_id]
    expected = picnic.expected(amount)
    assert picnic.told(calls) == (expected if len(calls) > 1 else expected[: len(calls)])


def test_an_export_says_what_the_sdk_said():
    exported = [call for call in calls_from_spans(spans(FILES[0])) if call.trace_id == WRAPPER]
    sent = calls_from_spans(captured("langfuse/multi_turn"))
    for ours, theirs in zip(exported, sent, strict=True):
        same = (
            "call_id",
            "messages",
            "tools",
            "choices",
            "sampling",
            "model",
            "agent_name",
            "conversation_id",
        )
        assert [getattr(ours, name) for name in same] == [getattr(theirs, name) for name in same]
        assert ours.parent_span_id == theirs.parent_span_id
        assert (ours.agent_name, ours.conversation_id) == (theirs.agent_name, theirs.conversation_id)
        assert abs(ours.start_ns - theirs.start_ns) < 1_000  # the export has microseconds


def test_parquet_says_what_json_says(tmp_path):
    texts = pa.map_(pa.string(), pa.string())
    types = {"metadata": texts, "usage_details": pa.map_(pa.string(), pa.int64()), "tool_definitions": texts}
    found = rows(FILES[0])
    columns = {}
    for name in found[0]:
        values = [row[name] for row in found]
        if name in types:
            values = [list(value.items()) for value in values]
        elif name in ("start_time", "end_time"):
            values = [datetime.fromisoformat(value) for value in values]
        if name != "cost_details":
            columns[name] = pa.array(values, types.get(name))
    pq.write_table(pa.table(columns), tmp_path / "observations.parquet")
    table = pq.ParquetFile(tmp_path / "observations.parquet").read().to_pylist()
    assert all(map(langfuse.is_row, table))
    calls = calls_from_spans(span for row in table for span in langfuse.spans_of(row))
    assert calls == calls_from_spans(spans(FILES[0]))


def test_times_are_utc():
    (span,) = langfuse.spans_of(rows(FILES[0])[0])  # 2026-11-29 14:58:07.541282
    assert (span.start_ns, span.end_ns) == (1795964287_541282_000, 1795964287_573524_000)
    (span,) = langfuse.spans_of(rows(FILES[1])[0])  # 2026-11-29T14:58:07.541Z
    assert span.start_ns == 1795964287_541_000_000


def test_ids_that_are_no_otel_ids_are_hashed_and_kept():
    row = {**rows(FILES[0])[0], "id": "obs-1", "trace_id": "my trace", "parent_observation_id": "obs-0"}
    (span,) = langfuse.spans_of(row)
    (above,) = langfuse.spans_of({**row, "id": "obs-0", "parent_observation_id": None})
    assert (len(span.trace_id), len(span.span_id)) == (32, 16)
    assert (span.trace_id, span.parent_span_id) == (above.trace_id, above.span_id)
    assert span.attributes["langfuse.row.id"] == "obs-1"
    uuid = "01A227DD-c2af-7777-884e-d4a86bc38e66"
    (span,) = langfuse.spans_of({**row, "trace_id": uuid})
    assert span.trace_id == "01a227ddc2af7777884ed4a86bc38e66"


def test_content_that_is_no_string_is_read_and_given_back():
    row = rows(FILES[0])[0]
    parsed = {**row, "input": json.loads(row["input"]), "output": json.loads(row["output"])}
    (span,) = langfuse.spans_of(parsed)
    assert langfuse.original(span) == parsed
    assert picnic.told(calls_from_spans([span])) == picnic.expected()[:1]


def test_lone_surrogates_and_huge_numbers_are_given_back():
    row = {**rows(FILES[0])[0], "name": "a\ud800b", "total_cost": 10**30, "latency": float("inf")}
    (span,) = langfuse.spans_of(row)
    ((stored,), *_) = decode_request(encode_request([span]))
    assert langfuse.original(stored) == row
    assert stored.name == "a?b"


def test_names_that_are_no_utf_8_can_be_stored():
    row = {**rows(FILES[0])[0], "a\ud800": 1, "metadata": {"b\ud800": "c\ud800"}}
    (span,) = langfuse.spans_of(row)
    ((stored,), *_) = decode_request(encode_request([span]))
    assert langfuse.original(stored)["metadata"] == row["metadata"]


def test_a_time_to_the_first_token_tells_of_a_stream():
    row = {**rows(FILES[0])[0], "time_to_first_token": 0.01}
    (call,) = calls_from_spans(langfuse.spans_of(row))
    assert call.grade_reasons == ("stream was left early: choice 0",)


def test_scores_of_traces_and_of_observations():
    found = [score for row in rows("scores.jsonl") for score in langfuse.scores_of(row)]
    assert len(found) == 10
    assert [score.value for score in found[:8]] == [1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0]
    common: dict[str, Any] = {"time_ns": 1795965600_000_000_000, "source": "langfuse"}
    assert found[8:] == [
        Score(WRAPPER, "75615b0d36480b69", "helpfulness", 0.75, None, "judge: ok", "EVAL", **common),
        Score(WRAPPER, None, "tone", None, "polite", None, "ANNOTATION", **common),
    ]
    known = {(span.trace_id, span.span_id) for span in spans(FILES[0])}
    assert (found[8].trace_id, found[8].span_id) in known


def test_a_score_is_no_span_and_an_observation_no_score():
    for row in rows("scores.jsonl"):
        assert langfuse.is_row(row)
        assert not list(langfuse.spans_of(row))
    assert not [score for row in rows(FILES[0]) for score in langfuse.scores_of(row)]


def test_a_score_of_a_session_is_of_no_trace():
    row = {**rows("scores.jsonl")[0], "trace_id": None, "session_id": "sess-7"}
    assert langfuse.is_row(row)
    [score] = langfuse.scores_of(row)
    assert (score.trace_id, score.span_id, score.session_id, score.project) == (
        None,
        None,
        "sess-7",
        "proj-fixture",
    )
    assert not list(langfuse.scores_of({**row, "session_id": None}))


@pytest.mark.parametrize("row", [TRACE, camel(TRACE)])
def test_a_trace_is_a_span_above_none_that_gives_the_row_back(row):
    assert langfuse.is_row(row)
    (span,) = langfuse.spans_of(row)
    assert (span.trace_id, span.parent_span_id, span.start_ns) == (WRAPPER, None, 1795964287_541282_000)
    assert (span.attributes["session.id"], span.attributes["user.id"]) == ("sess-5fe2", "user-9")
    assert langfuse.original(span) == row
    assert calls_from_spans([span]) == []


def test_calls_have_the_session_of_their_trace_wherever_its_row_is():
    found = [without_trace(row) for row in rows(FILES[0])]
    langchain = {**TRACE, "id": LANGCHAIN, "session_id": "sess-77ab"}  # its observations name a thread, too
    made = [list(langfuse.spans_of(row)) for row in (*found, TRACE, langchain)]
    for told in (made, made[::-1]):
        calls = calls_from_spans(span for some in told for span in some)
        sessions = {call.trace_id: call.conversation_id for call in calls}
        assert (sessions[WRAPPER], sessions[LANGCHAIN]) == ("sess-5fe2", "sess-77ab")
        assert not any(TRACE_SPAN_ID in call.ancestor_span_ids for call in calls)


def test_a_trace_with_all_in_it_says_what_rows_of_their_own_say():
    own = [camel(without_trace(row)) for row in rows(FILES[0]) if row["trace_id"] == WRAPPER]
    scores = [row for row in rows("scores.jsonl") if row["trace_id"] == WRAPPER]
    whole = {**camel(TRACE), "htmlPath": "/t", "observations": own, "scores": [camel(row) for row in scores]}
    (alone,) = langfuse.spans_of({**camel(TRACE), "htmlPath": "/t", "observations": ["id"], "scores": ["id"]})
    assert list(langfuse.spans_of(whole)) == [
        alone,
        *(span for row in own for span in langfuse.spans_of(row)),
    ]
    expected = [score for row in scores for score in langfuse.scores_of(row)]
    assert len(expected) == 3
    assert list(langfuse.scores_of(whole)) == expected
    bare = [{key: value for key, value in row.items() if key != "traceId"} for row in own]
    assert [span.trace_id for span in langfuse.spans_of({**whole, "observations": bare})] == [WRAPPER] * (
        1 + len(own)
    )
    short = {key: scores[0][key] for key in ("id", "name", "value", "data_type")}
    (score,) = langfuse.scores_of({**whole, "scores": [short, "id"]})
    assert (score.trace_id, score.span_id, score.value) == (WRAPPER, None, 1.0)


@pytest.mark.parametrize(
    "row",
    [
        *({}, {"id": "x"}, {"messages": []}, {"id": 3, "traceId": 4, "type": 5, "startTime": 6}),
        {"id": "x", "timestamp": "2026-11-29", "session_id": "s", "user_id": "u", "tags": []},
        {**TRACE, "messages": []},
        {**TRACE, "timestamp": "yesterday"},
    ],
)
def test_other_rows_are_not_taken(row):
    assert not langfuse.is_row(row)
    assert not list(langfuse.spans_of(row))
    assert not list(langfuse.scores_of(row))


@given(data=st.data())
def test_junk_in_any_column_never_raises_and_is_given_back(data):
    known = [*rows(FILES[0]), *rows(FILES[1]), *rows("scores.jsonl"), TRACE]
    row = dict(data.draw(st.sampled_from(known)))
    column = data.draw(st.sampled_from(sorted(row)))
    row[column] = data.draw(JUNK.filter(lambda value: not isinstance(value, bytes) and value == value))
    list(langfuse.scores_of(row))
    for span in langfuse.spans_of(row):
        assert langfuse.original(span) == row
        decode_request(encode_request([span]))
        calls_from_spans([span])
