"""Every row of the grade table."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spangrad.adapters.calls import calls_from_spans
from spangrad.adapters.dialects import otel_genai
from spangrad.adapters.grading import grade, reason_kind
from spangrad.adapters.model_call import Grade, ModelCall
from spangrad.adapters.report import ADVICE
from spangrad.tracer import conventions as c
from tests.adapters.building import REPLY, USER, span, text_attributes, token_attributes
from tests.adapters.picnic import TOOLS_NOT_TOLD


def graded(attributes: dict[str, Any], **fields: Any) -> ModelCall:
    (call,) = calls_from_spans([span(attributes=attributes, **fields)])
    return call


def test_ids_logprobs_and_version_make_a_call_exact():
    call = graded(text_attributes(**token_attributes()))
    assert (call.grade, call.grade_reasons) == (Grade.EXACT, ())
    assert call.prompt_token_ids == [1, 2, 3]
    assert call.choices[0].sampled_token_ids == [4, 5]
    assert call.choices[0].logprobs == [-0.5, -0.5]
    assert call.choices[0].policy_versions == [7, 7]


def test_a_reply_cut_by_its_token_limit_was_sampled_exactly():
    call = graded(text_attributes(**token_attributes(), **{c.RESPONSE_FINISH_REASONS: ["length"]}))
    assert (call.grade, call.choices[0].finish_reason) == (Grade.EXACT, "length")


def test_a_whole_reply_of_a_recorder_without_finish_reasons_is_never_exact():
    told = text_attributes(**token_attributes(), **{c.RESPONSE_FINISH_REASONS: [""]})
    told[c.OUTPUT_MESSAGES] = json.dumps([{key: REPLY[0][key] for key in ("role", "parts")}])
    reading = replace(otel_genai.read(span(attributes=told)), is_whole=True)
    reason = "finish reason was not recorded: choice 0 came in one piece"
    assert grade(reading) == (Grade.IDS, (reason,))
    assert grade(replace(reading, is_whole=False)) == (Grade.UNUSABLE, ("no finish reason: choice 0",))


def test_text_alone_is_graded_text():
    call = graded(text_attributes())
    assert (call.grade, call.grade_reasons) == (Grade.TEXT, ("no token ids",))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({c.CONSTRAINED: True}, "sampled under constraint"),
        ({c.POLICY_VERSIONS: c.pack_ints([-1, -1])}, "policy version unknown"),
        ({c.POLICY_VERSIONS: c.pack_ints([7])}, "1 for 2 sampled ids"),
        ({c.SAMPLED_LOGPROBS: c.pack_floats([-1.0] * 3)}, "3 for 2 sampled ids"),
        ({c.SAMPLED_LOGPROBS: c.pack_floats([-1.0, -9999.0])}, "-9999.0 at token 1"),
        ({c.SAMPLED_LOGPROBS: c.pack_floats([-1.0, math.nan])}, "not finite"),
        ({c.SAMPLED_LOGPROBS: c.pack_floats([-1.0, 0.5])}, "positive"),
        ({c.LOGPROBS_MODE: "raw", c.REQUEST_TEMPERATURE: 0.7}, "they are raw, with temperature 0.7"),
        ({c.LOGPROBS_MODE: "raw", c.REQUEST_TOP_P: 0.9}, "top_p 0.9"),
        ({c.REQUEST_TEMPERATURE: 0.0}, "greedily"),
        ({c.LOGPROBS_MODE: "processed", c.REQUEST_TOP_P: 0.9}, "can't recompute"),
        ({c.LOGPROBS_MODE: "processed", c.REQUEST_EXTRA: '{"typical_p": 0.9}'}, "typical_p 0.9"),
        ({c.LOGPROBS_MODE: "processed", c.REQUEST_EXTRA: '{"mirostat": 2}'}, "mirostat 2"),
        ({c.LOGPROBS_MODE: "processed", c.REQUEST_EXTRA: '{"best_of": 4}'}, "best_of 4"),
        ({c.LOGPROBS_MODE: "processed", c.REQUEST_EXTRA: '{"vllm_xargs": {"a": 1}}'}, "vllm_xargs"),
        ({c.LOGPROBS_MODE: "processed", c.SAMPLING_DEFAULTS: '{"top_k": 20}'}, "top_k 20"),
        ({c.SAMPLING_DEFAULTS: '"started with auto"'}, "sampling defaults unknown: frequency_penalty, min_p"),
    ],
)
def test_doubtful_logprobs_make_a_call_ids(changes, reason):
    call = graded(text_attributes(**{**token_attributes(), **changes}))
    assert call.grade is Grade.IDS
    assert any(reason in given for given in call.grade_reasons), call.grade_reasons


@pytest.mark.parametrize("value", [-0.0, 0.0, -1e-45, -1e-40, -8191.9, -8192.0, -9998.0, -10000.0, -3e38])
def test_a_finite_logprob_that_is_not_positive_is_one(value):
    logprobs = {c.SAMPLED_LOGPROBS: c.pack_floats([-0.5, value])}
    assert graded(text_attributes(**{**token_attributes(), **logprobs})).grade is Grade.EXACT


@pytest.mark.parametrize("value", [1e-45, 1e-40, 8192.0, math.inf, -math.inf, math.nan, -math.nan])
def test_a_number_that_is_positive_or_not_finite_is_no_logprob(value):
    logprobs = {c.SAMPLED_LOGPROBS: c.pack_floats([-0.5, value])}
    call = graded(text_attributes(**{**token_attributes(), **logprobs}))
    (told,) = call.grade_reasons
    assert told.startswith("a logprob is no logprob: choice 0")


def test_a_request_that_leaves_nothing_to_defaults_does_not_need_to_know_them():
    asked = {"top_k": -1, "min_p": 0, "frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1}
    said = {c.REQUEST_TEMPERATURE: 1.0, c.REQUEST_TOP_P: 1.0, c.REQUEST_EXTRA: json.dumps(asked)}
    said[c.SAMPLING_DEFAULTS] = '"started with auto"'
    assert graded(text_attributes(**token_attributes(), **said)).grade is Grade.EXACT


def test_what_the_request_asks_for_counts_more_than_defaults():
    said = {c.REQUEST_TEMPERATURE: 0.7, c.SAMPLING_DEFAULTS: '{"temperature": 0.2}'}
    call = graded(text_attributes(**token_attributes(), **said))
    assert (call.grade, call.sampling["temperature"]) == (Grade.EXACT, 0.7)


def test_raw_logprobs_are_exact_at_temperature_1():
    assert graded(text_attributes(**{**token_attributes(), c.LOGPROBS_MODE: "raw"})).grade is Grade.EXACT


def test_an_unknown_version_is_no_version():
    call = graded(text_attributes(**token_attributes(version=None)))
    assert (call.grade, call.grade_reasons) == (Grade.IDS, ("policy version unknown: choice 0",))


def test_missing_logprobs_are_not_zero():
    attributes = text_attributes(**token_attributes())
    del attributes[c.SAMPLED_LOGPROBS]
    call = graded(attributes)
    assert (call.grade, call.choices[0].logprobs) == (Grade.IDS, None)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({c.STREAM_COMPLETE: False, c.REQUEST_STREAM: True}, "stream was left early"),
        (
            {c.REQUEST_STREAM: True, c.RESPONSE_FINISH_REASONS: [""], c.OUTPUT_MESSAGES: "[]"},
            "stream was left early",
        ),
        ({c.RESPONSE_FINISH_REASONS: ["abort"]}, "ended with 'abort'"),
        ({c.RESPONSE_FINISH_REASONS: ["content_filter"]}, "ended with 'content_filter'"),
        ({c.RESPONSE_FINISH_REASONS: ["RECITATION"]}, "ended with 'RECITATION'"),
        ({c.RESPONSE_FINISH_REASONS: ["insufficient_system_resource"]}, "reply was not finished"),
        ({c.ERROR_TYPE: "500"}, "error: 500"),
        ({c.INPUT_MESSAGES: '[{"role": "us'}, "invalid JSON: gen_ai.input.messages"),
        ({c.OUTPUT_MESSAGES: '[{"role": 1}]'}, "unreadable: gen_ai.output.messages"),
        ({c.SAMPLED_TOKEN_IDS: b"123"}, "unreadable: spangrad.sampled_token_ids"),
        ({c.SAMPLED_TOKEN_IDS: b"", c.SAMPLED_LOGPROBS: b""}, "no token was sampled"),
        ({c.DROPPED: '{"response": "longer than 9 bytes"}'}, "response was dropped: longer than 9 bytes"),
    ],
)
def test_a_partial_failed_or_lossy_call_is_unusable_even_with_ids(changes, reason):
    call = graded(text_attributes(**{**token_attributes(), **changes}))
    assert call.grade is Grade.UNUSABLE
    assert any(reason in given for given in call.grade_reasons), call.grade_reasons


def test_dropped_attributes_make_a_call_unusable():
    call = graded(text_attributes(**token_attributes()), dropped_attributes=175)
    assert call.grade is Grade.UNUSABLE
    assert "175" in call.grade_reasons[0]


def test_an_error_status_without_a_type_is_an_error():
    call = graded(text_attributes(), status_code=2, status_message="boom")
    assert (call.grade, call.error) == (Grade.UNUSABLE, "boom")


def test_dropped_token_data_explains_the_grade_and_does_not_spoil_the_text():
    reason = json.dumps({"sampled_token_ids": "41 token ids came, usage counts 42"})
    call = graded(text_attributes(**{c.DROPPED: reason}))
    assert call.grade is Grade.TEXT
    assert "41 token ids came, usage counts 42" in call.grade_reasons[1]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({c.INPUT_MESSAGES: "[]"}, "no input messages were recorded"),
        ({c.OUTPUT_MESSAGES: "[]"}, "no output was recorded: choice 0"),
        (
            {c.INPUT_MESSAGES: '[{"role":"user","parts":[{"type":"video","content":"x"}]}]'},
            "a part has no chat form: 'video'",
        ),
    ],
)
def test_text_that_is_not_all_there_is_unusable(changes, reason):
    call = graded(text_attributes(**changes))
    assert call.grade is Grade.UNUSABLE
    assert reason in call.grade_reasons


def test_a_part_without_chat_form_does_no_harm_where_the_ids_are_known():
    changes = {c.INPUT_MESSAGES: '[{"role":"user","parts":[{"type":"video","content":"x"}]}]'}
    assert graded(text_attributes(**{**token_attributes(), **changes})).grade is Grade.EXACT


def test_the_worst_choice_decides():
    two = [*REPLY, *REPLY]
    attributes = text_attributes(**(token_attributes() | token_attributes(choice=1, sampled=(9,))))
    attributes |= {c.OUTPUT_MESSAGES: json.dumps(two), c.RESPONSE_FINISH_REASONS: ["stop", "stop"]}
    call = graded(attributes)
    assert call.grade is Grade.EXACT
    assert [choice.sampled_token_ids for choice in call.choices] == [[4, 5], [9]]
    del attributes["spangrad.sampled_token_ids.1"]
    call = graded(attributes)
    assert (call.grade, call.grade_reasons) == (Grade.TEXT, ("no sampled token ids: choice 1",))


def test_a_broken_call_does_no_harm_to_its_neighbours():
    broken = span("a", attributes=text_attributes(**{c.INPUT_MESSAGES: "{"}))
    whole = span("b", start_ns=20, attributes=text_attributes(**{c.RESPONSE_ID: "r2"}))
    assert [call.grade for call in calls_from_spans([broken, whole])] == [Grade.UNUSABLE, Grade.TEXT]


CALLED = [{"role": "assistant", "parts": [{"type": "tool_call", "id": "c", "name": "f", "arguments": "{}"}]}]
ANSWERED = [{"role": "tool", "parts": [{"type": "tool_call_response", "id": "c", "response": "3"}]}]
DEFINED = [{"type": "function", "name": "f"}]


@pytest.mark.parametrize(
    "told",
    [{c.OUTPUT_MESSAGES: json.dumps(CALLED)}, {c.INPUT_MESSAGES: json.dumps([*USER, *CALLED, *ANSWERED])}],
)
def test_tools_that_were_used_and_not_told_make_a_prompt_that_is_not_known(told):
    foreign = graded(text_attributes(**told), scope="acme")
    assert (foreign.grade, foreign.grade_reasons) == (Grade.TEXT, ("no token ids", TOOLS_NOT_TOLD))
    defined = graded(text_attributes(**told, **{c.TOOL_DEFINITIONS: json.dumps(DEFINED)}), scope="acme")
    assert defined.grade_reasons == ("no token ids",)
    # spangrad keeps the request: tools that it does not tell were not offered.
    assert graded(text_attributes(**told)).grade_reasons == ("no token ids",)
    # The engine's ids hold the whole prompt, whatever is told beside them.
    assert graded(text_attributes(**token_attributes(), **told), scope="acme").grade is Grade.EXACT
    assert reason_kind(TOOLS_NOT_TOLD) in ADVICE


def test_a_negative_id_is_no_id():
    prompt = graded(text_attributes(**token_attributes(prompt=(1, -1, 3))))
    assert (prompt.grade, prompt.prompt_token_ids) == (Grade.TEXT, None)
    told = "a token id is negative: spangrad.prompt_token_ids has -1 at 1"
    assert prompt.grade_reasons == ("no prompt token ids", told)
    reply = graded(text_attributes(**token_attributes(sampled=(4, -100))))
    assert (reply.grade, reply.choices[0].sampled_token_ids) == (Grade.TEXT, None)
    assert reply.grade_reasons == (
        "no sampled token ids: choice 0",
        "a token id is negative: spangrad.sampled_token_ids has -100 at 1",
    )
    without = token_attributes(sampled=(-1,)) | {
        c.OPERATION_NAME: "chat",
        c.RESPONSE_FINISH_REASONS: ["stop"],
    }
    assert graded(without).grade is Grade.UNUSABLE
    assert reason_kind(told) in ADVICE


@pytest.mark.parametrize(
    ("of_span", "of_message", "counted", "grade"),
    [
        ("stop", "error", "error", Grade.UNUSABLE),
        ("stop", "content_filter", "content_filter", Grade.UNUSABLE),
        ("error", "stop", "error", Grade.UNUSABLE),
        ("stop", "length", "length", Grade.TEXT),
        ("length", "stop", "length", Grade.TEXT),
        ("stop", "tool_call", "stop", Grade.TEXT),
    ],
)
def test_of_two_finish_reasons_the_one_that_says_that_a_reply_is_not_whole_counts(
    of_span, of_message, counted, grade
):
    output = json.dumps([{**REPLY[0], "finish_reason": of_message}])
    call = graded(text_attributes(**{c.RESPONSE_FINISH_REASONS: [of_span], c.OUTPUT_MESSAGES: output}))
    assert (call.grade, call.choices[0].finish_reason) == (grade, counted)
    if grade is Grade.TEXT:
        (_, told) = call.grade_reasons
        assert told.startswith(f"finish reasons contradict each other: choice 0 ended with {of_span!r}")
        assert reason_kind(told) in ADVICE


@pytest.mark.parametrize(
    ("usage", "reason"),
    [
        ({c.INPUT_TOKENS: 3, c.OUTPUT_TOKENS: 2}, None),
        ({c.INPUT_TOKENS: 1, c.CACHE_READ_TOKENS: 2}, None),
        ({c.INPUT_TOKENS: 9}, "usage contradicts the token ids: 9 prompt tokens were counted, 3 ids came"),
        ({c.OUTPUT_TOKENS: 3}, "usage contradicts the token ids: 3 sampled tokens were counted, 2 ids came"),
    ],
)
def test_ids_that_the_usage_contradicts_are_not_exact(usage, reason):
    call = graded(text_attributes(**token_attributes(), **usage))
    assert call.grade_reasons == (() if reason is None else (reason,))
    assert call.grade is (Grade.EXACT if reason is None else Grade.IDS)


names = st.sampled_from(
    sorted(
        str(value)
        for key, value in vars(c).items()
        if key.isupper() and isinstance(value, str) and not value.startswith("x-")
    )
)
values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 5),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.lists(st.one_of(st.text(max_size=3), st.integers()), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
    st.sampled_from(["[]", "{}", "null", "7", '"x"', "[{}]", '[{"role":"user","parts":[{}]}]', "[[]]"]),
)


@given(st.dictionaries(names, values, max_size=8))
def test_no_attribute_of_any_type_breaks_reading(changes):
    attributes = text_attributes(**token_attributes()) | changes | {c.OPERATION_NAME: "chat"}
    (call,) = calls_from_spans([span(attributes=attributes)])
    assert call.grade_reasons or call.grade is Grade.EXACT
