"""What a run says of credit that comes to nothing."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.trainer.played_run import Played, play, played_server, write_run

from spangrad.trainer.config import load_config


@pytest.fixture
def url() -> Iterator[str]:
    with played_server() as server:
        yield server.url


def played(folder: Path, url: str, *changes: str) -> Played:
    """A run of tasks that nobody runs twice."""
    tasks = [{"task_id": f"t{k}", "level": k % 2, "rewards": [float(k % 3)]} for k in range(40)]
    file = write_run(folder, url, tasks, '[credit]\nepisode = "running_baseline"\n')
    return play(load_config(file, ["rollout.group_size=1", "rollout.refills=1", *changes]))


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
