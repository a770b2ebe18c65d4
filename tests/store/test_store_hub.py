import gzip
import os
import socket
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from spangrad.errors import (
    HubUnreachableError,
    LeaseLostError,
    PortInUseError,
    StoreError,
    StoreLockedError,
)
from spangrad.store.client import HubClient
from spangrad.store.file_store import FileStore
from spangrad.store.records import (
    Policy,
    Reward,
    Rollout,
    RolloutStatus,
    RunEvent,
    Update,
    UpdateRead,
    UpdateSample,
)
from spangrad.store.serve import serve
from tests.store.building import conversation, new_trace, request, span
from tests.store.hub_process import HubProcess
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    with HubProcess(tmp_path_factory.mktemp("hub") / "s.duckdb") as process:
        yield process


def test_a_hub_and_a_file_answer_alike(hub: HubProcess, tmp_path: Path) -> None:
    spans = conversation("ab" * 16, "alike-0", 4)
    unowned = replace(span("ab" * 16, parent=spans[0].span_id), span_id="1234567890abcdef")
    rollouts = [Rollout(f"alike-{i}", run_id="alike", task={"n": i}, max_attempts=1) for i in range(4)]
    update = Update(
        run_id="alike",
        update_index=0,
        policy_version=1,
        rollout_ids=["alike-0"],
        samples=[UpdateSample("alike-0", "c", 0, -1.5, 3, None, 2, 0.125)],
        metrics={"a/b": float("nan"), "c": 1.0},
        checkpoint="c",
        time_ns=5,
        config={"learner": {"clip_high": float("inf"), "critic": None}},
        parent="p",
        reads=[UpdateRead("alike-0", call_id="c"), UpdateRead("alike-0", reward_id="w")],
    )
    answers: list[list[Any]] = []
    with FileStore(tmp_path / "s.duckdb") as file, HubClient(hub.url) as client:
        for store in (file, client):
            seen: list[Any] = [store.enqueue(rollouts), store.enqueue(rollouts)]
            seen.append([r.task for r in store.claim(worker="w", limit=3, run_id="alike", policy_version=2)])
            seen.append(store.heartbeat([("alike-0", 0), ("alike-1", 1)], worker="w"))
            store.finish("alike-0", 0, output={"raw": b"\x00", "text": "ü"})
            store.finish("alike-1", 0, status=RolloutStatus.FAILED, error_type="E", error="e")
            seen.append([store.put_otlp(request([*spans, unowned])), store.put_otlp(request(spans))])
            seen.append(list(store.spans(["alike-0"])))
            unread = store.unread_traces(rollout_ids=["alike-0"], limit=3)
            seen.append([(one.trace_id, list(one.rollout_ids)) for one in unread])
            read = {one.trace_id: one.changed_ns for one in unread}
            stray = {"trace_id": "ab" * 16, "span_id": "cd" * 8, "scope": "acme", "attributes": "acme.model"}
            seen.append(store.put_calls([], read=read, unknown=[stray]))
            seen.append(store.query("SELECT * FROM unknown_calls"))
            seen.append(store.mark_read({one.trace_id: one.changed_ns for one in unread}))
            seen.append(store.unread_traces(rollout_ids=["alike-0"]))
            seen.append(list(store.spans(trace_ids=["cd" * 16])))
            seen.append(
                store.put_rewards([Reward("alike-0", 1.0, time_ns=9), Reward("alike-1", 0.0, time_ns=8)])
            )
            seen.append(store.rewards(["alike-0", "alike-1"]))
            seen.append([store.commit_update(update), store.commit_update(update)])
            event = RunEvent("alike", 0, "gap", 0.5, 0.1, "warn", "wide \N{EN DASH} gap", time_ns=4)
            seen += [store.put_events([event]), store.put_events([event]), store.events("alike")]
            store.put_policy(Policy("alike", 1, "p", time_ns=3))
            seen += [store.policies("alike"), repr(store.updates("alike")), repr(store.last_update("alike"))]
            seen += [len(store.updates("alike", update_index=index)) for index in (0, 1)]
            seen.append([reward.reward_id for reward in store.rewards(["alike-0", "alike-1"])])
            seen.append(store.last_update("none"))
            found = store.rollouts(run_id="alike", rollout_ids=["alike-0", "alike-1", "alike-3"], limit=9)
            seen.append([replace(r, started_ns=None, ended_ns=None, lease_until_ns=None) for r in found])
            seen.append(
                store.query("SELECT name, 1.5::DECIMAL(3, 1) AS d FROM spans WHERE name = $n", {"n": "work"})
            )
            store.claim(worker="w", run_id="alike")
            store.finish("alike-3", 0, error_type="E", retry=True, free=True)
            seen.append(store.requeue(["alike-0", "alike-1", "alike-3", "none"]))
            left = store.rollouts(rollout_ids=["alike-1", "alike-3"])
            seen.append([(r.status, r.attempt, r.max_attempts) for r in left])
            for refused in (
                lambda: store.finish("alike-1", 0, output=1),  # noqa: B023
                lambda: store.commit_update(replace(update, update_index=7)),  # noqa: B023
                lambda: store.query("DROP TABLE spans"),  # noqa: B023
            ):
                with pytest.raises(StoreError) as error:
                    refused()
                seen.append((type(error.value), str(error.value)))
            answers.append(seen)
    assert len(answers[0]) == len(answers[1])
    for of_file, of_hub in zip(*answers, strict=True):
        assert of_file == of_hub
    assert answers[0][-3][0] is LeaseLostError
    assert answers[0][-5:-3] == [1, [(RolloutStatus.QUEUED, 1, 2)] * 2]


def test_traces_are_taken_as_protobuf_compressed_and_json(hub: HubProcess) -> None:
    body = request([span(new_trace())])
    as_json = {
        "resourceSpans": [
            {"scopeSpans": [{"spans": [{"traceId": new_trace(), "spanId": "00f067aa0ba902b7", "name": "j"}]}]}
        ]
    }
    with httpx.Client(base_url=hub.url) as http:
        plain = http.post("/v1/traces", content=body, headers={"content-type": "application/x-protobuf"})
        packed = http.post("/v1/traces", content=gzip.compress(body), headers={"content-encoding": "gzip"})
        deflated = http.post(
            "/v1/traces", content=zlib.compress(body), headers={"content-encoding": "deflate"}
        )
        text = http.post("/v1/traces", json=as_json)
        partial = http.post("/v1/traces", content=request([span("00" * 16)]))
    assert [r.status_code for r in (plain, packed, deflated, text, partial)] == [200] * 5
    new = [r.headers["x-spangrad-new-spans"] for r in (plain, packed, deflated, text, partial)]
    assert new == ["1", "0", "0", "1", "0"]
    assert ExportTraceServiceResponse.FromString(plain.content) == ExportTraceServiceResponse()
    assert ExportTraceServiceResponse.FromString(partial.content).partial_success.rejected_spans == 1
    assert text.json() == {}


def test_bad_bodies_are_refused_with_a_reason(hub: HubProcess) -> None:
    big = gzip.compress(bytes(65 * 2**20), 1)
    deflate = {"content-encoding": "deflate"}
    with httpx.Client(base_url=hub.url) as http:
        answers = [
            http.post("/v1/traces", content=b"\xff\xfe garbage"),
            http.post(
                "/v1/traces", content=b"{", headers={"content-type": "application/json; charset=utf-8"}
            ),
            http.post("/v1/traces", content=b"no gzip", headers={"content-encoding": "gzip"}),
            http.post(
                "/v1/traces", content=gzip.compress(b"x" * 99)[:-9], headers={"content-encoding": "gzip"}
            ),
            http.post("/v1/traces", content=b"no zlib", headers=deflate),
            http.post("/v1/traces", content=big, headers={"content-encoding": "gzip"}),
            http.post("/v1/traces", content=zlib.compress(bytes(65 * 2**20), 1), headers=deflate),
            http.post("/v1/traces", content=b"x", headers={"content-encoding": "br"}),
            http.post("/api/claim", content=b"nonsense"),
            http.post("/api/claim", json=["worker"]),
            http.post("/api/claim", json={"worker": "w", "colour": 1}),
            http.post("/api/claim", json={"worker": "w", "limit": "many"}),
            http.post("/api/enqueue", json={"rollouts": [{"rollout_id": "x", "colour": 1}]}),
            http.post("/api/enqueue", json={"rollouts": [{"rollout_id": "x", "attempt": "zero"}]}),
            http.post("/api/rollouts", json={"status": "happy"}),
            http.post("/api/spans", json={"rollout_ids": 7}),
        ]
        assert http.get("/healthz").json()["status"] == "ok"
    assert [r.status_code for r in answers] == [400] * 5 + [413, 413, 415] + [400] * 8
    assert all(r.json()["error"] == "StoreError" and r.json()["message"] for r in answers)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("query", {"sql": 7}, "query: argument 'sql' is 7; text was expected"),
        ("query", {}, "query needs the argument 'sql', text; send it"),
        (
            "query",
            {"sql": "SELECT 1", "parameters": "x"},
            "query: argument 'parameters' is 'x'; a list or an object was expected",
        ),
        (
            "claim",
            {"worker": "w", "limit": 1.5},
            "claim: argument 'limit' is 1.5; a whole number was expected",
        ),
        (
            "claim",
            {"worker": "w", "lease_s": None},
            "claim: argument 'lease_s' is None; a number was expected",
        ),
        ("stats", {"colour": 1}, "stats has no argument 'colour'; it takes []"),
        (
            "heartbeat",
            {"rollouts": [["a", "0"]], "worker": "w"},
            "heartbeat: argument 'rollouts' is [['a', '0']]; a list of [text, a whole number] was expected",
        ),
        (
            "finish",
            {"rollout_id": "a", "attempt": 0, "retry": "no"},
            "finish: argument 'retry' is 'no'; true or false was expected",
        ),
        (
            "requeue",
            {"rollout_ids": "a"},
            "requeue: argument 'rollout_ids' is 'a'; a list of text was expected",
        ),
        (
            "rewards",
            {"rollout_ids": [1]},
            "rewards: argument 'rollout_ids' is [1]; a list of text or null was expected",
        ),
        ("spans", {"trace_ids": 7}, "spans: argument 'trace_ids' is 7; a list of text or null was expected"),
        ("put_calls", {"rows": [1]}, "put_calls: argument 'rows' is [1]; a list of an object was expected"),
        (
            "enqueue",
            {"rollouts": [{"rollout_id": "x", "attempt": "zero"}]},
            "field 'attempt' of a Rollout is 'zero'; a whole number was expected",
        ),
        (
            "put_rewards",
            {"rewards": [{"rollout_id": "x", "value": "high"}]},
            "field 'value' of a Reward is 'high'; a number was expected",
        ),
    ],
)
def test_a_value_of_a_wrong_type_is_refused_in_one_clear_sentence(
    hub: HubProcess, name: str, arguments: dict[str, Any], message: str
) -> None:
    answer = httpx.post(f"{hub.url}/api/{name}", json=arguments)
    assert (answer.status_code, answer.json()) == (400, {"error": "StoreError", "message": message})


def test_other_hosts_and_foreign_pages_are_refused(hub: HubProcess) -> None:
    with httpx.Client(base_url=hub.url) as http:
        for headers in (
            {"host": "evil.example"},
            {"host": f"evil.example:{hub.port}"},
            {"origin": "http://evil.example"},
            {"origin": "null"},
            {"host": "127.0.0.1.evil.example"},
        ):
            for path in ("/v1/traces", "/api/rollouts"):
                answer = http.post(path, content=b"{}", headers=headers)
                assert (answer.status_code, answer.json()["error"]) == (403, "PermissionDeniedError")
        for headers in ({"host": "localhost"}, {"host": f"[::1]:{hub.port}"}, {"origin": hub.url}):
            assert http.post("/api/rollouts", content=b"{}", headers=headers).status_code == 200


def test_clients_never_claim_the_same_rollout(hub: HubProcess) -> None:
    with HubClient(hub.url) as client:
        client.enqueue([Rollout(f"claim-{i}", run_id="claims") for i in range(60)])

    def work(worker: int) -> list[str]:
        mine: list[str] = []
        with HubClient(hub.url) as client:
            while claimed := client.claim(worker=str(worker), run_id="claims", limit=1 + worker % 2):
                mine += [rollout.rollout_id for rollout in claimed]
        return mine

    with ThreadPoolExecutor(4) as pool:
        claimed = [rollout_id for mine in pool.map(work, range(4)) for rollout_id in mine]
    assert sorted(claimed) == sorted(f"claim-{i}" for i in range(60))


def test_a_batch_that_comes_from_many_at_once_is_stored_once(hub: HubProcess) -> None:
    body = request(conversation(new_trace(), "many", 5))

    def send(_: int) -> int:
        with HubClient(hub.url) as client:
            return client.put_otlp(body)

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(send, range(16))) == 5
    with HubClient(hub.url) as client:
        assert len(list(client.spans(["many"]))) == 5


def test_a_hub_that_is_told_to_stop_folds_its_log_and_exits_cleanly(tmp_path: Path) -> None:
    path = tmp_path / "s.duckdb"
    with HubProcess(path) as process:
        with HubClient(process.url) as client:
            client.put_otlp(request(conversation(new_trace(), "r", 3)))
        assert process.terminate() == 0
    assert not path.with_name("s.duckdb.wal").exists()
    with FileStore(path, read_only=True) as store:
        assert store.stats()["spans"] == 3


def test_whoever_finds_the_file_locked_learns_where_the_hub_is(tmp_path: Path) -> None:
    path = tmp_path / "s.duckdb"
    with HubProcess(path) as process:
        said = f"served by the hub at {process.url} \\(process {process.process.pid}\\); use that address"
        for read_only in (False, True):
            with pytest.raises(StoreLockedError, match=said):
                FileStore(path, read_only=read_only)
        assert process.terminate() == 0
    assert not (tmp_path / "s.duckdb.hub").exists()


def test_what_a_killed_hub_left_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "s.duckdb"
    with HubProcess(path) as process:
        process.kill()
    assert (tmp_path / "s.duckdb.hub").exists()
    with FileStore(path) as store:
        holder = "import sys; from spangrad.store import open_store; open_store(sys.argv[1])"
        done = subprocess.run([sys.executable, "-c", holder, str(path)], capture_output=True, text=True)
        assert store.rollouts() == []
    assert f"is held by process {os.getpid()}; stop it" in done.stderr
    with HubProcess(path) as process:
        assert process.url in (tmp_path / "s.duckdb.hub").read_text()


def test_a_client_waits_for_a_hub_that_restarts(tmp_path: Path) -> None:
    path = tmp_path / "s.duckdb"
    with HubProcess(path) as first:
        client = HubClient(first.url, retry_s=30)
        client.enqueue([Rollout("a")])
        port = first.port
        first.kill()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.rollouts)
        with HubProcess(path, port=port):
            assert [r.rollout_id for r in answer.result(60)] == ["a"]
    client.close()


def test_no_hub_is_one_clear_error() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with HubClient(url, retry_s=0.1) as client:
        with pytest.raises(HubUnreachableError, match=f"no hub at '{url}' .*`spangrad hub`"):
            client.rollouts()
        with pytest.raises(HubUnreachableError):
            list(client.spans())


def test_a_taken_port_is_named_before_the_store_is_opened(tmp_path: Path, hub: HubProcess) -> None:
    with pytest.raises(PortInUseError, match=f"127.0.0.1:{hub.port} can't be listened on"):
        serve(tmp_path / "s.duckdb", port=hub.port)
    assert list(tmp_path.iterdir()) == []


KILLED_WHILE_POSTING = """
import sys, httpx
from tests.store.building import conversation, new_trace, request
url, worker = sys.argv[1:]
with httpx.Client(base_url=url, timeout=60) as http:
    for i in range(10**6):
        trace_id = new_trace()
        body = request(conversation(trace_id, f"w{worker}-{i}", 1 + i % 4))
        try:
            answer = http.post("/v1/traces", content=body)
        except httpx.TransportError:
            break
        if answer.status_code == 200:
            print(trace_id, 1 + i % 4, flush=True)
"""


@pytest.mark.parametrize("acknowledged_before_the_kill", [3, 11, 40])
def test_every_acknowledged_batch_survives_sigkill_once(
    tmp_path: Path, acknowledged_before_the_kill: int
) -> None:
    path = tmp_path / "s.duckdb"
    outputs = [tmp_path / f"acknowledged-{i}" for i in range(3)]
    with HubProcess(path) as process:
        posting = []
        for i, output in enumerate(outputs):
            with output.open("w") as file:
                command = [sys.executable, "-c", KILLED_WHILE_POSTING, process.url, str(i)]
                posting.append(subprocess.Popen(command, stdout=file))
        wait_until(
            lambda: sum(len(o.read_text().splitlines()) for o in outputs) >= acknowledged_before_the_kill, 60
        )
        process.kill()
        assert [one.wait(60) for one in posting] == [0, 0, 0]
    acknowledged = dict(line.split() for output in outputs for line in output.read_text().splitlines())
    assert len(acknowledged) >= acknowledged_before_the_kill
    with FileStore(path) as store:
        stored: dict[str, list[str]] = {}
        for one in store.spans():
            stored.setdefault(one.trace_id, []).append(one.span_id)
    for trace_id, count in acknowledged.items():
        assert len(stored[trace_id]) == int(count)
    assert all(len(set(ids)) == len(ids) for ids in stored.values())
    for trace_id, ids in stored.items():  # a batch that was not acknowledged is there whole or not at all
        assert len(ids) == int(acknowledged.get(trace_id, len(ids)))


class Foreign(BaseHTTPRequestHandler):
    """Says the same to everybody."""

    answer = (b"", "")

    def do_POST(self) -> None:
        body, kind = self.answer
        self.rfile.read(int(self.headers.get("content-length", 0)))  # else closing resets the connection
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b'{"status": "ok"}', "application/json"),
        (b"[1, 2]", "application/json"),
        (b"", "application/json"),
        (b"<html>" + b"welcome " * 9999, "text/html"),
    ],
)
def test_a_server_that_is_no_hub_is_one_clear_error(body: bytes, kind: str) -> None:
    handler = type("Handler", (Foreign,), {"answer": (body, kind)})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        with HubClient(url) as client:
            for ask in (client.rollouts, lambda: list(client.spans()), lambda: client.put_otlp(b"")):
                with pytest.raises(HubUnreachableError, match=f"'{url}' is no spangrad hub") as raised:
                    ask()
                assert len(str(raised.value)) < 300
        server.shutdown()
