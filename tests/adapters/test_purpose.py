"""What a call was for: hints first, then rules that would rather miss than guess."""

import json
from typing import Any

import pytest

from spangrad.adapters import Purpose, calls_from_spans
from spangrad.tracer import conventions as c
from tests.adapters.building import span, text_attributes


def purpose(step: str | None = None, user: str = "hi", system: str | None = None, **more: Any) -> Any:
    said = [("system", system), ("user", "first"), ("assistant", "yes"), ("user", user)]
    messages = [{"role": r, "parts": [{"type": "text", "content": t}]} for r, t in said if t is not None]
    attributes = text_attributes(**{c.INPUT_MESSAGES: json.dumps(messages)}, **more)
    if step is not None:
        attributes[c.STEP_NAME] = step
    (call,) = calls_from_spans([span(attributes=attributes)])
    return call.purpose, call.purpose_reason


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        ("title", Purpose.TITLE),
        ("generate_title", Purpose.TITLE),
        ("chatTitleGenerator", Purpose.TITLE),
        ("generate-conversation-title", Purpose.TITLE),
        ("summarize", Purpose.SUMMARY),
        ("summarise_conversation", Purpose.SUMMARY),
        ("history summarizer", Purpose.SUMMARY),
        ("SummarizationMiddleware.before_model", Purpose.SUMMARY),
        ("judge", Purpose.JUDGE),
        ("llm_as_a_judge", Purpose.JUDGE),
        ("Judge Answer", Purpose.JUDGE),
    ],
)
def test_a_step_that_is_called_so_is_so(step, expected):
    assert purpose(step) == (expected, f"step name: {step}")


@pytest.mark.parametrize(
    "step",
    [
        "agent",
        "plan",
        "subtitle",
        "entitle",
        "title_search",
        "edit_title_page",
        "summarize_paper",
        "summarize_and_answer",
        "judgement_day",
        "judge_law_case",
        "evaluate",
        "grade_documents",
        "compact",
        "",
    ],
)
def test_a_step_that_may_be_the_agents_work_acts(step):
    assert purpose(step) == (Purpose.AGENT, None)


@pytest.mark.parametrize(
    ("message", "expected", "rule"),
    [
        ("You are a title generator. You output ONLY a thread title.", Purpose.TITLE, "title generator"),
        ("### Task:\nGenerate a concise, 3-5 word title with an emoji", Purpose.TITLE, "Open WebUI's titles"),
        ("### Task:\nGenerate 1-3 broad tags categorizing", Purpose.OTHER, "Open WebUI's tags"),
        (
            "Provide a concise, 5-word-or-less title for the conversation, using",
            Purpose.TITLE,
            "LibreChat's titles",
        ),
        (
            "  <role>\nContext Extraction Assistant\n</role>\n",
            Purpose.SUMMARY,
            "conversation summary",
        ),
        (
            "[System]\nPlease act as an impartial judge and evaluate the quality of the response",
            Purpose.JUDGE,
            "impartial judge",
        ),
    ],
)
def test_known_prompts_are_known_in_the_system_or_the_last_user_message(message, expected, rule):
    assert purpose(user=message) == (expected, f"known prompt: {rule}")
    assert purpose(system=message) == (expected, f"known prompt: {rule}")
    assert purpose(user=f"Tell me what this does: {message}") == (Purpose.AGENT, None)
    tools = json.dumps([{"type": "function", "name": "f", "parameters": {}}])
    assert purpose(system=message, **{c.TOOL_DEFINITIONS: tools}) == (Purpose.AGENT, None)


def test_a_hint_beats_every_rule():
    assert purpose("summarize", **{c.PURPOSE: "agent"}) == (Purpose.AGENT, "hint")
    assert purpose("judge", system="You are a title generator.", **{c.PURPOSE: "other"}) == (
        Purpose.OTHER,
        "hint",
    )


def test_a_name_beats_a_prompt():
    assert purpose("judge", system="You are a title generator.")[0] is Purpose.JUDGE
