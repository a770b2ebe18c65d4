"""Dialect MLflow, as its OpenAI and LangChain integrations 3.17 wrote it."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spangrad.adapters.calls import calls_from_spans
from spangrad.adapters.dialects import recognise
from spangrad.adapters.dialects.mlflow import INPUTS, OUTPUTS, PARAMETERS, SPAN_TYPE
from spangrad.adapters.exports.mlflow import spans_of
from spangrad.adapters.model_call import Grade, ModelCall, Purpose
from spangrad.store.otlp import decode_request, encode_request
from spangrad.store.records import Span
from tests.adapters import junk, picnic
from tests.adapters.captured import FIXTURES

NO_IDS = "no token ids"
PARSED = "arguments were re-serialised"
NO_VERSION = "policy version unknown: choice 0"
NO_LOGPROBS = "no logprobs: choice 0"
WARM = "logprobs are not of the sampled distribution: they have no known mode, with temperature 0.7"


def exported(case: str) -> list[Span]:
    """The spans of a file of trace dictionaries, through OTLP, as MLflow's own exporter has them."""
    lines = (FIXTURES / "mlflow_json" / f"{case}.jsonl").read_text().splitlines()
    spans = [span for line in lines for span in spans_of(json.loads(line))]
    return decode_request(encode_request(spans))[0]


def raw_response(span: Span) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads(span.attributes[OUTPUTS])
    return raw


@pytest.mark.parametrize("case", ["multi_turn", "multi_turn_noroot"])
def test_a_whole_conversation_with_its_ids_reads_as_it_was(case):
    """MLflow's OpenAI integration keeps the exchange itself: nothing is lost."""
    calls = calls_from_spans(exported(case))
    assert picnic.told(calls) == picnic.expected()
    assert [call.choices[0].finish_reason for call in calls] == picnic.FINISH_REASONS
    assert [tool["function"]["name"] for tool in calls[0].tools] == list(picnic.TOOLS)
    made = [call["function"]["arguments"] for x in calls[:2] for call in x.choices[0].message["tool_calls"]]
    assert made[:2] == picnic.ARGUMENTS
    assert {(call.grade, tuple(call.grade_reasons)) for call in calls} == {(Grade.IDS, (NO_VERSION, WARM))}
    assert (calls[0].dialect, calls[0].model) == ("mlflow", "stub-7b")
    assert calls[0].sampling == {
        "temperature": 0.7,
        "max_tokens": 256,
        "logprobs": True,
        "return_token_ids": True,
    }
    assert calls[0].usage == {"input_tokens": 342, "output_tokens": 37, "cache_read_tokens": 288}


def test_the_session_of_a_trace_is_the_conversation_of_its_calls():
    assert {call.conversation_id for call in calls_from_spans(exported("multi_turn"))} == {"sess-7"}


@pytest.mark.parametrize("case", ["multi_turn", "n2", "parallel_async", "parallel_threads"])
def test_ids_are_those_of_the_raw_response(case):
    spans = {span.span_id: span for span in exported(case)}
    for call in calls_from_spans(spans.values()):
        raw = raw_response(spans[call.span_id])
        assert call.response_id == raw["id"]
        assert call.prompt_token_ids == raw["prompt_token_ids"]
        assert [x.sampled_token_ids for x in call.choices] == [x["token_ids"] for x in raw["choices"]]


@pytest.mark.parametrize("case", ["stream", "stream_tool"])
def test_ids_of_a_stream_are_those_of_its_chunks(case):
    (span,) = exported(case)
    chunks = [json.loads(event.attributes["mlflow.chunk.value"]) for event in span.events]
    (call,) = calls_from_spans([span])
    assert call.prompt_token_ids == chunks[0]["prompt_token_ids"]
    sampled = [i for x in chunks for choice in x["choices"] for i in choice.get("token_ids") or ()]
    assert call.choices[0].sampled_token_ids == sampled
    assert len(sampled) == call.usage["output_tokens"]


def test_a_streams_tool_call_comes_from_its_chunks_and_not_from_what_mlflow_adds_them_up_to():
    (span,) = exported("stream_tool")
    added_up = raw_response(span)["choices"][0]
    assert (added_up["finish_reason"], added_up["message"]["tool_calls"]) == ("stop", None)
    (call,) = calls_from_spans([span])
    assert call.choices[0].finish_reason == "tool_calls"
    (tool,) = call.choices[0].message["tool_calls"]
    assert (tool["id"], tool["function"]["arguments"]) == (
        "call_get_weather_30",
        '{"city": "Turin", "days": 3}',
    )


@pytest.mark.parametrize("keep", [slice(1, None), slice(0, 2), slice(0, 0)])
def test_a_stream_without_all_of_its_chunks_is_not_trained(keep):
    (span,) = exported("stream")
    (call,) = calls_from_spans([replace(span, events=span.events[keep])])
    assert call.grade is Grade.UNUSABLE


def test_langchains_conversation_reads_as_it_was():
    """Its callback parses arguments; finish reason and response id are on the node above the call."""
    calls = calls_from_spans(exported("lc_multi_turn"))
    assert picnic.told(calls) == picnic.expected("40.0")
    assert [call.choices[0].finish_reason for call in calls] == picnic.FINISH_REASONS
    assert [tool["function"]["name"] for tool in calls[0].tools] == list(picnic.TOOLS)
    assert {(call.grade, tuple(call.grade_reasons)) for call in calls} == {(Grade.TEXT, (NO_IDS, PARSED))}
    assert [(call.agent_name, call.step_name, call.step_index) for call in calls] == [
        ("picnic_agent", "model", index) for index in (1, 3, 5, 7)
    ]
    assert {call.conversation_id for call in calls} == {"thread-42"}
    assert calls[0].response_id == "chatcmpl-3dd3e1be651927368"
    assert calls[0].usage == {"input_tokens": 354, "output_tokens": 37, "cache_read_tokens": 304}
    assert calls[0].sampling["max_tokens"] == 256


@pytest.mark.parametrize(
    ("case", "grades"),
    [
        (
            "n2",
            [("ids", (NO_LOGPROBS, NO_VERSION, "no logprobs: choice 1", "policy version unknown: choice 1"))],
        ),
        ("parallel_async", [("ids", (NO_LOGPROBS, NO_VERSION))] * 4),
        ("parallel_threads", [("ids", (NO_LOGPROBS, NO_VERSION, WARM))] * 4),
        ("responses", [("text", (NO_IDS,))]),
        ("stream", [("ids", (NO_VERSION,))]),
        ("stream_tool", [("ids", (NO_LOGPROBS, NO_VERSION))]),
        (
            "lc_parallel_async",
            [("text", (NO_IDS, PARSED))] * 4 + [("unusable", ("no finish reason: choice 0",))],
        ),
    ],
)
def test_every_call_counts_once_and_has_its_grade(case, grades):
    calls = calls_from_spans(exported(case))
    assert [(str(call.grade), tuple(call.grade_reasons)) for call in calls] == grades


@pytest.mark.parametrize(
    ("case", "errors"),
    [
        ("fail", ["InternalServerError", "BadRequestError", "NotFoundError"]),
        ("lc_fail", ["OpenAIAPIError", "OpenAIModelNotFoundError"]),
    ],
)
def test_a_failed_call_says_what_its_exception_said(case, errors):
    calls = calls_from_spans(exported(case))
    assert [str(call.error).split(": Error code")[0] for call in calls] == errors
    assert {call.grade for call in calls} == {Grade.UNUSABLE}


def told_with(span: Span, **attributes: Any) -> ModelCall:
    (call,) = calls_from_spans([replace(span, attributes={**span.attributes, **attributes})])
    return call


def test_an_embedding_is_one_and_another_providers_form_is_said():
    (span,) = exported("responses")
    asked, answered = {"model": "e", "input": ["a"]}, {"object": "list", "data": [{"embedding": [0.5]}]}
    embedding = told_with(
        span, **{SPAN_TYPE: '"EMBEDDING"', INPUTS: json.dumps(asked), OUTPUTS: json.dumps(answered)}
    )
    assert (embedding.purpose, embedding.grade_reasons) == (
        Purpose.EMBEDDING,
        ("an embedding: nothing was sampled",),
    )
    gemini = {
        INPUTS: '{"contents": "hi"}',
        OUTPUTS: '{"candidates": []}',
        "mlflow.message.format": '"gemini"',
    }
    assert told_with(span, **gemini).grade_reasons[0] == "a form that is not read: gemini"


def test_attributes_that_were_cut_are_a_fault():
    (span,) = exported("responses")
    call = told_with(span, **{OUTPUTS: span.attributes[OUTPUTS][:60]})
    assert call.grade is Grade.UNUSABLE
    assert call.grade_reasons[0] == f"invalid JSON: {OUTPUTS} can't be parsed"


@pytest.mark.parametrize("case", ["n2", "stream_tool", "lc_fail", "lc_parallel_async"])
def test_junk_in_any_attribute_raises_nothing(case):
    spans = exported(case)
    call = next(span for span in spans if recognise(span) is not None)
    above = [span for span in spans if span.span_id == call.parent_span_id]
    for other in junk.spoiled(call):
        calls_from_spans([other, *above])
    for parent in above:
        for other in junk.spoiled(parent):
            calls_from_spans([call, other])


@settings(max_examples=100, deadline=None)
@given(
    junk.JSON, st.sampled_from([INPUTS, OUTPUTS, PARAMETERS, "metadata", "mlflow.chat.tools"]), st.booleans()
)
def test_json_of_another_shape_raises_nothing(value, name, is_langchain):
    call = next(span for span in exported("lc_fail" if is_langchain else "n2") if recognise(span) is not None)
    told_with(call, **{name: junk.as_text(value)})
