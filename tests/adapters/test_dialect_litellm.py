"""Dialect LiteLLM, as its OpenTelemetry callback 1.108 wrote it."""

import ast
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spangrad.adapters.calls import calls_from_spans
from spangrad.adapters.dialects import recognise
from spangrad.adapters.dialects.litellm import CACHE_HIT, CALL_TYPE, NO_TOOL_CALLS, USAGE
from spangrad.adapters.model_call import Grade, Purpose
from spangrad.store.records import Span
from spangrad.tracer import conventions as c
from tests.adapters import junk, picnic
from tests.adapters.captured import captured

NO_IDS = "no token ids"
RAW = "llm.hosted_vllm."
ASYNC = ("no logprobs: choice 0", "policy version unknown: choice 0")


def told_with(span: Span, **attributes: object) -> Span:
    return replace(span, attributes={**span.attributes, **attributes})


def test_a_whole_conversation_reads_as_it_was():
    """The callback keeps everything but the ids of the tool calls that a reply makes."""
    calls = calls_from_spans(captured("litellm_otel/multi_turn"))
    expected = picnic.expected()
    for _, reply in expected:
        if "tool_calls" in reply:
            reply["tool_calls"] = [(None, *call[1:]) for call in reply["tool_calls"]]
    assert picnic.told(calls) == expected
    assert [call.choices[0].finish_reason for call in calls] == picnic.FINISH_REASONS
    assert [tool["function"]["name"] for tool in calls[0].tools] == list(picnic.TOOLS)
    assert calls[0].tools[0]["function"]["parameters"]["required"] == ["city"]
    made = [call["function"]["arguments"] for x in calls[:2] for call in x.choices[0].message["tool_calls"]]
    assert made[:2] == picnic.ARGUMENTS
    assert {(call.grade, tuple(call.grade_reasons)) for call in calls} == {(Grade.TEXT, (NO_IDS,))}
    assert (calls[0].dialect, calls[0].model) == ("litellm", "stub-7b")
    assert calls[0].sampling == {"temperature": 0.7, "max_tokens": 256}
    assert calls[0].usage == {"input_tokens": 342, "output_tokens": 37}


@pytest.mark.parametrize(
    ("case", "grades"),
    [
        ("n2", [("text", (NO_IDS,))]),
        ("parallel_async", [("ids", ASYNC)] * 4),
        ("stream", [("text", (NO_IDS,))]),
        ("stream_tool", [("text", (NO_IDS,))]),
    ],
)
def test_every_call_counts_once_and_has_its_grade(case, grades):
    calls = calls_from_spans(captured(f"litellm_otel/{case}"))
    assert [(str(call.grade), tuple(call.grade_reasons)) for call in calls] == grades


def test_asynchronous_calls_have_the_ids_of_the_raw_response():
    spans = captured("litellm_otel/parallel_async")
    raw = {span.parent_span_id: span for span in spans if span.name == "raw_gen_ai_request"}
    calls = calls_from_spans(spans)
    assert len(calls) == len(raw) == 4
    for call in calls:
        told = raw[call.span_id].attributes
        (choice,) = ast.literal_eval(told[RAW + "choices"])
        assert call.prompt_token_ids == ast.literal_eval(told[RAW + "prompt_token_ids"])
        assert call.choices[0].sampled_token_ids == choice["token_ids"]
        assert call.span_ids == (call.span_id, raw[call.span_id].span_id)
        assert call.response_id == told[RAW + "id"]
        assert call.sampling == {"return_token_ids": True}
    made = [tool for call in calls for tool in call.choices[0].message.get("tool_calls", ())]
    assert [tool["id"] for tool in made] == ["call_search_notes_10"] * 2
    assert sorted(tool["function"]["arguments"] for tool in made) == [
        '{"query": "bridges", "limit": 1}',
        '{"query": "tides", "limit": 1}',
    ]


def test_two_choices_are_one_call():
    (call,) = calls_from_spans(captured("litellm_otel/n2"))
    assert [choice.message["content"] for choice in call.choices] == [
        "You said: two versions please",
        "You said: two versions please (v1)",
    ]


def test_a_call_that_failed_has_litellms_id_for_no_response():
    calls = calls_from_spans(captured("litellm_otel/fail"))
    kinds = ["InternalServerError", "ContextWindowExceededError", "NotFoundError"]
    assert [str(call.error).split(": litellm.")[0] for call in calls] == kinds
    assert [(call.response_id, str(call.grade)) for call in calls] == [(None, "unusable")] * 3


def test_a_raw_exchange_that_cant_be_read_takes_nothing_from_the_call():
    request, raw = captured("litellm_otel/parallel_async")[:2]
    broken = told_with(raw, **{RAW + "choices": raw.attributes[RAW + "choices"][:-40]})
    (call,) = calls_from_spans([request, broken])
    assert call.grade is Grade.TEXT
    assert call.choices[0].message["tool_calls"][0]["function"]["name"] == "search_notes"
    assert call.grade_reasons[1].startswith("unreadable: llm.hosted_vllm.choices is no Python literal")


def test_a_raw_exchange_whose_call_is_not_there_is_a_call():
    _, raw = captured("litellm_otel/parallel_async")[:2]
    (call,) = calls_from_spans([raw])
    assert (call.grade, call.model) == (Grade.IDS, "stub-7b")


def test_tool_calls_that_several_choices_may_have_made_are_a_fault():
    (span, _) = captured("litellm_otel/stream_tool")
    reply = json.loads(span.attributes[c.OUTPUT_MESSAGES])[0]
    (call,) = calls_from_spans([told_with(span, **{c.OUTPUT_MESSAGES: json.dumps([reply, reply])})])
    assert call.grade is Grade.UNUSABLE
    assert NO_TOOL_CALLS in call.grade_reasons


def test_a_cached_reply_an_embedding_and_hidden_reasoning_are_told():
    (span, _) = captured("litellm_otel/n2")
    (cached,) = calls_from_spans([told_with(span, **{CACHE_HIT: True})])
    assert cached.grade is Grade.UNUSABLE
    usage = "{'completion_tokens': 14, 'completion_tokens_details': {'reasoning_tokens': 9}}"
    (hidden,) = calls_from_spans([told_with(span, **{USAGE: usage})])
    assert hidden.grade_reasons == (NO_IDS, "what was thought is not known: the recorder left out 9 tokens")
    embedded = {k: v for k, v in span.attributes.items() if k != c.OUTPUT_MESSAGES and "finish" not in k}
    (embedding,) = calls_from_spans([replace(span, attributes={**embedded, CALL_TYPE: "aembedding"})])
    assert embedding.purpose is Purpose.EMBEDDING
    assert calls_from_spans([told_with(span, **{CALL_TYPE: "rerank"})]) == []


@pytest.mark.parametrize("case", ["stream_tool", "parallel_async"])
def test_junk_in_any_attribute_raises_nothing(case):
    request, raw = captured(f"litellm_otel/{case}")[:2]
    for other in junk.spoiled(replace(request, attributes=_without_metadata(request))):
        recognise(other)
        calls_from_spans([other, raw])
    for other in junk.spoiled(raw):
        calls_from_spans([request, other])


def _without_metadata(span: Span) -> dict[str, object]:
    return {k: v for k, v in span.attributes.items() if not k.startswith("metadata.user")}


@settings(max_examples=60, deadline=None)
@given(
    junk.JSON, st.sampled_from(["choices", "messages", "prompt_token_ids", "usage", "tools", "temperature"])
)
def test_literals_of_another_shape_raise_nothing(value, name):
    request, raw = captured("litellm_otel/parallel_async")[:2]
    (call,) = calls_from_spans([request, told_with(raw, **{RAW + name: repr(value)})])
    assert call.dialect == "litellm"
