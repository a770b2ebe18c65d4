"""Dialect LangSmith, as the SDK's own OpenTelemetry exporter told the runs that the SDK posted.

Left out by the dialect: ids of anything but an unstreamed call of the wrapped OpenAI client.
"""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spangrad.adapters.calls import calls_from_spans
from spangrad.adapters.dialects import recognise
from spangrad.adapters.dialects.langsmith import LANGSMITH
from spangrad.adapters.model_call import Grade, Purpose
from tests.adapters import picnic
from tests.adapters.building import span
from tests.adapters.captured import captured
from tests.adapters.test_dialect_langfuse import JUNK, WHOLE, arguments

TEXT = (Grade.TEXT, ("no token ids",))
DUMPED = (Grade.TEXT, ("no token ids", "arguments were re-serialised"))
IDS = (
    Grade.IDS,
    (
        "policy version unknown: choice 0",
        "logprobs are not of the sampled distribution: they have no known mode, with temperature 0.7",
    ),
)
CASES: dict[str, list[Any]] = {
    "multi_turn": [DUMPED] * 4,
    "oai_multi_turn": [IDS] * 4,
    "parallel_async": [DUMPED] * 4 + [TEXT],
    "stream": [TEXT],
    "fail": [
        (
            Grade.UNUSABLE,
            ("error: OpenAIAPIError('Error code: 500 - EngineCore encountered an issue (synthetic).')",),
        ),
        (
            Grade.UNUSABLE,
            (
                "error: OpenAIModelNotFoundError('Error code: 404 - The model `no-such-model` "
                "does not exist.')",
            ),
        ),
    ],
}


def run(inputs, outputs, *, kind="llm", **attributes):
    return span(
        scope="langsmith",
        attributes={
            "langsmith.span.kind": kind,
            "gen_ai.operation.name": "chat",
            "gen_ai.prompt": json.dumps(inputs),
            "gen_ai.completion": json.dumps(outputs),
            **attributes,
        },
    )


def the_call(*args, **kwargs):
    (call,) = calls_from_spans([run(*args, **kwargs)])
    return call


@pytest.mark.parametrize("case", CASES)
def test_every_call_counts_once_with_its_grade_and_reasons(case):
    calls = calls_from_spans(captured(f"langsmith_otel/{case}"))
    assert [(call.grade, call.grade_reasons) for call in calls] == CASES[case]
    assert {call.dialect for call in calls} == {"langsmith"}


@pytest.mark.parametrize(("case", "amount"), [("oai_multi_turn", "40"), ("multi_turn", "40.0")])
def test_a_whole_conversation_reads_as_it_was(case, amount):
    calls = calls_from_spans(captured(f"langsmith_otel/{case}"))
    assert picnic.told(calls) == picnic.expected(amount)
    assert [call.choices[0].finish_reason for call in calls] == picnic.FINISH_REASONS
    assert [tool["function"]["name"] for tool in calls[0].tools] == list(picnic.TOOLS)
    assert {call.model for call in calls} == {"stub-7b"}
    assert all(str(call.response_id).startswith("chatcmpl-") for call in calls)
    assert (calls[0].sampling["temperature"], calls[0].sampling["max_tokens"]) == (0.7, 256)


def test_arguments_of_the_wrapper_are_byte_for_byte_the_models():
    calls = calls_from_spans(captured("langsmith_otel/oai_multi_turn"))
    assert arguments(calls)[:2] == picnic.ARGUMENTS


def test_ids_and_logprobs_are_those_of_the_raw_response():
    spans = captured("langsmith_otel/oai_multi_turn")
    raw = {
        each.attributes["gen_ai.response.id"]: json.loads(each.attributes["gen_ai.completion"])
        for each in spans
        if "gen_ai.response.id" in each.attributes
    }
    calls = calls_from_spans(spans)
    assert len(raw) == len(calls) == 4
    for call in calls:
        response = raw[call.response_id]
        (choice,) = response["choices"]
        assert list(call.prompt_token_ids or ()) == response["prompt_token_ids"]
        assert list(call.choices[0].sampled_token_ids or ()) == choice["token_ids"]
        wanted = [token["logprob"] for token in choice["logprobs"]["content"]]
        assert list(call.choices[0].logprobs or ()) == pytest.approx(wanted, rel=1e-6)


def test_agent_step_and_thread_are_those_of_the_metadata():
    calls = calls_from_spans(captured("langsmith_otel/multi_turn"))
    assert {(call.agent_name, call.step_name, call.conversation_id) for call in calls} == {
        ("picnic_agent", "model", "thread-42")
    }
    assert [call.step_index for call in calls] == [1, 3, 5, 7]
    assert {call.conversation_id for call in calls_from_spans(captured("langsmith_otel/oai_multi_turn"))} == {
        "sess-7"
    }


def test_tokens_are_counted_with_the_cache():
    call = calls_from_spans(captured("langsmith_otel/multi_turn"))[0]
    assert call.usage == {"input_tokens": 354, "output_tokens": 37, "cache_read_tokens": 304}


def test_runs_of_other_kinds_are_no_calls_though_their_operation_is_one():
    assert recognise(run({"input": "hi"}, {}, kind="prompt")) is None
    assert recognise(run({"query": "hi"}, {}, kind="retriever")) is None
    assert recognise(run({}, {}, kind="chain")) is None


def test_embeddings_are_calls_of_their_own_purpose():
    call = the_call({"input": ["hi"]}, {"output": [0.1]}, kind="embedding")
    assert (call.purpose, call.grade_reasons) == (Purpose.EMBEDDING, ("an embedding: nothing was sampled",))


def test_a_stream_without_a_finish_reason_was_left_early():
    inputs = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    said = {"role": "assistant", "content": "hel"}
    outputs = {"choices": [{"index": 0, "message": said, "finish_reason": None}]}
    assert the_call(inputs, outputs).grade_reasons == ("stream was left early: choice 0",)


@pytest.mark.parametrize(
    "outputs",
    [
        {"role": "assistant", "content": "hello"},
        {"output": "hello"},
        {"output": {"role": "assistant", "content": "hello"}},
        {"message": {"role": "assistant", "content": "hello"}},
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]},
    ],
)
def test_a_traced_function_returns_a_reply_in_one_piece(outputs):
    call = the_call({"messages": [{"role": "user", "content": "hi"}]}, outputs)
    assert call.choices[0].message == {"role": "assistant", "content": "hello"}
    assert call.grade_reasons == ("no token ids", WHOLE)


def test_anthropics_client_has_its_system_message_apart():
    inputs = {"model": "m", "system": "be brief", "messages": [{"role": "user", "content": "hi"}]}
    outputs = {"role": "assistant", "content": [{"type": "text", "text": "hello"}], "stop_reason": "end_turn"}
    call = the_call(inputs, outputs)
    assert [message["content"] for message in call.messages] == ["be brief", "hi"]
    assert (call.choices[0].message["content"], call.choices[0].finish_reason) == ("hello", "stop")


def test_arguments_that_langchain_kept_as_a_string_are_that_string():
    raw = [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at":1}'}}]
    kwargs = {
        "content": "",
        "type": "ai",
        "tool_calls": [{"name": "look", "args": {"at": 1}, "id": "c1", "type": "tool_call"}],
        "additional_kwargs": {"tool_calls": raw},
    }
    message = {"lc": 1, "type": "constructor", "id": ["AIMessage"], "kwargs": kwargs}
    generation = {"text": "", "generation_info": {"finish_reason": "tool_calls"}, "message": message}
    call = the_call({"messages": [[{"role": "user", "content": "hi"}]]}, {"generations": [[generation]]})
    assert call.choices[0].message["tool_calls"] == raw
    assert call.grade_reasons == ("no token ids", picnic.TOOLS_NOT_TOLD)


def test_several_prompts_in_one_run_are_a_fault():
    batches = [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]]
    assert the_call({"messages": batches}, {"output": "x"}).grade_reasons == (
        "unreadable: gen_ai.prompt: 2 prompts in one call; expected one",
    )


MORE_JUNK = st.sampled_from(
    [
        *('{"messages": [3]}', '{"messages": [[3], [4]]}', '{"model": "m", "messages": null}'),
        *('{"generations": [3]}', '{"generations": [[{"message": 3}]]}', '{"generations": []}'),
        *('{"choices": [], "usage_metadata": 3}', '{"choices": [{"token_ids": 3}]}', '{"output": 3}'),
        *('{"input": [3], "model": "m"}', '{"object": "response", "output": [3]}', '{"messages": [3]}'),
    ]
)


@given(data=st.data())
def test_junk_in_any_attribute_is_a_fault_and_never_an_exception(data):
    case = data.draw(st.sampled_from(["multi_turn", "oai_multi_turn", "stream", "fail"]))
    spans = [each for each in captured(f"langsmith_otel/{case}") if LANGSMITH.is_call(each)]
    broken = data.draw(st.sampled_from(spans))
    name = data.draw(st.sampled_from(["gen_ai.prompt", "gen_ai.completion", *sorted(broken.attributes)]))
    broken = replace(broken, attributes={**broken.attributes, name: data.draw(st.one_of(JUNK, MORE_JUNK))})
    LANGSMITH.read(broken)
    assert len(calls_from_spans([broken])) == (name != "langsmith.span.kind")
