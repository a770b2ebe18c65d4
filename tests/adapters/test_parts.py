"""Readings that are parts of a call, put together."""

from dataclasses import replace

from spangrad.adapters.calls import calls_of
from spangrad.adapters.ingest import ingest
from spangrad.adapters.model_call import Choice
from spangrad.adapters.parts import join_parts
from spangrad.adapters.reading import Reading
from spangrad.store.file_store import FileStore
from tests.adapters.building import span
from tests.adapters.captured import FIXTURES

REPLY = (Choice(message={"role": "assistant", "content": "hello"}, finish_reason="stop"),)
ASKED = ({"role": "user", "content": "hi"},)


def request(name: str, *, start_ns: int = 0, trace: str = "1", messages=ASKED) -> Reading:
    told = span(name, trace=trace, scope="two", start_ns=start_ns)
    return Reading(told, "two", model="m", messages=messages, step_name=f"step of {name}", is_streamed=True)


def reply(name: str, *, began_ns: int, start_ns: int = 500, trace: str = "1", messages=ASKED) -> Reading:
    told = span(name, trace=trace, scope="two", start_ns=start_ns)
    return Reading(told, "two", model="m", messages=messages, choices=REPLY, is_part=True, began_ns=began_ns)


def joined(*readings: Reading) -> list[tuple[str, tuple[str, ...]]]:
    ids = {
        reading.span.span_id: bytes.fromhex(reading.span.span_id).strip(b"\0").decode()
        for reading in readings
    }
    return [(ids[r.span.span_id], tuple(ids[part.span_id] for part in r.parts)) for r in join_parts(readings)]


def test_a_reply_belongs_to_the_equal_request_that_ended_nearest_to_its_beginning():
    first, second = request("a", start_ns=100), request("b", start_ns=200)
    assert joined(second, reply("x", began_ns=211), first, reply("y", began_ns=111)) == [
        ("b", ("x",)),
        ("a", ("y",)),
    ]


def test_a_request_gets_one_reply():
    assert joined(request("a"), reply("x", began_ns=10), reply("y", began_ns=10)) == [
        ("a", ("x",)),
        ("y", ()),
    ]


def test_a_request_of_the_same_trace_comes_first():
    far, near = request("a", trace="2", start_ns=100), request("b", start_ns=0)
    assert joined(far, near, reply("x", began_ns=110)) == [("a", ()), ("b", ("x",))]


def test_other_messages_are_another_call():
    other = ({"role": "user", "content": "bye"},)
    assert joined(request("a"), reply("x", began_ns=10, messages=other)) == [("a", ()), ("x", ())]


def test_a_reply_that_ended_before_the_request_began_is_not_its_own():
    assert joined(request("a", start_ns=900), reply("x", began_ns=10)) == [("a", ()), ("x", ())]


def test_the_call_has_the_requests_names_and_the_replys_content_and_end():
    (call,) = join_parts([request("a"), replace(reply("x", began_ns=10), response_id="r")])
    assert (call.step_name, call.response_id, call.choices) == ("step of a", "r", REPLY)
    assert (call.span.start_ns, call.span.end_ns) == (0, 510)
    assert not call.is_part


def test_a_part_below_its_call_adds_what_the_call_lacks_and_its_faults_explain_what_is_missing():
    call = replace(request("a"), choices=REPLY, sampling={"temperature": 0.5})
    below = Reading(
        span("x", parent="a", scope="two"), "two", choices=REPLY, prompt_token_ids=[1], is_part=True
    )
    (whole,) = join_parts([below, call])
    assert (whole.prompt_token_ids, whole.sampling, whole.messages) == ([1], {"temperature": 0.5}, ASKED)
    (whole,) = join_parts([replace(below, faults=("unreadable: x",)), call])
    assert (whole.prompt_token_ids, whole.faults, whole.token_losses) == (None, (), ("unreadable: x",))


def test_the_traces_of_one_call_are_one_session(tmp_path):
    """Without a span above them, Logfire's request and reply are traces of their own."""
    store = FileStore(tmp_path / "spans.duckdb")
    report = ingest([FIXTURES / "logfire_openai" / "stream.otlp.jsonl"], store)
    assert (report.traces, report.calls, report.by_grade) == (2, 1, {"text": 1})
    assert report.joined_by == {"one call in several traces": 1}
    (call,) = calls_of(store)
    assert len(call.trace_ids) == 2
    (again,) = calls_of(store, [str(call.rollout_id)])
    assert again == call
    store.close()
