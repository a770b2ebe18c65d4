"""Log records in a store: lossless, once, durable, by whose key."""

import gzip
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import duckdb
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse

from spangrad.errors import PermissionDeniedError, StoreError
from spangrad.store.client import HubClient
from spangrad.store.file_store import FileStore
from spangrad.store.keys import Keys
from spangrad.store.migrations import MIGRATIONS
from spangrad.store.otlp import decode_logs, encode_logs, json_logs_to_protobuf
from spangrad.store.records import LogRecord, RewardAuthor
from tests.store.building import conversation, request, span
from tests.store.hub_process import HubProcess

EVENTS = Path(__file__).parents[1] / "adapters/fixtures/exports/otel_collector/content_on_events.logs.jsonl"
FULL = LogRecord(
    trace_id="ab" * 16,
    span_id="cd" * 8,
    time_ns=2**64 - 1,
    observed_ns=5,
    event_name="gen_ai.client.inference.operation.details",
    body={"text": "café 🍞", "bytes": b"\x00\xff", "list": [1, 1.0, True, None, float("inf")], "$x": 1},
    attributes={"n": 1, "f": 1.0, "$bytes": "no tag", "nested": {"a": [{"b": b""}]}},
    severity_number=9,
    severity_text="INFO",
    scope="judge",
    scope_version="1",
    scope_attributes={"k": "v"},
    schema_url="s",
    resource={"service.name": "agent"},
    resource_schema_url="r",
    flags=2**32 - 1,
    dropped_attributes=3,
)
BARE = LogRecord(None, None, 0, 0, "")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileStore]:
    with FileStore(tmp_path / "s.duckdb") as opened:
        yield opened


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Keys, Path]:
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    made = Keys.generate()
    made.save(path)
    return made, path


def test_records_come_back_as_they_came(store: FileStore) -> None:
    assert store.put_logs(encode_logs([FULL, BARE])) == 2
    assert list(store.logs()) == [FULL, BARE]
    assert repr(list(store.logs())) == repr([FULL, BARE])  # 1 and 1.0 are equal, and not the same


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"])) | st.binary(),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(body=_VALUES, value=_VALUES)
def test_any_record_survives_otlp(body: object, value: object) -> None:
    record = replace(FULL, body=body, attributes={"k": value})
    assert decode_logs(encode_logs([record, BARE])) == [record, BARE]


def test_the_same_batch_twice_is_stored_once(store: FileStore) -> None:
    batch = encode_logs([FULL, BARE, FULL])
    assert (store.put_logs(batch), store.put_logs(batch)) == (2, 0)
    assert store.stats()["logs"] == 2


def test_real_records_are_found_by_rollout_and_by_trace(store: FileStore) -> None:
    spans = conversation("ab" * 16, "r-1", 2)
    store.put_otlp(request(spans))
    mine = replace(FULL, span_id=spans[1].span_id)
    store.put_logs(encode_logs([mine, FULL, BARE]))
    assert list(store.logs(["r-1"])) == [mine]
    assert len(list(store.logs(trace_ids=["ab" * 16]))) == 2
    assert list(store.logs(["r-2"], trace_ids=[])) == []
    assert list(store.logs([])) == []


def test_records_of_a_trace_are_in_order_of_time(store: FileStore) -> None:
    told = [replace(FULL, time_ns=time, observed_ns=seen) for time, seen in ((3, 9), (0, 2), (1, 9))]
    store.put_logs(encode_logs(told))
    assert [(log.time_ns, log.observed_ns) for log in store.logs()] == [(1, 9), (0, 2), (3, 9)]


def test_an_evaluation_that_an_agent_sent_first_does_not_stand_in_for_the_evaluators(
    store: FileStore,
) -> None:
    batch = encode_logs([replace(FULL, event_name="gen_ai.evaluation.result"), BARE])
    assert store.put_logs(batch, author=RewardAuthor.AGENT) == 2
    assert store.put_logs(batch, author=RewardAuthor.EVALUATOR) == 1
    authors = store.query("SELECT author FROM logs WHERE trace_id IS NOT NULL ORDER BY author")
    assert [row["author"] for row in authors] == ["agent", "evaluator"]


def test_what_is_no_logs_request_is_refused(store: FileStore) -> None:
    with pytest.raises(StoreError, match="no OTLP ExportLogsServiceRequest"):
        store.put_logs(b"\xff\xff\xff")


def test_a_file_of_before_logs_takes_them_once_it_is_brought_up_to_date(tmp_path: Path) -> None:
    path = tmp_path / "old.duckdb"
    with duckdb.connect(str(path)) as con:
        con.execute("CREATE TABLE schema_migrations (version INTEGER, name VARCHAR, applied_ns BIGINT)")
        for version, step in enumerate(MIGRATIONS[:2], start=1):
            step(con)
            con.execute("INSERT INTO schema_migrations VALUES (?, '', 0)", [version])
    with FileStore(path) as migrated:
        assert list(migrated.logs()) == []
        assert migrated.put_logs(encode_logs([FULL])) == 1


@pytest.mark.slow
def test_a_hub_takes_logs_as_protobuf_and_json_packed_or_not(tmp_path: Path) -> None:
    line = EVENTS.read_bytes().splitlines()[0]
    protobuf = json_logs_to_protobuf(line)
    with HubProcess(tmp_path / "s.duckdb") as hub:
        for body, kind, new in (
            (line, "application/json; charset=utf-8", "1"),
            (protobuf, "application/x-protobuf", "0"),
            (gzip.compress(line), "application/json", "0"),
            (gzip.compress(protobuf), "application/x-protobuf", "0"),
        ):
            headers = {"content-type": kind}
            if body[:2] == b"\x1f\x8b":
                headers["content-encoding"] = "gzip"
            answer = httpx.post(f"{hub.url}/v1/logs", content=body, headers=headers)
            assert (answer.status_code, answer.headers["x-spangrad-new-logs"]) == (200, new)
            if "json" in kind:
                assert answer.json() == {}
            else:
                assert ExportLogsServiceResponse.FromString(answer.content) == ExportLogsServiceResponse()
        bad = httpx.post(f"{hub.url}/v1/logs", content=b"{", headers={"content-type": "application/json"})
        assert bad.status_code == 400
        with HubClient(hub.url) as client:
            assert list(client.logs()) == decode_logs(protobuf)
            assert client.put_logs(encode_logs([FULL, BARE])) == 2
            assert list(client.logs(trace_ids=[str(FULL.trace_id)])) == [FULL]
            assert list(client.logs(["nobody"])) == []
            with pytest.raises(StoreError, match="trace_ids"):
                list(client.logs(trace_ids=[1]))  # type: ignore[list-item]


@pytest.mark.slow
def test_acknowledged_logs_survive_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "s.duckdb"
    hub = HubProcess(path)
    sent = [replace(FULL, time_ns=i) for i in range(1, 21)]
    with HubClient(hub.url) as client:
        for record in sent:
            assert client.put_logs(encode_logs([record])) == 1
    hub.kill()
    with FileStore(path) as store:
        assert list(store.logs()) == sent


@pytest.mark.slow
def test_an_agents_key_sends_logs_and_reads_none(tmp_path: Path, keys: tuple[Keys, Path]) -> None:
    with HubProcess(tmp_path / "s.duckdb", keys=keys[1]) as hub:
        with HubClient(hub.url, keys[0].agent) as agent:
            assert agent.put_logs(encode_logs([FULL])) == 1
            with pytest.raises(PermissionDeniedError):
                list(agent.logs())
        with HubClient(hub.url, keys[0].evaluator) as evaluator:
            assert list(evaluator.logs()) == [FULL]
            assert evaluator.query("SELECT author FROM logs") == [{"author": "agent"}]
        assert httpx.post(f"{hub.url}/v1/logs", content=b"").status_code == 401


@pytest.mark.slow
def test_traces_of_a_plain_sender_are_taken_as_json_and_packed(tmp_path: Path) -> None:
    """What the collector's otlphttp exporter sends: gzip, either encoding."""
    fixtures = EVENTS.parent
    lines = (fixtures / "traces.jsonl").read_bytes().splitlines()
    with HubProcess(tmp_path / "s.duckdb") as hub:
        new = 0
        for line in lines:
            headers = {"content-type": "application/json", "content-encoding": "gzip"}
            answer = httpx.post(f"{hub.url}/v1/traces", content=gzip.compress(line), headers=headers)
            assert answer.status_code == 200
            new += int(answer.headers["x-spangrad-new-spans"])
        with HubClient(hub.url) as client:
            assert client.put_otlp(request([span("ef" * 16)])) == 1
            ids = {found.span_id for found in client.spans()}
    told = [json.loads(line)["resourceSpans"][0]["scopeSpans"][0]["spans"] for line in lines]
    assert new == sum(map(len, told))
    assert ids >= {each["spanId"] for spans in told for each in spans}
