"""Spans that come live are as good as ingested ones: their calls, rollouts and rewards are in the tables."""

import threading
from dataclasses import replace

import pytest

from spangrad.adapters import accounts
from spangrad.adapters.accounts import account_rollouts, account_traces, account_unread, keep_accounts
from spangrad.adapters.calls import calls_of
from spangrad.adapters.dialects import DIALECTS, recognise
from spangrad.adapters.ingest import ingest
from spangrad.store.file_store import FileStore
from spangrad.store.otlp import encode_logs, encode_request, json_logs_to_protobuf, json_to_protobuf
from spangrad.store.records import LogRecord, Rollout, SpanEvent
from spangrad.tracer import conventions as c
from tests.adapters.building import span, text_attributes, token_attributes
from tests.adapters.captured import FIXTURES
from tests.waiting import wait_until

FILES = sorted(FIXTURES.glob("*/multi_turn.otlp.jsonl"))
TABLES = ("calls", "sessions", "call_keys", "rewards")
COLLECTOR = FIXTURES / "exports" / "otel_collector"


@pytest.fixture
def store(tmp_path):
    with FileStore(tmp_path / "store.duckdb") as opened:
        yield opened


def send(store, *paths):
    """A collector's lines, each a request of its own."""
    for line in (line for path in paths for line in path.read_bytes().splitlines() if line):
        if b'"resourceLogs"' in line:
            store.put_logs(json_logs_to_protobuf(line))
        else:
            store.put_otlp(json_to_protobuf(line))


def tables(store):
    return {name: store.query(f"SELECT * FROM {name} ORDER BY ALL") for name in TABLES}


def call(span_id="a", **more):
    return span(span_id, attributes=text_attributes(**more.pop("attributes", {})), **more)


def gateway(span_id="g", parent: str | None = "a", **more):
    return span(
        span_id,
        parent=parent,
        scope=c.SCOPE_GATEWAY,
        start_ns=2,
        end_ns=8,
        attributes=text_attributes() | token_attributes(),
        **more,
    )


def verdict(judged, value=0.5):
    attributes = {c.REWARD_VALUE: value}
    return encode_logs(
        [LogRecord(judged.trace_id, judged.span_id, 7, 9, c.REWARD_EVENT, attributes=attributes)]
    )


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.parent.name)
def test_live_spans_are_as_good_as_ingested_ones(store, tmp_path, path):
    send(store, path)
    told = account_unread(store)
    with FileStore(tmp_path / "ingested.duckdb") as other:
        report = ingest([path], other)
        assert tables(store) == tables(other)
        assert [rollout.rollout_id for rollout in store.rollouts()] == [
            r.rollout_id for r in other.rollouts()
        ]
    assert (told.calls, told.by_grade, told.by_reason) == (report.calls, report.by_grade, report.by_reason)
    assert store.unread_traces() == []


def test_reading_again_changes_nothing(store):
    send(store, *FILES[:3])
    account_unread(store)
    before = tables(store)
    send(store, *FILES[:3])
    assert len(store.unread_traces()) > 0
    account_unread(store)
    assert tables(store) == before


def test_a_span_that_comes_later_leaves_no_second_account_of_its_call(store):
    store.put_otlp(encode_request([gateway()]))
    account_unread(store)
    assert store.query("SELECT span_id, grade FROM calls") == [
        {"span_id": gateway().span_id, "grade": "exact"}
    ]
    store.put_otlp(encode_request([call()]))
    account_unread(store)
    for table in ("calls", "call_keys"):
        assert store.query(f"SELECT call_id FROM {table}") == [
            {"call_id": f"{call().trace_id}-{call().span_id}"}
        ]


def test_a_rollouts_traces_are_read_together(store):
    named = {c.ROLLOUT_ID: "r"}
    client = call(attributes=named, end_ns=10)
    store.put_otlp(encode_request([client]))
    account_unread(store)
    apart = gateway(parent=None, trace="2")
    store.put_otlp(encode_request([replace(apart, attributes={**apart.attributes, **named})]))
    account_unread(store)
    rows = store.query("SELECT call_id, rollout_id, grade FROM calls")
    assert [(row["rollout_id"], row["grade"]) for row in rows] == [("r", "exact")]
    assert rows[0]["call_id"] == calls_of(store, ["r"])[0].call_id


def test_a_trainers_rollouts_are_read_when_it_asks(store):
    store.enqueue([Rollout("r"), Rollout("other")])
    mine = call(attributes={c.ROLLOUT_ID: "r", c.ATTEMPT: 0})
    theirs = call("b", trace="2", attributes={c.ROLLOUT_ID: "other", c.ATTEMPT: 0})
    store.put_otlp(encode_request([mine, theirs]))
    told = account_rollouts(store, ["r"])
    assert (told.calls, [one.trace_id for one in store.unread_traces()]) == (1, [theirs.trace_id])
    assert account_rollouts(store, ["r"]).traces == 0


def test_a_session_that_goes_on_is_known_to_the_end(store):
    store.put_otlp(encode_request([call()]))
    account_unread(store)
    [rollout] = store.rollouts()
    store.put_otlp(encode_request([call("b", start_ns=100, status_code=2, status_message="out of paper")]))
    account_unread(store)
    [later] = store.rollouts()
    assert (later.rollout_id, later.ended_ns) == (rollout.rollout_id, 110)
    assert later.error == "out of paper"


@pytest.mark.parametrize("order", [("read", "judged"), ("judged", "read")])
def test_a_live_verdict_rewards_the_rollout_that_its_span_turns_out_to_be_of(store, order):
    send(store, COLLECTOR / "traces.jsonl")
    for step in order:
        if step == "read":
            account_unread(store)
        else:
            send(store, COLLECTOR / "evaluation_results.logs.jsonl")
    rollouts = {one.call_id: one.rollout_id for one in calls_of(store)}
    rewards = store.rewards()
    assert len(rewards) == 2
    assert [rollouts[reward.call_id] for reward in rewards] == [reward.rollout_id for reward in rewards]


def test_a_verdict_waits_until_the_call_is_known_as_one(store):
    def inference(span_id, start_ns):
        attributes = {"openinference.span.kind": "LLM", "llm.model_name": "m", "input.value": "hi"}
        return span(span_id, scope="openinference.x", start_ns=start_ns, attributes=attributes)

    first, second = inference("a", 0), inference("b", 100)
    store.put_otlp(encode_request([first]))
    account_unread(store)
    store.put_otlp(encode_request([second]))  # its trace has a rollout already
    store.put_logs(verdict(second))
    assert store.rewards() == []
    account_unread(store)
    [reward] = store.rewards()
    assert reward.call_id == f"{second.trace_id}-{second.span_id}"


def test_an_event_of_a_foreign_span_rewards_its_session(store):
    event = SpanEvent(c.REWARD_EVENT, 5, {c.REWARD_VALUE: 0.25, c.REWARD_NAME: "polite"})
    store.put_otlp(encode_request([replace(call(), events=(event,))]))
    account_unread(store)
    [reward] = store.rewards()
    assert (reward.rollout_id, reward.name, reward.value) == (call().trace_id, "polite", 0.25)
    account_traces(store, [call().trace_id])
    assert len(store.rewards()) == 1


def test_a_trace_that_no_reader_survives_costs_no_other(store, monkeypatch, caplog):
    name = str(recognise(call()))
    dialect = DIALECTS[name]

    def read(told):
        if told.trace_id.endswith("7"):
            raise RuntimeError("a form that nobody foresaw")
        return dialect.read(told)

    monkeypatch.setitem(DIALECTS, name, replace(dialect, read=read))
    spans = [call(trace=str(number), start_ns=100 * number) for number in range(1, 10)]
    store.put_otlp(encode_request(spans))
    told = account_unread(store)
    assert (told.calls, told.unreadable, store.unread_traces()) == (8, 1, [])
    assert f"trace {spans[6].trace_id} can't be read" in caplog.text


def test_many_traces_are_read_some_at_a_time(store, monkeypatch):
    monkeypatch.setattr(accounts, "CONTENT_AT_ONCE", 1000)
    spans = [call(trace=str(number), start_ns=100 * number) for number in range(1, 100)]
    store.put_otlp(encode_request(spans))
    assert account_unread(store).calls == 99
    assert len(store.query("SELECT 1 FROM calls")) == 99


@pytest.mark.parametrize("is_late", [False, True])
def test_a_hub_reads_what_is_quiet_and_at_its_end_the_rest(store, is_late):
    stop = threading.Event()
    quiet_s = 3600.0 if is_late else 0.0
    thread = threading.Thread(target=keep_accounts, args=(store, stop), kwargs={"quiet_s": quiet_s})
    thread.start()
    try:
        store.put_otlp(encode_request([call()]))
        if not is_late:
            wait_until(lambda: store.query("SELECT 1 FROM calls"))
        else:
            assert store.query("SELECT 1 FROM calls") == []
    finally:
        stop.set()
        thread.join(60)
    assert len(store.query("SELECT 1 FROM calls")) == 1
    assert store.unread_traces() == []


def test_a_hub_says_whose_calls_nobody_reads_and_not_for_each(store, caplog):
    stop = threading.Event()
    thread = threading.Thread(target=keep_accounts, args=(store, stop), kwargs={"quiet_s": 0.0})
    thread.start()
    try:
        for number in range(1, 4):
            stray = span(trace=str(number), scope="acme", attributes={c.OPERATION_NAME: "chat"})
            store.put_otlp(encode_request([stray]))
            wait_until(lambda: store.unread_traces() == [])
    finally:
        stop.set()
        thread.join(60)
    [told] = [record.getMessage() for record in caplog.records if "no known dialect" in record.getMessage()]
    assert "model calls of scope 'acme' is in no known dialect (1 since" in told


def test_ingest_counts_evaluations_in_log_records(store, tmp_path):
    nothing = tmp_path / "label.pb"
    attributes = {"gen_ai.evaluation.score.label": "pass"}
    nothing.write_bytes(encode_logs([LogRecord(None, None, 7, 9, c.REWARD_EVENT, attributes=attributes)]))
    paths = [COLLECTOR / "traces.jsonl", COLLECTOR / "evaluation_results.logs.jsonl", nothing]
    report = ingest(paths, store)
    assert (report.scores, report.new_rewards, report.scores_left_out) == (3, 2, {"no number": 1})
    again = ingest(paths, store)
    assert (again.scores, again.new_rewards) == (3, 0)
