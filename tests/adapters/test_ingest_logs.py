"""Log records of trace files: stored beside spans, handed to readers, counted where nobody claims them."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from spangrad.adapters.calls import calls_from_spans, calls_of
from spangrad.adapters.exports.rewards import NO_NUMBER, SAME_SCORE
from spangrad.adapters.ingest import REPEATED_LOGS, ingest
from spangrad.adapters.log_events import BODY, with_logs
from spangrad.store.file_store import FileStore
from spangrad.store.otlp import decode_logs, encode_logs, json_logs_to_protobuf, json_to_protobuf
from spangrad.store.records import LogRecord, RewardAuthor
from spangrad.tracer.conventions import REWARD_EVENT, REWARD_VALUE
from tests.adapters.captured import FIXTURES, captured

LEGACY = FIXTURES / "openai_v2_legacy" / "multi_turn.otlp.jsonl"
COLLECTOR = FIXTURES / "exports" / "otel_collector"


@pytest.fixture
def store(tmp_path):
    with FileStore(tmp_path / "store.duckdb") as opened:
        yield opened


def logs_in(path: Path) -> list[LogRecord]:
    lines = [line for line in path.read_bytes().splitlines() if b'"resourceLogs"' in line]
    return [record for line in lines for record in decode_logs(json_logs_to_protobuf(line))]


def test_spans_and_records_of_a_file_are_all_stored_and_once(store):
    told = logs_in(LEGACY)
    report = ingest([LEGACY], store)
    assert (report.logs, report.new_logs, report.unclaimed_logs) == (len(told), len(told), 0)
    assert sorted(store.logs(), key=repr) == sorted(told, key=repr)
    again = ingest([LEGACY], store)
    assert (again.logs, again.new_logs) == (len(told), 0)
    assert again.faults[REPEATED_LOGS].count == len(told)


def test_a_stored_call_is_read_with_its_records_as_the_file_told_them(store):
    ingest([LEGACY], store)
    stored = with_logs(store.spans(), store.logs())
    told = [dataclasses.replace(span, rollout_id=None) for span in stored]  # which its session gave it
    assert sorted(told, key=lambda s: s.start_ns) == sorted(
        captured("openai_v2_legacy/multi_turn"), key=lambda s: s.start_ns
    )
    bodies = [event.attributes[BODY] for span in told for event in span.events]
    assert any("picnic" in json.dumps(body) for body in bodies)


def test_calls_of_a_store_are_those_of_the_file(store):
    for folder in ("genai_openai_events", "openai_v2_legacy"):
        ingest([FIXTURES / folder / "multi_turn.otlp.jsonl"], store)
    told = [*captured("genai_openai_events/multi_turn"), *captured("openai_v2_legacy/multi_turn")]
    of_file = calls_from_spans(told)
    assert [dataclasses.replace(call, rollout_id=None) for call in calls_of(store)] == of_file
    stored = calls_from_spans(store.spans(), store.logs())
    assert [dataclasses.replace(call, rollout_id=None) for call in stored] == of_file


@pytest.mark.parametrize("order", [("traces", "logs"), ("logs", "traces")])
def test_content_in_a_file_of_its_own_is_joined_whichever_comes_first(store, order):
    first, second = (COLLECTOR / f"content_on_events.{signal}.jsonl" for signal in order)
    ingest([first], store)
    report = ingest([second], store)
    assert (report.calls, report.unclaimed_logs) == (4, 0)
    assert len(list(store.logs())) == 4


def test_records_that_no_span_claims_are_counted(store, tmp_path):
    abandoned = FIXTURES / "openai_v2_legacy" / "stream_abandoned.otlp.jsonl"
    lone = tmp_path / "lone.pb"
    lone.write_bytes(encode_logs([LogRecord(None, None, 5, 5, "", body="started")]))
    told = len(logs_in(abandoned))
    shutil.copy(abandoned, tmp_path)
    report = ingest([tmp_path / abandoned.name, lone], store)
    claimed = {(span.trace_id, span.span_id) for span in store.spans()}
    expected = sum((log.trace_id, log.span_id) not in claimed for log in store.logs())
    assert report.logs == told + 1
    assert report.unclaimed_logs == expected > 0


def test_records_in_protobuf_are_told_from_spans(store, tmp_path):
    lines = LEGACY.read_bytes().splitlines()
    bodies = [
        json_logs_to_protobuf(line) if b'"resourceLogs"' in line else json_to_protobuf(line) for line in lines
    ]
    file = tmp_path / "mixed.pb"
    file.write_bytes(b"".join(len(body).to_bytes(4, "big") + body for body in bodies))
    report = ingest([file], store)
    assert (report.logs, report.spans, report.broken) == (len(logs_in(LEGACY)), 4, ())


def test_metrics_in_protobuf_are_neither(store, tmp_path):
    request = ExportMetricsServiceRequest()
    metric = (
        request.resource_metrics.add().scope_metrics.add().metrics.add(name="n", description="d", unit="s")
    )
    metric.gauge.data_points.add(time_unix_nano=1, as_int=3)
    file = tmp_path / "metrics.pb"
    file.write_bytes(request.SerializeToString())
    report = ingest([file], store)
    assert (report.logs, report.spans, len(report.broken)) == (0, 0, 1)


def test_a_broken_line_of_logs_costs_no_other(store, tmp_path):
    lines = LEGACY.read_text().splitlines()
    file = tmp_path / "logs.jsonl"
    file.write_text("\n".join([*lines, '{"resourceLogs": [{"scopeLogs": 3}]}', '{"resourceLogs": [']))
    report = ingest([file], store)
    assert [broken.line for broken in report.broken] == [len(lines) + 2]
    assert f"{file}:{len(lines) + 1}: a list of scopeLogs" in report.faults["wrong types"].example
    assert report.logs == len(logs_in(LEGACY))


@pytest.mark.parametrize(
    "order", [("traces", "evaluation_results.logs"), ("evaluation_results.logs", "traces")]
)
def test_evaluations_of_traces_that_name_no_rollout_are_rewards_of_their_session(store, order):
    for name in order:
        ingest([COLLECTOR / f"{name}.jsonl"], store)
    judged = {
        f"{log.trace_id}-{log.span_id}": log for log in logs_in(COLLECTOR / "evaluation_results.logs.jsonl")
    }
    rollouts = {call.call_id: call.rollout_id for call in calls_of(store)}
    assert {(r.rollout_id, r.call_id, r.name, r.value) for r in store.rewards()} == {
        (rollouts[call_id], call_id, "task_success", log.attributes["gen_ai.evaluation.score.value"])
        for call_id, log in judged.items()
    }
    again = ingest([COLLECTOR / "traces.jsonl", COLLECTOR / "evaluation_results.logs.jsonl"], store)
    assert len(store.rewards()) == 2
    assert (again.scores, again.new_rewards, again.scores_left_out) == (2, 0, {SAME_SCORE: 2})


def test_of_evaluations_each_is_a_new_reward_or_left_out_for_one_reason(store, tmp_path):
    def verdict(**attributes):
        return LogRecord("f" * 32, "e" * 16, 5, 5, "", attributes={"event.name": REWARD_EVENT} | attributes)

    number, label = verdict(**{REWARD_VALUE: 0.5}), verdict(**{"gen_ai.evaluation.score.label": "good"})
    file = tmp_path / "verdicts.pb"
    file.write_bytes(encode_logs([number, number, label]))
    first, again = ingest([file], store), ingest([file], store)
    assert (first.scores, first.scores_left_out) == (3, {NO_NUMBER: 1, SAME_SCORE: 1})
    assert (again.scores, again.scores_left_out) == (3, {NO_NUMBER: 1, SAME_SCORE: 2})


def test_an_evaluation_that_names_a_response_alone_finds_its_call(store, tmp_path):
    [first, *_] = calls_from_spans(captured("genai_openai/multi_turn"))
    attributes = {"gen_ai.response.id": first.response_id, "gen_ai.evaluation.score.value": 0.25}
    file = tmp_path / "verdict.pb"
    file.write_bytes(
        encode_logs([LogRecord(None, None, 5, 5, "gen_ai.evaluation.result", attributes=attributes)])
    )
    ingest([FIXTURES / "genai_openai" / "multi_turn.otlp.jsonl", file], store)
    [reward] = store.rewards()
    assert (reward.call_id, reward.rollout_id, reward.value) == (first.call_id, first.trace_id, 0.25)


def test_an_agents_verdict_gets_no_other_author_by_ingesting(store):
    logs = COLLECTOR / "evaluation_results.logs.jsonl"
    store.put_logs(json_logs_to_protobuf(logs.read_bytes()), author=RewardAuthor.AGENT)
    ingest([COLLECTOR / "traces.jsonl"], store)
    assert [reward.author for reward in store.rewards()] == [RewardAuthor.AGENT] * 2
    ingest([logs], store)  # the operator's own
    assert [reward.author for reward in store.rewards()].count(RewardAuthor.OPERATOR) == 2
