"""Spans reach the hub, or wait on disk: what the agent notices is nothing."""

import socket
import threading
from pathlib import Path

import httpx
import pytest

import spangrad
from spangrad.errors import ConfigError
from spangrad.store.file_store import FileStore
from spangrad.store.hub import MAX_BODY_BYTES
from spangrad.tracer import conventions as c
from spangrad.tracer.exporter import SpoolExporter
from spangrad.tracer.hub_exporter import HubExporter
from spangrad.tracer.runtime import active
from spangrad.tracer.span_size import MAX_SPAN_BYTES
from spangrad.tracer.spool import Spool
from tests.store.building import new_trace, request, span
from tests.tracer.recording import spans_of_request, spans_of_store
from tests.tracer.stub_server import HubServer, ModelServer, hub_server
from tests.waiting import wait_until


def ask(model: ModelServer, prompt: str) -> None:
    body = {"model": "policy", "messages": [{"role": "user", "content": prompt}]}
    assert httpx.post(f"{model.url}/chat/completions", json=body).status_code == 200


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def prompts(hub: HubServer) -> list[str]:
    return sorted(span.prompt() for request in hub.requests for span in spans_of_request(request))


def test_spans_arrive_with_the_key(model: ModelServer, hub: HubServer) -> None:
    spangrad.init(store=hub.url, key="agent-key", service_name="shop")
    ask(model, "one")
    assert spangrad.flush()
    assert prompts(hub) == ["one"]
    assert set(hub.keys) == {"Bearer agent-key"}
    (span,) = spans_of_request(hub.requests[0])
    assert (span.resource["service.name"], span.scope) == ("shop", c.SCOPE_TRACER)


def test_a_key_that_ends_in_a_newline_is_that_key(model: ModelServer, hub: HubServer) -> None:
    spangrad.init(store=hub.url, key="agent-key\n")
    ask(model, "one")
    assert spangrad.flush()
    assert set(hub.keys) == {"Bearer agent-key"}


def test_what_no_header_or_address_can_hold_costs_no_call(model: ModelServer, hub: HubServer) -> None:
    for url, key in ((hub.url, "agent\nkey"), (hub.url, "schl\u0171ssel"), ("http://127.0.0.1:port", "key")):
        spangrad.init(store=url, key=key, spool_dir="waiting")
        ask(model, "kept")
        assert not spangrad.flush(0.5)
        assert not spangrad.flush(0.5)  # its thread, which finds what waits on disk, lives on
        spangrad.shutdown()
    kept: list[bytes] = []
    Spool("waiting").drain(kept.append)
    assert [span.prompt() for request in kept for span in spans_of_request(request)] == ["kept"] * 3


def test_a_call_returns_while_the_hub_hangs(model: ModelServer, hub: HubServer) -> None:
    hub.hold = threading.Event()
    spangrad.init(store=hub.url)
    for number in range(20):
        ask(model, str(number))  # returns, although the hub has answered nothing yet
    assert hub.requests == []
    hub.hold.set()
    assert spangrad.flush()
    assert sorted(set(prompts(hub))) == sorted(
        str(number) for number in range(20)
    )  # a slow batch comes twice


@pytest.mark.slow
def test_a_dead_hub_costs_nothing_and_its_spans_arrive_once_in_the_next_process(
    model: ModelServer, tmp_path: Path
) -> None:
    port = free_port()
    spangrad.init(store=f"http://127.0.0.1:{port}", spool_dir=tmp_path / "spool")
    for number in range(5):
        ask(model, str(number))
    assert spangrad.shutdown()
    with hub_server(port) as hub:
        spangrad.init(store=hub.url, spool_dir=tmp_path / "spool")  # as the next process would
        wait_until(lambda: len(hub.requests) > 0)
        ask(model, "5")
        assert spangrad.flush()
        assert prompts(hub) == ["0", "1", "2", "3", "4", "5"]
        assert list((tmp_path / "spool").glob("*.seg")) == []


@pytest.mark.slow
def test_a_hub_that_comes_back_gets_what_waited(model: ModelServer, hub: HubServer, tmp_path: Path) -> None:
    hub.status = 503
    spangrad.init(store=hub.url, spool_dir=tmp_path / "spool")
    ask(model, "early")
    assert not spangrad.flush(0.5)
    assert hub.refused > 0
    hub.status = 200
    ask(model, "late")
    wait_until(lambda: prompts(hub) == ["early", "late"])
    wait_until(spangrad.flush)


def test_a_refusal_for_good_is_dropped_and_counted_and_holds_up_nothing(
    hub: HubServer, tmp_path: Path
) -> None:
    exporter = HubExporter(hub.url, spool_dir=tmp_path / "spool")
    hub.status = 400
    assert not exporter.export_request(request([span(new_trace())]))
    assert exporter.lost_spans == 1
    hub.status = 200
    assert exporter.export_request(b"")
    assert len(hub.requests) == 1
    assert exporter.spool.size_bytes() == 0


def test_spans_that_the_hub_rejects_are_counted_one_by_one(hub: HubServer, tmp_path: Path) -> None:
    exporter = HubExporter(hub.url, spool_dir=tmp_path / "spool")
    batch = request([span(new_trace()) for _ in range(5)])
    hub.rejects = 2
    assert not exporter.export_request(batch)
    assert (exporter.lost_spans, exporter.is_waiting) == (2, False)
    hub.rejects, hub.status = 0, 503
    assert exporter.export_request(batch)
    assert exporter.lost_spans == 2
    hub.status = 400
    assert exporter.drain(at_once=True) == 1
    assert (exporter.lost_spans, exporter.is_waiting) == (7, False)


def test_spans_that_neither_hub_nor_disk_takes_are_counted_one_by_one(hub: HubServer, tmp_path: Path) -> None:
    exporter = HubExporter(hub.url, spool_dir=tmp_path / "spool")
    exporter.spool.max_bytes = 10
    hub.status = 503
    assert not exporter.export_request(request([span(new_trace()) for _ in range(5)]))
    assert exporter.lost_spans == 5


def test_a_wrong_key_keeps_the_spans(hub: HubServer, tmp_path: Path) -> None:
    exporter = HubExporter(hub.url, "wrong", tmp_path / "spool")
    hub.status = 401
    assert exporter.export_request(b"")
    exporter.shutdown()
    hub.status = 200
    assert HubExporter(hub.url, "right", tmp_path / "spool").drain() == 1
    assert hub.keys == ["Bearer wrong", "Bearer right"]


def test_a_batch_that_the_hub_always_fails_at_holds_up_none_behind_it(
    hub: HubServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    exporter = HubExporter(hub.url, spool_dir=tmp_path / "spool")
    hub.status = 503
    for name in ("stubborn", "one", "two"):
        assert exporter.export_request(request([span(new_trace(), name=name)]))
    hub.status, hub.fails_at = 200, b"stubborn"
    assert [exporter.drain(at_once=True) for _ in range(5)] == [0, 0, 0, 2, 0]
    assert [one.name for one in hub.spans()] == ["one", "two"]
    assert hub.refused == 1 + 3  # then it is left alone for a while, and the others are not
    assert not exporter.force_flush(300)
    assert hub.refused > 1 + 3
    assert (exporter.lost_spans, exporter.is_waiting) == (0, True)
    assert caplog.text.count("fails each time at 1 batches (status 500: a bug)") == 1
    assert exporter.export_request(request([span(new_trace(), name="three")]))
    exporter.shutdown()
    hub.fails_at = None
    assert HubExporter(hub.url, spool_dir=tmp_path / "spool").drain() == 1
    assert [one.name for one in hub.spans()] == ["one", "two", "three", "stubborn"]
    assert list((tmp_path / "spool").iterdir()) == []


def test_a_slow_hub_does_not_hold_up_the_export_and_gets_all_in_the_end(
    hub: HubServer, tmp_path: Path
) -> None:
    exporter = HubExporter(hub.url, spool_dir=tmp_path / "spool", timeout_s=0.5)
    hub.status = 503
    for number in range(60):
        assert exporter.export_request(request([span(new_trace(), name=f"{number}")]))
    hub.status, hub.takes_s = 200, 0.05
    counts = [exporter.drain(at_once=True)]
    assert 0 < counts[0] < 20 and exporter.is_waiting
    while exporter.is_waiting:
        counts.append(exporter.drain(at_once=True))
    assert sum(counts) == 60
    assert {one.name for one in hub.spans()} == {f"{number}" for number in range(60)}


@pytest.mark.parametrize(
    ("says", "reason"),
    [
        (b"", "status 503"),
        (b'{"error": "StoreFullError", "message": "no space left"}', "status 503: no space left"),
        (
            b"<h1>Busy</h1>\r\n\x00try later" + b" later" * 100,
            "status 503: <h1>Busy</h1> try later later later",
        ),
        (b'["\xff"]', 'status 503: ["\ufffd"]'),
    ],
)
def test_the_hubs_reason_is_said_and_shortened(
    hub: HubServer, tmp_path: Path, caplog: pytest.LogCaptureFixture, says: bytes, reason: str
) -> None:
    hub.status, hub.says = 503, says
    exporter = HubExporter(hub.url, spool_dir=tmp_path / "spool")
    assert exporter.export_request(request([span(new_trace())]))
    hub.status = 400
    assert exporter.drain(at_once=True) == 1
    wait, refuse = [record.getMessage() for record in caplog.records]
    assert f"does not take spans ({reason}" in wait and len(wait) < 600
    assert "with status 400" in refuse and reason.removeprefix("status 503").removeprefix(": ") in refuse


def test_what_a_closing_process_cannot_deliver_goes_to_disk(hub: HubServer, tmp_path: Path) -> None:
    exporter = HubExporter(hub.url, spool_dir=tmp_path / "spool")
    exporter.close_soon(0)
    assert exporter.export_request(b"")
    assert hub.requests == []
    assert HubExporter(hub.url, spool_dir=tmp_path / "spool").drain() == 1


def test_a_full_disk_spool_is_counted_and_reaches_nobody(tmp_path: Path) -> None:
    exporter = SpoolExporter(tmp_path / "store.duckdb")
    exporter.spool.max_bytes = 10
    assert not exporter.export_request(b"too long for it")
    assert exporter.lost_spans == 1


def test_large_calls_are_sent_in_several_requests(model: ModelServer, hub: HubServer) -> None:
    spangrad.init(store=hub.url)
    for number in range(4):
        ask(model, f"{number} " + "x" * 2 * 2**20)
    assert spangrad.flush()
    assert len(prompts(hub)) == 4
    assert max(map(len, hub.requests)) < 5 * 2**20


def test_a_span_that_a_receiver_finds_too_long_takes_no_other_with_it(
    model: ModelServer, hub: HubServer
) -> None:
    hub.max_bytes = 4 * 2**20
    spangrad.init(store=hub.url)
    for text in ("one", "x" * 5 * 2**20, "two", "three"):
        ask(model, text)
    assert spangrad.flush()
    assert prompts(hub) == ["one", "three", "two"]
    assert hub.refused == 1
    exporter = current_exporter()
    assert (exporter.lost_spans, exporter.is_waiting) == (1, False)


def test_the_longest_span_that_is_made_goes_into_one_request_to_the_hub_and_into_the_store(
    tmp_path: Path,
) -> None:
    assert MAX_SPAN_BYTES + 2**20 < MAX_BODY_BYTES
    text = "x" * (6 * 2**20)
    long = span(new_trace(), attributes={c.OPERATION_NAME: "chat", c.INPUT_MESSAGES: text}, rollout="r")
    with FileStore(tmp_path / "store.duckdb") as store:
        assert store.put_otlp(request([long, span(new_trace(), rollout="r")])) == 2
        found = [one.attributes.get(c.INPUT_MESSAGES) for one in store.spans(["r"])]
    assert sorted(map(str, found)) == ["None", text]


def current_exporter() -> HubExporter:
    running = active()
    assert running is not None
    assert isinstance(running.worker.exporter, HubExporter)
    return running.worker.exporter


def test_a_url_that_is_no_hub_is_refused() -> None:
    with pytest.raises(ConfigError, match="must look like"):
        spangrad.init(store="http://")


def test_an_unwritable_store_folder_does_not_reach_the_agent(model: ModelServer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    spangrad.init(store=tmp_path / "file" / "store.duckdb")
    ask(model, "one")
    assert spangrad.flush()
    spangrad.shutdown()
    assert spans_of_store(tmp_path / "file" / "store.duckdb") == []
