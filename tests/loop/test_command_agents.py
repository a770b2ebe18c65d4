"""Agents that are programs: real processes, a real hub and gateway, a stub engine."""

import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from spangrad.adapters.calls import calls_of
from spangrad.errors import RolloutError
from spangrad.store import open_store
from spangrad.store.records import Rollout, RolloutStatus
from spangrad.trainer.rollouts.agent_command import TAIL_BYTES, output_of
from spangrad.trainer.rollouts.agent_start import MAX_OUTPUT_BYTES
from tests.gateway.stub_engine import stub_engine
from tests.loop.working import HERE, running_gateway, work
from tests.waiting import wait_until

pytestmark = pytest.mark.slow
PLAIN = (sys.executable, "-S", "odd_program.py")
"""Python without site-packages: nothing can be imported into it, and nothing is."""


def recorded(hub, rollout):
    store = open_store(hub.hub_url, hub.keys.trainer)
    calls = list(calls_of(store, [rollout.rollout_id]))
    store.close()
    return calls


def is_alive(pid):
    """Whether a process is there and no zombie: who adopts orphans may not look after them."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def has_started(marker):
    return marker.exists() and len(marker.read_text().split()) == 2


@pytest.mark.parametrize(
    "command",
    [PLAIN, ("./odd_program.sh",), (sys.executable, "recorded_program.py")],
    ids=["python without packages", "shell and curl", "python that the tracer sees, too"],
)
def test_calls_of_a_program_belong_to_its_rollout_each_once(hub, tmp_path, command):
    tasks = {name: {"what": "call", "question": f"é {name}"} for name in ("a", "b")}
    with stub_engine() as engine, running_gateway(hub, engine) as url:
        found, rewards, report = work(hub, tmp_path, tasks, gateway_url=url, command=command)
    assert report.first_error is None and rewards == {"a": 1.0, "b": 1.0}
    for rollout in found.values():
        (call,) = recorded(hub, rollout)
        assert (rollout.status, call.grade, call.attempt) == (RolloutStatus.SUCCEEDED, "exact", 0)
        assert rollout.output["said"]
    if command is PLAIN:
        assert found["a"].output["temperature"] == 1.0 and found["a"].output["cwd"] == str(HERE)


def test_a_program_has_its_turns(hub, tmp_path):
    loop = {"what": "call until told to stop"}
    with stub_engine() as engine, running_gateway(hub, engine) as url:
        found, _, _ = work(
            hub, tmp_path, {"a": loop, "b": loop}, gateway_url=url, command=PLAIN, turns={"a": 3}
        )
    assert {name: rollout.output["calls"] for name, rollout in found.items()} == {"a": 3, "b": 20}


def test_a_program_that_fails_says_why_and_costs_its_neighbours_nothing(hub, tmp_path):
    whats = ("exit", "crash", "say much", "say much and then the result", "some\ntext", "42")
    found, rewards, report = work(hub, tmp_path, {what: {"what": what} for what in whats}, command=PLAIN)
    failed = {name: r.error for name, r in found.items() if r.status is RolloutStatus.FAILED}
    assert failed == {
        "exit": "exit code 3; its standard error ends: no luck today",
        "crash": "it was ended by SIGSEGV",
        "say much": f"it printed 1500001 bytes, {MAX_OUTPUT_BYTES} at most can be its output",
    }
    assert {found[name].error_type for name in failed} == {"AgentFailedError"}
    assert {name: r.attempt for name, r in found.items()} == {what: int(what in failed) for what in whats}
    assert {name: r.output for name, r in found.items() if name not in failed} == {
        "say much and then the result": {"done": True},
        "some\ntext": "I was told:\nsome\ntext",
        "42": "I was told:\n42",
    }
    assert rewards.keys() == found.keys() - failed.keys() and report.failed_attempts == 6
    assert "no luck today" in (tmp_path / "agent.log").read_text()


def test_a_program_that_hangs_is_killed_with_its_children_and_nobody_else(hub, tmp_path):
    pids, marker = tmp_path / "pids", tmp_path / "marker"
    tasks = {
        "a": {"what": "hang", "pids": str(pids), "is_once": True},
        "b": {"what": "take a while", "seconds": 2.5},
        "c": {"what": "wait", "marker": str(marker)},  # begins behind b, so it is not overdue when a is
    }
    with ThreadPoolExecutor(1) as thread:
        working = thread.submit(work, hub, tmp_path, tasks, command=PLAIN, timeout_s=5.0, concurrency=2)
        wait_until(lambda: has_started(pids))
        children = [int(pid) for pid in pids.read_text().split()]
        assert all(map(is_alive, children))
        wait_until(lambda: not any(map(is_alive, children)))
        marker.touch()
        found, _, report = working.result()
    assert {name: rollout.attempt for name, rollout in found.items()} == {"a": 1, "b": 0, "c": 0}
    assert {rollout.status for rollout in found.values()} == {RolloutStatus.SUCCEEDED}
    assert report.first_error == (
        f"{tmp_path.name}-a: TimeoutError: over 5 s: it was ended by SIGKILL; its standard error ends:"
        " waiting for nobody"
    )
    assert (report.timed_out, report.failed_attempts) == (1, 1)


def test_a_rollout_that_was_given_up_ends_its_program(hub, tmp_path, monkeypatch):
    monkeypatch.setattr("spangrad.trainer.rollouts.worker.LEASE_S", 1.5)
    pids = tmp_path / "pids"
    tasks = {"a": {"what": "hang", "pids": str(pids)}, "b": {"what": "fine"}}
    with ThreadPoolExecutor(1) as thread:
        working = thread.submit(work, hub, tmp_path, tasks, command=PLAIN, concurrency=1)
        wait_until(lambda: has_started(pids))
        store = open_store(hub.hub_url, hub.keys.trainer)
        assert store.give_up([f"{tmp_path.name}-a"], error_type="StragglerError", error="late") == 1
        store.close()
        wait_until(lambda: not any(is_alive(int(pid)) for pid in pids.read_text().split()))
        found, _, report = working.result()
    assert (found["a"].error_type, found["b"].status) == ("StragglerError", RolloutStatus.SUCCEEDED)
    assert (report.lost_leases, report.timed_out) == (1, 0)


def test_what_a_program_leaves_behind_is_killed_and_waited_for_by_nobody(hub, tmp_path):
    found, _, _ = work(hub, tmp_path, {"a": {"what": "leave a child behind"}}, command=PLAIN)
    wait_until(lambda: not is_alive(found["a"].output["pid"]))


WORKER = """
import sys
from pathlib import Path
from tests.loop.test_command_agents import PLAIN
from tests.loop.working import config_of
from spangrad.store.keys import Keys
from spangrad.trainer.rollouts.worker import RolloutWorker
from types import SimpleNamespace

hub_url, keys, folder = sys.argv[1:]
hub = SimpleNamespace(hub_url=hub_url, keys=Keys.load(Path(keys)))
RolloutWorker().run(config_of(hub, Path(folder), command=PLAIN))
"""


def test_a_worker_that_is_killed_leaves_no_process_behind(hub, tmp_path):
    pids = tmp_path / "pids"
    store = open_store(hub.hub_url, hub.keys.trainer)
    task = {"what": "hang", "pids": str(pids)}
    store.enqueue([Rollout(f"{tmp_path.name}-a", run_id=tmp_path.name, task=task)])
    told = [hub.hub_url, str(hub.keys_file), str(tmp_path)]
    worker = subprocess.Popen([sys.executable, "-c", textwrap.dedent(WORKER), *told])
    wait_until(lambda: worker.poll() is not None or has_started(pids))
    children = [int(pid) for pid in pids.read_text().split()]
    assert all(map(is_alive, children))
    worker.kill()
    worker.wait()
    wait_until(lambda: not any(map(is_alive, children)))
    store.give_up([f"{tmp_path.name}-a"], error_type="Killed", error="")
    store.close()


@pytest.mark.parametrize("program", ["no-such-program", "./no_such_program.sh", "./odd_program.py"])
def test_a_program_that_is_not_there_costs_no_attempt(hub, tmp_path, program):
    with pytest.raises(RolloutError, match=rf"agent\.command: there is no program '{program}'"):
        work(hub, tmp_path, {"a": {"what": "a"}}, command=(program,))
    store = open_store(hub.hub_url, hub.keys.trainer)
    (rollout,) = store.rollouts(run_id=tmp_path.name)
    store.close()
    assert (rollout.status, rollout.attempt) == (RolloutStatus.QUEUED, 0)


@pytest.mark.parametrize(
    ("printed", "output"),
    [
        ('log\n{"a": 1}\n\n', {"a": 1}),
        ('{"a": 1}', {"a": 1}),
        ('{"a": 1}\nbye', '{"a": 1}\nbye'),
        ("the answer is\n42", "the answer is\n42"),
        ("see\n[1]", "see\n[1]"),
        ("{a: 1}", "{a: 1}"),
        ("{" * 100_000, "{" * 100_000),
        ("", ""),
    ],
)
def test_the_output_is_the_object_in_the_last_line_or_all_text(printed, output):
    assert output_of(printed) == output


def test_the_end_of_a_long_standard_error_is_kept(hub, tmp_path):
    program = tmp_path / "loud.sh"
    program.write_text("#!/bin/sh\nseq 100000 >&2\nexit 1\n")
    program.chmod(0o700)
    found, _, _ = work(hub, tmp_path, {"a": {}}, command=(str(program),))
    text = str(found["a"].error)
    assert text.endswith("99999\n100000") and len(text) < TAIL_BYTES + 50
