"""Dialects Logfire and pydantic-ai, as Logfire 5.4 and pydantic-ai 2.68 wrote them."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spangrad.adapters.calls import calls_from_spans
from spangrad.adapters.dialects import recognise
from spangrad.adapters.model_call import Grade
from spangrad.tracer import conventions as c
from tests.adapters import junk, picnic
from tests.adapters.captured import captured

NO_IDS = "no token ids"
PARSED = "arguments were re-serialised"


def test_a_whole_conversation_of_logfire_reads_as_it_was():
    """Logfire keeps everything but the bytes of the arguments."""
    calls = calls_from_spans(captured("logfire_openai/multi_turn"))
    assert picnic.told(calls) == picnic.expected()
    assert [call.choices[0].finish_reason for call in calls] == picnic.FINISH_REASONS
    assert [tool["function"]["name"] for tool in calls[0].tools] == list(picnic.TOOLS)
    assert {(call.grade, tuple(call.grade_reasons)) for call in calls} == {(Grade.TEXT, (NO_IDS, PARSED))}
    assert (calls[0].dialect, calls[0].model) == ("logfire", "stub-7b")
    assert calls[0].sampling == {"temperature": 0.7, "max_tokens": 256}
    assert calls[0].response_id == "chatcmpl-3dd3e1be041997800"
    assert calls[0].usage == {"input_tokens": 342, "output_tokens": 37, "cache_read_tokens": 288}


def test_a_whole_conversation_of_pydantic_ai_reads_as_it_was():
    """pydantic-ai keeps the arguments' bytes and names agent and conversation; it drops ids and logprobs."""
    calls = calls_from_spans(captured("pydantic_ai/multi_turn"))
    assert picnic.told(calls) == picnic.expected("40.0")
    assert [call.choices[0].finish_reason for call in calls] == picnic.FINISH_REASONS
    assert [tool["function"]["name"] for tool in calls[0].tools] == list(picnic.TOOLS)
    assert {(call.grade, tuple(call.grade_reasons)) for call in calls} == {(Grade.TEXT, (NO_IDS,))}
    made = [call["function"]["arguments"] for x in calls[:2] for call in x.choices[0].message["tool_calls"]]
    assert made[:2] == picnic.ARGUMENTS
    assert {(call.dialect, call.agent_name) for call in calls} == {("pydantic_ai", "picnic_agent")}
    assert {call.conversation_id for call in calls} == {"01a22b49-dfe5-7674-a316-54da8ef27b9a"}


def test_a_whole_conversation_of_an_older_logfire_reads_as_it_was():
    """It keeps the arguments' bytes, and neither response ids nor finish reasons."""
    calls = calls_from_spans(captured("logfire_openai_3/multi_turn"))
    assert picnic.told(calls) == picnic.expected()
    assert [tool["function"]["name"] for tool in calls[0].tools] == list(picnic.TOOLS)
    made = [call["function"]["arguments"] for x in calls[:2] for call in x.choices[0].message["tool_calls"]]
    assert made[:2] == picnic.ARGUMENTS
    assert calls[0].sampling == {"temperature": 0.7, "max_tokens": 256, "logprobs": True}
    assert {(call.response_id, call.choices[0].finish_reason) for call in calls} == {(None, None)}


def test_tools_come_from_the_request_parameters_where_there_are_no_definitions():
    spans = captured("pydantic_ai/multi_turn")
    older = [
        replace(s, attributes={k: v for k, v in s.attributes.items() if k != c.TOOL_DEFINITIONS})
        for s in spans
    ]
    tools = [call.tools for call in calls_from_spans(older)]
    assert tools == [call.tools for call in calls_from_spans(spans)]


@pytest.mark.parametrize(
    ("case", "grades"),
    [
        ("logfire_openai/cancelled_stream", [("unusable", ("stream was left early: choice 0",))]),
        ("logfire_openai/parallel_async", [("text", (NO_IDS, PARSED))] * 4),
        ("logfire_openai/responses", [("text", (NO_IDS,))]),
        ("logfire_openai/stream", [("text", (NO_IDS,))]),
        ("logfire_openai/stream_no_usage", [("text", (NO_IDS,))]),
        ("logfire_openai/stream_tool", [("text", (NO_IDS, PARSED))]),
        ("logfire_openai_3/multi_turn", [("unusable", ("no finish reason: choice 0",))] * 4),
        ("logfire_openai_3/stream", [("unusable", ("stream was left early: choice 0",))]),
        ("logfire_openai_3/stream_tool", [("unusable", ("stream was left early: choice 0",))]),
        ("pydantic_ai/stream", [("text", (NO_IDS,))]),
        ("pydantic_ai/stream_abandoned", [("unusable", ("stream was left early: choice 0",))]),
    ],
)
def test_every_call_counts_once_and_has_its_grade(case, grades):
    calls = calls_from_spans(captured(case))
    assert [(str(call.grade), tuple(call.grade_reasons)) for call in calls] == grades


@pytest.mark.parametrize(
    ("case", "errors"),
    [
        ("logfire_openai/fail", ["InternalServerError", "BadRequestError", "NotFoundError"]),
        ("logfire_openai_3/fail", ["InternalServerError", "BadRequestError", "NotFoundError"]),
        ("pydantic_ai/fail", ["ModelServerError", "ModelContextWindowExceededError"]),
    ],
)
def test_a_call_that_failed_is_one_call_and_unusable(case, errors):
    calls = calls_from_spans(captured(case))
    assert [str(call.error).split(":")[0] for call in calls] == errors
    assert {call.grade for call in calls} == {Grade.UNUSABLE}


def test_a_stream_lasts_from_its_request_to_its_reply():
    request, reply = captured("logfire_openai/stream")
    (call,) = calls_from_spans([reply, request])
    assert (call.span_id, call.trace_id) == (request.span_id, request.trace_id)
    assert call.span_ids == (request.span_id, reply.span_id)
    assert (call.start_ns, call.end_ns) == (request.start_ns, reply.end_ns)
    assert call.response_id == "chatcmpl-2e39a08f042358477"
    assert call.choices[0].message["content"] == "The quick brown fox naps; the café closes at six."


def test_a_request_without_its_reply_is_a_call_without_output():
    request, reply = captured("logfire_openai/stream")
    (call,) = calls_from_spans([request])
    assert call.grade_reasons == ("no output was recorded",)
    (call,) = calls_from_spans([reply])
    assert call.grade is Grade.TEXT


def test_another_client_of_an_older_logfire_is_counted_and_said():
    span = captured("logfire_openai_3/multi_turn")[0]
    (call,) = calls_from_spans([replace(span, scope="logfire.anthropic")])
    assert call.grade is Grade.UNUSABLE
    assert "a form that is not read: logfire.anthropic before the conventions" in call.grade_reasons


def test_what_logfire_scrubbed_is_not_trained():
    (span,) = captured("logfire_openai/responses")
    told = json.dumps([{"path": ["attributes", c.OUTPUT_MESSAGES, 0], "matched_substring": "auth"}])
    (call,) = calls_from_spans([replace(span, attributes={**span.attributes, "logfire.scrubbed": told})])
    assert call.grade_reasons == (f"text was redacted: {c.OUTPUT_MESSAGES}",)


@pytest.mark.parametrize(
    "case", ["logfire_openai/stream_tool", "logfire_openai_3/stream_tool", "pydantic_ai/stream"]
)
def test_junk_in_any_attribute_raises_nothing(case):
    for span in captured(case):
        for other in junk.spoiled(span):
            recognise(other)
            calls_from_spans([other])


@settings(max_examples=60, deadline=None)
@given(
    junk.JSON, st.sampled_from([c.INPUT_MESSAGES, c.OUTPUT_MESSAGES, c.TOOL_DEFINITIONS, "logfire.scrubbed"])
)
def test_json_of_another_shape_raises_nothing(value, name):
    (span,) = captured("logfire_openai/responses")
    for told in (value, junk.as_text(value)):
        calls_from_spans([replace(span, attributes={**span.attributes, name: told})])
