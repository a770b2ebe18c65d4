"""However a process ends, what it recorded is not lost."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from spangrad.tracer.current import ENVIRONMENT
from tests.tracer.recording import calls, roots, spans_of_store
from tests.tracer.stub_server import ModelServer
from tests.waiting import wait_until

PRELUDE = """
import atexit, multiprocessing, os, signal, sys, threading, httpx, spangrad
spangrad.init(store=sys.argv[1])
def ask(prompt):
    body = {"model": "policy", "messages": [{"role": "user", "content": prompt}]}
    httpx.post(sys.argv[2] + "/chat/completions", json=body)
def say(word):
    print(word, flush=True)
"""

pytestmark = pytest.mark.slow


def start(code: str, store: Path, model: ModelServer) -> "subprocess.Popen[str]":
    environment = {name: value for name, value in os.environ.items() if name != ENVIRONMENT}
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + code, str(store), model.url],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def run(code: str, store: Path, model: ModelServer, returncode: int = 0) -> str:
    child = start(code, store, model)
    out, errors = child.communicate(timeout=60)
    assert child.returncode == returncode, errors
    return out + errors


@pytest.mark.parametrize(
    ("ending", "returncode"),
    [
        ("", 0),
        ("sys.exit(3)", 3),
        ("raise ValueError('uncaught')", 1),
        ("os.kill(os.getpid(), signal.SIGTERM); signal.pause()", -signal.SIGTERM),
    ],
    ids=["return", "sys.exit", "uncaught exception", "SIGTERM"],
)
def test_the_end_of_a_process_flushes(
    model: ModelServer, tmp_path: Path, ending: str, returncode: int
) -> None:
    code = "with spangrad.rollout():\n    ask('last')\nask('after')\n" + ending
    run(code, tmp_path / "store.duckdb", model, returncode)
    spans = spans_of_store(tmp_path / "store.duckdb")
    assert [call.prompt() for call in calls(spans)] == ["last", "after"]
    assert len(roots(spans)) == 1


def test_calls_made_by_exit_handlers_and_late_threads_are_kept(model: ModelServer, tmp_path: Path) -> None:
    code = """
gone = threading.Event()
threading.Thread(target=lambda: (threading.main_thread().join(), ask("thread"))).start()
"""
    run(code, tmp_path / "store.duckdb", model)
    assert [call.prompt() for call in calls(spans_of_store(tmp_path / "store.duckdb"))] == ["thread"]


def test_a_handler_of_the_application_for_sigterm_stays(model: ModelServer, tmp_path: Path) -> None:
    code = """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
spangrad.shutdown(); spangrad.init(store=sys.argv[1])
ask("one")
os.kill(os.getpid(), signal.SIGTERM)
signal.pause()
"""
    run(code, tmp_path / "store.duckdb", model, 5)
    assert len(calls(spans_of_store(tmp_path / "store.duckdb"))) == 1


def test_forked_children_record_their_own_calls_and_only_those(model: ModelServer, tmp_path: Path) -> None:
    code = """
with spangrad.rollout(rollout_id="r-1"):
    ask("parent")
    child = os.fork()
    if child == 0:
        ask("os.fork")
        spangrad.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    process = multiprocessing.get_context("fork").Process(target=ask, args=("multiprocessing",))
    process.start()
    process.join()
    assert process.exitcode == 0
"""
    run(code, tmp_path / "store.duckdb", model)
    spans = spans_of_store(tmp_path / "store.duckdb")
    assert sorted(call.prompt() for call in calls(spans)) == ["multiprocessing", "os.fork", "parent"]
    assert {call["spangrad.rollout.id"] for call in calls(spans)} == {"r-1"}
    assert len(roots(spans)) == 1


def test_sigkill_keeps_what_was_recorded_a_moment_ago(model: ModelServer, tmp_path: Path) -> None:
    code = "ask('one'); spangrad.flush(); ask('two'); say('ready'); signal.pause()"
    child = start(code, tmp_path / "s", model)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    flushed = spans_of_store(tmp_path / "s")
    assert "one" in [call.prompt() for call in calls(flushed)]
    spool = tmp_path / "s.spool"
    if len(flushed) == 1:
        wait_until(lambda: list(spool.iterdir()))  # the worker writes by itself
    child.kill()
    child.communicate()
    assert [call.prompt() for call in calls(flushed + spans_of_store(tmp_path / "s"))] == ["one", "two"]


def test_a_dead_hub_is_survived_by_the_whole_process(model: ModelServer, tmp_path: Path) -> None:
    code = "ask('one'); ask('two'); say('done')"
    child = subprocess.run(
        [sys.executable, "-c", PRELUDE + code, "http://127.0.0.1:1", model.url],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=60,
    )
    assert (child.returncode, child.stdout) == (0, "done\n"), child.stderr
    assert len(list(tmp_path.glob(".spangrad/spool/*/*.seg"))) >= 1
