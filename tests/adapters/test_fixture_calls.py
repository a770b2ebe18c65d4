"""Every captured file gives as many model calls as `CALLS.json` says: a call counts once."""

import json

import pytest

from spangrad.adapters.calls import calls_from_spans, calls_of
from spangrad.adapters.ingest import ingest
from spangrad.store.file_store import FileStore
from tests.adapters.captured import FIXTURES, captured

IN_EACH = json.loads((FIXTURES / "CALLS.json").read_text())
FILES = sorted(
    str(path.relative_to(FIXTURES)).removesuffix(".otlp.jsonl") for path in FIXTURES.glob("*/*.otlp.jsonl")
)
TOLD_TWICE = {
    "logfire_openai/cancelled_stream": 1,  # a span for the request, another one for the reply
    "logfire_openai/stream": 1,
    "logfire_openai/stream_no_usage": 1,
    "logfire_openai/stream_tool": 1,
    "logfire_openai_3/stream": 1,
    "logfire_openai_3/stream_tool": 1,
    "openinference_langchain_plus_openai/multi_turn": 4,  # a framework's and a client's span for each
}
"""Files with more spans that tell of calls than calls, and how many calls those are."""


def expected(name: str) -> int:
    folder, case = name.split("/")
    count = TOLD_TWICE.get(name, IN_EACH[folder][case]["model_call_spans"])
    assert isinstance(count, int)
    return count


@pytest.mark.parametrize("name", FILES)
def test_a_file_gives_as_many_calls_as_were_made(name):
    calls = calls_from_spans(captured(name))
    assert len(calls) == expected(name)
    assert len({span_id for call in calls for span_id in call.span_ids}) >= len(calls)
    assert all(call.start_ns <= call.end_ns for call in calls)


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith("/n2")])
def test_a_reply_with_two_choices_is_one_call(name):
    (call,) = calls_from_spans(captured(name))
    told = ["stop", None] if name == "openinference_litellm/n2" else ["stop", "stop"]  # the first's alone
    assert [choice.finish_reason for choice in call.choices] == told


def test_all_files_in_one_store_give_the_calls_of_each(tmp_path):
    """Twenty recorders told of the same conversations: what one of them told is never taken for another's."""
    with FileStore(tmp_path / "store.duckdb") as store:
        report = ingest([FIXTURES / f"{name}.otlp.jsonl" for name in FILES], store)
        found = {call.call_id: (call.grade, call.span_ids) for call in calls_of(store)}
    assert report.calls == len(found) == sum(map(expected, FILES))
    alone = [call for name in FILES for call in calls_from_spans(captured(name))]
    assert found == {call.call_id: (call.grade, call.span_ids) for call in alone}


def test_every_file_is_listed_and_every_listed_file_is_there():
    listed = {f"{folder}/{case}" for folder, cases in IN_EACH.items() for case in cases}
    assert set(FILES) == {name for name in listed if not name.startswith("mlflow_json/")}
    assert set(TOLD_TWICE) <= set(FILES)
