"""`spangrad run -- CMD`: programs that know nothing of spangrad."""

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from spangrad.store.file_store import FileStore
from spangrad.store.migrations import SCHEMA_VERSION
from spangrad.tracer import conventions as c
from spangrad.tracer.launch import run_command
from tests.tracer.recording import Recorded, calls, roots, spans_of_store
from tests.tracer.stub_server import ModelServer
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

AGENT = """
import os, subprocess, sys
import httpx
url = sys.argv[1]
def ask(prompt):
    body = {"model": "policy", "messages": [{"role": "user", "content": prompt}]}
    httpx.post(url + "/chat/completions", json=body)
if len(sys.argv) > 2:
    ask(sys.argv[2])
else:
    ask("child")
    os.chdir("/")
    script = os.path.join(sys.path[0] or ".", "agent.py")
    subprocess.run([sys.executable, script, url, "grandchild"], check=True)
    sys.exit(7)
"""


@pytest.fixture
def agent(tmp_path: Path) -> Path:
    path = tmp_path / "agent.py"
    path.write_text(AGENT)
    return path


def owned_by_one_root(spans: list[Recorded]) -> Recorded:
    (root,) = roots(spans)
    for call in calls(spans):
        assert (call.trace_id, call.parent_id) == (root.trace_id, root.span_id)
        assert call[c.ROLLOUT_ID] == root[c.ROLLOUT_ID]
        assert call.get(c.TASK_ID) == root.get(c.TASK_ID)
    return root


def test_a_script_and_its_children_are_one_rollout(model: ModelServer, agent: Path) -> None:
    code = run_command(
        [sys.executable, str(agent), model.url], store="store.duckdb", rollout_id="r & 1", task_id="t/ü"
    )
    assert code == 7
    spans = spans_of_store("store.duckdb")
    root = owned_by_one_root(spans)
    assert [call.prompt() for call in calls(spans)] == ["child", "grandchild"]
    assert (root[c.ROLLOUT_ID], root[c.TASK_ID]) == ("r & 1", "t/ü")
    assert root.is_error


def test_a_module_is_recorded_without_code(
    model: ModelServer, agent: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text("import os; os.environ['THEIRS'] = 'ran'")
    agent.write_text(AGENT + "\nassert os.environ['THEIRS'] == 'ran'\n")
    monkeypatch.setenv("PYTHONPATH", str(other))
    code = run_command([sys.executable, "-m", "agent", model.url, "module"], store="store.duckdb")
    assert code == 0
    spans = spans_of_store("store.duckdb")
    assert not owned_by_one_root(spans).is_error
    assert [call.prompt() for call in calls(spans)] == ["module"]


def test_explicit_rollouts_and_rewards_of_the_program_are_kept(model: ModelServer, agent: Path) -> None:
    agent.write_text(
        "import spangrad\n"
        + AGENT.replace('ask("child")', "")
        + "\nspangrad.reward(0.25)\nwith spangrad.rollout(rollout_id='own'):\n    ask('in own')\n"
    )
    assert run_command([sys.executable, str(agent), model.url, "outside"], store="s", rollout_id="run") == 0
    spans = spans_of_store("s")
    assert {call.prompt(): call[c.ROLLOUT_ID] for call in calls(spans)} == {"outside": "run", "in own": "own"}
    (rewarded,) = [span for span in spans if span.events]
    assert (rewarded[c.ROLLOUT_ID], rewarded.events[0][1][c.REWARD_VALUE]) == ("run", 0.25)


def test_a_command_that_is_not_there_is_one_clear_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run_command(["no-such-command-here"], store="s") == 127
    assert run_command([], store="s") == 127
    (tmp_path / "text.txt").write_text("x")
    assert run_command(["./text.txt"], store="s") == 126
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert "'no-such-command-here'" in lines[0]


def test_signals_reach_the_child_and_its_death_is_the_exit_code(model: ModelServer, tmp_path: Path) -> None:
    child = (
        "import signal, sys, pathlib\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))\n"
        "pathlib.Path('ready').touch()\n"
        "signal.pause()\n"
    )
    launcher = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from spangrad.tracer.launch import run_command;"
            "sys.exit(run_command(sys.argv[1:], store='s'))",
            sys.executable,
            "-c",
            child,
        ],
        cwd=tmp_path,
    )
    wait_until(lambda: (tmp_path / "ready").exists())
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(30) == 9
    killed = run_command([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], store=tmp_path / "s")
    assert killed == 128 + 9
    assert [root.is_error for root in roots(spans_of_store(tmp_path / "s"))] == [True, True]


def test_signals_that_nohup_ignores_are_ignored_by_the_child_too(tmp_path: Path) -> None:
    code = "import signal; print(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN)"
    done = subprocess.run(
        [sys.executable, "-m", "spangrad", "run", "--", sys.executable, "-c", code],
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "True"


def test_a_python_without_spangrad_says_that_it_is_not_recorded(tmp_path: Path) -> None:
    autostart = (
        Path(__import__("spangrad.tracer.launch").tracer.launch.__file__).resolve().parent / "autostart"
    )
    bare = subprocess.run(
        [
            sys.executable,
            "-S",
            "-c",
            f"import runpy; runpy.run_path({str(autostart / 'sitecustomize.py')!r})",
        ],
        capture_output=True,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        cwd=tmp_path,
    )
    assert bare.returncode == 0
    assert "is not recorded" in bare.stderr


ASKER = """
import sys, httpx
for number in range(5):
    body = {"model": "policy", "messages": [{"role": "user", "content": f"{number} " + "x" * 1000}]}
    httpx.post(sys.argv[1] + "/chat/completions", json=body)
print("done")
"""


def run_asker(
    folder: Path, model: ModelServer, store: str, longest_file: int | None = None
) -> subprocess.CompletedProcess[str]:
    def limit() -> None:
        if longest_file is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (longest_file, resource.RLIM_INFINITY))

    command = (sys.executable, "-m", "spangrad", "run", "--store", store, "--")
    return subprocess.run(
        [*command, sys.executable, "-c", ASKER, model.url],
        preexec_fn=limit,
        cwd=folder,
        capture_output=True,
        text=True,
    )


def test_files_that_can_not_hold_a_batch_cost_no_call(model: ModelServer, tmp_path: Path) -> None:
    done = run_asker(tmp_path, model, "s", longest_file=4000)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(calls(spans_of_store(tmp_path / "s"))) == 5


def test_a_disk_that_takes_no_span_is_said_once_with_their_number(model: ModelServer, tmp_path: Path) -> None:
    done = run_asker(tmp_path, model, "s", longest_file=100)
    assert (done.returncode, done.stdout) == (0, "done\n")
    *childs, launchers = done.stderr.splitlines()
    assert " 5 spans" in childs[-1] and "s.spool' can't be written (File too large)" in childs[-1]
    assert len(childs) <= 2  # the first loss, and how it ended if there were more
    assert launchers.startswith("spangrad run: the end of this rollout is not recorded: spool ")
    assert list((tmp_path / "s.spool").iterdir()) == []


def test_a_hub_that_is_down_is_said_once(model: ModelServer, tmp_path: Path) -> None:
    done = run_asker(tmp_path, model, "http://127.0.0.1:1")
    (line,) = done.stderr.splitlines()
    assert line.startswith("hub http://127.0.0.1:1 does not take spans")


@pytest.mark.parametrize("made_as", ["folder in the way", "newer schema", "no database"])
def test_a_store_that_can_not_take_spans_is_refused_before_the_agent_runs(
    model: ModelServer, tmp_path: Path, made_as: str
) -> None:
    store, message = tmp_path / "s.duckdb", "is no DuckDB database"
    if made_as == "folder in the way":
        (tmp_path / "file").touch()
        store, message = tmp_path / "file" / "s.duckdb", "s.duckdb.spool' can't be written"
    elif made_as == "newer schema":
        with FileStore(store) as opened, opened._database.transaction() as con:
            con.execute("INSERT INTO schema_migrations VALUES (99, 'm099', 0)")
        message = f"'s.duckdb' has schema 99, this spangrad reads up to {SCHEMA_VERSION}"
    else:
        store.write_text("hello")
    done = run_asker(tmp_path, model, str(store))
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("spangrad: ") and message in line
