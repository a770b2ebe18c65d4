"""An agent that nothing can be imported into says that its session is over: one POST to the gateway."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from spangrad.store.file_store import FileStore
from spangrad.tracer import conventions as names
from tests.gateway.gateway_setup import GatewayFactory, Setup, body

GATEWAY = """
import sys, threading
from spangrad.tracer.gateway import GatewayConfig, running
with running(GatewayConfig(sys.argv[1], store=sys.argv[2], port=0)) as url:
    print(url, flush=True)
    threading.Event().wait()
"""


def call(url: str, prefix: str = "/rollout/r", **sent: Any) -> None:
    httpx.post(f"{url}{prefix}/v1/chat/completions", json=body("a b"), **sent).raise_for_status()


def end(url: str, prefix: str = "/rollout/r", **sent: Any) -> httpx.Response:
    return httpx.post(f"{url}{prefix}/v1/end", timeout=30, **sent)


def told(gateway: Setup) -> list[Mapping[str, Any]]:
    """Attributes of spans in the order in which they were exported."""
    gateway.flush()
    return [span.attributes or {} for span in gateway.exporter.get_finished_spans()]


@pytest.mark.parametrize(
    ("prefix", "headers", "named"),
    [
        ("/rollout/r", {}, ("r", 0)),
        ("/rollout/r/2", {}, ("r", 2)),
        ("", {names.HEADER_ROLLOUT: "r/s", names.HEADER_ATTEMPT: "1"}, ("r/s", 1)),
        ("", {"authorization": "Bearer k~r~3"}, ("r", 3)),
        ("", {"x-api-key": "k~r"}, ("r", 0)),
        ("/rollout/r/3", {"authorization": "Bearer k~r"}, ("r", 3)),
    ],
)
def test_an_end_names_its_rollout_as_calls_do(
    gateway: Setup, prefix: str, headers: dict[str, str], named: tuple[str, int]
) -> None:
    call(gateway.url, prefix, headers=headers)
    answer = end(gateway.url, prefix, headers=headers)
    assert (answer.status_code, answer.json()) == (200, {"rollout_id": named[0], "attempt": named[1]})
    one, last = told(gateway)
    assert all((span[names.ROLLOUT_ID], span[names.ATTEMPT]) == named for span in (one, last))
    assert names.SPAN_ROLE not in one and last[names.SPAN_ROLE] == names.ROLE_END
    assert len(gateway.engine.requests) == 1, "the engine was asked for the end"


def test_a_plain_sdk_ends_its_session_with_the_address_and_the_key_that_it_has(gateway: Setup) -> None:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="mine~r-1") as sdk:
        sdk.chat.completions.create(model="stub", messages=[{"role": "user", "content": "a"}])
        answer = sdk.post("/end", cast_to=httpx.Response)
    assert answer.json() == {"rollout_id": "r-1", "attempt": 0}
    assert [span.get(names.SPAN_ROLE) for span in told(gateway)] == [None, names.ROLE_END]


def test_an_end_of_nothing_is_a_404_that_says_how_to_name_something(gateway: Setup) -> None:
    answer = end(gateway.url, "")
    assert answer.status_code == 404
    assert "/rollout/ID/v1/end" in answer.json()["error"]["message"]
    assert end(gateway.url, "/rollout/r/x").status_code == 400
    assert end(gateway.url, "/rollout/a%2F1").status_code == 400
    assert told(gateway) == []


@pytest.mark.parametrize("prefix", ["/rollout/other", "/rollout/own/1", "/rollout/own/3"])
def test_a_key_that_names_a_rollout_ends_no_other_one(gateway: Setup, prefix: str) -> None:
    answer = end(gateway.url, prefix, headers={"authorization": "Bearer k~own~2"})
    assert answer.status_code == 403
    assert "the key is that of rollout own, attempt 2" in answer.json()["error"]["message"]
    assert told(gateway) == []
    assert end(gateway.url, "/rollout/own/2", headers={"authorization": "Bearer k~own~2"}).is_success


def test_without_the_agents_key_nothing_ends(start_gateway: GatewayFactory) -> None:
    gateway = start_gateway(agent_key="sk-agents-0123456789", operator_keys=["sk-operator-0123456789"])
    for key in ("", "Bearer other~r", "Bearer sk-operator-0123456789"):
        assert end(gateway.url, headers={"authorization": key}).status_code == 401
    assert gateway.exporter.get_finished_spans() == ()
    assert end(gateway.url, headers={"authorization": "Bearer sk-agents-0123456789~r"}).is_success


def test_an_end_comes_behind_the_calls_that_were_answered_before_it(gateway: Setup) -> None:
    call(gateway.url)
    call(gateway.url)
    assert end(gateway.url).is_success
    gateway.flush()
    spans = gateway.exporter.get_finished_spans()
    assert [span.name for span in spans] == ["chat stub", "chat stub", "end"]
    assert max(span.end_time or 0 for span in spans[:2]) <= (spans[2].start_time or 0)


def test_an_end_that_can_not_come_behind_them_is_refused_and_may_be_said_again(
    start_gateway: GatewayFactory,
) -> None:
    gateway = start_gateway(flush_timeout_s=0.2, version_ttl_s=0.0)
    with openai.OpenAI(base_url=f"{gateway.url}/rollout/r/v1", api_key="k") as sdk:
        stream = sdk.chat.completions.create(
            model="stub", messages=[{"role": "user", "content": "a HOLD"}], stream=True
        )
        next(iter(stream))
        gateway.engine.tell_version.clear()
        gateway.engine.release.set()
        assert list(stream)
    answer = end(gateway.url)
    assert answer.status_code == 503 and "ask again" in answer.json()["error"]["message"]
    gateway.engine.tell_version.set()
    while not (answer := end(gateway.url)).is_success:
        assert answer.status_code == 503
    assert end(gateway.url).json() == answer.json()
    assert [span.get(names.SPAN_ROLE) for span in told(gateway)] == [None, names.ROLE_END, names.ROLE_END]


def test_an_end_that_was_answered_outlives_the_gateway(gateway: Setup, tmp_path: Path) -> None:
    store = tmp_path / "s.duckdb"
    command = [sys.executable, "-c", GATEWAY, gateway.engine.url, str(store)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        call(url)
        answer = end(url)
        os.kill(process.pid, signal.SIGKILL)
    assert answer.is_success, answer.text
    with FileStore(store) as opened:
        roles = [span.attributes.get(names.SPAN_ROLE) for span in opened.spans(rollout_ids=["r"])]
    assert sorted(roles, key=json.dumps) == [names.ROLE_END, None]
