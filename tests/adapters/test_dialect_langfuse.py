"""Dialect Langfuse, as its SDK wrote it.

Left out by the dialect: the finish reason of a reply that was not streamed, response ids, token ids.
"""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spangrad.adapters.calls import calls_from_spans
from spangrad.adapters.dialects import recognise
from spangrad.adapters.dialects.langfuse import INVENTED, LANGFUSE, usage_of
from spangrad.adapters.model_call import Grade, Purpose
from spangrad.adapters.sessions import keys_of
from tests.adapters import picnic
from tests.adapters.building import span
from tests.adapters.captured import captured

WHOLE = "finish reason was not recorded: choice 0 came in one piece"
DUMPED = "arguments were re-serialised"
NO_IDS = "no token ids"
CASES = {
    "multi_turn": [(Grade.TEXT, (NO_IDS, WHOLE))] * 4,
    "multi_turn_noroot": [(Grade.TEXT, (NO_IDS, WHOLE))] * 4,
    "parallel_async": [(Grade.TEXT, (NO_IDS, WHOLE))] * 4,
    "lc_multi_turn": [(Grade.TEXT, (NO_IDS, WHOLE, DUMPED))] * 4,
    "lc_parallel": [(Grade.TEXT, (NO_IDS, WHOLE, DUMPED))] * 4 + [(Grade.TEXT, (NO_IDS, WHOLE))],
    "lc_parallel_async": [(Grade.TEXT, (NO_IDS, WHOLE, DUMPED))] * 4 + [(Grade.TEXT, (NO_IDS, WHOLE))],
    "stream": [(Grade.TEXT, (NO_IDS,))],
    "stream_tool": [(Grade.TEXT, (NO_IDS,))],
    "responses": [(Grade.TEXT, (NO_IDS,))],
    "lc_stream": [(Grade.UNUSABLE, ("stream was left early: choice 0",))],
    "lc_fail": [
        (Grade.UNUSABLE, ("error: Error code: 500 - EngineCore encountered an issue (synthetic).",)),
        (Grade.UNUSABLE, ("error: Error code: 404 - The model `no-such-model` does not exist.",)),
    ],
    "fail": [
        (Grade.UNUSABLE, ("error: Error code: 500 - EngineCore encountered an issue (synthetic).",)),
        (
            Grade.UNUSABLE,
            ("error: Error code: 400 - This model's maximum context length is 32768 tokens (synthetic).",),
        ),
        (Grade.UNUSABLE, ("error: Error code: 404 - The model `no-such-model` does not exist.",)),
    ],
}


def generation(**attributes):
    names = {
        "type": "generation",
        "input": '[{"role": "user", "content": "hi"}]',
        "output": '{"role": "assistant", "content": "hello"}',
        **attributes,
    }
    return span(
        scope="langfuse-sdk",
        attributes={
            name if "." in name else f"langfuse.observation.{name.replace('__', '.')}": value
            for name, value in names.items()
            if value is not None
        },
    )


def arguments(calls):
    replies = [call.choices[0].message for call in calls]
    return [call["function"]["arguments"] for reply in replies for call in reply.get("tool_calls", ())]


def the_call(**attributes):
    (call,) = calls_from_spans([generation(**attributes)])
    return call


@pytest.mark.parametrize("case", CASES)
def test_every_call_counts_once_with_its_grade_and_reasons(case):
    calls = calls_from_spans(captured(f"langfuse/{case}"))
    assert [(call.grade, call.grade_reasons) for call in calls] == CASES[case]
    assert {call.dialect for call in calls} == {"langfuse"}


@pytest.mark.parametrize(
    ("case", "amount"), [("multi_turn", "40"), ("multi_turn_noroot", "40"), ("lc_multi_turn", "40.0")]
)
def test_a_whole_conversation_reads_as_it_was(case, amount):
    calls = calls_from_spans(captured(f"langfuse/{case}"))
    assert picnic.told(calls) == picnic.expected(amount)
    assert [tool["function"]["name"] for tool in calls[0].tools] == list(picnic.TOOLS)
    assert {call.model for call in calls} == {"stub-7b"}
    assert dict(calls[0].sampling) == {"temperature": 0.7, "max_tokens": 256}


def test_arguments_of_the_wrapper_are_byte_for_byte_the_models():
    calls = calls_from_spans(captured("langfuse/multi_turn"))
    written = arguments(calls)
    assert written[:2] == picnic.ARGUMENTS
    assert json.loads(written[3]) == picnic.NOTES[2]


def test_tool_definitions_among_the_messages_of_langchain_are_tools_and_no_messages():
    calls = calls_from_spans(captured("langfuse/lc_multi_turn"))
    assert [message["role"] for message in calls[0].messages] == ["system", "user"]
    results = [message for call in calls for message in call.messages if message["role"] == "tool"]
    assert all(message.get("tool_call_id") for message in results)
    assert all(len(call.tools) == 3 for call in calls)


def test_parameters_that_the_wrapper_makes_up_are_left_out():
    (streamed,) = calls_from_spans(captured("langfuse/stream"))
    assert streamed.sampling == {}
    asked = {**INVENTED, "top_p": 0.9, "max_tokens": 5, "n": 2}
    assert the_call(model__parameters=json.dumps(asked)).sampling == {"top_p": 0.9, "max_tokens": 5, "n": 2}
    told = {"temperature": 1, "max_completion_tokens": 5}
    assert the_call(model__parameters=json.dumps(told)).sampling == {"temperature": 1, "max_tokens": 5}


def test_agent_step_and_session_are_those_that_langgraph_and_langfuse_name():
    calls = calls_from_spans(captured("langfuse/lc_multi_turn"))
    assert {(call.agent_name, call.step_name, call.conversation_id) for call in calls} == {
        ("picnic_agent", "model", "sess-7")
    }
    assert [call.step_index for call in calls] == [1, 3, 5, 7]
    assert {call.conversation_id for call in calls_from_spans(captured("langfuse/lc_stream"))} == {"sess-7"}


def test_an_agent_observation_names_the_calls_below_it():
    calls = calls_from_spans(captured("langfuse/multi_turn"))
    assert {call.agent_name for call in calls} == {"picnic-agent"}
    (call,) = calls_from_spans(captured("langfuse/stream"))
    assert call.agent_name is None


def test_four_traces_without_a_root_have_keys_that_chain_them():
    calls = calls_from_spans(captured("langfuse/multi_turn_noroot"))
    assert len({call.trace_id for call in calls}) == 4
    keys = [keys_of(call) for call in calls]
    for earlier, later in pairwise(keys):
        assert set(later.prefix_keys) & set(earlier.reply_keys)


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        # OpenAI's names count what came out of the cache: 342 = 54 + 288
        (
            {"completion_tokens": 37, "prompt_tokens": 342, "prompt_tokens_details": {"cached_tokens": 288}},
            {"input_tokens": 342, "output_tokens": 37, "cache_read_tokens": 288},
        ),
        # Langfuse's do not: 50 + 304 + 37 = 391
        (
            {"input": 50, "output": 37, "total": 391, "input_cache_read": 304},
            {"input_tokens": 354, "output_tokens": 37, "cache_read_tokens": 304},
        ),
        # unless the total says so: 354 + 37 = 391
        (
            {"input": 354, "output": 37, "total": 391, "input_cache_read": 304},
            {"input_tokens": 354, "output_tokens": 37, "cache_read_tokens": 304},
        ),
        ({"input": 3, "output": 4}, {"input_tokens": 3, "output_tokens": 4}),
        ({"input_tokens": 9, "output_tokens": 7}, {"input_tokens": 9, "output_tokens": 7}),
        (None, {}),
        ({"input": "many", "output": None}, {}),
    ],
)
def test_tokens_are_counted_with_the_cache(told, expected):
    assert usage_of(told) == expected


def test_a_bare_text_is_a_reply_and_a_cut_one_is_none():
    assert the_call(output="hello").choices[0].message == {"role": "assistant", "content": "hello"}
    assert the_call(output='{"answer": 3}').choices[0].message["content"] == '{"answer": 3}'
    assert the_call(output="[3]").choices[0].message["content"] == "[3]"
    cut = the_call(output='{"role": "assistant", "content": "hel')
    assert (cut.grade, cut.choices) == (Grade.UNUSABLE, ())
    assert cut.grade_reasons[0].startswith("invalid JSON: langfuse.observation.output can't be parsed")
    cut = the_call(input='[{"role": "user", "content": "h')
    assert cut.grade_reasons[0].startswith("invalid JSON: langfuse.observation.input can't be parsed")
    assert the_call(output="").grade_reasons == ("no output was recorded",)


def test_a_plain_prompt_is_what_a_user_says():
    assert the_call(input="hi").messages == [{"role": "user", "content": "hi"}]
    observed = json.dumps({"args": [], "kwargs": {"messages": [{"role": "user", "content": "hi"}]}})
    assert the_call(input=observed).messages == [{"role": "user", "content": "hi"}]


def test_every_choice_of_a_call_is_a_choice():
    call = the_call(output='[{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]')
    assert [choice.message["content"] for choice in call.choices] == ["a", "b"]


def test_a_streamed_reply_without_a_finish_reason_was_left_early():
    started = {"completion_start_time": '"2026-11-29T14:58:17.089416Z"'}
    assert the_call(**started).grade_reasons == ("stream was left early: choice 0",)
    done = the_call(**started, **{"langfuse.observation.metadata.finish_reason": '"stop"'})
    assert (done.grade, done.choices[0].finish_reason) == (Grade.TEXT, "stop")


def test_a_reply_as_long_as_allowed_is_taken_for_cut():
    allowed = {"model__parameters": '{"max_tokens": 5}'}
    assert the_call(**allowed, usage_details='{"output": 5}').choices[0].finish_reason == "length"
    assert the_call(**allowed, usage_details='{"output": 4}').choices[0].finish_reason is None


def test_items_of_the_responses_api_are_turns():
    items = [
        {"role": "user", "content": "hi"},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at":1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "sky"},
    ]
    call = the_call(input=json.dumps(items), output='{"role": "assistant", "content": "blue"}')
    assert [message["role"] for message in call.messages] == ["user", "assistant", "tool"]
    assert call.messages[1]["tool_calls"][0]["function"]["arguments"] == '{"at":1}'


def test_images_that_langfuse_took_out_are_missed():
    url = {"url": "@@@langfuseMedia:type=image/png|id=x1|source=base64_data_uri@@@"}
    shown = [{"role": "user", "content": [{"type": "image_url", "image_url": url}]}]
    call = the_call(input=json.dumps(shown))
    assert call.grade is Grade.UNUSABLE
    assert "bytes of images, sound or files are not kept: 1 of them" in call.grade_reasons


def test_embeddings_are_calls_of_their_own_purpose():
    call = the_call(type="embedding", output="[0.1, 0.2]")
    assert (call.purpose, call.grade_reasons) == (Purpose.EMBEDDING, ("an embedding: nothing was sampled",))


def test_other_observations_are_no_calls():
    assert [recognise(generation(type=kind)) for kind in ("span", "agent", "tool", "event")] == [None] * 4


JUNK = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20), st.binary(max_size=8)),
    st.lists(st.one_of(st.integers(), st.text(max_size=5), st.none()), max_size=3),
    st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
    st.sampled_from(
        [
            *(
                "{",
                "[",
                "null",
                "[[]]",
                "{}",
                "[null]",
                '[{"role": 3}]',
                '{"choices": [3]}',
                '{"kwargs": []}',
            ),
            *('{"messages": 3}', '{"tools": 3, "messages": [[]]}', '[{"type": "function_call"}]', "[[[1]]]"),
            *('{"role": "assistant", "content": {"a": 1}}', '{"tool_calls": [3]}', '{"tool_calls": 3}'),
            *('[{"type": "reasoning", "summary": 3}]', '{"choices": [{"message": 3}]}', '"text"', "1e999"),
        ]
    ),
)


@given(data=st.data())
def test_junk_in_any_attribute_is_a_fault_and_never_an_exception(data):
    case = data.draw(st.sampled_from(["multi_turn", "lc_multi_turn", "stream_tool", "responses", "fail"]))
    spans = [each for each in captured(f"langfuse/{case}") if LANGFUSE.is_call(each)]
    broken = data.draw(st.sampled_from(spans))
    name = data.draw(st.sampled_from(sorted(broken.attributes)))
    broken = replace(broken, attributes={**broken.attributes, name: data.draw(JUNK)})
    LANGFUSE.read(broken)
    assert len(calls_from_spans([broken])) == (name != "langfuse.observation.type")
