"""Dialect OpenInference, as its recorders of OpenAI, LangChain, LiteLLM and OpenAI Agents wrote it."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spangrad.adapters.calls import calls_from_spans
from spangrad.adapters.dialects import recognise
from spangrad.adapters.dialects.openinference import read
from spangrad.adapters.grading import EMBEDDED
from spangrad.adapters.model_call import Grade, ModelCall, Purpose
from spangrad.store.records import Span
from tests.adapters import picnic
from tests.adapters.building import span
from tests.adapters.captured import FIXTURES, captured

RESERIALISED = "arguments were re-serialised"
VERSION = "policy version unknown: choice 0"
NO_LOGPROBS = "no logprobs: choice 0"
UNFINISHED = "no finish reason: choice 0"
WARM = "logprobs are not of the sampled distribution: they have no known mode, with temperature 0.7"
KNOWN = json.loads((FIXTURES / "CALLS.json").read_bytes())
FOLDERS = ("openinference_openai", "openinference_langchain", "openinference_openai_agents")


def defaults_but(*asked: str) -> str:
    left_out = {
        "frequency_penalty",
        "min_p",
        "presence_penalty",
        "repetition_penalty",
        "temperature",
        "top_k",
    }
    names = ", ".join(sorted((left_out | {"top_p"}) - set(asked)))
    return f"sampling defaults unknown: {names}; the recorder leaves out extra_body"


def call_spans(name: str) -> list[Span]:
    return [span for span in captured(name) if recognise(span) is not None]


def raw(call: Span) -> Any:
    return json.loads(call.attributes["output.value"])


def calls_of(name: str) -> list[ModelCall]:
    return calls_from_spans(captured(name))


@pytest.mark.parametrize(
    ("name", "amount"),
    [
        ("openinference_openai/multi_turn", "40"),
        ("openinference_langchain/multi_turn", "40.0"),
        ("openinference_openai_agents/multi_turn", "40.0"),
        ("openinference_langchain_plus_openai/multi_turn", "40.0"),
        ("openinference_litellm/multi_turn", "40"),
    ],
)
def test_a_whole_conversation_reads_as_it_was(name, amount):
    """OpenAI Agents' recorder keeps neither tools nor finish reasons."""
    calls = calls_of(name)
    assert picnic.told(calls) == picnic.expected(amount)
    is_whole = "agents" not in name
    assert [c.choices[0].finish_reason for c in calls] == (picnic.FINISH_REASONS if is_whole else [None] * 4)
    assert [t["function"]["name"] for t in calls[0].tools] == (list(picnic.TOOLS) if is_whole else [])
    first = [calls[i].choices[0].message["tool_calls"][0]["function"]["arguments"] for i in (0, 1)]
    assert first == picnic.ARGUMENTS  # byte for byte


IDS = ["ids", VERSION]
ERROR_500 = "Error code: 500 - EngineCore encountered an issue (synthetic)."
ERROR_404 = "Error code: 404 - The model `no-such-model` does not exist."
TOO_LONG = "Error code: 400 - This model's maximum context length is 32768 tokens (synthetic)."
LANGCHAIN = "error: langchain_openai.chat_models.base"
GRADES: Mapping[str, list[list[str]]] = {
    "openinference_openai/cancelled_stream": [["unusable", "stream was left early"]],
    "openinference_openai/fail": [
        ["unusable", f"error: openai.InternalServerError: {ERROR_500}"],
        ["unusable", f"error: openai.BadRequestError: {TOO_LONG}"],
        ["unusable", f"error: openai.NotFoundError: {ERROR_404}"],
    ],
    "openinference_openai/long_conversation": [
        [
            "unusable",
            "attributes are missing: message 0, though llm.input_messages.48 is there",
            "attributes were dropped: 175 of them, by a limit of the SDK",
        ]
    ],
    "openinference_openai/multi_turn": [[*IDS, defaults_but("temperature"), WARM]] * 4,
    "openinference_openai/parallel_async": [["ids", NO_LOGPROBS, VERSION, defaults_but()]] * 4,
    "openinference_openai/responses": [["text", "no token ids"]],
    "openinference_openai/stream": [[*IDS, defaults_but()]],
    "openinference_openai/stream_no_usage": [[*IDS, defaults_but()]],
    "openinference_openai/stream_tool": [["ids", NO_LOGPROBS, VERSION, defaults_but()]],
    "openinference_langchain/fail": [
        ["unusable", f"{LANGCHAIN}.OpenAIAPIError: {ERROR_500}"],
        ["unusable", f"{LANGCHAIN}.OpenAIModelNotFoundError: {ERROR_404}"],
    ],
    "openinference_langchain/multi_turn": [["text", "no token ids", RESERIALISED]] * 4,
    "openinference_langchain/parallel": [
        *[["text", "no token ids", RESERIALISED]] * 4,
        ["text", "no token ids"],
    ],
    "openinference_langchain/parallel_async": [
        *[["text", "no token ids", RESERIALISED]] * 4,
        ["text", "no token ids"],
    ],
    "openinference_langchain/stream": [["text", "no token ids"]],
    "openinference_openai_agents/fail": [
        ["unusable", f"error: Error getting response: {{'error': '{ERROR_500}'}}"]
    ],
    "openinference_openai_agents/multi_turn": [["unusable", UNFINISHED]] * 4,
    "openinference_openai_agents/parallel_subagents": [["unusable", UNFINISHED]] * 6,
    "openinference_openai_agents/stream": [["unusable", UNFINISHED]],
    "openinference_litellm/multi_turn": [[*IDS, WARM], ["text", "no token ids"]] * 2,
    "openinference_litellm/n2": [["unusable", "no finish reason: choice 1"]],
    "openinference_litellm/stream": [["text", "no token ids"]],
    "openinference_litellm/stream_abandoned": [["unusable", "stream was left early"]],
}


@pytest.mark.parametrize("name", GRADES)
def test_every_file_gives_its_calls_with_their_grades_and_reasons(name):
    calls = calls_of(name)
    assert [[str(call.grade), *call.grade_reasons] for call in calls] == GRADES[name]
    folder, case = name.split("/")
    if folder in KNOWN:
        assert len(calls) == KNOWN[folder][case]["model_call_spans"]


def test_no_captured_file_is_left_out():
    assert {f"{folder}/{case}" for folder in FOLDERS for case in KNOWN[folder]} <= set(GRADES)


@pytest.mark.parametrize("case", ["multi_turn", "parallel_async", "stream", "stream_no_usage", "stream_tool"])
def test_ids_and_logprobs_are_those_of_the_response(case):
    spans = {span.span_id: span for span in call_spans(f"openinference_openai/{case}")}
    for call in calls_of(f"openinference_openai/{case}"):
        response = raw(spans[call.span_id])
        (choice,) = response["choices"]
        assert call.prompt_token_ids == response["prompt_token_ids"]
        assert call.choices[0].sampled_token_ids == choice["token_ids"]
        told = (choice.get("logprobs") or {}).get("content")
        logprobs = call.choices[0].logprobs
        assert (None if logprobs is None else list(logprobs)) == (
            pytest.approx([token["logprob"] for token in told]) if told else None
        )
        assert call.response_id == response["id"]


def test_of_litellm_ids_are_known_where_the_reply_had_no_text():
    calls = calls_of("openinference_litellm/multi_turn")
    assert [call.choices[0].sampled_token_ids is not None for call in calls] == [True, False, True, False]
    spans = {span.span_id: span for span in call_spans("openinference_litellm/multi_turn")}
    assert calls[0].prompt_token_ids == raw(spans[calls[0].span_id])["prompt_token_ids"]


def test_of_litellm_tool_results_keep_the_call_that_they_answer():
    """Only `input.value` has the id."""
    last = calls_of("openinference_litellm/multi_turn")[-1]
    answers = [m["tool_call_id"] for m in last.messages if m["role"] == "tool"]
    assert answers == ["call_get_weather_0", "call_get_weather_1", "call_convert_2", "call_search_notes_3"]


def test_of_litellm_both_choices_are_kept():
    (call,) = calls_of("openinference_litellm/n2")
    assert [choice.message["content"] for choice in call.choices] == [
        "You said: two versions please",
        "You said: two versions please (v1)",
    ]


def test_a_langgraph_node_step_agent_and_session_are_named():
    calls = calls_of("openinference_langchain/multi_turn")
    assert {(c.agent_name, c.step_name, c.conversation_id) for c in calls} == {
        ("picnic_agent", "model", "sess-7")
    }
    assert [call.step_index for call in calls] == [1, 3, 5, 7]
    assert [call.usage["cache_read_tokens"] for call in calls] == [304, 384, 544, 640]


def test_without_a_session_a_langgraph_thread_is_the_conversation():
    (first, *_) = call_spans("openinference_langchain/multi_turn")
    attributes = {name: value for name, value in first.attributes.items() if name != "session.id"}
    metadata = {
        key: value for key, value in json.loads(attributes["metadata"]).items() if key != "session_id"
    }
    told = read(replace(first, attributes={**attributes, "metadata": json.dumps(metadata)}))
    assert told.conversation_id == "thread-42"


def test_an_agents_name_is_found_above_its_calls():
    calls = calls_of("openinference_openai_agents/parallel_subagents")
    names = [call.agent_name for call in calls]
    assert sorted(filter(None, names)) == ["bridges_researcher"] * 2 + ["lead"] * 2 + ["tides_researcher"] * 2


def test_of_an_agents_stream_the_reply_and_the_response_id_are_found():
    (call,) = calls_of("openinference_openai_agents/stream")
    assert call.choices[0].message["content"] == "The quick brown fox naps; the café closes at six."
    assert call.response_id == "chatcmpl-45f90018216085500"  # not `__fake_id__`


def test_the_responses_route_reads_as_chat():
    (call,) = calls_of("openinference_openai/responses")
    assert call.messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello"},
    ]
    assert call.choices[0].message["content"] == "Short answer from the responses route."


def test_truncated_json_spoils_its_call_and_no_other():
    first, *rest = call_spans("openinference_openai/multi_turn")
    cut = {**first.attributes, "input.value": first.attributes["input.value"][:300]}
    calls = calls_from_spans([replace(first, attributes=cut), *rest])
    assert [str(call.grade) for call in calls] == ["unusable", "ids", "ids", "ids"]
    assert calls[0].grade_reasons[0].startswith("invalid JSON: input.value can't be parsed")


def test_hidden_text_is_not_trained():
    first, *_ = call_spans("openinference_langchain/multi_turn")
    hidden = {
        name: "__REDACTED__" if "content" in name else value for name, value in first.attributes.items()
    }
    (call,) = calls_from_spans([replace(first, attributes=hidden)])
    assert call.grade is Grade.UNUSABLE
    assert "text was redacted: llm.input_messages" in call.grade_reasons


def flat(**more: Any) -> dict[str, Any]:
    return {
        "openinference.span.kind": "LLM",
        "llm.input_messages.0.message.role": "user",
        "llm.input_messages.0.message.content": "hi",
        "llm.output_messages.0.message.role": "assistant",
        "llm.output_messages.0.message.content": "hello",
        "llm.finish_reason": "stop",
        **more,
    }


def test_flat_attributes_alone_are_a_call():
    (call,) = calls_from_spans([span(scope="somebody", attributes=flat())])
    assert (call.dialect, str(call.grade)) == ("openinference", "text")
    assert call.messages == [{"role": "user", "content": "hi"}]
    assert call.choices[0].message == {"role": "assistant", "content": "hello"}


def test_parts_of_a_flat_message_are_text_images_and_thoughts():
    parts = {
        "0.message_content.type": "text",
        "0.message_content.text": "what is this?",
        "1.message_content.type": "image",
        "1.message_content.image.image.url": "https://a/b.png",
    }
    thought = {"0.message_content.type": "reasoning", "0.message_content.text": "hm"}
    told = flat(**{f"llm.input_messages.0.message.contents.{name}": value for name, value in parts.items()})
    del told["llm.input_messages.0.message.content"]
    told |= {f"llm.output_messages.0.message.contents.{name}": value for name, value in thought.items()}
    (call,) = calls_from_spans([span(scope="somebody", attributes=told)])
    assert call.messages[0]["content"] == [
        {"type": "text", "text": "what is this?"},
        {"type": "image_url", "image_url": {"url": "https://a/b.png"}},
    ]
    assert call.choices[0].message["reasoning"] == "hm"


def test_a_message_that_is_missing_in_the_middle_is_told():
    far = {"llm.input_messages.2.message.role": "user", "llm.input_messages.2.message.content": "again"}
    (call,) = calls_from_spans([span(scope="somebody", attributes=flat(**far))])
    assert call.grade_reasons == ("attributes are missing: message 1, though llm.input_messages.2 is there",)


def test_embeddings_are_calls_that_sampled_nothing():
    told = {"openinference.span.kind": "EMBEDDING", "embedding.model_name": "e5"}
    (call,) = calls_from_spans([span(scope="openinference.instrumentation.openai", attributes=told)])
    assert (call.model, call.purpose, call.grade_reasons) == ("e5", Purpose.EMBEDDING, (EMBEDDED,))


@pytest.mark.parametrize("kind", ["CHAIN", "TOOL", "AGENT", "RETRIEVER", 7, None])
def test_other_spans_are_no_calls(kind):
    assert recognise(span(scope="openinference.x", attributes={"openinference.span.kind": kind})) is None


SAMPLES = [
    call_spans(name)[0]
    for name in (
        *("openinference_openai/multi_turn", "openinference_openai/stream", "openinference_openai/responses"),
        *("openinference_langchain/multi_turn", "openinference_langchain/stream"),
        *("openinference_openai_agents/multi_turn", "openinference_openai_agents/stream"),
        *("openinference_litellm/multi_turn", "openinference_litellm/n2"),
    )
]
KEYS = (
    *("choices", "message", "messages", "role", "content", "generations", "kwargs", "output", "tool_calls"),
    *("function", "logprobs", "token_ids", "object", "input", "model", "type"),
)
JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=6),
    st.binary(max_size=4),
    st.lists(st.integers(), max_size=2),
    st.recursive(
        st.one_of(st.none(), st.integers(), st.text(max_size=3)),
        lambda inner: st.one_of(
            st.lists(inner, max_size=2),
            st.dictionaries(
                st.sampled_from(KEYS),
                inner,
                max_size=3,
            ),
        ),
        max_leaves=6,
    ).map(json.dumps),
)


@given(st.data())
def test_no_attribute_of_any_type_breaks_reading(data):
    sample = data.draw(st.sampled_from(SAMPLES))
    changes = data.draw(
        st.dictionaries(st.sampled_from(sorted(sample.attributes)), JUNK, min_size=1, max_size=3)
    )
    for call in calls_from_spans([replace(sample, attributes={**sample.attributes, **changes})]):
        assert call.grade_reasons


def test_reading_is_whole_for_every_shape_of_one_value():
    """Also values that name the right keys and hold the wrong things."""
    shapes = (
        *("[]", "{}", "null", "7", '"x"', "[{}]", '{"choices": [1]}', '{"choices": [{"message": 7}]}'),
        *('{"generations": [[{"message": {"kwargs": 3}}]]}', '{"generations": [[7]]}', '{"generations": 7}'),
        *('[{"object": "response", "output": 3}]', '{"object": "response", "output": [7]}'),
        *('{"messages": [{"role": "user", "content": {"a": 1}}]}', '{"model": "m", "input": [7]}'),
    )
    for sample in SAMPLES:
        for name in ("input.value", "output.value", "llm.invocation_parameters", "metadata"):
            for shape in shapes:
                (call,) = calls_from_spans([replace(sample, attributes={**sample.attributes, name: shape})])
                assert call.grade_reasons
