"""A rollout worker against a real hub, with agents and rewards that misbehave."""

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
import ray
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from spangrad.adapters.calls import calls_of
from spangrad.credit.pipeline import is_truncated
from spangrad.credit.transitions import acts
from spangrad.errors import RolloutError
from spangrad.store import open_store
from spangrad.store.records import Rollout, RolloutStatus
from spangrad.tracer.gateway import GatewayConfig, running
from spangrad.tracer.hub_exporter import HubExporter
from spangrad.trainer.cluster import start_ray
from spangrad.trainer.processes import free_port
from spangrad.trainer.rollouts.scheduling import run_rollouts
from spangrad.trainer.rollouts.worker import FREE_RETRIES
from spangrad.trainer.up import Stack
from tests.gateway.stub_engine import stub_engine
from tests.loop.working import config_of, running_gateway, work
from tests.trainer.stub_weights import stub_weights
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("function", ["run", "run_async"])
def test_a_rollout_that_exits_or_raises_fails_alone(hub, tmp_path, function):
    tasks = {name: {"what": name} for name in ("exit", "raise", "good", "fine", "surrogate", "nan")}
    found, rewards, report = work(hub, tmp_path, tasks, function=f"odd_agents.py:{function}")
    status = {name: rollout.status for name, rollout in found.items()}
    assert {name for name, s in status.items() if s is RolloutStatus.SUCCEEDED} == {"good", "fine"}
    assert found["exit"].error_type == "SystemExit" and found["raise"].error == "not today"
    assert rewards == {"good": 1.0, "fine": 1.0}
    assert report.first_error is not None


def test_a_crash_of_the_agents_process_costs_its_neighbours_nothing(hub, tmp_path):
    tasks = {"a": {"what": "crash"}, **{name: {"what": name} for name in ("b", "c", "d", "e")}}
    found, rewards, _ = work(hub, tmp_path, tasks)
    assert found["a"].status is RolloutStatus.FAILED
    assert {found[name].status for name in "bcde"} == {RolloutStatus.SUCCEEDED}
    assert set(rewards) == set("bcde")


def test_a_rollout_that_hangs_costs_its_neighbours_nothing(hub, tmp_path):
    tasks = {"a": {"what": "hang"}, **{name: {"what": name} for name in ("b", "c")}}
    found, _, report = work(hub, tmp_path, tasks, timeout_s=2.5)
    assert found["a"].status is RolloutStatus.FAILED and found["a"].error_type == "TimeoutError"
    assert {found[name].status for name in "bc"} == {RolloutStatus.SUCCEEDED}
    assert report.timed_out == 2


def test_a_reward_that_is_no_number_is_missing_not_an_end_of_the_run(hub, tmp_path):
    values = {"text": "good", "list": [1.0], "number": 0.5, "nothing": None, "object": {"reward": 1}}
    tasks = {name: {"what": name, "reward": value} for name, value in values.items()}
    found, rewards, report = work(hub, tmp_path, tasks)
    assert {rollout.status for rollout in found.values()} == {RolloutStatus.SUCCEEDED}
    assert rewards == {"number": 0.5, "object": 1.0}
    assert report.reward_errors == 2
    failures = {name: rollout.failure for name, rollout in found.items() if rollout.failure}
    assert failures.keys() == {"text", "list"} and all("RewardError: " in text for text in failures.values())


def test_a_rollout_that_ends_while_a_slow_grader_works_is_not_overdue(hub, tmp_path):
    marker = str(tmp_path / "marker")
    tasks = {
        "a": {"what": "good", "marker": marker, "grade_s": 4.0},
        "b": {"what": "wait for grader", "marker": marker},
    }
    found, rewards, report = work(hub, tmp_path, tasks, reward="odd_agents.py:slow_reward", timeout_s=2.5)
    assert {rollout.attempt for rollout in found.values()} == {0}
    assert rewards == {"a": 1.0, "b": 1.0} and report.timed_out == 0


def test_a_grader_that_exits_gives_no_reward(hub, tmp_path):
    found, rewards, report = work(hub, tmp_path, {"a": {"what": "a"}}, reward="odd_agents.py:exiting_reward")
    assert found["a"].status is RolloutStatus.SUCCEEDED and rewards == {} and report.reward_errors == 1


def test_a_worker_that_dies_is_replaced_and_its_rollout_run_again(hub, tmp_path, caplog):
    task = {"what": "kill worker", "marker": str(tmp_path / "marker")}
    config = config_of(hub, tmp_path)
    store = open_store(hub.hub_url, hub.keys.trainer)
    start_ray()
    (ended,), _ = run_rollouts(store, [Rollout("dies", run_id=tmp_path.name, task=task)], config, workers=1)
    store.close()
    ray.shutdown()
    assert (ended.status, ended.attempt) == (RolloutStatus.SUCCEEDED, 1)
    assert "a rollout worker died and is replaced" in caplog.text


def is_running(hub, tmp_path):
    store = open_store(hub.hub_url, hub.keys.trainer)
    found = store.rollouts(run_id=tmp_path.name, status=RolloutStatus.RUNNING)
    store.close()
    return bool(found)


def test_a_rollout_that_was_given_up_frees_its_place(hub, tmp_path, monkeypatch):
    monkeypatch.setattr("spangrad.trainer.rollouts.worker.LEASE_S", 1.5)
    tasks = {"a": {"what": "hang"}, "b": {"what": "good"}}
    with ThreadPoolExecutor(1) as thread:
        working = thread.submit(work, hub, tmp_path, tasks, concurrency=1)
        wait_until(lambda: is_running(hub, tmp_path))
        store = open_store(hub.hub_url, hub.keys.trainer)
        assert store.give_up([f"{tmp_path.name}-a"], error_type="StragglerError", error="late") == 1
        store.close()
        found, rewards, report = working.result()
    assert (found["a"].status, found["a"].attempt) == (RolloutStatus.FAILED, 0)
    assert (found["b"].status, rewards) == (RolloutStatus.SUCCEEDED, {"b": 1.0})
    assert (report.lost_leases, report.timed_out, report.failed_attempts) == (1, 0, 0)


def test_a_claim_is_made_under_the_version_that_is_served_then(hub, tmp_path):
    marker = tmp_path / "marker"
    tasks = {"a": {"what": "wait for grader", "marker": str(marker)}, "b": {"what": "good"}}
    with stub_weights() as engine, ThreadPoolExecutor(1) as thread:
        engine.version = "3"
        settings: dict[str, Any] = {"engine_urls": (engine.url,), "policy_version": 2, "concurrency": 1}
        working = thread.submit(work, hub, tmp_path, tasks, **settings)
        wait_until(lambda: is_running(hub, tmp_path))
        engine.version = "4"
        marker.touch()
        found, _, report = working.result()
    assert (found["a"].policy_version, found["b"].policy_version) == (3, 4)
    assert not report.engine_changed


@pytest.mark.parametrize("version", ["1", "default"])
def test_nothing_is_claimed_while_older_weights_are_served(hub, tmp_path, version):
    with stub_weights() as engine:
        engine.version = version
        settings: dict[str, Any] = {"engine_urls": (engine.url,), "policy_version": 2}
        found, _, report = work(hub, tmp_path, {"a": {"what": "good"}}, **settings)
    assert (found["a"].status, found["a"].attempt) == (RolloutStatus.QUEUED, 0)
    assert report.engine_changed


def test_an_agent_that_cant_be_started_costs_no_attempt(hub, tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("import no_such_module_anywhere\n")
    with pytest.raises(RolloutError, match="no_such_module_anywhere"):
        work(hub, tmp_path, {"a": {"what": "a"}}, function=f"{broken}:run")
    store = open_store(hub.hub_url, hub.keys.trainer)
    (rollout,) = store.rollouts(run_id=tmp_path.name)
    assert (rollout.status, rollout.attempt) == (RolloutStatus.QUEUED, 0)
    store.close()


def work_while_the_gateway_is_killed(hub, tmp_path, whats, *, away_s=0.0, **settings):
    """Run tasks, one of which kills the gateway; it comes back after `away_s`. Returns as `work` does."""
    with ThreadPoolExecutor(1) as thread, stub_engine() as engine:
        config = replace(hub.config, gateway_port=free_port(), engine_url=engine.url)
        with Stack(config) as stack:
            stack.start_gateway()
            first = stack.gateway
            assert first is not None
            shared = {"pid": first.pid, "marker": str(tmp_path / "marker")}
            tasks = {name: {"what": what, **shared} for name, what in whats.items()}
            working = thread.submit(work, hub, tmp_path, tasks, gateway_url=stack.gateway_url, **settings)
            wait_until(lambda: not first.is_alive() or working.done())
            back_at = time.monotonic() + away_s
            first.stop()
            wait_until(lambda: time.monotonic() > back_at or working.done())
            stack.start_gateway()  # here: it dies with the thread that starts it
            return working.result()


def test_rollouts_have_their_turns_and_end_by_themselves(hub, tmp_path):
    loop = {"what": "call until told to stop"}
    with stub_engine() as engine, running_gateway(hub, engine) as url:
        found, rewards, report = work(
            hub, tmp_path, {"a": loop, "b": loop, "c": loop}, gateway_url=url, turns={"a": 3, "b": 0}
        )
    assert {name: rollout.output["calls"] for name, rollout in found.items()} == {"a": 3, "b": 0, "c": 20}
    assert {name: rollout.turn_budget for name, rollout in found.items()} == {"a": 3, "b": 0, "c": None}
    assert set(rewards) == {"a", "b", "c"} and report.failed_attempts == 0
    store = open_store(hub.hub_url, hub.keys.trainer)
    calls = {name: calls_of(store, [rollout.rollout_id]) for name, rollout in found.items()}
    store.close()
    assert {name: sum(acts(call) for call in made) for name, made in calls.items()} == {
        "a": 3,
        "b": 0,
        "c": 20,
    }
    assert {name: is_truncated(found[name], made) for name, made in calls.items()} == {
        "a": True,
        "b": True,
        "c": False,
    }


def test_a_rollout_whose_gateway_was_killed_under_it_is_run_again(hub, tmp_path):
    found, _, report = work_while_the_gateway_is_killed(hub, tmp_path, {"a": "kill gateway"})
    assert (found["a"].status, found["a"].attempt) == (RolloutStatus.SUCCEEDED, 1)
    assert found["a"].max_attempts == 3, "the lost attempt was free"
    assert report.failed_attempts == 1 and "gateway was restarted" in report.first_error
    store = open_store(hub.hub_url, hub.keys.trainer)
    calls = list(calls_of(store, [found["a"].rollout_id]))
    store.close()
    assert [call.grade for call in calls] == ["exact", "exact"]


def test_time_without_a_gateway_counts_in_no_timeout(hub, tmp_path):
    whats = {"a": "kill gateway", "b": "outlive gateway"}
    found, _, report = work_while_the_gateway_is_killed(hub, tmp_path, whats, away_s=5.0, timeout_s=2.5)
    assert report.timed_out == 0 and "gateway was restarted" in report.first_error
    for rollout in found.values():
        assert (rollout.status, rollout.attempt, rollout.max_attempts) == (RolloutStatus.SUCCEEDED, 1, 3)


@contextmanager
def shared_address(urls):
    """An address behind which requests reach one server after the other."""
    turns = itertools.cycle(urls)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self._answer(httpx.get(urls[0] + self.path))

        def do_POST(self):
            self._answer(
                httpx.post(next(turns) + self.path, headers={"authorization": self.headers["authorization"]})
            )

        def _answer(self, reply):
            self.send_response(reply.status_code)
            self.send_header("content-length", str(len(reply.content)))
            self.end_headers()
            self.wfile.write(reply.content)

        def log_message(self, format, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_gateway_that_is_another_one_every_time_uses_attempts_up_in_the_end(hub, tmp_path):
    with stub_engine() as engine:
        config = GatewayConfig(engine_url=engine.url, store=hub.hub_url, port=0, agent_key=hub.keys.agent)
        with running(config) as first, running(config) as second, shared_address([first, second]) as url:
            found, rewards, report = work(hub, tmp_path, {"a": {"what": "good"}}, gateway_url=url)
    rollout = found["a"]
    assert (rollout.status, rollout.error_type) == (RolloutStatus.FAILED, "GatewayRestartedError")
    assert "two share the address" in str(rollout.error) and rewards == {}
    assert rollout.max_attempts == 2 + FREE_RETRIES
    assert report.failed_attempts == rollout.attempt + 1 == rollout.max_attempts


class Losing(SpanExporter):
    """Loses the first spans, then sends to a hub."""

    def __init__(self, exporter, losses):
        self.exporter, self.losses = exporter, losses

    def export(self, spans):
        if self.losses <= 0:
            return self.exporter.export(spans)
        self.losses -= len(spans)
        return SpanExportResult.FAILURE

    def force_flush(self, timeout_millis=30_000):
        return self.exporter.force_flush(timeout_millis)

    def shutdown(self):
        self.exporter.shutdown()


def work_behind_a_losing_gateway(hub, tmp_path, task, *, losses):
    with stub_engine() as engine:
        config = GatewayConfig(engine_url=engine.url, store=hub.hub_url, port=0, agent_key=hub.keys.agent)
        exporter = HubExporter(hub.hub_url, hub.keys.evaluator, tmp_path / "spool", timeout_s=30)
        with running(config, exporter=Losing(exporter, losses)) as url:
            return work(hub, tmp_path, {"a": task}, gateway_url=url)


def test_a_rollout_whose_spans_were_dropped_is_run_again_and_that_uses_an_attempt_up(hub, tmp_path):
    found, rewards, report = work_behind_a_losing_gateway(hub, tmp_path, {"what": "call"}, losses=1)
    assert (found["a"].status, found["a"].attempt) == (RolloutStatus.SUCCEEDED, 1)
    assert found["a"].max_attempts == 2 and rewards == {"a": 1.0}
    assert report.failed_attempts == 1 and "dropped spans in mid-rollout" in report.first_error
    store = open_store(hub.hub_url, hub.keys.trainer)
    assert len(list(calls_of(store, [found["a"].rollout_id]))) == 1
    store.close()


def test_a_rollout_whose_spans_are_dropped_every_time_fails_when_its_attempts_are_used_up(hub, tmp_path):
    found, rewards, report = work_behind_a_losing_gateway(hub, tmp_path, {"what": "call"}, losses=10**6)
    assert (found["a"].status, found["a"].attempt) == (RolloutStatus.FAILED, 1)
    assert found["a"].error_type == "SpansDroppedError" and "calls may be missing" in found["a"].error
    assert rewards == {} and report.failed_attempts == 2
