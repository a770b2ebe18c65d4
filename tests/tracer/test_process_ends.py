"""However a process ends, what it recorded is not lost."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from spangrad.tracer import conventions as c
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
        stdin=subprocess.PIPE,
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
    assert not list(tmp_path.rglob("*.journal"))
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
        wait_until(lambda: list(spool.glob("*.seg")))  # the worker writes by itself
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


STREAMS = """
client = httpx.Client()
def begin(prompt):
    body = {"model": "policy", "stream": True, "messages": [{"role": "user", "content": prompt}]}
    request = client.build_request("POST", sys.argv[2] + "/chat/completions", json=body)
    response = client.send(request, stream=True)
    parts = response.iter_bytes()
    read = b""
    while b"You" not in read:
        read += next(parts)
    return response, parts
"""


@pytest.mark.parametrize(
    ("ending", "returncode"),
    [("", 0), ("os.kill(os.getpid(), signal.SIGTERM); signal.pause()", -signal.SIGTERM)],
    ids=["return", "SIGTERM"],
)
def test_a_stream_that_is_still_held_at_the_end_is_recorded_as_left_early(
    model: ModelServer, tmp_path: Path, ending: str, returncode: int
) -> None:
    code = f"{STREAMS}\nwith spangrad.rollout():\n    held = begin('GATED one')\nspangrad.flush()\n{ending}"
    output = run(code, tmp_path / "s", model, returncode)
    model.gate.set()
    spans = spans_of_store(tmp_path / "s")
    (call,) = calls(spans)
    assert call[c.STREAM_COMPLETE] is False
    assert call.json(c.OUTPUT_MESSAGES)[0]["parts"] == [{"type": "text", "content": "You"}]
    assert call[c.ROLLOUT_ID] == roots(spans)[0][c.ROLLOUT_ID]
    assert output == ""


def test_a_call_without_a_response_at_the_end_is_recorded_as_failed(
    model: ModelServer, tmp_path: Path
) -> None:
    code = """
import socket
silent = socket.create_server(("127.0.0.1", 0))
url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1/chat/completions"
body = {"model": "policy", "messages": [{"role": "user", "content": "anybody?"}]}
threading.Thread(target=httpx.post, args=(url,), kwargs={"json": body, "timeout": 60}, daemon=True).start()
asked, _ = silent.accept()
asked.recv(1)
"""
    assert run(code, tmp_path / "s", model) == ""
    (call,) = calls(spans_of_store(tmp_path / "s"))
    assert (call.prompt(), call.is_error, call[c.ERROR_TYPE]) == ("anybody?", True, "no response")


def test_a_running_call_outlives_a_flush_and_a_forked_child_that_inherits_it(
    model: ModelServer, tmp_path: Path
) -> None:
    code = f"""{STREAMS}
held, parts = begin('GATED one')
process = multiprocessing.get_context("fork").Process(target=spangrad.flush)
process.start()
process.join()
spangrad.flush()
say('flushed')
sys.stdin.readline()
assert b"[DONE]" in b"".join(parts)
"""
    child = start(code, tmp_path / "s", model)
    assert child.stdout is not None and child.stdout.readline() == "flushed\n"
    assert spans_of_store(tmp_path / "s") == []
    model.gate.set()
    _, errors = child.communicate("go\n", timeout=60)
    assert child.returncode == 0, errors
    (call,) = calls(spans_of_store(tmp_path / "s"))
    assert call[c.STREAM_COMPLETE] is True
