"""A copy of a store gives back what came in, byte for byte once both are in canonical order."""

import json
import math
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message  # type: ignore[import-untyped]
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from spangrad.adapters.datasets.otlp import framed, json_line, write_copy
from spangrad.adapters.datasets.scanning import Scanner
from spangrad.adapters.ingest import ingest
from spangrad.adapters.otlp_files import messages
from spangrad.store.file_store import FileStore
from spangrad.store.otlp import encode_logs, encode_request
from spangrad.store.records import LogRecord, Span, SpanEvent
from tests.adapters.building import span
from tests.adapters.captured import FIXTURES

FILES = sorted(FIXTURES.glob("*/*.otlp.jsonl")) + sorted(
    (FIXTURES / "exports/otel_collector").glob("*.jsonl")
)


def copied(store, folder, *, as_json):
    side = write_copy(folder, store, None, Scanner(), as_json=as_json)
    return folder / side.file


def canonical(paths):
    """Every span by its ids and every log record, each with its resource and scope, attributes in order."""
    spans: dict[tuple[bytes, bytes], bytes] = {}
    records: set[bytes] = set()
    for path in paths:
        for message, _ in messages(path):
            if isinstance(message, ExportTraceServiceRequest):
                for resource in message.resource_spans:
                    for scope in resource.scope_spans:
                        for one in scope.spans:
                            told = whole(resource, scope, one)
                            spans.setdefault((one.trace_id, one.span_id), told)
            elif isinstance(message, ExportLogsServiceRequest):
                for resource in message.resource_logs:
                    for scope in resource.scope_logs:
                        for one in scope.log_records:
                            records.add(whole(resource, scope, one))
    return spans, records


def whole(resource: Any, scope: Any, one: Message) -> bytes:
    """A span or record with all that is said above it."""
    urls = f"{resource.schema_url} {scope.schema_url}".encode()
    return urls + b"".join(map(ordered, (resource.resource, scope.scope, one)))


def ordered(message: Message) -> bytes:
    """The bytes of a message with attributes in order of their keys, at every depth.

    A status or body that is there and empty says what one that is not there says.
    """
    copy = type(message)()
    copy.CopyFrom(message)
    for field, value in copy.ListFields():
        if field.name in ("status", "body") and not value.ByteSize():
            copy.ClearField(field.name)
    _sort(copy)
    return bytes(copy.SerializeToString(deterministic=True))


def _sort(message):
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        repeated = list(value) if field.is_repeated else [value]
        for item in repeated:
            _sort(item)
        if field.message_type.name == "KeyValue" and field.is_repeated:
            in_order = sorted(
                (type(item).FromString(item.SerializeToString()) for item in repeated), key=lambda i: i.key
            )
            del value[:]
            value.extend(in_order)


@pytest.mark.parametrize("as_json", [True, False], ids=["json", "protobuf"])
def test_all_that_real_recorders_wrote_comes_back(tmp_path, as_json):
    with FileStore(tmp_path / "s.duckdb") as store:
        ingest(FILES, store)
        file = copied(store, tmp_path, as_json=as_json)
    spans, records = canonical([file])
    sent_spans, sent_records = canonical(FILES)
    assert len(spans) > 400 and len(records) > 10
    assert spans == sent_spans
    assert records == sent_records


def test_the_copy_of_a_copy_is_the_same_bytes(tmp_path):
    with FileStore(tmp_path / "a.duckdb") as store:
        ingest([FIXTURES / "genai_openai", FIXTURES / "exports/otel_collector"], store)
        first = copied(store, tmp_path, as_json=True).read_bytes()
        again = copied(store, tmp_path, as_json=True).read_bytes()
        packed = copied(store, tmp_path, as_json=False)
    with FileStore(tmp_path / "b.duckdb") as store:
        ingest([packed], store)
        third = copied(store, tmp_path, as_json=True).read_bytes()
    assert first == again == third


text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
value = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.just(math.nan)
    | text
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)
attributes = st.dictionaries(text, value, max_size=4)
numbers = st.integers(0, 2**64 - 1)
counts = st.integers(0, 2**32 - 1)
origins = st.fixed_dictionaries(
    {
        "resource": attributes,
        "resource_schema_url": text,
        "scope": text,
        "scope_version": text,
        "scope_attributes": attributes,
        "schema_url": text,
    }
)
events = st.builds(SpanEvent, text, numbers, attributes, counts)
links = st.fixed_dictionaries(
    {
        "trace_id": st.sampled_from(["1" * 32, "ab" * 16]),
        "span_id": st.sampled_from(["2" * 16, "cd" * 8]),
        "trace_state": text,
        "attributes": attributes,
        "dropped_attributes": counts,
        "flags": counts,
    }
)


def span_of(number: int) -> st.SearchStrategy[Span]:
    """Any span with these ids; every other one is in the same trace."""
    ids = span(f"s{number}", trace=str(number % 2 + 1))
    told = {
        "parent_span_id": st.sampled_from([None, "73" * 8, f"{0x7330:016x}"]),
        "name": text,
        "kind": st.integers(0, 9),
        "start_ns": numbers,
        "end_ns": numbers,
        "status_code": st.integers(0, 2),
        "status_message": text,
        "attributes": attributes,
        "events": st.lists(events, max_size=2).map(tuple),
        "links": st.lists(links, max_size=2).map(tuple),
        "trace_state": text,
        "flags": counts,
        "dropped_attributes": counts,
        "dropped_events": counts,
        "dropped_links": counts,
    }
    return st.tuples(st.fixed_dictionaries(told), origins).map(
        lambda drawn: replace(ids, **drawn[0], **drawn[1])
    )


def record_of(number: int) -> st.SearchStrategy[LogRecord]:
    """Any record; of a span, of a trace, or of neither."""
    told = {
        "trace_id": st.sampled_from([None, "1".rjust(32, "0"), "9" * 32]),
        "span_id": st.sampled_from([None, f"{0x7330:016x}"]),
        "time_ns": numbers,
        "observed_ns": st.just(number + 1),
        "event_name": text,
        "body": value,
        "attributes": attributes,
        "severity_number": st.integers(0, 24),
        "severity_text": text,
        "flags": counts,
        "dropped_attributes": counts,
    }
    return st.tuples(st.fixed_dictionaries(told), origins).map(
        lambda drawn: LogRecord(**drawn[0], **drawn[1])
    )


@settings(max_examples=15)
@given(st.data(), st.integers(1, 6), st.integers(0, 3))
def test_any_batches_in_any_order_with_repeats_come_back_from_either_form(data, span_count, record_count):
    spans = [data.draw(span_of(number)) for number in range(span_count)]
    records = [data.draw(record_of(number)) for number in range(record_count)]
    requests = [(encode_request(spans[at : at + 2]), False) for at in range(0, span_count, 2)]
    requests += [(encode_logs([record]), True) for record in records]
    repeated = data.draw(st.lists(st.sampled_from(requests), max_size=2))
    order = data.draw(st.permutations([*requests, *repeated]))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        packed, lines = folder / "sent.pb", folder / "sent.jsonl"
        packed.write_bytes(b"".join(framed(body) for body, _ in order))
        lines.write_bytes(b"".join(json_line(body, is_logs=is_logs) for body, is_logs in order))
        expected = canonical([packed])
        for sent in (packed, lines):
            with FileStore(folder / f"{sent.name}.duckdb") as store:
                report = ingest([sent], store)
                assert (report.new_spans, report.new_logs, report.broken) == (span_count, record_count, ())
                for as_json in (True, False):
                    assert canonical([copied(store, folder, as_json=as_json)]) == expected


def test_a_copy_of_some_rollouts_has_theirs_alone_and_counts_secrets(tmp_path):
    with FileStore(tmp_path / "s.duckdb") as store:
        mine = [
            span(
                "a", trace="1", attributes={"spangrad.rollout.id": "r1", "note": "sk-proj-1234567890abcdef"}
            ),
            span("b", trace="2", attributes={"spangrad.rollout.id": "r2"}),
        ]
        store.put_otlp(encode_request(mine))
        scanner = Scanner()
        side = write_copy(tmp_path, store, ["r1"], scanner, as_json=True)
    (line,) = (tmp_path / side.file).read_text().splitlines()
    told = json.loads(line)["resourceSpans"][0]["scopeSpans"][0]["spans"]
    assert [one["spanId"] for one in told] == [mine[0].span_id]
    assert (side.rows, side.rollouts, dict(scanner.found)) == (1, 1, {"api key": 1})
