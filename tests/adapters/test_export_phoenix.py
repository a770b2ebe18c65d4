"""Phoenix's exports as spans and scores; what was sent to it is among the captured files."""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

from spangrad.adapters.calls import calls_from_spans
from spangrad.adapters.exports.phoenix import KIND, PHOENIX_KIND, REST, is_row, scores_of, spans_of
from spangrad.adapters.exports.score import Score
from spangrad.store.otlp import encode_request
from spangrad.store.records import Span
from tests.adapters import junk, picnic
from tests.adapters.captured import FIXTURES, captured

FOLDER = FIXTURES / "exports" / "phoenix"
ORIGINALS = (
    *("openinference_openai/multi_turn", "openinference_openai/fail", "openinference_openai/stream"),
    *("openinference_langchain/parallel_async", "genai_openai/multi_turn"),
)
ADDED = {PHOENIX_KIND, REST, "phoenix.export.row"}


def rows(shape: str) -> list[dict[str, Any]]:
    match shape:
        case "api":
            return [json.loads(line) for line in (FOLDER / "spans_api.jsonl").read_text().splitlines()]
        case "dataframe":
            return list(pq.read_table(FOLDER / "spans_dataframe_jsonified.parquet").to_pylist())
    return [json.loads((FOLDER / "spans_otlpv1.json").read_text())]


def spans(shape: str) -> dict[str, Span]:
    return {span.span_id: span for row in rows(shape) for span in spans_of(row)}


def originals() -> dict[str, Span]:
    return {span.span_id: span for case in ORIGINALS for span in captured(case)}


@pytest.mark.parametrize("shape", ["api", "dataframe", "otlpv1"])
def test_spans_are_those_that_were_sent(shape):
    """But for nanoseconds, which Phoenix rounds."""
    sent = originals()
    assert all(is_row(row) for row in rows(shape))
    found = spans(shape)
    assert len(found) == 33
    for span_id, span in found.items():
        original = sent[span_id]
        assert (span.trace_id, span.parent_span_id) == (original.trace_id, original.parent_span_id)
        assert (span.name, span.status_code) == (original.name, original.status_code)
        assert abs(span.start_ns - original.start_ns) <= 1000
        assert abs(span.end_ns - original.end_ns) <= 1000
        assert [(e.name, dict(e.attributes)) for e in span.events] == [
            (e.name, dict(e.attributes)) for e in original.events
        ]
        told = {name: _comparable(name, span.attributes.get(name)) for name in original.attributes}
        assert told == {name: _comparable(name, value) for name, value in original.attributes.items()}


def _comparable(name: str, value: Any) -> Any:
    """OTLP of Phoenix has lists as lists of strings; the dataframe's JSON has more digits."""
    if name == "metadata":
        return {key: _plain(told) for key, told in json.loads(value).items()}
    return round(value, 9) if isinstance(value, float) else value


def _plain(told: Any) -> Any:
    if isinstance(told, float):
        return round(told, 9)
    return list(map(str, told)) if isinstance(told, list) else told


@pytest.mark.parametrize("shape", ["api", "dataframe", "otlpv1"])
def test_openinference_spans_get_nothing_but_what_was_sent(shape):
    sent = originals()
    for span_id, span in spans(shape).items():
        if not span.name.startswith("chat "):
            assert span.attributes.keys() - ADDED == sent[span_id].attributes.keys()


@pytest.mark.parametrize("shape", ["api", "dataframe", "otlpv1"])
def test_a_genai_span_is_read_as_what_was_sent_and_not_as_what_phoenix_made_of_it(shape):
    genai = [span for span in spans(shape).values() if span.name.startswith("chat ")]
    assert all(KIND not in span.attributes and span.attributes[PHOENIX_KIND] == "LLM" for span in genai)
    calls = calls_from_spans(genai)
    assert picnic.told(calls) == picnic.expected()
    assert {call.dialect for call in calls} == {"otel_genai"}
    assert {tuple(call.grade_reasons) for call in calls} == {("no token ids", "arguments were re-serialised")}


def test_nothing_of_an_api_row_is_thrown_away():
    for row in rows("api"):
        (span,) = spans_of(row)
        assert json.loads(span.attributes[REST]) == {"id": row["id"]}
        told = {name: value for name, value in span.attributes.items() if name not in (*ADDED, KIND)}
        if "metadata" in told:
            told |= dict(_dotted(json.loads(told.pop("metadata")), "metadata"))
        assert told == row["attributes"]


def _dotted(told: Mapping[str, Any], prefix: str) -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for key, value in told.items():
        name = f"{prefix}.{key}"
        pairs += _dotted(value, name) if isinstance(value, dict) else [(name, value)]
    return pairs


def test_a_dataframe_that_keeps_lists_and_structs_is_read(tmp_path):
    messages = [{"message.role": "user", "message.content": "hi", "message.tool_calls": None}]
    calls = [{"tool_call.id": "c1", "tool_call.function.name": "f", "tool_call.function.arguments": "{ }"}]
    reply = [{"message.role": "assistant", "message.content": None, "message.tool_calls": calls}]
    row = {
        "name": "ChatCompletion",
        "span_kind": "LLM",
        "parent_id": None,
        "start_time": datetime.fromisoformat("2026-11-29T14:00:00.000001+00:00"),
        "end_time": datetime.fromisoformat("2026-11-29T14:00:01+00:00"),
        "status_code": "OK",
        "status_message": "",
        "events": [],
        "context.span_id": "00f067aa0ba902b7",
        "context.trace_id": "4bf92f3577b34da6a3ce929d0e0e4736",
        "attributes.llm.input_messages": messages,
        "attributes.llm.output_messages": reply,
        "attributes.llm.token_count.prompt": 3.0,
        "attributes.metadata": {"langgraph_node": "plan"},
        "attributes.user": {"name": "ann", "age": None},
        "eval.Helpful.score": 0.5,
        "eval.Helpful.label": "so so",
    }
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "spans.parquet")
    (read,) = pq.read_table(tmp_path / "spans.parquet").to_pylist()
    (span,) = spans_of(read)
    prefix = "llm.output_messages.0.message.tool_calls.0.tool_call."
    assert {name: value for name, value in span.attributes.items() if name != REST} == {
        "llm.input_messages.0.message.role": "user",
        "llm.input_messages.0.message.content": "hi",
        "llm.output_messages.0.message.role": "assistant",
        f"{prefix}id": "c1",
        f"{prefix}function.name": "f",
        f"{prefix}function.arguments": "{ }",
        "llm.token_count.prompt": 3,
        "metadata": '{"langgraph_node": "plan"}',
        "user.name": "ann",
        KIND: "LLM",
    }
    assert (span.start_ns, span.end_ns) == (1795960800000001000, 1795960801000000000)
    (score,) = scores_of(read)
    assert score == Score(span.trace_id, span.span_id, "Helpful", 0.5, "so so", None, None, None, "phoenix")
    assert json.loads(span.attributes[REST]) == {"eval.Helpful.score": 0.5, "eval.Helpful.label": "so so"}


def test_annotations_are_scores():
    row = {
        "id": "U3BhbkFubm90YXRpb246MQ==",
        "name": "correctness",
        "annotator_kind": "HUMAN",
        "span_id": "D39232BB49E52F33",
        "user_id": "ann",
        "result": {"score": 1, "label": "right", "explanation": "as it says"},
        "created_at": "2026-11-29T15:00:00+00:00",
        "updated_at": "2026-11-29T15:00:01+00:00",
    }
    assert is_row(row)
    assert list(spans_of(row)) == []
    assert list(scores_of({"data": [row], "next_cursor": None})) == [
        Score(
            trace_id="",
            span_id="d39232bb49e52f33",
            name="correctness",
            value=1.0,
            label="right",
            explanation="as it says",
            author="ann",
            time_ns=1795964401000000000,
            source="phoenix HUMAN",
        )
    ]
    flat = {"annotation_name": "n", "annotator_kind": "LLM", "trace_id": "a" * 32, "result.score": 0.25}
    assert list(scores_of(flat)) == [Score("a" * 32, None, "n", 0.25, None, None, None, None, "phoenix LLM")]


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"data": [3], "next_cursor": None},
        {"span_kind": "LLM", "context": 3},
        {"span_kind": 3, "context": {"trace_id": "t", "span_id": "s"}, "attributes": 3, "events": "[3]"},
        {"span_kind": "LLM", "context.trace_id": "t", "context.span_id": "s", "attributes.llm.tools": "[3"},
        {"span_kind": "LLM", "context.trace_id": "t", "context.span_id": "s", "attributes.metadata": [3]},
        {
            "trace_id": "t",
            "span_id": "s",
            "start_time_unix_nano": "x",
            "attributes": [3, {"key": 3}, {"key": "a"}],
        },
        {"annotator_kind": "LLM", "span_id": "s", "result": 3},
    ],
)
def test_rows_of_another_shape_raise_nothing(row):
    assert isinstance(is_row(row), bool)
    list(spans_of(row))
    list(scores_of(row))


@pytest.mark.parametrize("shape", ["api", "dataframe", "otlpv1"])
def test_junk_anywhere_in_a_row_raises_nothing_and_gives_spans_that_can_be_kept(shape):
    row = rows(shape)[0]
    for other in junk.spoiled_rows(row["data"][-1] if shape == "otlpv1" else row):
        assert isinstance(is_row(other), bool)
        encode_request(spans_of(other))
        list(scores_of(other))


@pytest.mark.parametrize("shape", ["api", "dataframe", "otlpv1"])
def test_calls_are_those_of_the_spans_that_were_sent(shape):
    sent = {call.call_id: call for call in calls_from_spans(originals().values())}
    calls = calls_from_spans(spans(shape).values())
    assert len(calls) == 17
    for call in calls:
        original = sent[call.call_id]
        assert (call.dialect, call.grade) == (original.dialect, original.grade)
        assert (call.messages, call.choices) == (original.messages, original.choices)
        assert (call.tools, call.prompt_token_ids) == (original.tools, original.prompt_token_ids)
        assert (call.step_name, call.conversation_id) == (original.step_name, original.conversation_id)
