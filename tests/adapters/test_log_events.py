"""Log records become events of the span that they name."""

from spangrad.adapters.log_events import BODY, with_logs
from spangrad.store.records import LogRecord
from tests.adapters.building import span
from tests.adapters.captured import captured


def record(name, time_ns, trace_id=None, span_id=None, **fields):
    return LogRecord(trace_id, span_id, time_ns, 0, name, **fields)


def test_a_record_is_an_event_of_its_span_in_order_of_time():
    call = span("a")
    ids = {"trace_id": call.trace_id, "span_id": call.span_id}
    records = [record("second", 2, body="b", **ids), record("first", 1, body={"x": 1}, **ids)]
    [told] = with_logs([call], records)
    assert [(e.name, e.attributes[BODY]) for e in told.events] == [("first", {"x": 1}), ("second", "b")]


def test_a_record_of_another_span_or_of_none_changes_nothing():
    call = span("a")
    records = [record("alone", 1), record("other", 1, trace_id=call.trace_id, span_id="f" * 16)]
    assert with_logs([call], records) == [call]


def test_an_old_record_is_named_by_its_attribute():
    call = span("a")
    old = record("", 1, call.trace_id, call.span_id, attributes={"event.name": "gen_ai.choice"})
    assert [event.name for event in with_logs([call], [old])[0].events] == ["gen_ai.choice"]


def test_the_records_of_a_real_file_are_found_by_their_spans():
    names = {event.name for told in captured("openai_v2_legacy/multi_turn") for event in told.events}
    assert names >= {"gen_ai.system.message", "gen_ai.user.message", "gen_ai.choice", "gen_ai.tool.message"}
