"""MLflow's trace dictionaries as spans and scores."""

import base64
import json
from typing import Any

import pytest

from spangrad.adapters.conversations import PROJECT
from spangrad.adapters.exports.mlflow import INFO, REST, is_row, scores_of, spans_of
from spangrad.adapters.exports.score import Score
from spangrad.store.otlp import encode_request
from spangrad.store.records import Span
from tests.adapters import junk
from tests.adapters.captured import FIXTURES

FILES = sorted((FIXTURES / "mlflow_json").glob("*.jsonl"))
CALLS = json.loads((FIXTURES / "CALLS.json").read_text())["mlflow_json"]
TRACE = "tr-3d0671a57b82aa8e69bdeda5d8448e32"


def rows(name: str) -> list[dict[str, Any]]:
    return [
        json.loads(line) for line in (FIXTURES / "mlflow_json" / f"{name}.jsonl").read_text().splitlines()
    ]


def row_of(spans: list[Span]) -> dict[str, Any]:
    """The dictionary that spans were made of, out of the spans alone."""
    (info,) = (json.loads(span.attributes[INFO]) for span in spans if INFO in span.attributes)
    session = info["trace_metadata"].get("mlflow.trace.session")
    return {"info": info, "data": {"spans": [_told(span, session) for span in spans]}}


def _told(span: Span, session: str | None) -> dict[str, Any]:
    added = {INFO, REST, PROJECT, *(["mlflow.trace.session"] if session else [])}
    told: dict[str, Any] = {
        "trace_id": base64.b64encode(bytes.fromhex(span.trace_id)).decode(),
        "span_id": base64.b64encode(bytes.fromhex(span.span_id)).decode(),
        "parent_span_id": span.parent_span_id
        and base64.b64encode(bytes.fromhex(span.parent_span_id)).decode(),
        "name": span.name,
        "start_time_unix_nano": span.start_ns,
        "end_time_unix_nano": span.end_ns,
        "status": {
            "code": ("STATUS_CODE_UNSET", "STATUS_CODE_OK", "STATUS_CODE_ERROR")[span.status_code],
            "message": span.status_message,
        },
        "attributes": {key: value for key, value in span.attributes.items() if key not in added},
        "links": list(span.links),
    }
    events = [
        {"name": event.name, "time_unix_nano": event.time_ns, "attributes": dict(event.attributes)}
        for event in span.events
    ]
    return {**told, **({"events": events} if events else {}), **json.loads(span.attributes.get(REST, "{}"))}


@pytest.mark.parametrize("name", [file.stem for file in FILES])
def test_nothing_of_a_trace_is_thrown_away(name):
    traces = rows(name)
    assert len(traces) == CALLS[name]["traces"]
    spans = [list(spans_of(row)) for row in traces]
    assert sum(map(len, spans)) == CALLS[name]["spans"]
    assert all(is_row(row) for row in traces)
    assert [row_of(some) for some in spans] == [_with_events(row) for row in traces]


def _with_events(row: dict[str, Any]) -> dict[str, Any]:
    """The dictionary without empty lists of events, which a span doesn't tell from none."""
    spans = [{k: v for k, v in span.items() if k != "events" or v} for span in row["data"]["spans"]]
    return {**row, "data": {**row["data"], "spans": spans}}


def test_ids_are_those_of_the_trace_and_info_is_on_the_root():
    (row,) = rows("multi_turn")
    spans = list(spans_of(row))
    assert {span.trace_id for span in spans} == {TRACE.removeprefix("tr-")}
    assert [INFO in span.attributes for span in spans] == [True, False, False, False, False]
    assert spans[0].parent_span_id is None
    assert {span.parent_span_id for span in spans[1:]} == {spans[0].span_id}


def test_other_forms_of_a_trace_give_the_same_spans():
    (row,) = rows("multi_turn")
    searched = {"trace_id": TRACE, "trace": json.dumps(row), "state": "OK"}
    assert is_row(searched)
    assert list(spans_of(searched)) == list(spans_of(row))
    columns = {**row["info"], "spans": row["data"]["spans"]}
    assert is_row(columns)
    assert list(spans_of(columns)) == list(spans_of(row))


def test_a_trace_of_mlflow_2_is_read():
    told = {
        "name": "chat",
        "context": {"trace_id": "0x3d0671a57b82aa8e69bdeda5d8448e32", "span_id": "0xebbb1168f84fa5b3"},
        "parent_id": None,
        "start_time": 5,
        "end_time": 9,
        "status_code": "ERROR",
        "status_message": "no",
        "attributes": {"mlflow.spanType": '"CHAT_MODEL"'},
        "events": [{"name": "exception", "timestamp": 7, "attributes": {}}],
    }
    row = {"info": {"request_id": TRACE, "request_metadata": {}}, "data": {"spans": [told]}}
    (span,) = spans_of(row)
    assert (span.trace_id, span.span_id) == (TRACE[3:], "ebbb1168f84fa5b3")
    assert (span.start_ns, span.end_ns, span.status_code, span.status_message) == (5, 9, 2, "no")
    assert span.events[0].time_ns == 7000


def test_ids_of_another_form_are_hashed_and_kept():
    row = {"info": {"trace_id": "tr-mine"}, "data": {"spans": [{"span_id": "first", "name": "x"}]}}
    (span,) = spans_of(row)
    assert (len(span.trace_id), len(span.span_id)) == (32, 16)
    assert span.attributes["mlflow.export.trace_id"] == "tr-mine"
    assert span.attributes["mlflow.export.span_id"] == "first"
    assert list(spans_of(row)) == [span]


def test_assessments_are_scores():
    (row,) = rows("multi_turn")
    spans = list(spans_of(row))
    common = {"trace_id": TRACE, "create_time": "2026-11-29T15:01:22.123456Z", "valid": True}
    assessments = [
        {
            **common,
            "assessment_name": "helpful",
            "span_id": spans[1].span_id,
            "source": {"source_type": "LLM_JUDGE", "source_id": "gpt"},
            "feedback": {"value": True},
            "rationale": "it is",
        },
        {**common, "assessment_name": "tone", "feedback": {"value": "kind"}},
        {**common, "assessment_name": "old", "feedback": {"value": 0.5}, "valid": False},
        {**common, "assessment_name": "answer", "expectation": {"value": "Lyon"}},
    ]
    scored = {**row, "info": {**row["info"], "assessments": assessments}}
    assert list(scores_of(scored)) == [
        Score(
            trace_id=spans[0].trace_id,
            span_id=spans[1].span_id,
            name="helpful",
            value=1.0,
            label="true",
            explanation="it is",
            author="gpt",
            time_ns=1795964482123456000,
            source="mlflow LLM_JUDGE",
        ),
        Score(spans[0].trace_id, None, "tone", None, "kind", None, None, 1795964482123456000, "mlflow"),
    ]
    assert json.loads(next(iter(spans_of(scored))).attributes[INFO])["assessments"] == assessments


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"info": 3, "data": {"spans": []}},
        {"info": {}, "data": {"spans": "x"}},
        {"trace_id": "a", "trace": "{", "tags": {}},
        {"trace_id": "a", "trace": "[]"},
        {
            "info": {"assessments": [3, {"feedback": 3}]},
            "data": {"spans": [3, {}, {"attributes": 3, "events": [3]}]},
        },
        {"info": {"trace_metadata": 3}, "data": {"spans": [{"status": 3, "context": 3, "links": [{}]}]}},
        {"info": {}, "data": {"spans": [{"start_time_unix_nano": "x", "span_id": 3, "status_code": []}]}},
    ],
)
def test_rows_of_another_shape_raise_nothing(row):
    assert isinstance(is_row(row), bool)
    list(spans_of(row))
    list(scores_of(row))


@pytest.mark.parametrize("name", ["n2", "stream_tool", "lc_fail"])
def test_junk_anywhere_in_a_trace_raises_nothing_and_gives_spans_that_can_be_kept(name):
    for other in junk.spoiled_rows(rows(name)[0]):
        assert isinstance(is_row(other), bool)
        encode_request(spans_of(other))
        list(scores_of(other))
