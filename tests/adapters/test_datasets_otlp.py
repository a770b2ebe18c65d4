"""A copy of a store gives back what came in, byte for byte once both are in canonical order."""

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from google.protobuf.message import Message  # type: ignore[import-untyped]
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from spangrad.adapters.datasets.otlp import write_copy
from spangrad.adapters.datasets.scanning import Scanner
from spangrad.adapters.ingest import ingest
from spangrad.adapters.otlp_files import messages
from spangrad.store.file_store import FileStore
from spangrad.store.otlp import encode_logs, encode_request
from spangrad.store.records import LogRecord, SpanEvent
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
                            told = b"".join(map(ordered, (resource.resource, scope.scope, one)))
                            spans.setdefault((one.trace_id, one.span_id), told)
            elif isinstance(message, ExportLogsServiceRequest):
                for resource in message.resource_logs:
                    for scope in resource.scope_logs:
                        for one in scope.log_records:
                            records.add(b"".join(map(ordered, (resource.resource, scope.scope, one))))
    return spans, records


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
    | text
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)
attributes = st.dictionaries(text, value, max_size=4)
numbers = st.integers(0, 2**63 - 1)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_spans_and_records_come_back_from_either_form(data):
    spans = [
        replace(
            span(f"s{number}", trace=str(number % 2 + 1), parent=data.draw(st.sampled_from([None, "s0"]))),
            start_ns=data.draw(numbers),
            end_ns=data.draw(numbers),
            name=data.draw(text),
            kind=data.draw(st.integers(0, 9)),
            status_code=data.draw(st.integers(0, 2)),
            status_message=data.draw(text),
            attributes=data.draw(attributes),
            resource=data.draw(attributes),
            scope_attributes=data.draw(attributes),
            events=(SpanEvent(data.draw(text), data.draw(numbers), data.draw(attributes)),),
            dropped_attributes=data.draw(st.integers(0, 2**32 - 1)),
        )
        for number in range(data.draw(st.integers(1, 4)))
    ]
    record = LogRecord(
        spans[0].trace_id,
        spans[0].span_id,
        time_ns=data.draw(numbers),
        observed_ns=1,
        event_name=data.draw(text),
        body=data.draw(value),
        attributes=data.draw(attributes),
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with FileStore(folder / "s.duckdb") as store:
            store.put_otlp(encode_request(spans))
            store.put_logs(encode_logs([record]))
            files = [copied(store, folder, as_json=as_json) for as_json in (True, False)]
        sent = [folder / "spans.pb", folder / "logs.pb"]
        sent[0].write_bytes(framed(encode_request(spans)))
        sent[1].write_bytes(framed(encode_logs([record])))
        expected = canonical(sent)
        assert canonical(files[:1]) == expected
        assert canonical(files[1:]) == expected


def framed(request: bytes) -> bytes:
    return len(request).to_bytes(4, "big") + request


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
