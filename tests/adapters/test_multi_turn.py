"""The picnic conversation out of every file that has it: the same four calls, written out in `picnic.py`.

Four programs held it: OpenAI's client in a loop, and agents of LangChain, pydantic-ai and OpenAI Agents,
which word their tools in their own way. What a recorder leaves out or changes is said in `SOURCES`; all else
is equal, whoever tells of it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from spangrad.adapters.calls import calls_of
from spangrad.adapters.ingest import ingest
from spangrad.adapters.messages import ARGUMENTS_RESERIALISED
from spangrad.adapters.model_call import ModelCall
from spangrad.store.file_store import FileStore
from tests.adapters import picnic
from tests.adapters.captured import FIXTURES

CLIENT, LANGCHAIN, OTHER = "client", "langchain", "another agent"
AMOUNT = {CLIENT: "40", LANGCHAIN: "40.0", OTHER: "40.0"}
INPUT_TOKENS = {CLIENT: [342, 423, 577, 676], LANGCHAIN: [354, 435, 591, 690]}
OUTPUT_TOKENS = [37, 87, 44, 19]


@dataclass(frozen=True)
class Source:
    """A file, and what of the conversation it does not tell."""

    agent: str
    lost: frozenset[str] = frozenset()
    """`arguments`: their bytes. `schemas`: what tools take, but not their names."""
    ids: str = ""
    """Which replies have the engine's ids: `all`, or those `without text`."""
    rollout: str | None = None
    """Its rollout or trace, in a file that tells of more."""


def told(agent: str, *lost: str, ids: str = "", rollout: str | None = None) -> Source:
    return Source(agent, frozenset(lost), ids, rollout)


# A file or folder, and, where it tells of several, which recorder's.
SOURCES: Mapping[str, Source] = {
    "genai_langchain/multi_turn.otlp.jsonl": told(LANGCHAIN, "arguments"),
    "genai_openai/multi_turn.otlp.jsonl": told(CLIENT, "arguments"),
    "genai_openai_events/multi_turn.otlp.jsonl": told(CLIENT, "arguments"),
    "langfuse/lc_multi_turn.otlp.jsonl": told(LANGCHAIN, "arguments", "finish reasons"),
    "langfuse/multi_turn.otlp.jsonl": told(CLIENT, "finish reasons"),
    "langfuse/multi_turn_noroot.otlp.jsonl": told(CLIENT, "finish reasons"),
    "langsmith_otel/multi_turn.otlp.jsonl": told(LANGCHAIN, "arguments"),
    "langsmith_otel/oai_multi_turn.otlp.jsonl": told(CLIENT, ids="all"),
    "litellm_otel/multi_turn.otlp.jsonl": told(CLIENT, "ids of made calls"),
    "logfire_openai/multi_turn.otlp.jsonl": told(CLIENT, "arguments"),
    "logfire_openai_3/multi_turn.otlp.jsonl": told(CLIENT, "finish reasons"),
    "mlflow_json/lc_multi_turn.jsonl": told(LANGCHAIN, "arguments"),
    "mlflow_json/multi_turn.jsonl": told(CLIENT, ids="all"),
    "mlflow_json/multi_turn_noroot.jsonl": told(CLIENT, ids="all"),
    "openai_v2_latest/multi_turn.otlp.jsonl": told(CLIENT, "arguments", "tools"),
    "openai_v2_legacy/multi_turn.otlp.jsonl": told(CLIENT, "tools", "text beside calls"),
    "openinference_langchain/multi_turn.otlp.jsonl": told(LANGCHAIN, "arguments"),
    "openinference_langchain_plus_openai/multi_turn.otlp.jsonl": told(LANGCHAIN, ids="all"),
    "openinference_litellm/multi_turn.otlp.jsonl": told(CLIENT, ids="without text"),
    "openinference_openai/multi_turn.otlp.jsonl": told(CLIENT, ids="all"),
    "openinference_openai_agents/multi_turn.otlp.jsonl": told(OTHER, "tools", "finish reasons"),
    "openllmetry_langchain/multi_turn.otlp.jsonl": told(LANGCHAIN, "arguments"),
    "openllmetry_langchain_plus_openai/multi_turn.otlp.jsonl": told(LANGCHAIN, "arguments"),
    "openllmetry_openai/multi_turn.otlp.jsonl": told(CLIENT, "arguments"),
    "pydantic_ai/multi_turn.otlp.jsonl": told(OTHER),
    "exports/agent_lightning/events_v1.jsonl": told(CLIENT, "sampling", ids="all"),
    "exports/langfuse/observations_v2.jsonl": told(
        CLIENT, "finish reasons", rollout="ac478c5a5ae573b8c1fe08edc473fa0c"
    ),
    "exports/langfuse/observations_v2.jsonl, LangChain": told(
        LANGCHAIN, "arguments", "finish reasons", rollout="a5b3bd7e3ea08d2b9a7cac5231544ec4"
    ),
    "exports/langsmith/runs.jsonl": told(CLIENT, ids="all", rollout="01a227ddc2af7777884ed4a86bc38e66"),
    "exports/langsmith/bulk, LangChain": told(
        LANGCHAIN, "arguments", rollout="01a227dd802a71d6ab45ad7454030303"
    ),
    "exports/otel_collector/traces.jsonl": told(
        CLIENT, "arguments", rollout="5b73efdba90750a3d6185da822e117b8"
    ),
    "exports/phoenix/spans_api.jsonl": told(CLIENT, ids="all", rollout="ab5afe6fc5df678510f39e674c6d73d6"),
    "exports/phoenix/spans_dataframe_jsonified.parquet": told(
        CLIENT, ids="all", rollout="ab5afe6fc5df678510f39e674c6d73d6"
    ),
    "exports/phoenix/spans_otlpv1.json, OTel GenAI": told(
        CLIENT, "arguments", rollout="5b73efdba90750a3d6185da822e117b8"
    ),
    "exports/plain_chat/messages.jsonl": told(CLIENT, "usage", "sampling"),
    "exports/plain_chat/request_response.jsonl": told(CLIENT, ids="all"),
}


@pytest.fixture(scope="module", params=SOURCES)
def found(request, tmp_path_factory):
    """A source and its four calls, through a store."""
    source = SOURCES[request.param]
    with FileStore(tmp_path_factory.mktemp("store") / "store.duckdb") as store:
        ingest([FIXTURES / request.param.partition(",")[0]], store)
        calls = calls_of(store)
    if source.rollout is not None:
        own = [call for call in calls if call.trace_id == source.rollout]
        calls = own if len(own) > 1 else [call for call in calls if call.rollout_id == source.rollout]
    return source, calls[:4]  # Agent Lightning's file ends with a call that failed


def test_messages_and_replies_are_those_that_were_sent(found):
    source, calls = found
    expected = picnic.expected(AMOUNT[source.agent])
    if "ids of made calls" in source.lost:
        for _, reply in expected:
            if "tool_calls" in reply:
                reply["tool_calls"] = [(None, *call[1:]) for call in reply["tool_calls"]]
    if "text beside calls" in source.lost:  # of earlier turns; in the reply it is there
        for asked, _ in expected:
            asked[:] = [{**m, "content": None} if m.get("tool_calls") else m for m in asked]
    assert picnic.told(calls) == expected


def test_calls_are_one_rollout_in_order(found):
    _, calls = found
    assert len({call.rollout_id for call in calls}) == 1 and calls[0].rollout_id
    assert [call.start_ns for call in calls] == sorted(call.start_ns for call in calls)


def test_finish_reasons_are_the_models(found):
    source, calls = found
    expected = [None] * 4 if "finish reasons" in source.lost else picnic.FINISH_REASONS
    assert [call.choices[0].finish_reason for call in calls] == expected


def test_tools_are_those_that_the_model_was_shown(found):
    source, calls = found
    if "tools" in source.lost:
        assert [list(call.tools) for call in calls] == [[]] * 4
        return
    assert {tuple(tool["function"]["name"] for tool in call.tools) for call in calls} == {picnic.TOOLS}
    if source.agent == CLIENT:
        assert [[plain(tool) for tool in call.tools] for call in calls] == [picnic.TOOL_DEFINITIONS] * 4
    else:  # with defaults of its own, but the same
        required = [tool["function"]["parameters"]["required"] for tool in calls[0].tools]
        assert required == [["city"], ["amount", "src", "dst"], ["query"]]
        assert [call.tools for call in calls] == [calls[0].tools] * 4


def plain(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": tool["type"], "function": dict(tool["function"])}


def test_arguments_have_the_models_bytes_or_the_call_says_that_they_have_not(found):
    source, calls = found
    written = [arguments_of(call.choices[0].message) for call in calls]
    shown = [arguments for message in calls[-1].messages for arguments in arguments_of(message)]
    is_noted = [ARGUMENTS_RESERIALISED in call.grade_reasons for call in calls]
    assert is_noted == ["arguments" in source.lost] * 4
    if "arguments" not in source.lost:
        assert written == picnic.WRITTEN
        assert shown == [each for arguments in picnic.WRITTEN for each in arguments]


def arguments_of(message: Mapping[str, Any]) -> list[str]:
    return [call["function"]["arguments"] for call in message.get("tool_calls", ())]


def test_tokens_are_counted_and_sampling_is_as_asked(found):
    source, calls = found
    if "usage" not in source.lost:
        assert [call.usage["output_tokens"] for call in calls] == OUTPUT_TOKENS
        counted = [call.usage["input_tokens"] for call in calls]
        assert counted == INPUT_TOKENS.get(source.agent, counted)
    if "sampling" not in source.lost and source.agent != OTHER:
        asked = [(call.sampling.get("temperature"), call.sampling.get("max_tokens")) for call in calls]
        assert asked == [(0.7, 256)] * 4
        # LiteLLM names its provider, too.
        assert {(call.model or "").rpartition("/")[2] for call in calls} == {"stub-7b"}


def test_ids_and_logprobs_are_the_engines(found):
    source, calls = found
    has_ids = [is_known(source, call) for call in calls]
    assert [call.prompt_token_ids is not None for call in calls] == has_ids
    assert [call.choices[0].sampled_token_ids is not None for call in calls] == has_ids
    for call, response in zip(calls, responses(), strict=True):
        if call.prompt_token_ids is None:
            continue
        (choice,) = response["choices"]
        assert call.choices[0].sampled_token_ids == choice["token_ids"]
        logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
        assert call.choices[0].logprobs == pytest.approx(logprobs)
        if source.agent == CLIENT:  # tools in other words are another prompt
            assert call.prompt_token_ids == response["prompt_token_ids"]


def is_known(source: Source, call: ModelCall) -> bool:
    return source.ids == "all" or (source.ids == "without text" and not call.choices[0].message["content"])


def responses() -> list[dict[str, Any]]:
    """What the model answered, as it was on the wire."""
    lines = (FIXTURES / "exports/plain_chat/request_response.jsonl").read_text().splitlines()
    return [json.loads(line)["response"] for line in lines]


def test_every_file_with_the_conversation_is_among_the_sources():
    """What LangSmith's SDK posted is no file that anybody has: its tests make runs of it."""
    files = {str(path.relative_to(FIXTURES)) for path in FIXTURES.glob("*/*multi_turn*.jsonl")}
    posted = {file for file in files if file.startswith("langsmith_native/")}
    assert files - posted == {file for file in SOURCES if not file.startswith("exports/")}
