"""Dialect OTel GenAI with content in one event a call, and openai-v2's spans that have both."""

from dataclasses import replace

import pytest

from spangrad.adapters.calls import calls_from_spans
from spangrad.adapters.dialects.genai_events import DETAILS, NO_RECORD, NOT_CAPTURED
from spangrad.adapters.log_events import with_logs
from spangrad.adapters.model_call import Grade
from spangrad.store.otlp import decode_logs, decode_request, json_logs_to_protobuf, json_to_protobuf
from spangrad.store.records import SpanEvent
from spangrad.tracer import conventions as c
from tests.adapters import picnic
from tests.adapters.building import REPLY, USER, span, text_attributes
from tests.adapters.captured import FIXTURES, captured

TEXT = ("no token ids",)
PARSED = ("no token ids", "arguments were re-serialised")
WITHOUT_TOOLS = ("no token ids", picnic.TOOLS_NOT_TOLD, "arguments were re-serialised")
COLLECTOR = FIXTURES / "exports" / "otel_collector"


def calls(name):
    return calls_from_spans(captured(name))


@pytest.mark.parametrize(
    ("recorder", "dialect", "reasons"),
    [
        ("genai_openai_events", "otel_genai_events", PARSED),
        ("openai_v2_latest", "otel_genai", WITHOUT_TOOLS),
    ],
)
def test_a_whole_conversation_reads_as_it_was(recorder, dialect, reasons):
    found = calls(f"{recorder}/multi_turn")
    expected = picnic.expected()
    assert picnic.told(found) == expected
    assert [call.choices[0].finish_reason for call in found] == picnic.FINISH_REASONS
    assert {call.dialect for call in found} == {dialect}
    assert {(call.grade, tuple(call.grade_reasons)) for call in found} == {(Grade.TEXT, reasons)}


def test_tools_are_in_the_event_where_the_recorder_keeps_them():
    assert [t["function"]["name"] for t in calls("genai_openai_events/multi_turn")[0].tools] == [
        *picnic.TOOLS
    ]
    assert calls("openai_v2_latest/multi_turn")[0].tools == ()  # this recorder leaves them out


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("n2", TEXT),
        ("parallel_async", PARSED),
        ("parallel_threads", PARSED),
        ("responses", TEXT),
        ("retry", TEXT),
        ("stream", TEXT),
        ("stream_no_usage", TEXT),
        ("stream_tool", PARSED),
    ],
)
def test_what_was_recorded_whole_is_text_and_the_same_as_on_spans(case, expected):
    found = calls(f"genai_openai_events/{case}")
    assert {(call.grade, tuple(call.grade_reasons)) for call in found} == {(Grade.TEXT, expected)}
    if case == "retry":  # its request names the recorder
        return
    on_spans = calls(f"genai_openai/{case}")
    assert sorted(map(str, picnic.told(found))) == sorted(map(str, picnic.told(on_spans)))
    assert [len(call.choices) for call in found] == [len(call.choices) for call in on_spans]


@pytest.mark.parametrize("case", ["cancelled_stream", "stream_abandoned", "fail"])
def test_what_failed_or_was_left_is_unusable(case):
    for call in calls(f"genai_openai_events/{case}"):
        assert call.grade is Grade.UNUSABLE
        assert call.grade_reasons[0].startswith("error: ")


def test_system_instructions_of_the_event_come_first():
    (call,) = calls("genai_openai_events/responses")
    assert [message["role"] for message in call.messages] == ["system", "user"]


def test_a_call_whose_log_record_is_not_there_says_so_and_what_to_do():
    bare = [replace(each, events=()) for each in captured("genai_openai_events/multi_turn")]
    found = calls_from_spans(bare)
    assert [(call.grade, call.grade_reasons) for call in found] == [(Grade.UNUSABLE, (NO_RECORD,))] * 4
    assert "ingest the recorder's log records" in NO_RECORD


def test_content_in_a_logs_file_of_the_collector_is_joined_by_ids():
    traces = (COLLECTOR / "content_on_events.traces.jsonl").read_bytes().splitlines()
    spans = [each for line in traces for each in decode_request(json_to_protobuf(line))[0]]
    logs = (COLLECTOR / "content_on_events.logs.jsonl").read_bytes().splitlines()
    records = [each for line in logs for each in decode_logs(json_logs_to_protobuf(line))]
    assert picnic.told(calls_from_spans(with_logs(spans, reversed(records)))) == picnic.expected()


def test_an_event_without_content_says_that_it_was_not_captured():
    told = {
        name: value
        for name, value in text_attributes().items()
        if name not in (c.INPUT_MESSAGES, c.OUTPUT_MESSAGES)
    }
    bare = replace(
        span(scope="x", attributes=told), events=(SpanEvent(DETAILS, 1, {c.OPERATION_NAME: "chat"}),)
    )
    (call,) = calls_from_spans([bare])
    assert (call.grade, call.grade_reasons) == (Grade.UNUSABLE, (NOT_CAPTURED,))


def test_what_the_span_lacks_comes_from_its_own_event_or_the_events_body():
    told = {name: value for name, value in text_attributes().items() if name != c.OUTPUT_MESSAGES}
    output = {c.OUTPUT_MESSAGES: REPLY}
    for content in (output, {"body": output}):
        half = replace(span(scope="x", attributes=told), events=(SpanEvent(DETAILS, 1, content),))
        (call,) = calls_from_spans([half])
        assert (call.grade, call.choices[0].message["content"]) == (Grade.TEXT, "hello")


def test_attributes_that_the_event_lost_are_content_that_is_missing():
    told = {c.OPERATION_NAME: "chat", c.PROVIDER_NAME: "openai", c.RESPONSE_FINISH_REASONS: ["stop"]}
    event = SpanEvent(DETAILS, 1, {c.INPUT_MESSAGES: USER, c.OUTPUT_MESSAGES: REPLY}, dropped_attributes=2)
    (call,) = calls_from_spans([replace(span(scope="x", attributes=told), events=(event,))])
    assert call.grade_reasons == ("attributes were dropped: 2 of them, by a limit of the SDK",)


def test_calls_below_a_stream_that_was_never_exported_stay_calls_of_their_own():
    found = calls("openai_v2_latest/fail")
    assert len({call.call_id for call in found}) == 3
    assert len({call.trace_id for call in found}) == 1
    assert [(call.parent_span_id, call.ancestor_span_ids, call.span_ids) for call in found] == [
        (None, (), (call.span_id,)) for call in found
    ]


def test_a_context_that_stays_attached_is_no_agent_above_later_calls():
    found = calls("openai_v2_latest/parallel_async")
    roots = {each.span_id for each in captured("openai_v2_latest/parallel_async") if each.scope == "my.agent"}
    assert {call.ancestor_span_ids for call in found} == {tuple(roots)}


@pytest.mark.parametrize(
    ("case", "expected"), [("stream", TEXT), ("stream_no_usage", TEXT), ("stream_tool", WITHOUT_TOOLS)]
)
def test_openai_v2s_streams_are_text(case, expected):
    (call,) = calls(f"openai_v2_latest/{case}")
    assert (call.grade, tuple(call.grade_reasons)) == (Grade.TEXT, expected)
