"""Answers as Arrow, from a file and from a hub that goes on writing."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa  # type: ignore[import-untyped]
import pytest

from spangrad.errors import HubUnreachableError, PermissionDeniedError, StoreError
from spangrad.store.arrow import ARROW_TYPE, answer_from_ipc, ipc_from_answer
from spangrad.store.client import HubClient
from spangrad.store.file_store import FileStore
from spangrad.store.keys import Keys
from tests.store.building import conversation, new_trace, request
from tests.store.hub_process import HubProcess
from tests.waiting import wait_until

TYPES = """
SELECT 18446744073709551615::UBIGINT AS big, (-9223372036854775807 - 1)::BIGINT AS small,
  NULL::UBIGINT AS none, 12345678901234567890.123456789::DECIMAL(38, 9) AS money, [1, NULL, 3] AS list,
  []::VARCHAR[] AS empty, {'a': [{'b': 'x'}, NULL]} AS nested, MAP {'reward': 0.1::DOUBLE} AS map,
  '\\x00\\xFF'::BLOB AS bytes, make_timestamp_ns(1764500000123456789) AS time,
  TIMESTAMPTZ '2026-11-30 12:00:00+00' AS zoned, DATE '2026-11-30' AS day, true AS yes, NULL AS nothing,
  0.1::FLOAT AS real, 'nan'::DOUBLE AS nan
"""


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    body = request(conversation("ab" * 16, "r", 3))
    folder = tmp_path_factory.mktemp("arrow")
    with ExitStack() as stack:
        hub = stack.enter_context(HubProcess(folder / "hub.duckdb"))
        client = stack.enter_context(HubClient(hub.url))
        file = stack.enter_context(FileStore(folder / "file.duckdb"))
        for store in (file, client):
            store.put_otlp(body)
        yield {"file": file, "hub": client}


@pytest.fixture(params=["file", "hub"])
def store(request: pytest.FixtureRequest, stores: dict[str, Any]) -> Any:
    return stores[request.param]


def table(store: Any, sql: str, parameters: Any = (), **options: Any) -> pa.Table:
    with store.query_arrow(sql, parameters, **options) as answer:
        return answer.read_all()


def test_values_are_exact(store: Any) -> None:
    found = table(store, TYPES)
    assert found.schema.field("big").type == pa.uint64()
    assert found.schema.field("time").type == pa.timestamp("ns")
    assert found.column("time").cast(pa.int64()).to_pylist() == [1764500000123456789]
    (row,) = found.drop_columns(["time"]).to_pylist()
    assert (row["big"], row["small"], row["none"]) == (2**64 - 1, -(2**63), None)
    assert row["money"] == Decimal("12345678901234567890.123456789")
    assert (row["list"], row["empty"], row["nested"]) == ([1, None, 3], [], {"a": [{"b": "x"}, None]})
    assert (row["map"], row["bytes"]) == ([("reward", 0.1)], b"\x00\xff")
    assert row["zoned"] == datetime(2026, 11, 30, 12, tzinfo=UTC)
    assert (row["day"], row["yes"], row["nothing"]) == (date(2026, 11, 30), True, None)
    assert row["real"] != 0.1
    assert row["nan"] != row["nan"]


def test_a_file_and_a_hub_answer_alike(stores: dict[str, Any]) -> None:
    for sql in (
        TYPES,
        "SELECT * FROM spans ORDER BY start_ns",
        "DESCRIBE spans",
        "SELECT 1 AS a WHERE false",
        "SELECT 1 AS a, 2 AS a, 3 AS A",
    ):
        of_file, of_hub = (table(stores[name], sql) for name in ("file", "hub"))
        assert of_file.schema == of_hub.schema
        assert repr(of_file.to_pydict()) == repr(of_hub.to_pydict())
    for store in stores.values():
        assert store.query(sql) == of_file.to_pylist() == [{"a": 1, "a_1": 2, "A_2": 3}]


def test_any_number_of_rows_and_parameters_by_place_and_by_name(store: Any) -> None:
    rows = table(store, "SELECT i FROM range(?) t(i)", [123_457]).column("i").to_pylist()
    assert rows == list(range(123_457))
    assert table(store, "SELECT $a AS a", {"a": "x' OR 1=1"}).to_pylist() == [{"a": "x' OR 1=1"}]


@pytest.mark.parametrize(
    "sql",
    [
        "DELETE FROM spans",
        "WITH x AS (DELETE FROM spans RETURNING *) SELECT * FROM x",
        "EXPLAIN ANALYZE DELETE FROM spans",
        "SELECT 1; DELETE FROM spans",
        "COPY spans TO 'stolen.csv'",
        "SELECT * FROM read_text('/etc/passwd')",
        "SET enable_external_access = true",
        "selct",
        "SELECT * FROM nosuch",
    ],
)
def test_what_does_more_than_read_is_refused_before_the_answer_begins(store: Any, sql: str) -> None:
    with pytest.raises(StoreError) as raised:
        table(store, sql)
    assert not isinstance(raised.value, HubUnreachableError)
    assert "\n" not in str(raised.value)
    assert table(store, "SELECT count(*) AS n FROM spans").to_pylist() == [{"n": 3}]


def test_an_answer_that_takes_too_long_is_stopped(store: Any) -> None:
    endless = "SELECT count(*) FROM range(10000000) a, range(10000000) b"
    with pytest.raises(StoreError, match=r"took longer than 0\.2 s and was stopped"):
        table(store, endless, timeout_s=0.2)


FAILS_LATE = """
SELECT repeat('x', 1000) || CASE WHEN i = 90000 THEN error('boom')::INT ELSE i END AS i
FROM range(100000) t(i)
"""


def test_an_error_in_the_middle_is_the_same_error_everywhere(store: Any) -> None:
    with store.query_arrow(FAILS_LATE) as answer:
        assert len(answer.read_next_batch())
        with pytest.raises(StoreError, match="boom") as raised:
            answer.read_all()
    assert not isinstance(raised.value, HubUnreachableError)
    assert table(store, "SELECT 1 AS a").to_pylist() == [{"a": 1}]


def test_a_part_is_not_taken_for_the_whole_by_others(stores: dict[str, Any]) -> None:
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.post(f"{stores['hub'].url}/api/query", json={"sql": FAILS_LATE}, headers={"accept": ARROW_TYPE})


def test_whoever_does_not_accept_arrow_gets_json(stores: dict[str, Any]) -> None:
    asked = {"sql": "SELECT 1 AS a"}
    url = f"{stores['hub'].url}/api/query"
    assert httpx.post(url, json=asked).json() == {"result": [{"a": 1}]}
    found = httpx.post(url, json=asked, headers={"accept": f"text/html, {ARROW_TYPE}"})
    assert found.headers["content-type"] == ARROW_TYPE
    assert pa.ipc.open_stream(found.content).read_all().to_pylist() == [{"a": 1}]
    refused = httpx.post(url, json=asked | {"colour": 1}, headers={"accept": ARROW_TYPE})
    assert (refused.status_code, refused.json()["error"]) == (400, "StoreError")


def test_an_answer_beyond_its_bound_ends_with_an_error(stores: dict[str, Any]) -> None:
    answer = stores["file"].query_arrow("SELECT i FROM range(100000) t(i)")
    sent: list[bytes] = []
    with pytest.raises(StoreError, match="more than 100000 bytes"):
        sent.extend(ipc_from_answer(answer, max_bytes=100_000))
    with pytest.raises(StoreError, match="more than 100000 bytes"):
        answer_from_ipc(sent).read_all()
    assert sum(map(len, sent)) < 200_000


@pytest.mark.slow
def test_an_agents_key_reads_nothing(tmp_path: Path) -> None:
    keys = Keys.generate()
    keys.save(tmp_path / "keys.json")
    with HubProcess(tmp_path / "s.duckdb", keys=tmp_path / "keys.json") as hub:
        for key in (None, keys.agent):
            with HubClient(hub.url, key) as client, pytest.raises(PermissionDeniedError):
                table(client, "SELECT 1 AS a")
        with HubClient(hub.url, keys.evaluator) as client:
            assert table(client, "SELECT 1 AS a").to_pylist() == [{"a": 1}]


@pytest.mark.slow
def test_a_hub_writes_while_it_answers(tmp_path: Path) -> None:
    sent, stop = [0], threading.Event()

    def write(url: str) -> None:
        with HubClient(url) as client:
            while not stop.is_set():
                assert client.put_otlp(request(conversation(new_trace(), f"r-{sent[0]}", 4))) == 4
                sent[0] += 1

    with HubProcess(tmp_path / "s.duckdb") as hub, HubClient(hub.url) as client:
        writer = threading.Thread(target=write, args=(hub.url,))
        writer.start()
        try:
            wait_until(lambda: sent[0] > 3, 60)
            with client.query_arrow("SELECT trace_id, span_id FROM spans, range(20000)") as answer:
                first, before = answer.read_next_batch(), sent[0]
                wait_until(lambda: sent[0] > before + 5, 60)  # it is being answered, and others write
                rest = answer.read_all()
            spans = set(zip(*pa.concat_tables([pa.table(first), rest]).to_pydict().values(), strict=True))
        finally:
            stop.set()
            writer.join()
        assert len(first) + len(rest) == len(spans) * 20_000  # one state, whole
        assert len(spans) % 4 == 0
        assert 4 <= len(spans) <= 4 * (before + 1)
        assert table(client, "SELECT count(*) AS n FROM spans").to_pylist() == [{"n": 4 * sent[0]}]


@pytest.mark.slow
def test_a_hub_holds_no_more_than_a_part_of_an_answer(tmp_path: Path) -> None:
    with HubProcess(tmp_path / "s.duckdb") as hub, HubClient(hub.url) as client:
        table(client, "SELECT repeat('x', 1000) AS x FROM range(1000)")
        before = peak_bytes(hub.process.pid)
        with client.query_arrow("SELECT repeat('x', 1000) || i AS x FROM range(300000) t(i)") as answer:
            assert sum(batch.nbytes for batch in answer) > 300 * 10**6
        assert peak_bytes(hub.process.pid) - before < 100 * 10**6


@pytest.mark.slow
def test_a_reader_that_stops_reading_is_left_and_holds_nothing(tmp_path: Path) -> None:
    sql = "SELECT repeat('x', 1000) || i AS x FROM range(1000000) t(i)"
    body = json.dumps({"sql": sql, "timeout_s": 0.5}).encode()
    head = f"POST /api/query HTTP/1.1\r\nhost: 127.0.0.1\r\naccept: {ARROW_TYPE}\r\n"
    with HubProcess(tmp_path / "s.duckdb") as hub:
        with socket.create_connection(("127.0.0.1", hub.port)) as asked:
            asked.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            time.sleep(1.5)
            asked.settimeout(60)
            received = b"".join(iter(lambda: asked.recv(2**20), b""))
        assert received.startswith(b"HTTP/1.1 200 OK")
        assert len(received) < 100 * 10**6
        assert not received.endswith(b"0\r\n\r\n")  # a part, that nobody takes for the whole
        assert hub.terminate() == 0


def peak_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024
