"""Agents that are servers: a real one in a process of its own, a real hub and gateway, a stub engine."""

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from spangrad.adapters.calls import calls_of
from spangrad.errors import RolloutError
from spangrad.store import open_store
from spangrad.store.records import RolloutStatus
from spangrad.trainer.processes import Service, free_port
from spangrad.trainer.rollouts.agent_start import MAX_OUTPUT_BYTES
from spangrad.trainer.rollouts.worker import FREE_RETRIES
from tests.gateway.stub_engine import stub_engine
from tests.loop.working import running_gateway, work
from tests.waiting import wait_until

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


def odd_server(folder, port):
    return Service(
        "agent",
        [sys.executable, "-m", "tests.loop.odd_server", str(port)],
        log=folder / "server.log",
        ready_url=f"http://127.0.0.1:{port}/ready",
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    port = free_port()
    with odd_server(tmp_path_factory.mktemp("server"), port):
        yield f"http://127.0.0.1:{port}/run"


def recorded(hub, rollout):
    store = open_store(hub.hub_url, hub.keys.trainer)
    calls = list(calls_of(store, [rollout.rollout_id]))
    store.close()
    return calls


def test_a_server_is_told_all_that_its_calls_need(hub, tmp_path, server):
    tasks = {name: {"what": "call", "question": f"é {name}"} for name in ("a", "b")}
    with stub_engine() as engine, running_gateway(hub, engine) as url:
        headers = {"x-mine": "secret"}
        found, rewards, report = work(hub, tmp_path, tasks, gateway_url=url, url=server, headers=headers)
    assert report.first_error is None and rewards == {"a": 1.0, "b": 1.0}
    for name, rollout in found.items():
        output = rollout.output
        assert output["task"] == {**tasks[name], "temperature": 1.0}
        assert (output["rollout_id"], output["attempt"]) == (rollout.rollout_id, 0)
        assert (output["base_url"], output["model"]) == (f"{url}/rollout/{rollout.rollout_id}/0/v1", "none")
        assert output["api_key"] == hub.keys.agent
        assert output["headers"].pop("traceparent").startswith("00-")
        assert output["headers"] == {
            "x-spangrad-rollout": rollout.rollout_id,
            "x-spangrad-attempt": "0",
            "x-mine": "secret",
        }
        (call,) = recorded(hub, rollout)
        assert (rollout.status, call.grade) == (RolloutStatus.SUCCEEDED, "exact")


def test_a_server_has_its_turns(hub, tmp_path, server):
    loop = {"what": "call until told to stop"}
    with stub_engine() as engine, running_gateway(hub, engine) as url:
        found, _, _ = work(hub, tmp_path, {"a": loop, "b": loop}, gateway_url=url, url=server, turns={"a": 3})
    assert {name: rollout.output["calls"] for name, rollout in found.items()} == {"a": 3, "b": 20}


def test_what_the_agent_fails_uses_attempts_up(hub, tmp_path, server):
    whats = ("refuse", "raise", "no json", "large", "redirect", "fine")
    found, rewards, _ = work(hub, tmp_path, {what: {"what": what} for what in whats}, url=server)
    failed = {name: rollout.error for name, rollout in found.items() if name != "fine"}
    assert {found[name].error_type for name in failed} == {"AgentFailedError"}
    assert {(found[name].attempt, found[name].max_attempts) for name in failed} == {(1, 2)}
    assert failed == {
        "refuse": '422 Unprocessable Entity: {"detail":"I don\'t do that"}',
        "raise": "500 Internal Server Error: Internal Server Error",
        "no json": "the answer is no JSON: Expecting value: line 1 column 1 (char 0): <html>",
        "large": f"the answer is larger than {MAX_OUTPUT_BYTES} bytes",
        "redirect": "307 Temporary Redirect",
    }
    assert (found["fine"].output, rewards) == ("fine", {"fine": 1.0})


def test_a_server_that_is_busy_costs_no_attempt(hub, tmp_path, server):
    task = {"what": "busy once", "marker": str(tmp_path / "marker")}
    found, _, report = work(hub, tmp_path, {"a": task}, url=server)
    assert (found["a"].status, found["a"].attempt, found["a"].max_attempts) == (RolloutStatus.SUCCEEDED, 1, 3)
    assert "AgentUnavailableError: 503 Service Unavailable: later" in str(report.first_error)


@pytest.mark.parametrize(("what", "says"), [("busy", "429 Too Many Requests: later"), ("cut", "peer closed")])
def test_what_is_busy_or_breaks_every_time_uses_attempts_up_in_the_end(hub, tmp_path, server, what, says):
    found, rewards, _ = work(hub, tmp_path, {"a": {"what": what}}, url=server)
    rollout = found["a"]
    assert (rollout.status, rollout.error_type) == (RolloutStatus.FAILED, "AgentUnavailableError")
    assert says in str(rollout.error) and "it may be the reason" in str(rollout.error)
    assert rollout.max_attempts == 2 + FREE_RETRIES and rewards == {}


def test_a_request_that_hangs_is_ended_and_nobody_elses(hub, tmp_path, server):
    marker = tmp_path / "marker"
    tasks = {"a": {"what": "hang", "marker": str(marker)}, "b": {"what": "fine"}}
    found, _, report = work(hub, tmp_path, tasks, url=server, timeout_s=2.0)
    assert (found["a"].status, found["a"].error_type) == (RolloutStatus.FAILED, "TimeoutError")
    assert (found["a"].error, report.timed_out) == ("over 2 s", 2)
    assert (found["b"].status, found["b"].attempt) == (RolloutStatus.SUCCEEDED, 0)
    wait_until(marker.exists)  # the server saw that nobody waits any more


def test_a_server_that_ended_is_waited_for(hub, tmp_path):
    port, marker = free_port(), tmp_path / "marker"
    tasks = {
        "a": {"what": "end the server once", "marker": str(marker)},
        **{name: {"what": name} for name in "bcdefgh"},
    }
    with ThreadPoolExecutor(1) as thread, odd_server(tmp_path, port) as server:
        working = thread.submit(work, hub, tmp_path, tasks, url=f"http://127.0.0.1:{port}/run", concurrency=2)
        wait_until(lambda: not server.is_alive())
        server.stop()
        server.start()  # in this thread: it dies with the one that starts it
        found, rewards, report = working.result()
    assert {rollout.status for rollout in found.values()} == {RolloutStatus.SUCCEEDED}
    assert (found["a"].attempt, found["a"].max_attempts) == (1, 3)
    assert all(rollout.max_attempts == 2 + rollout.attempt for rollout in found.values()), "all were free"
    assert rewards.keys() == tasks.keys() and "AgentUnavailableError" in str(report.first_error)


def test_a_server_that_is_not_there_ends_the_worker_and_costs_no_attempt(hub, tmp_path):
    url = f"http://127.0.0.1:{free_port()}/run"
    with pytest.raises(RolloutError, match=rf"the agent at {re.escape(url)} could not be reached for 1 s"):
        work(hub, tmp_path, {"a": {"what": "a"}}, url=url, engine_wait_s=1.0)
    store = open_store(hub.hub_url, hub.keys.trainer)
    (rollout,) = store.rollouts(run_id=tmp_path.name)
    store.close()
    assert (rollout.status, rollout.attempt) == (RolloutStatus.QUEUED, 0)


def test_the_server_of_the_readme_is_an_agent(hub, tmp_path):
    page = (ROOT / "trainer" / "README.md").read_text()
    (block,) = re.findall(r"^```python\n(# my_server\.py.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    (tmp_path / "my_server.py").write_text(block)
    port = free_port()
    program = (sys.executable, "-m", "uvicorn", "my_server:app", "--app-dir", str(tmp_path))
    with stub_engine() as engine, running_gateway(hub, engine) as url:
        command = [*program, "--port", str(port)]
        server = Service("agent", command, log=tmp_path / "server.log", ready_url="").start()
        try:
            found, _, report = work(
                hub,
                tmp_path,
                {"a": {"question": "hello"}},
                gateway_url=url,
                url=f"http://127.0.0.1:{port}/run",
            )
        finally:
            server.stop()
    assert report.first_error is None and found["a"].output["answer"]
    (call,) = recorded(hub, found["a"])
    assert call.grade == "exact"
