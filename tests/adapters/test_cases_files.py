"""A collector's files: requests in no order, content in files of its own, rollouts over many lines and files.

From files, through `ingest`. Listed in `CASES.md`.
"""

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spangrad.adapters.calls import calls_of
from spangrad.adapters.ingest import ingest
from spangrad.adapters.model_call import ModelCall
from spangrad.store.file_store import FileStore
from tests.adapters.captured import FIXTURES
from tests.adapters.trace_files import Line, apart, calls_through, lines_of, spans_in, written

NAMES = (
    *("genai_langchain/multi_turn", "genai_openai/multi_turn", "genai_openai_events/multi_turn"),
    *("openai_v2_legacy/parallel_threads", "litellm_otel/parallel_async", "langfuse/lc_multi_turn"),
    *("logfire_openai/stream_tool", "openinference_langchain_plus_openai/multi_turn"),
)
PIECES = [piece for name in NAMES for piece in apart(lines_of(f"{name}.otlp.jsonl"))]
"""A request for each span and log record, of eight recorders; two of them keep content in log records."""


def without_rollouts(calls: list[ModelCall]) -> list[ModelCall]:
    return [replace(call, rollout_id=None) for call in calls]


def rollouts(calls: list[ModelCall]) -> set[frozenset[str]]:
    by_id: dict[str | None, set[str]] = {}
    for call in calls:
        by_id.setdefault(call.rollout_id, set()).add(call.call_id)
    return {frozenset(ids) for ids in by_id.values()}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The calls of all pieces in the order in which they were recorded."""
    folder = tmp_path_factory.mktemp("in-order")
    return calls_through(folder / "store.duckdb", [written(folder / "all.jsonl", PIECES)])


@settings(max_examples=5)
@given(order=st.permutations(range(len(PIECES))), places=st.lists(st.integers(0, 4), min_size=1, max_size=9))
def test_lines_in_any_order_over_any_files_are_the_same_calls(expected, order, places):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parts: list[list[Line]] = [[] for _ in range(5)]
        for position, at in enumerate(order):
            parts[places[position % len(places)]].append(PIECES[at])
        files = [written(folder / f"{number}.jsonl", part) for number, part in enumerate(parts)]
        found = calls_through(folder / "store.duckdb", files)
    assert without_rollouts(found) == without_rollouts(expected)


@pytest.mark.parametrize("order", ["logs, then spans", "spans, then logs", "both at once"])
def test_content_in_a_logs_file_is_found_whichever_file_comes_first(tmp_path, expected, order):
    logs = written(tmp_path / "logs.jsonl", [piece for piece in PIECES if "resourceLogs" in piece])
    spans = written(tmp_path / "spans.jsonl", [piece for piece in PIECES if "resourceSpans" in piece])
    runs = {"logs, then spans": ([logs], [spans]), "spans, then logs": ([spans], [logs])}
    found = calls_through(tmp_path / "store.duckdb", *runs.get(order, ([spans, logs],)))
    assert without_rollouts(found) == without_rollouts(expected)
    assert rollouts(found) == rollouts(expected)


def test_a_rollout_over_many_lines_and_files_is_whole_only_with_all_of_them(tmp_path):
    lines = [*apart(lines_of("langfuse/lc_multi_turn.otlp.jsonl"))]
    assert len(list(spans_in(lines))) == len(lines) == 17
    files = [written(tmp_path / f"{at}.jsonl", [line]) for at, line in enumerate(lines)]
    with FileStore(tmp_path / "store.duckdb") as store:
        reports = [ingest([file], store) for file in files]
        found = calls_of(store)
        [rollout] = store.rollouts()
    assert sum(report.new_spans for report in reports) == 17
    assert [call.call_id for call in found] == [
        call.call_id
        for call in calls_through(tmp_path / "b.duckdb", [FIXTURES / "langfuse/lc_multi_turn.otlp.jsonl"])
    ]
    assert {call.rollout_id for call in found} == {rollout.rollout_id}
    assert {call.agent_name for call in found} == {"picnic_agent"}  # which a span above them says
