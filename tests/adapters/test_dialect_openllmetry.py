"""Dialect OpenLLMetry, as its instrumentations wrote it."""

import pytest

from spangrad.adapters.calls import calls_from_spans
from spangrad.adapters.dialects import recognise
from spangrad.adapters.model_call import Grade
from tests.adapters import picnic
from tests.adapters.building import span, text_attributes
from tests.adapters.captured import captured

TEXT = ("no token ids",)
PARSED = ("no token ids", "arguments were re-serialised")


def calls(name):
    return calls_from_spans(captured(name))


@pytest.mark.parametrize(
    ("recorder", "amount"),
    [
        ("openllmetry_openai", "40"),
        ("openllmetry_langchain", "40.0"),  # LangChain's own tool converts 40.0 euros
        ("openllmetry_langchain_plus_openai", "40.0"),
    ],
)
def test_a_whole_conversation_reads_as_it_was(recorder, amount):
    found = calls(f"{recorder}/multi_turn")
    assert picnic.told(found) == picnic.expected(amount)
    assert [call.choices[0].finish_reason for call in found] == picnic.FINISH_REASONS
    assert {tuple(tool["function"]["name"] for tool in call.tools) for call in found} == {picnic.TOOLS}
    assert [call.sampling for call in found] == [{"temperature": 0.7, "max_tokens": 256}] * 4
    assert {(call.dialect, call.model) for call in found} == {("openllmetry", "stub-7b")}
    assert [call.grade for call in found] == [Grade.TEXT] * 4
    assert {tuple(call.grade_reasons) for call in found} == {PARSED}
    assert found[0].usage["output_tokens"] == 37


def test_names_and_threads_of_langgraph_are_on_the_span_itself():
    found = calls("openllmetry_langchain/multi_turn")
    assert {(call.agent_name, call.step_name, call.conversation_id) for call in found} == {
        ("picnic_agent", "model", "thread-42")
    }
    assert [call.step_index for call in found] == [1, 3, 5, 7]  # every other step of the graph runs tools


def test_the_trace_that_created_an_agent_is_no_call():
    created = [s for s in captured("openllmetry_langchain/multi_turn") if s.name.startswith("create_agent")]
    assert [recognise(each) for each in created] == [None]


def test_spans_of_tools_and_tasks_whose_arguments_are_python_are_no_calls():
    names = {s.name.split()[0] for s in captured("openllmetry_langchain/multi_turn") if recognise(s) is None}
    assert names >= {"execute_tool", "execute_task", "invoke_agent"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("openllmetry_openai/parallel_async", [PARSED, PARSED, PARSED, PARSED]),
        ("openllmetry_openai/responses", [TEXT]),
        ("openllmetry_openai/stream", [TEXT]),
        ("openllmetry_openai/stream_no_usage", [TEXT]),
        ("openllmetry_openai/stream_tool", [PARSED]),
        ("openllmetry_langchain/parallel", [PARSED, PARSED, PARSED, PARSED, TEXT]),
        ("openllmetry_langchain/parallel_async", [PARSED, PARSED, PARSED, PARSED, TEXT]),
        ("openllmetry_langchain/stream", [TEXT]),
    ],
)
def test_what_was_recorded_whole_is_text(name, expected):
    found = calls(name)
    assert sorted(tuple(call.grade_reasons) for call in found) == sorted(expected)
    assert {call.grade for call in found} == {Grade.TEXT}


@pytest.mark.parametrize(
    ("name", "count"), [("openllmetry_openai/fail", 3), ("openllmetry_langchain/fail", 2)]
)
def test_a_failed_call_is_unusable(name, count):
    found = calls(name)
    assert [call.grade for call in found] == [Grade.UNUSABLE] * count
    assert all(reason.startswith("error: ") for call in found for reason in call.grade_reasons)


def test_a_stream_that_was_cancelled_is_partial_though_its_status_is_ok():
    (call,) = calls("openllmetry_openai/cancelled_stream")
    assert (call.grade, call.grade_reasons) == (Grade.UNUSABLE, ("stream was left early: choice 0",))
    assert call.choices[0].message["content"] == "The quick brown fox naps; the café"


def test_a_streamed_reply_of_an_unknown_role_is_the_assistants():
    (call,) = calls("openllmetry_langchain/stream")
    assert call.choices[0].message["role"] == "assistant"


def test_traceloops_names_on_the_span_of_another_recorder_change_no_dialect():
    named = text_attributes(**{"traceloop.association.properties.thread_id": "t"})
    scope = "opentelemetry.instrumentation.genai.openai"
    assert recognise(span(scope=scope, attributes=named)) == "otel_genai"
    assert recognise(span(scope="my.instrumentation", attributes=named)) == "openllmetry"
