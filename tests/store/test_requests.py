"""One bad span costs only itself: in requests of either form, of spans and of log records."""

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spangrad.errors import StoreError
from spangrad.store.faults import Faults, Outcome
from spangrad.store.otlp import records_of, spans_of
from spangrad.store.records import Span
from spangrad.store.requests import logs_request, trace_request
from tests.store.building import conversation, new_trace, request
from tests.store.otlp_faults import (
    LEFT_OUT,
    MENDED,
    TRACE,
    json_logs,
    json_request,
    json_span,
    wire_logs,
    wire_request,
)


def read(data: Any) -> tuple[list[Span], Faults]:
    body = data if isinstance(data, bytes) else json.dumps(data).encode()
    message, faults = trace_request(body, is_json=True)
    return spans_of(message), faults


def read_wire(body: bytes) -> tuple[list[Span], Faults]:
    message, faults = trace_request(body)
    return spans_of(message), faults


def numbers(spans: list[Span]) -> list[int]:
    return [int(span.span_id, 16) for span in spans]


@pytest.mark.parametrize("what", LEFT_OUT)
def test_a_span_that_can_not_be_kept_costs_no_other(what: str) -> None:
    more, kind = LEFT_OUT[what]
    spans, faults = read(json_request(json_span(1), json_span(2, **more), json_span(3)))
    assert numbers(spans) == [1, 3]
    assert [span.resource for span in spans] == [{"service.name": "shop"}] * 2
    assert [(found, one.outcome, one.count) for found, one in faults.items()] == [(kind, Outcome.LEFT_OUT, 1)]
    assert faults[kind].example


@pytest.mark.parametrize("what", MENDED)
def test_what_can_be_kept_in_another_form_is_and_is_counted(what: str) -> None:
    more, kind, stored = MENDED[what]
    spans, faults = read(json_request(json_span(1), json_span(2, **more), json_span(3)))
    assert numbers(spans) == [1, 2, 3]
    assert spans[1].attributes == {"x": stored}
    assert spans[0].attributes == {"n": 1}
    assert [(found, one.outcome, one.count) for found, one in faults.items()] == [(kind, Outcome.MENDED, 1)]
    assert f"{2:016x}" in faults[kind].example


def test_a_bare_nan_is_a_nan() -> None:
    spans, faults = read(
        json_request(json_span(1, attributes=[{"key": "x", "value": {"doubleValue": math.nan}}]))
    )
    assert repr(spans[0].attributes["x"]) == "nan"
    assert list(faults) == ["NaN or Infinity without quotes"]


def test_bytes_that_are_no_utf8_are_escaped_in_json() -> None:
    body = json.dumps(json_request(json_span(1), json_span(2, name="caf?"))).encode()
    spans, faults = read(body.replace(b"caf?", b"caf\xe9"))
    assert [span.name for span in spans] == ["span 1", "caf\\udce9"]
    assert faults.count(Outcome.MENDED) == 1


def test_a_number_of_thousands_of_digits_is_kept_as_text() -> None:
    body = json.dumps(json_request(json_span(1), json_span(2, attributes="?"))).replace(
        '"?"', '[{"key": "x", "value": {"intValue": ' + "9" * 5000 + "}}]"
    )
    spans, faults = read(body.encode())
    assert spans[1].attributes == {"x": "9" * 5000}
    assert list(faults) == ["integers beyond 64 bits"]


@pytest.mark.parametrize("levels", [60, 400, 5000])
def test_a_value_of_any_depth_costs_its_span_alone(levels: int) -> None:
    deep = '{"arrayValue": {"values": [' * levels + '{"stringValue": "x"}' + "]}}" * levels
    body = json.dumps(json_request(json_span(1, name='"[{'), json_span(2, attributes="?"), json_span(3)))
    spans, faults = read(body.replace('"?"', f'[{{"key": "x", "value": {deep}}}]').encode())
    assert [span.name for span in spans] == ['"[{', "span 3"]
    assert [(kind, one.count) for kind, one in faults.items()] == [("nested too deep", 1)]
    with pytest.raises(StoreError, match="no OTLP request in JSON"):
        read(body.replace('"?"', "[" * levels).encode())


@pytest.mark.parametrize(
    ("data", "kept", "lost"),
    [
        ({"resourceSpans": [3, *json_request(json_span(1))["resourceSpans"]]}, [1], 1),
        ({"resourceSpans": [{"scopeSpans": "none"}, *json_request(json_span(1))["resourceSpans"]]}, [1], 1),
        ({"resourceSpans": [{"scopeSpans": [{"spans": [3, json_span(1)]}]}]}, [1], 1),
        (
            {
                "resourceSpans": [
                    {"resource": {"attributes": 3}, "scopeSpans": [{"spans": [json_span(1), json_span(2)]}]},
                    {"scopeSpans": [{"scope": 7, "spans": [json_span(3)]}, {"spans": [json_span(4)]}]},
                ]
            },
            [4],
            3,
        ),
    ],
    ids=["a number as resource", "text as scopes", "a number as span", "bad resource and scope"],
)
def test_a_bad_container_costs_what_is_in_it(data: Any, kept: list[int], lost: int) -> None:
    spans, faults = read(data)
    assert (numbers(spans), faults.count(Outcome.LEFT_OUT)) == (kept, lost)


@pytest.mark.parametrize("body", [b"[]", b"nonsense", b'{"resourceSpans": 3}', b'{"resourceSpans": [', b""])
def test_json_that_is_no_request_at_all_is_refused(body: bytes) -> None:
    with pytest.raises(StoreError, match="no OTLP request in JSON"):
        trace_request(body, is_json=True)


# protobuf


def test_text_that_is_no_utf8_costs_no_span_in_protobuf() -> None:
    spans, faults = read_wire(wire_request(b"first", b"caf\xe9 au lait", b"a\xed\xa0\xbd", b"last one"))
    assert [span.name for span in spans] == ["first", "caf\\xe9 au lait", "a\\ud83d", "last one"]
    assert {kind: (one.outcome, one.count) for kind, one in faults.items()} == {
        "text that is no UTF-8": (Outcome.MENDED, 1),
        "lone surrogates": (Outcome.MENDED, 1),
    }
    assert f"{2:016x}" in faults["text that is no UTF-8"].example


def test_a_broken_span_costs_no_other_in_protobuf() -> None:
    body = wire_request(b"first", b"xxxxxxx", b"last one")
    broken = body.replace(b"\x2a\x07xxxxxxx", b"\x2a\x7fxxxxxxx")  # its name does not end inside it
    spans, faults = read_wire(broken)
    assert [span.name for span in spans] == ["first", "last one"]
    assert faults.count(Outcome.LEFT_OUT) == 1
    assert TRACE in next(iter(faults.values())).example


def test_spans_without_ids_are_left_out_of_protobuf_with_their_names() -> None:
    body = wire_request(b"first", b"second")
    spans, faults = read_wire(body.replace(b"\x00\x00\x00\x00\x00\x00\x00\x02", bytes(8)))
    assert [span.name for span in spans] == ["first"]
    assert (faults["bad ids"].count, "'second'" in faults["bad ids"].example) == (1, True)


@pytest.mark.parametrize("body", [b"\xff\xff not protobuf", b"\n\x05hello", b"hello", b"\x0a" * 40])
def test_bytes_that_are_no_request_at_all_are_refused(body: bytes) -> None:
    with pytest.raises(StoreError, match="no OTLP ExportTraceServiceRequest"):
        trace_request(body)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_whatever_byte_is_changed_the_other_spans_are_there_or_all_is_refused(data: st.DataObject) -> None:
    body = bytearray(request(conversation(new_trace(), "r", 3)))
    body[data.draw(st.integers(0, len(body) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        spans, _ = read_wire(bytes(body))
    except StoreError:
        return
    assert len(spans) <= 3


# log records


def test_a_bad_log_record_costs_no_other() -> None:
    good = {"timeUnixNano": "5", "body": {"stringValue": "fine"}}
    bad = [
        {**good, "timeUnixNano": "soon"},
        {**good, "severityNumber": "LOUD"},
        {**good, "body": {"stringValue": "\ud83d"}},
        {**good, "traceId": "0af7", "spanId": "00" * 8},
    ]
    message, faults = logs_request(json.dumps(json_logs(good, *bad, good)).encode(), is_json=True)
    records = records_of(message)
    assert [record.body for record in records] == ["fine", "\\ud83d", "fine", "fine"]
    assert [record.trace_id for record in records] == [None] * 4
    assert {kind: (one.outcome, one.count) for kind, one in faults.items()} == {
        "bad times": (Outcome.LEFT_OUT, 1),
        "unknown enum values": (Outcome.LEFT_OUT, 1),
        "lone surrogates": (Outcome.MENDED, 1),
        "ids of log records that are none, kept without": (Outcome.MENDED, 1),
    }


def test_text_that_is_no_utf8_costs_no_log_record_in_protobuf() -> None:
    message, faults = logs_request(wire_logs(b"first", b"caf\xe9", b"last one"))
    assert [record.severity_text for record in records_of(message)] == ["first", "caf\\xe9", "last one"]
    assert faults.count(Outcome.MENDED) == 1
