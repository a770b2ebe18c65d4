"""`spangrad score`, run as a user runs it: files, a function, interrupted and killed."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from spangrad.adapters import account_unread
from spangrad.store import open_store
from spangrad.store.records import Rollout
from tests.command_line import listed, listen_to_ctrl_c, recorded, spangrad
from tests.waiting import is_alive, wait_until

CHECKS = """
import os, time
from pathlib import Path

def is_four(rollout):
    return rollout.final_text == "4"

def fails(rollout):
    raise RuntimeError("no database")

def waits(rollout):
    with open("seen", "a") as seen:
        seen.write(f"{os.getpid()} {rollout.rollout_id}\\n")
    while rollout.task["n"] >= 3 and not Path("go").exists():
        time.sleep(0.01)
    return rollout.task["n"]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Six rollouts that ended, in two runs, and a module of verifiers."""
    (tmp_path / "checks.py").write_text(CHECKS)
    with open_store(str(tmp_path / "s.duckdb")) as store:
        store.enqueue(
            [Rollout(f"r-{n}", task={"n": n}, run_id=f"run-{n % 2}", split="eval") for n in range(1, 7)]
        )
        for rollout in store.claim(worker="w", limit=6):
            store.put_otlp(recorded(rollout.rollout_id, int(rollout.task["n"])))
            store.finish(rollout.rollout_id, rollout.attempt)
        account_unread(store)
    return tmp_path


def score(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    done: subprocess.CompletedProcess[str] = spangrad("score", "--store", "s.duckdb", *arguments, cwd=folder)
    return done


def rewards(folder: Path) -> dict[str, float]:
    with open_store(str(folder / "s.duckdb")) as store:
        return {reward.rollout_id: reward.value for reward in store.rewards()}


def test_a_file_of_rewards_is_told_by_line(folder: Path) -> None:
    rows = [{"rollout_id": "r-1", "value": 1}, {"rollout_id": "r-9", "value": 1}, {"rollout_id": "r-2"}]
    (folder / "rewards.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = score(folder, "rewards.jsonl")
    assert done.returncode == 0
    assert "rewards\treward\t1" in done.stdout.splitlines()
    assert "left_out\tno such rollout\t1" in done.stdout.splitlines()
    assert done.stderr.splitlines() == [
        "left out: rewards.jsonl:2: no such rollout: r-9",
        "left out: rewards.jsonl:3: no value: columns: rollout_id",
    ]
    (told,) = listed("score", str(folder / "rewards.jsonl"), "--store", str(folder / "s.duckdb"), "--json")
    assert (told["rewards"], told["new_rewards"]) == (1, 0)
    assert [row["line"] for row in told["left_out"]] == [2, 3]
    shown = listed("rollouts", "--store", str(folder / "s.duckdb"), "--json")
    assert [row["reward"] for row in shown] == [1.0] + [None] * 5


def test_a_file_without_a_usable_row_is_an_error(folder: Path) -> None:
    (folder / "rewards.jsonl").write_text('{"id": 1, "score": 1}\n')
    done = score(folder, "rewards.jsonl")
    assert done.returncode == 1
    assert "no row of rewards.jsonl gave a reward: rewards.jsonl:1: neither rollout_id" in done.stderr
    assert rewards(folder) == {}


@pytest.mark.slow
def test_a_function_scores_what_the_filters_choose(folder: Path) -> None:
    done = score(folder, "--with", "checks:is_four", "--run", "run-1", "--json")
    (told,) = map(json.loads, done.stdout.splitlines())
    assert (told["by_outcome"], told["means"], done.stderr) == ({"scored": 3}, {"reward": 1.0}, "")
    assert rewards(folder) == {"r-1": 1.0, "r-3": 1.0, "r-5": 1.0}
    sql = "SELECT rollout_id FROM rollouts WHERE rollout_id < 'r-5' -- all but two"
    done = score(folder, "--with", "checks.py:is_four", "--sql", sql, "--split", "eval")
    assert "rollouts\t-\t4\t-" in done.stdout.splitlines()
    assert "rewards\treward\t2\t1" in done.stdout.splitlines()
    assert "2 rollouts have a reward 'reward' of this author" in done.stderr
    done = score(folder, "--with", "checks.py:is_four", "-r", "r-1", "-r", "r-6", "--again", "--workers", "1")
    assert "new_rewards\t-\t2\t-" in done.stdout.splitlines()  # one of them: `checks:` became `checks.py:`
    assert len(rewards(folder)) == 6


@pytest.mark.slow
def test_a_function_that_fails_everywhere_is_an_error_with_its_first_words(folder: Path) -> None:
    done = score(folder, "--with", "checks.py:fails")
    assert done.returncode == 1
    first, last = done.stderr.splitlines()
    assert first.startswith("no reward, raised (6), first: r-") and first.endswith(
        "RuntimeError: no database (checks.py:9)"
    )
    assert last.startswith("spangrad: 'checks.py:fails' failed on all 6 rollouts, first on r-")
    assert rewards(folder) == {}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "takes either files of rewards or a function"),
        (("x.jsonl", "--with", "checks:is_four"), "takes either files of rewards or a function"),
        (("x.jsonl", "--sql", "SELECT 1"), "--sql is for --with only"),
        (("--with", "checks:is_four", "--name", ""), "--name is empty"),
        (("--with", "checks:is_four", "--run", "run-7"), "no rollout of run 'run-7'"),
        (("--with", "checks:is_four", "--sql", "SELECT 1"), "--sql needs a SELECT with a column rollout_id"),
        (("x.jsonl", "--store", "nosuch.duckdb"), "there is no store at 'nosuch.duckdb'"),
    ],
)
def test_what_can_not_be_done_is_said_in_one_line(
    folder: Path, arguments: tuple[str, ...], says: str
) -> None:
    done = score(folder, *arguments)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert says in line
    assert not (folder / "nosuch.duckdb").exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_stopped_or_killed_it_goes_on_where_it_was(folder: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "spangrad", "score", "--store", "s.duckdb", "--with", "checks.py:waits"]
    process = subprocess.Popen(
        [*command, "--workers", "2"],
        cwd=folder,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=listen_to_ctrl_c,
    )
    seen, log = folder / "seen", folder / "s.duckdb.wal"
    try:  # until r-3 and r-4 wait, and r-1 and r-2 are stored
        wait_until(lambda: seen.exists() and len(seen.read_text().splitlines()) >= 4)
        wait_until(lambda: log.exists() and {b"r-1", b"r-2"} <= set(re.findall(rb"r-\d", log.read_bytes())))
    finally:
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=60)
    workers = {int(line.split()[0]) for line in seen.read_text().splitlines()}
    wait_until(lambda: not any(map(is_alive, workers)))
    if number is not signal.SIGKILL:
        assert process.returncode == 130, stderr
        assert "judged\tscored\t2\t-" in stdout.splitlines()
        assert stderr == "stopped; what was judged is stored, and the same command goes on from there\n"
    assert set(rewards(folder)) == {"r-1", "r-2"}
    seen.unlink()
    (folder / "go").touch()
    done = score(folder, "--with", "checks.py:waits")
    assert done.returncode == 0
    assert sorted(line.split()[1] for line in seen.read_text().splitlines()) == ["r-3", "r-4", "r-5", "r-6"]
    assert rewards(folder) == {f"r-{n}": float(n) for n in range(1, 7)}


@pytest.mark.slow
def test_progress_is_shown_on_a_terminal(folder: Path) -> None:
    ours, theirs = pty.openpty()
    command = [
        sys.executable,
        "-m",
        "spangrad",
        "score",
        "--store",
        "s.duckdb",
        "--with",
        "checks.py:is_four",
    ]
    environment = {**os.environ, "COLUMNS": "80", "TERM": "xterm"}
    process = subprocess.Popen(command, cwd=folder, stderr=theirs, stdout=subprocess.DEVNULL, env=environment)
    os.close(theirs)
    shown = b""
    with suppress(OSError):  # what a terminal says when nobody is left to write to it
        while piece := os.read(ours, 2**16):
            shown += piece
    os.close(ours)
    assert process.wait(60) == 0
    assert b"judging" in shown and b"%" in shown
