"""Files of traces into a real store."""

import json
import shutil
from pathlib import Path

import pyarrow as pa  # type: ignore[import-untyped]
import pytest

from spangrad.adapters.ingest import ingest
from spangrad.errors import DialectError
from spangrad.store.file_store import FileStore
from spangrad.store.otlp import decode_request, encode_request, json_to_protobuf
from spangrad.tracer import conventions as c
from tests.adapters.building import span, text_attributes

FIXTURES = Path(__file__).parent / "fixtures"
MULTI_TURN = FIXTURES / "genai_openai" / "multi_turn.otlp.jsonl"


@pytest.fixture
def store(tmp_path):
    with FileStore(tmp_path / "store.duckdb") as opened:
        yield opened


def requests(path: Path = MULTI_TURN) -> list[bytes]:
    return [json_to_protobuf(line) for line in path.read_bytes().splitlines() if line]


def test_a_folder_is_counted_by_dialect_grade_and_reason(store, tmp_path):
    genai = ("fail", "multi_turn", "n2", "responses", "retry", "stream_abandoned", "stream_tool")
    others = ("genai_langchain/multi_turn", "openai_v2_latest/stream", "openinference_openai/stream")
    for name in (*(f"genai_openai/{each}" for each in genai), *others):
        copy = tmp_path / "traces" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(FIXTURES / f"{name}.otlp.jsonl", copy)
    report = ingest([tmp_path / "traces"], store)
    assert report.files == 10
    assert report.by_dialect == {"otel_genai": 17, "openinference": 1}
    assert report.by_grade == {"text": 13, "ids": 1, "unusable": 4}
    assert report.by_reason["no token ids"] == 13
    assert report.by_reason["error"] == 4
    assert report.skipped == {}
    assert report.broken == ()
    assert report.new_spans == report.spans
    assert json.dumps(report.to_json())


def test_embeddings_are_counted_apart_from_what_could_be_trained(store, tmp_path):
    named = {c.OPERATION_NAME: "embeddings", c.PROVIDER_NAME: "openai", c.RESPONSE_ID: "e"}
    file = tmp_path / "traces.pb"
    file.write_bytes(encode_request([span("a", attributes=text_attributes()), span("b", attributes=named)]))
    report = ingest([file], store)
    assert (report.calls, report.embeddings) == (1, 1)
    assert report.by_grade == {"text": 1}
    assert report.by_reason == {"no token ids": 1}


def test_the_same_file_twice_is_stored_once(store):
    assert ingest([MULTI_TURN], store).new_spans == 4
    again = ingest([MULTI_TURN], store)
    assert (again.spans, again.new_spans, again.calls) == (4, 0, 4)


def test_a_broken_line_is_counted_with_its_number_and_the_rest_is_read(store, tmp_path):
    lines = MULTI_TURN.read_text().splitlines()
    bad_id = lines[1].replace('"traceId": "', '"traceId": "zz')
    file = tmp_path / "traces.jsonl"
    file.write_text("\n".join([lines[0], '{"resourceSpans": [{', bad_id, "[1]", '{"x": 1}', "", lines[2]]))
    report = ingest([file], store)
    assert [broken.line for broken in report.broken] == [2, 4]
    assert f"{file}:3: " in report.faults["bad ids"].example
    assert (report.spans, report.calls) == (2, 2)
    assert (report.unknown_rows, report.unknown_row) == (1, f'{file}:5: {{"x": 1}}')


def test_ids_survive_the_way_through_json(store):
    ingest([MULTI_TURN], store)
    line = json.loads(MULTI_TURN.read_text().splitlines()[0])
    expected = line["resourceSpans"][0]["scopeSpans"][0]["spans"][0]
    found = {span.span_id: span for span in store.spans()}[expected["spanId"]]
    assert found.trace_id == expected["traceId"]
    assert found.start_ns == int(expected["startTimeUnixNano"])


@pytest.mark.parametrize("compressed", [False, True])
def test_length_delimited_protobuf_is_read(store, tmp_path, compressed):
    file = tmp_path / "traces.pb"
    with file.open("wb") as out:
        for body in requests():
            packed = pa.compress(body, "zstd", asbytes=True) if compressed else body
            out.write(len(packed).to_bytes(4, "big") + packed)
    assert ingest([file], store).calls == 4


def test_a_length_delimited_file_that_was_cut_short_loses_its_last_message_only(store, tmp_path):
    file = tmp_path / "traces.pb"
    whole = b"".join(len(body).to_bytes(4, "big") + body for body in requests())
    file.write_bytes(whole[:-10])
    report = ingest([file], store)
    assert (report.calls, report.broken[0].line) == (3, 4)


def test_a_single_protobuf_request_is_read(store, tmp_path):
    file = tmp_path / "request.bin"
    file.write_bytes(requests()[0])
    assert ingest([file], store).calls == 1


def test_a_request_over_many_lines_is_read(store, tmp_path):
    file = tmp_path / "request.json"
    file.write_text(json.dumps(json.loads(MULTI_TURN.read_text().splitlines()[0]), indent=2))
    assert ingest([file], store).calls == 1


@pytest.mark.parametrize("content", [b"", b"\n\n"])
def test_an_empty_file_is_told_to_be_empty(store, tmp_path, content):
    file = tmp_path / "empty.jsonl"
    file.write_bytes(content)
    report = ingest([file, MULTI_TURN], store)
    assert (report.messages, report.broken_files) == (4, 1)
    assert report.broken[0].reason == "not traces but an empty file"


def test_a_file_that_is_not_there_is_one_clear_error(store, tmp_path):
    with pytest.raises(DialectError, match=r"nothing\.jsonl"):
        ingest([tmp_path / "nothing.jsonl"], store)


def test_progress_ends_at_the_size_of_all_files(store, tmp_path):
    second = shutil.copy(MULTI_TURN, tmp_path / "second.jsonl")
    seen: list[tuple[int, int]] = []
    ingest([MULTI_TURN, second], store, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (2 * MULTI_TURN.stat().st_size,) * 2
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_calls_whose_spans_are_spread_over_files_are_graded_together(store, tmp_path):
    spans, _ = decode_request(requests(FIXTURES / "genai_langchain" / "multi_turn.otlp.jsonl")[0])
    assert spans
    lines = (FIXTURES / "genai_langchain" / "multi_turn.otlp.jsonl").read_text().splitlines()
    parts = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    parts[0].write_text("\n".join(lines[::2]))
    parts[1].write_text("\n".join(lines[1::2]))
    report = ingest(parts, store)
    assert (report.traces, report.calls) == (1, 4)
