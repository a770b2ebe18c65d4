"""Marks that other tracers' scrubbers leave, and text that only looks like one."""

import json

import pytest

from spangrad.adapters.calls import calls_from_spans
from spangrad.adapters.model_call import Grade
from spangrad.adapters.scrubbing import scrub_mark
from spangrad.tracer import conventions as c
from tests.adapters.building import span, text_attributes


@pytest.mark.parametrize(
    "text",
    [
        "[Scrubbed due to 'Cookie']",
        "before [Scrubbed due to 'Cookie'] after",
        "redacted-by-litellm",
        "<fully masked due to failed mask function>",
        "__REDACTED__",
        "mail me at [EMAIL_REDACTED], please",
        "[REDACTED]",
        "<redacted>",
        " [Filtered] ",
        "***REDACTED***",
        "REDACTED",
        "*****",
        '{"cookie": "[REDACTED]"}',
    ],
)
def test_marks_of_scrubbers_are_found(text):
    assert scrub_mark(text) is not None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "The name was [REDACTED] in the file that the court released.",
        "redacted",
        "Masked",
        "removed",
        "We scrubbed the deck.",
        "**bold** and ***bolder***",
        "[removed the file]",
        '{"state": "hidden"}',
    ],
)
def test_ordinary_text_is_no_mark(text):
    assert scrub_mark(text) is None


def message(content, role="user"):
    return json.dumps([{"role": role, "parts": [{"type": "text", "content": content}]}])


@pytest.mark.parametrize("place", [c.INPUT_MESSAGES, c.OUTPUT_MESSAGES])
def test_a_foreign_call_with_scrubbed_text_is_unusable(place):
    attributes = text_attributes(**{place: message("[Scrubbed due to 'Cookie']")})
    (call,) = calls_from_spans([span(attributes=attributes, scope="opentelemetry.util.genai.handler")])
    assert call.grade is Grade.UNUSABLE
    assert any(reason.startswith("text was scrubbed: ") for reason in call.grade_reasons)


def test_scrubbed_arguments_of_a_tool_call_count():
    part = {"type": "tool_call", "id": "t", "name": "f", "arguments": '{"key": "[Filtered]"}'}
    attributes = text_attributes(
        **{c.OUTPUT_MESSAGES: json.dumps([{"role": "assistant", "parts": [part], "finish_reason": "stop"}])}
    )
    (call,) = calls_from_spans([span(attributes=attributes, scope="opentelemetry.util.genai.handler")])
    assert call.grade is Grade.UNUSABLE


def test_what_our_own_tracer_saw_is_what_the_model_saw():
    (call,) = calls_from_spans(
        [span(attributes=text_attributes(**{c.INPUT_MESSAGES: message("[REDACTED]")}))]
    )
    assert call.grade is Grade.TEXT
