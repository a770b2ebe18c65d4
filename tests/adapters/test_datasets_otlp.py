"""A copy of a store gives back what came in, byte for byte once both are in canonical order."""

import json
import math
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message  # type: ignore[import-untyped]
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import (
    AnyValue,
    ArrayValue,
    EntityRef,
    InstrumentationScope,
    KeyValue,
    KeyValueList,
)
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from spangrad.adapters.datasets.otlp import framed, json_line, write_copy
from spangrad.adapters.datasets.scanning import Scanner
from spangrad.adapters.dialects import recognise
from spangrad.adapters.ingest import REPEATED, REPEATED_LOGS, ingest
from spangrad.adapters.otlp_files import messages
from spangrad.store.file_store import FileStore
from spangrad.store.otlp import encode_logs, encode_request
from spangrad.store.records import LogRecord, RepeatedKeys, Span, SpanEvent
from tests.adapters.building import span
from tests.adapters.captured import FIXTURES

TWICE = FIXTURES / "openinference_langchain_plus_openai" / "multi_turn.otlp.jsonl"
"""Calls that a framework and its client recorded."""
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


def any_value(told: Any) -> AnyValue:
    """What was drawn as a value of OTLP; a list of pairs is a list of keys and values."""
    if isinstance(told, list):
        return AnyValue(kvlist_value=KeyValueList(values=key_values(told)))
    if isinstance(told, tuple):
        return AnyValue(array_value=ArrayValue(values=[any_value(each) for each in told]))
    return AnyValue(int_value=told) if isinstance(told, int) else AnyValue(string_value=told)


def key_values(pairs: Any) -> list[KeyValue]:
    return [KeyValue(key=key, value=any_value(told)) for key, told in pairs]


some_key = st.sampled_from(["a", "b", "$map", "service.name"])
repeating = st.lists(
    st.tuples(
        some_key,
        st.recursive(
            st.integers(0, 9) | text,
            lambda inner: st.lists(st.tuples(some_key, inner), max_size=3) | st.tuples(inner, inner),
            max_leaves=5,
        ),
    ),
    max_size=5,
).map(key_values)
refs = st.lists(
    st.builds(
        EntityRef,
        schema_url=text,
        type=text,
        id_keys=st.lists(text, max_size=2),
        description_keys=st.lists(text, max_size=2),
    ),
    max_size=2,
)
resources = st.builds(
    Resource, attributes=repeating, dropped_attributes_count=st.integers(0, 2**32 - 1), entity_refs=refs
)
scopes = st.builds(
    InstrumentationScope,
    name=text,
    version=text,
    attributes=repeating,
    dropped_attributes_count=st.integers(0, 2**32 - 1),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_request_comes_back_also_repeated_keys_and_what_was_dropped(data):
    traces, logs = ExportTraceServiceRequest(), ExportLogsServiceRequest()
    for number in range(1, 1 + data.draw(st.integers(1, 3))):
        of_spans = traces.resource_spans.add(resource=data.draw(resources), schema_url=data.draw(text))
        block = of_spans.scope_spans.add(scope=data.draw(scopes), schema_url=data.draw(text))
        one = block.spans.add(
            trace_id=b"t" * 16, span_id=bytes([number]) * 8, attributes=data.draw(repeating)
        )
        one.events.add(name="e", attributes=data.draw(repeating))
        one.links.add(trace_id=b"l" * 16, span_id=b"l" * 8, attributes=data.draw(repeating))
        of_logs = logs.resource_logs.add(resource=data.draw(resources), schema_url=data.draw(text))
        records = of_logs.scope_logs.add(scope=data.draw(scopes), schema_url=data.draw(text))
        record = records.log_records.add(time_unix_nano=number, attributes=data.draw(repeating))
        record.body.kvlist_value.values.extend(data.draw(repeating))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sent = [folder / "spans.pb", folder / "logs.pb"]
        for file, request in zip(sent, (traces.SerializeToString(), logs.SerializeToString()), strict=True):
            file.write_bytes(framed(request))
        with FileStore(folder / "s.duckdb") as store:
            report = ingest(sent, store)
            files = [copied(store, folder, as_json=as_json) for as_json in (True, False)]
            assert (report.new_spans, report.new_logs) == (
                len(traces.resource_spans),
                len(logs.resource_logs),
            )
            again = ingest(sent, store)
            known = {REPEATED, REPEATED_LOGS}
            assert (again.new_spans, again.new_logs, set(again.faults) - known) == (0, 0, set())
        expected = canonical(sent)
        assert canonical(files[:1]) == expected
        assert canonical(files[1:]) == expected


def test_what_is_dropped_or_repeated_hides_nothing_from_sql(tmp_path):
    request = ExportTraceServiceRequest()
    pairs = [("service.name", "first"), ("service.name", "shop")]
    of_spans = request.resource_spans.add(
        resource=Resource(attributes=key_values(pairs), dropped_attributes_count=3)
    )
    of_spans.scope_spans.add().spans.add(trace_id=b"t" * 16, span_id=b"s" * 8, attributes=key_values(pairs))
    with FileStore(tmp_path / "s.duckdb") as store:
        store.put_otlp(request.SerializeToString())
        (row,) = store.query(
            "SELECT resource->>'service.name' AS r, attributes->>'service.name' AS a, other FROM spans"
        )
        (one,) = store.spans()
    assert (row["r"], row["a"]) == ("shop", "shop")
    assert json.loads(row["other"]) == {
        "attributes": [["service.name", "first"]],
        "resource": [["service.name", "first"]],
        "resource_dropped_attributes": 3,
    }
    assert one.resource == RepeatedKeys({"service.name": "shop"}, [("service.name", "first")])


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


def test_a_copys_card_counts_a_call_once_in_however_many_spans_it_is_told(tmp_path):
    with FileStore(tmp_path / "store.duckdb") as store:
        told = ingest([TWICE], store)
        side = write_copy(tmp_path, store, None, Scanner(), as_json=True)
        assert (side.calls, side.dialects, side.grades) == (told.calls, told.by_dialect, told.by_grade)
        assert sum(recognise(one) is not None for one in store.spans()) > side.calls > 0
        [rollout, *_] = store.rollouts()
        of_one = write_copy(tmp_path, store, [rollout.rollout_id], Scanner(), as_json=True)
        assert 0 < of_one.calls <= side.calls
