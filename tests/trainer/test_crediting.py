"""What a run says of credit that comes to nothing."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.trainer.played_run import Played, play, played_server
from tests.trainer.small_policy import make_policy

from spangrad.trainer.config import load_config

RUN = """
[run]
id = "r"
updates = 2
[hub]
url = "{folder}/store.duckdb"
[serving]
engine_url = "{url}"
gateway_url = "{url}"
model = "{folder}/policy"
[agent]
function = "agent.py:run"
tasks = "tasks.jsonl"
reward = "agent.py:reward"
[rollout]
groups_per_update = 2
group_size = 1
max_staleness = 1
refills = 1
[credit]
episode = "running_baseline"
[learner]
threads = 1
"""


@pytest.fixture
def url() -> Iterator[str]:
    with played_server() as server:
        yield server.url


def played(folder: Path, url: str, *changes: str) -> Played:
    """A run of tasks that nobody runs twice."""
    make_policy(folder / "policy")
    tasks = [{"task_id": f"t{k}", "level": k % 2, "rewards": [float(k % 3)]} for k in range(40)]
    (folder / "tasks.jsonl").write_text("\n".join(map(json.dumps, tasks)))
    (folder / "agent.py").write_text("def run(task): ...\ndef reward(task, output): ...\n")
    (folder / "run.toml").write_text(RUN.format(folder=folder, url=url))
    return play(load_config(folder / "run.toml", changes))


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in caplog.messages if "rollouts train nothing" in line]


def test_a_baseline_of_tasks_that_come_once_is_said_once_and_is_why_an_update_is_empty(tmp_path, url, caplog):
    with caplog.at_level(logging.WARNING):
        run = played(tmp_path, url)
    (line,) = said(caplog)
    assert line.startswith(
        "2 of 2 rollouts train nothing: by credit.baseline_key 'task_id' none of their kind"
    )
    told = line.replace("2 of 2", "4 of 4")  # with those of the refill
    assert run.updates == [] and f"0 calls refused; {told}; the rollouts stay" in str(run.error)


def test_a_baseline_that_is_there_lets_a_run_go_on(tmp_path, url):
    run = played(tmp_path, url, "credit.baseline_key=all")
    assert run.error is None
    missing = [update.metrics["credit/baseline_missing"] for update in run.updates]
    assert missing == [1.0, 0.0]  # the first of all
