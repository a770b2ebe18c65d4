"""A whole run whose policy two learner workers train, and one of them killed while an update is made."""

import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from spangrad.trainer.serving.publish import served_version
from tests.loop.conftest import end
from tests.waiting import is_alive, wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
TWO = ("learner.workers=2", "learner.sharding=fsdp2")


def ranks_of(run: int) -> list[int]:
    """Processes of Ray Train's workers that descend from the process of a run."""
    parents, found = {}, []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
            if b"RayTrainWorker" in (stat.parent / "cmdline").read_bytes():
                found.append(int(stat.parent.name))
        except OSError:  # ended since
            continue

    def descends(pid: int) -> bool:
        return pid == run or (pid in parents and descends(parents[pid]))

    return sorted(pid for pid in found if descends(pid))


def test_a_run_of_two_learner_workers_ends_when_one_is_killed_and_goes_on_with_the_same_command(ground):
    config = ground.config("ranked", updates=3)
    run = ground.start(config, *TWO)
    try:
        # Version 1 is published: what the learner is asked for next belongs to update 1.
        wait_until(lambda: run.poll() is not None or len(ground.store.policies("ranked")) >= 2, 500)
        assert run.poll() is None, end(run)
        ranks = ranks_of(run.pid)
        assert len(ranks) == 2
        os.kill(ranks[1], signal.SIGSTOP)  # so that no update can be over before it dies
        ahead = "SELECT group_id FROM rollouts WHERE run_id = 'ranked' AND consumed_by IS NULL"
        ahead += " GROUP BY group_id HAVING bool_and(status IN ('succeeded', 'failed'))"
        wait_until(lambda: len(ground.store.query(ahead)) >= 2, 120)
        os.kill(ranks[1], signal.SIGKILL)
        code, _, err = end(run)
    finally:
        run.kill()
    assert code == 1
    last = err.strip().splitlines()[-1]
    assert last.startswith("spangrad: a learner worker of 2 was lost"), err
    assert "start the run again, it goes on from its last checkpoint" in last
    done = len(ground.store.updates("ranked"))
    assert 1 <= done < 3
    wait_until(lambda: not is_alive(ranks[0]))

    code, out, err = end(ground.start(config, *TWO), 500)
    assert code == 0, err
    assert out.startswith(f"continuing run 'ranked' at update {done} ")
    assert "3 updates, policy version 3" in out
    updates = ground.store.updates("ranked")
    assert [update.update_index for update in updates] == [0, 1, 2]
    assert set(Counter(one for update in updates for one in update.rollout_ids).values()) == {1}
    for update in updates:
        assert update.metrics["gap/published_mean"] < 0.02 and update.metrics["gap/published_moved"] > 0
    assert served_version(ground.engine.url) == 3
