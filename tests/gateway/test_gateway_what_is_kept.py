"""What a gateway takes out of spans, and what of them outlives it."""

import json
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from spangrad.errors import ConfigError
from spangrad.store import open_store
from spangrad.tracer import conventions as names
from spangrad.tracer import span_size
from spangrad.tracer.gateway import GatewayConfig
from tests.gateway.gateway_setup import GatewayFactory, Setup, body, dropped
from tests.gateway.stub_engine import StubEngine
from tests.gateway.test_gateway_stop import gateway_process
from tests.waiting import wait_until

ADDRESS = "jane@example.org"


def ask(url: str, text: str = "a b", **headers: str) -> httpx.Response:
    return httpx.post(f"{url}/v1/chat/completions", json=body(text), headers=headers, timeout=30)


def test_a_rule_takes_texts_out_of_what_is_stored_and_not_out_of_the_reply(
    start_gateway: GatewayFactory,
) -> None:
    gateway = start_gateway(redact="emails")
    assert ADDRESS in ask(gateway.url, f"write to {ADDRESS}").text
    attributes = gateway.attributes()
    assert ADDRESS not in json.dumps({name: str(value) for name, value in attributes.items()})
    assert "[redacted: e-mail]" in attributes[names.INPUT_MESSAGES]
    assert names.SAMPLED_TOKEN_IDS not in attributes  # they spell it out
    assert {names.INPUT_MESSAGES, names.OUTPUT_MESSAGES} <= set(json.loads(attributes[names.REDACTED]))


def test_a_request_that_is_nested_too_deep_to_look_through_costs_no_other_call(
    start_gateway: GatewayFactory,
) -> None:
    gateway = start_gateway(redact="emails")
    deep: Any = ADDRESS
    for _ in range(480):
        deep = [deep]
    for more in ({}, {"metadata": deep}, {}):
        answer = httpx.post(f"{gateway.url}/v1/chat/completions", json=body("a b", **more), timeout=30)
        answer.raise_for_status()
    spans = gateway.spans()
    assert len(spans) == 3 and gateway.health()["spans"]["dropped"] == 0
    assert not any(ADDRESS in str(span.attributes) for span in spans)


def test_keys_in_an_engines_error_are_blanked_without_a_rule(engine: StubEngine, gateway: Setup) -> None:
    secret = "sk-" + "a1b2c3d4" * 4
    httpx.post(f"{gateway.url}/v1/chat/completions", json=body(f"FAIL {secret}"), timeout=30)
    (span,) = gateway.spans()
    assert secret not in str(span.status.description)


def test_a_raw_log_and_a_rule_contradict_each_other(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="raw_log holds replies as they are"):
        GatewayConfig(engine_url="http://h:1", store="s", redact=True, raw_log=tmp_path / "raw")
    with pytest.raises(ConfigError, match="is no rule"):
        GatewayConfig(engine_url="http://h:1", store="s", redact="nonsense")


def test_what_makes_a_span_too_long_is_left_out_and_named(
    gateway: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(span_size, "MAX_SPAN_BYTES", 4000)
    ask(gateway.url, "word " * 2000)
    attributes = gateway.attributes()
    assert names.INPUT_MESSAGES not in attributes
    assert "too long" in dropped(attributes)[names.INPUT_MESSAGES]


def test_a_reply_that_a_cache_served_is_marked(engine: StubEngine, gateway: Setup) -> None:
    engine.reply_headers = {"x-cache": "HIT"}
    assert ask(gateway.url).headers["x-cache"] == "HIT"
    assert gateway.attributes()[names.CACHED] is True


@pytest.fixture
def silent_hub() -> Iterator[str]:
    """It takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken: list[socket.socket] = []

        def take() -> None:
            while True:
                try:
                    taken.append(listener.accept()[0])
                except OSError:
                    return

        threading.Thread(target=take, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        for connection in taken:
            connection.close()


@pytest.mark.slow
def test_calls_that_have_ended_outlive_a_gateway_that_is_killed(
    engine: StubEngine, silent_hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = tmp_path / "s.duckdb"
    options = ["--engine", engine.url]
    with gateway_process(*options, "--store", silent_hub) as (url, process):
        for number in range(3):
            ask(url, f"call {number}", **{names.HEADER_ROLLOUT: f"r-{number}"}).raise_for_status()
        wait_until(lambda: waiting(url) == 3)
        process.send_signal(signal.SIGKILL)
        process.wait()
    (spool,) = tmp_path.glob(".spangrad/spool/*-gateway")  # not where agents with their own key look
    assert list(spool.glob("*.journal")) and not list(spool.glob("*.seg"))
    spool.rename(f"{store}.spool")  # where a file's gateway looks
    with gateway_process(*options, "--store", str(store)):
        wait_until(lambda: not list(Path(f"{store}.spool").glob("*.journal")))
    with open_store(str(store)) as opened:
        spans = list(opened.spans())
    assert sorted(str(span.rollout_id) for span in spans) == ["r-0", "r-1", "r-2"]
    for span in spans:
        assert span.scope == names.SCOPE_GATEWAY
        assert len(names.unpack_ints(span.attributes[names.SAMPLED_TOKEN_IDS])) == 3


def waiting(url: str) -> Any:
    return httpx.get(f"{url}/spangrad/health").json()["spans"]["waiting"]


def test_a_gateway_that_stops_leaves_no_journal(start_gateway: GatewayFactory, tmp_path: Path) -> None:
    from spangrad.tracer.gateway import running

    with running(
        GatewayConfig(engine_url=start_gateway().engine.url, store=str(tmp_path / "s.duckdb"), port=0)
    ) as url:
        ask(url).raise_for_status()
        wait_until(lambda: list(tmp_path.glob("s.duckdb.spool/*.journal")))
    assert [path.suffix for path in tmp_path.glob("s.duckdb.spool/*")] == [".seg"]


def test_with_a_rule_there_is_no_journal(engine: StubEngine, silent_hub: str, tmp_path: Path) -> None:
    from spangrad.tracer.gateway import running

    config = GatewayConfig(
        engine_url=engine.url, store=silent_hub, port=0, spool_dir=tmp_path / "spool", redact="emails"
    )
    with running(config) as url:
        ask(url, f"write to {ADDRESS}").raise_for_status()
        wait_until(lambda: waiting(url) == 1)
        assert not list((tmp_path / "spool").glob("*.journal"))
    for path in (tmp_path / "spool").iterdir():
        assert ADDRESS.encode() not in path.read_bytes()
