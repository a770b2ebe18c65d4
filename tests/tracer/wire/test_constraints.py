"""Calls whose tokens were not the policy's own choice are told from those whose were."""

from typing import Any

import pytest

from spangrad.adapters.grading import grade
from spangrad.adapters.model_call import Choice, Grade
from spangrad.adapters.reading import Reading
from spangrad.tracer import conventions as c
from spangrad.tracer.gateway.record import request_attributes
from spangrad.tracer.gateway.rewrite import Route
from spangrad.tracer.wire.constraints import is_constrained
from tests.adapters.building import span

TOOL = {"type": "function", "function": {"name": "look"}}
TOOLS = {"tools": [TOOL]}
STRICT = {"tools": [{"type": "function", "function": {"name": "look", "strict": True}}]}
STRICT_ELSEWHERE = {"tools": [{"type": "function", "name": "look", "strict": True}]}
SCHEMA = {"type": "json_schema", "schema": {}}

FREE: list[dict[str, Any]] = [
    {},
    TOOLS,
    {**TOOLS, "tool_choice": "auto"},
    {**TOOLS, "tool_choice": {"type": "auto"}},
    {**STRICT, "tool_choice": "none"},
    {**TOOLS, "parallel_tool_calls": True},
    {"parallel_tool_calls": False},
    {"tools": None},
    {"tools": ["odd"]},
    {"response_format": {"type": "text"}},
    {"response_format": None},
    {"text": {"format": {"type": "text"}}},
    {"text": {"verbosity": "low"}},
    {"output_config": {"effort": "low"}},
    {"thinking": {"type": "adaptive"}},
    {"thinking_token_budget": None},
    {"thinking_token_budget": -1},
    {"min_tokens": 0},
    {"bad_words": []},
    {"logit_bias": {}},
    {"watermarking": False},
    {"ignore_eos": True},
    {"stop": ["x"], "stop_token_ids": [5], "include_stop_str_in_output": True},
    {"continue_final_message": True, "add_generation_prompt": False},
    {"repetition_detection": {"max_pattern_size": 4}},
]
BOUND: list[dict[str, Any]] = [
    {**TOOLS, "tool_choice": "required"},
    {**TOOLS, "tool_choice": {"type": "function", "function": {"name": "look"}}},
    {**TOOLS, "tool_choice": {"type": "function", "name": "look"}},
    {**TOOLS, "tool_choice": {"type": "any"}},
    {**TOOLS, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
    {**TOOLS, "parallel_tool_calls": False},
    {"function_call": {"name": "look"}},
    STRICT,
    STRICT_ELSEWHERE,
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "structural_tag"}},
    {"text": {"format": SCHEMA}},
    {"output_config": {"format": SCHEMA}},
    {"structured_outputs": {"regex": "[0-9]"}},
    {"guided_choice": ["a"]},
    {"guided_json": {}},
    {"ebnf": 'root ::= "yes"'},
    {"regex": "yes|no"},
    {"json_schema": "{}"},
    {"allowed_token_ids": [1]},
    {"bad_words": ["x"]},
    {"logit_bias": {"5": 1.0}},
    {"thinking_token_budget": 0},
    {"thinking_token_budget": 100},
    {"thinking": {"type": "enabled", "budget_tokens": 1024}},
    {"min_tokens": 1},
    {"watermarking": True},
    {"use_beam_search": True},
]


@pytest.mark.parametrize("settings", FREE, ids=str)
def test_calls_that_leave_the_choice_to_the_policy_are_not_marked(settings: dict[str, Any]) -> None:
    assert not is_constrained(settings)


@pytest.mark.parametrize("settings", BOUND, ids=str)
def test_calls_with_masked_or_forced_tokens_are_marked_by_the_gateway(settings: dict[str, Any]) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}], **settings}
    assert request_attributes(body, Route.CHAT)[c.CONSTRAINED] is True


@pytest.mark.parametrize(("settings", "level"), [({}, Grade.EXACT), ({"min_tokens": 4}, Grade.IDS)])
def test_a_span_of_others_that_names_the_field_is_not_exact(settings: dict[str, Any], level: Grade) -> None:
    choice = Choice(
        message={"role": "assistant", "content": "a"},
        finish_reason="stop",
        sampled_token_ids=[5],
        logprobs=[-0.5],
        policy_versions=[1],
    )
    reading = Reading(
        span=span(),
        dialect="otel_genai",
        sampling=settings,
        choices=[choice],
        prompt_token_ids=[1, 2],
        logprobs_mode="processed",
    )
    assert grade(reading)[0] is level
