"""What the hub says of spans and log records that it could not keep: OTLP's `partial_success`."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from starlette.testclient import TestClient

from spangrad.store.client import HubClient
from spangrad.store.faults import Faults, Outcome
from spangrad.store.file_store import OTHER_CONTENT, FileStore
from spangrad.store.hub import create_app
from tests.store.building import conversation, new_trace, request, span
from tests.store.hub_process import HubProcess
from tests.store.otlp_faults import (
    LEFT_OUT,
    MENDED,
    json_logs,
    json_request,
    json_span,
    wire_logs,
    wire_request,
)


@contextmanager
def hub_on(path: Path) -> Iterator[tuple[TestClient, FileStore]]:
    store = FileStore(path)
    with TestClient(create_app(store), base_url="http://127.0.0.1") as http:
        yield http, store


def test_a_bad_span_in_json_is_rejected_and_the_rest_is_stored(tmp_path: Path) -> None:
    with hub_on(tmp_path / "s.duckdb") as (http, store):
        spoiled = [more for more, _ in LEFT_OUT.values()]
        bad = [json_span(100 + number, **more) for number, more in enumerate(spoiled)]
        answer = http.post("/v1/traces", json=json_request(json_span(1), *bad, json_span(2)))
        assert (answer.status_code, answer.headers["x-spangrad-new-spans"]) == (200, "2")
        partial = answer.json()["partialSuccess"]
        assert partial["rejectedSpans"] == str(len(bad))
        for kind in ("bad ids", "bad times", "unknown enum values", "wrong types"):
            assert kind in partial["errorMessage"]
        assert [one.name for one in store.spans()] == ["span 1", "span 2"]


def test_a_span_that_was_mended_is_stored_and_told_without_being_rejected(tmp_path: Path) -> None:
    with hub_on(tmp_path / "s.duckdb") as (http, store):
        mended = [json_span(number, **more) for number, (more, _, _) in enumerate(MENDED.values(), start=1)]
        body = as_python_writes_it(json_request(*mended))
        answer = http.post("/v1/traces", content=body, headers={"content-type": "application/json"})
        assert (answer.status_code, answer.headers["x-spangrad-new-spans"]) == (200, str(len(mended)))
        partial = answer.json()["partialSuccess"]
        assert "rejectedSpans" not in partial
        assert (
            "1 lone surrogates" in partial["errorMessage"] or "2 lone surrogates" in partial["errorMessage"]
        )
        stored = {one.span_id: one.attributes["x"] for one in store.spans()}
        assert list(stored.values()) == [value for _, _, value in MENDED.values()]


def as_python_writes_it(data: Any) -> bytes:
    import json

    return json.dumps(data).encode()  # NaN and lone surrogates as no strict writer has them


def test_protobuf_with_text_that_is_no_utf8_is_taken(tmp_path: Path) -> None:
    with hub_on(tmp_path / "s.duckdb") as (http, store):
        answer = http.post("/v1/traces", content=wire_request(b"first", b"caf\xe9", b"last one"))
        assert (answer.status_code, answer.headers["x-spangrad-new-spans"]) == (200, "3")
        partial = ExportTraceServiceResponse.FromString(answer.content).partial_success
        assert (partial.rejected_spans, "no UTF-8" in partial.error_message) == (0, True)
        assert [one.name for one in store.spans()] == ["first", "caf\\xe9", "last one"]


def test_log_records_are_rejected_one_by_one(tmp_path: Path) -> None:
    with hub_on(tmp_path / "s.duckdb") as (http, store):
        good = {"timeUnixNano": "5", "body": {"stringValue": "fine"}}
        answer = http.post("/v1/logs", json=json_logs(good, {**good, "timeUnixNano": "soon"}))
        assert (answer.status_code, answer.headers["x-spangrad-new-logs"]) == (200, "1")
        assert answer.json()["partialSuccess"]["rejectedLogRecords"] == "1"
        answer = http.post("/v1/logs", content=wire_logs(b"caf\xe9"))
        partial = ExportLogsServiceResponse.FromString(answer.content).partial_success
        assert (answer.status_code, partial.rejected_log_records) == (200, 0)
        assert "no UTF-8" in partial.error_message
        assert [record.severity_text for record in store.logs()] == ["caf\\xe9", ""]


@pytest.mark.parametrize("path", ["/v1/traces", "/v1/logs"])
def test_a_body_that_is_no_otlp_is_400(tmp_path: Path, path: str) -> None:
    with hub_on(tmp_path / "s.duckdb") as (http, _):
        for body in (b"\xff\xfe garbage", b"hello", b"\n\x05hello"):
            assert http.post(path, content=body).status_code == 400
        for text in (b"{", b"[]", b'"x"', b'{"resourceSpans": 3, "resourceLogs": 3}', b'{"x": 1}'):
            answer = http.post(path, content=text, headers={"content-type": "application/json"})
            assert (answer.status_code, "no OTLP" in answer.json()["message"]) == (400, True)


def test_spans_at_the_address_of_logs_are_400_and_not_lost_in_silence(tmp_path: Path) -> None:
    with hub_on(tmp_path / "s.duckdb") as (http, _):
        answer = http.post("/v1/logs", json=json_request(json_span(1)))
        assert (answer.status_code, "'resourceLogs' was expected" in answer.json()["message"]) == (400, True)
        assert http.post("/v1/logs", json={}).status_code == 200


def test_a_span_with_the_id_of_a_stored_one_and_other_content_is_rejected(tmp_path: Path) -> None:
    one = span(new_trace(), name="first")
    other = replace(one, name="second")
    with hub_on(tmp_path / "s.duckdb") as (http, store):
        for body, rejected in ((request([one]), 0), (request([one]), 0), (request([one, other]), 1)):
            answer = http.post("/v1/traces", content=body)
            partial = ExportTraceServiceResponse.FromString(answer.content).partial_success
            assert partial.rejected_spans == rejected
        assert OTHER_CONTENT in partial.error_message and one.span_id in partial.error_message
        assert [found.name for found in store.spans()] == ["first"]


def test_a_batch_that_comes_again_is_no_conflict(tmp_path: Path) -> None:
    """Also where it was stored as a difference to others, and where NaN is unequal to itself."""
    spans = [*conversation(new_trace(), "r", 6), span(new_trace(), attributes={"x": [float("nan"), 1]})]
    faults = Faults()
    with FileStore(tmp_path / "s.duckdb") as store:
        assert store.put_otlp(request(spans[::2]), faults) == 4
        assert store.put_otlp(request(spans), faults) == 3
        assert store.put_otlp(request(spans), faults) == 0
    assert not faults


def test_two_spans_of_one_batch_with_one_id_are_told_apart(tmp_path: Path) -> None:
    one = span(new_trace(), attributes={"n": 1})
    faults = Faults()
    with FileStore(tmp_path / "s.duckdb") as store:
        assert store.put_otlp(request([one, one, replace(one, attributes={"n": 2})]), faults) == 1
        assert [found.attributes for found in store.spans()] == [{"n": 1}]
    assert [(kind, one.outcome, one.count) for kind, one in faults.items()] == [
        (OTHER_CONTENT, Outcome.LEFT_OUT, 1)
    ]


@pytest.mark.slow
def test_a_client_is_told_by_kind_what_the_hub_left_out(tmp_path: Path) -> None:
    one = span(new_trace(), name="first")
    faults = Faults()
    with HubProcess(tmp_path / "s.duckdb") as process, HubClient(process.url) as client:
        assert client.put_otlp(request([one, replace(one, trace_id="00" * 16)]), faults) == 1
        assert client.put_otlp(request([replace(one, name="zwölf")]), faults) == 0
        assert client.put_logs(wire_logs(b"caf\xe9"), faults) == 1
    assert {kind: (one.outcome, one.count) for kind, one in faults.items()} == {
        "bad ids": (Outcome.LEFT_OUT, 1),
        OTHER_CONTENT: (Outcome.LEFT_OUT, 1),
        "text that is no UTF-8": (Outcome.MENDED, 1),
    }
    assert "zwölf" in faults[OTHER_CONTENT].example
