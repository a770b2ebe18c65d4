"""What recorders cut, lose and rewrite: such calls are graded for what is left, and harm no other.

From files, through `ingest`. Listed in `CASES.md`.
"""

import json

import pytest
from typer.testing import CliRunner

from spangrad.adapters.calls import calls_of
from spangrad.adapters.ingest import ingest
from spangrad.adapters.model_call import Grade
from spangrad.adapters.sessions import Rule
from spangrad.cli import app
from spangrad.errors import EmptyBatchError
from spangrad.store.file_store import FileStore
from tests.adapters.captured import FIXTURES
from tests.adapters.trace_files import attributes_of, calls_through, lines_of, spans_in, written

LIMIT = 200
"""Characters that an SDK keeps of a text, with OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT set so."""
AS_JSON = [
    *("genai_langchain", "genai_openai", "langfuse", "langsmith_otel", "litellm_otel", "logfire_openai"),
    *("logfire_openai_3", "openai_v2_latest", "openinference_langchain"),
    *("openinference_langchain_plus_openai", "openinference_litellm", "openinference_openai"),
    *("openinference_openai_agents", "openllmetry_langchain", "openllmetry_openai", "pydantic_ai"),
]
"""Recorders that write messages as JSON into the attributes of a span."""


def export(tmp_path, store, form, *options):
    """Rows and card of an export, run as a user runs it."""
    folder = tmp_path / f"{form}-{len(options)}"
    command = ["export", str(folder), "--format", form, "--store", str(store), "--json", *options]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return (folder / "train.jsonl").read_text().splitlines(), json.loads(done.stdout)


@pytest.mark.parametrize("recorder", AS_JSON)
def test_json_that_was_cut_costs_its_call_and_no_other(tmp_path, recorder):
    lines = lines_of(f"{recorder}/multi_turn.otlp.jsonl")
    whole = calls_through(tmp_path / "whole.duckdb", [written(tmp_path / "whole.jsonl", lines)])
    for span in spans_in(lines):
        if span["spanId"] in whole[1].span_ids:
            for pair in span["attributes"]:
                if "stringValue" in pair["value"]:
                    pair["value"]["stringValue"] = pair["value"]["stringValue"][:LIMIT]
    found = calls_through(tmp_path / "cut.duckdb", [written(tmp_path / "cut.jsonl", lines)])
    cut = found.pop(1)
    assert cut.grade is Grade.UNUSABLE
    assert any(reason.startswith("invalid JSON: ") for reason in cut.grade_reasons), cut.grade_reasons
    del whole[1]
    assert [(call.call_id, call.messages, call.choices, call.grade) for call in found] == [
        (call.call_id, call.messages, call.choices, call.grade) for call in whole
    ]


def test_a_conversation_that_lost_its_oldest_attributes_is_not_trainable(tmp_path):
    with FileStore(tmp_path / "store.duckdb") as store:
        ingest([FIXTURES / "openinference_openai/long_conversation.otlp.jsonl"], store)
        (call,) = calls_of(store)
        (span,) = store.spans()
    assert span.dropped_attributes == 175 and "llm.input_messages.0.message.role" not in span.attributes
    assert call.grade is Grade.UNUSABLE
    assert call.grade_reasons == (
        "attributes are missing: message 0, though llm.input_messages.48 is there",
        "attributes were dropped: 175 of them, by a limit of the SDK",
    )
    with pytest.raises(
        EmptyBatchError, match=r"grade unusable: attributes are missing; attributes were dropped"
    ):
        export(tmp_path, tmp_path / "store.duckdb", "messages")


@pytest.mark.parametrize(
    ("dropped", "without", "reason"),
    [
        (
            0,
            "llm.input_messages.0.",
            "attributes are missing: message 0, though llm.input_messages.1 is there",
        ),
        (3, "nothing", "attributes were dropped: 3 of them, by a limit of the SDK"),
    ],
)
def test_either_sign_of_a_lost_beginning_is_enough(tmp_path, dropped, without, reason):
    lines = lines_of("openinference_langchain/multi_turn.otlp.jsonl")
    for span in spans_in(lines):
        if attributes_of(span).get("openinference.span.kind") == "LLM":
            span["attributes"] = [p for p in span["attributes"] if not p["key"].startswith(without)]
            span["droppedAttributesCount"] = dropped
    found = calls_through(tmp_path / "store.duckdb", [written(tmp_path / "traces.jsonl", lines)])
    assert [call.grade for call in found] == [Grade.UNUSABLE] * 4
    assert {reason in call.grade_reasons for call in found} == {True}


LEFT = sorted(
    str(path.relative_to(FIXTURES))
    for case in ("stream_abandoned", "cancelled_stream")
    for path in FIXTURES.glob(f"*/{case}.otlp.jsonl")
)


@pytest.mark.parametrize("name", LEFT)
def test_a_stream_that_was_left_is_never_trained_whatever_its_recorder_makes_of_it(tmp_path, name):
    found = calls_through(tmp_path / "store.duckdb", [FIXTURES / name])
    assert {call.grade for call in found} <= {Grade.UNUSABLE}
    assert all(
        reason.startswith(("error", "stream was left early", "no finish reason", "reply was not finished"))
        for call in found
        for reason in call.grade_reasons[:1]
    )
    if found:
        with pytest.raises(EmptyBatchError):
            export(tmp_path, tmp_path / "store.duckdb", "messages")


@pytest.mark.parametrize("recorder", ["genai_openai", "genai_openai_events", "openai_v2_legacy"])
def test_retries_below_the_client_are_one_call(tmp_path, recorder):
    (call,) = calls_through(tmp_path / "store.duckdb", [FIXTURES / f"{recorder}/retry.otlp.jsonl"])
    assert (call.grade, call.error, len(call.choices)) == (Grade.TEXT, None, 1)


@pytest.mark.parametrize(
    "name", sorted(str(p.relative_to(FIXTURES)) for p in FIXTURES.glob("*/parallel_threads*"))
)
def test_calls_of_threads_that_lost_their_parent_are_found_again_by_what_they_say(tmp_path, name):
    """Two sub-agents of two turns each, in four traces: neither four rollouts nor one."""
    with FileStore(tmp_path / "store.duckdb") as store:
        report = ingest([FIXTURES / name], store)
        found = calls_of(store)
    assert len({call.trace_id for call in found}) == 4
    assert {call.grade for call in found} <= {Grade.TEXT, Grade.IDS}
    assert report.joined_by == {str(Rule.PREFIX): 2}
    for rollout_id in {call.rollout_id for call in found}:
        first, second = (call for call in found if call.rollout_id == rollout_id)
        assert second.messages[: len(first.messages)] == first.messages
        assert first.end_ns <= second.start_ns


def test_absent_and_empty_content_are_told_apart_where_the_request_was_kept(tmp_path):
    kept = ("openinference_openai/multi_turn.otlp.jsonl", "mlflow_json/multi_turn.jsonl")
    for number, name in enumerate((*kept, "langsmith_otel/oai_multi_turn.otlp.jsonl")):
        found = calls_through(tmp_path / f"{number}.duckdb", [FIXTURES / name])
        calling = [m for m in found[-1].messages if m.get("tool_calls")]
        assert [message["content"] for message in calling] == [None, "Two more look-ups.", None]
    (streamed,) = calls_through(
        tmp_path / "streamed.duckdb", [FIXTURES / "genai_openai/stream_tool.otlp.jsonl"]
    )
    assert not streamed.choices[0].message.get("content")  # the recorder adds an empty part
    assert streamed.choices[0].message["tool_calls"]


def test_an_environment_that_was_copied_into_metadata_goes_into_no_dataset(tmp_path):
    """LangSmith's exporter copies every `LANGSMITH_*` variable onto every span."""
    key = "lsv2_pt_0123456789abcdef0123456789abcdef_0123456789"
    lines = lines_of("langsmith_otel/oai_multi_turn.otlp.jsonl")
    for span in spans_in(lines):
        assert any(name.startswith("langsmith.metadata.LANGSMITH_") for name in attributes_of(span))
        told = {"key": "langsmith.metadata.LANGSMITH_API_KEY", "value": {"stringValue": key}}
        span["attributes"].append(told)
    store = tmp_path / "store.duckdb"
    found = calls_through(store, [written(tmp_path / "traces.jsonl", lines)])
    assert key not in repr(found)
    for form in ("messages", "trl-sft", "sharegpt"):
        rows, card = export(tmp_path, store, form)
        assert rows and not any("LANGSMITH" in row or key in row for row in rows)
        assert card["secrets_found"] == {}
    done = CliRunner().invoke(
        app, ["export", str(tmp_path / "copy"), "--format", "otlp", "--store", str(store), "--json"]
    )
    assert json.loads(done.stdout)["secrets_found"] != {}  # a copy is complete; its card says so
