"""Engine or gateway is killed in the middle of a rollout and comes back: no half rollout is trained."""

import os
import signal

import pytest

from spangrad.store.records import RolloutStatus
from spangrad.trainer.processes import free_port
from spangrad.trainer.serving.engine import Engine, EngineConfig
from spangrad.trainer.serving.publish import served_version
from tests.loop.conftest import end, open_ground
from tests.waiting import wait_until

pytestmark = pytest.mark.vllm


def kill_group(pid):
    assert pid is not None
    os.killpg(os.getpgid(pid), signal.SIGKILL)


def restart_engine(ground):
    kill_group(ground.engine.pid)
    wait_until(lambda: not ground.engine.is_alive(), 20)
    ground.engine.stop()
    ground.engine.start().wait_ready()


def restart_gateway(ground):
    kill_group(ground.stack.gateway.pid)
    wait_until(lambda: not ground.stack.gateway.is_alive(), 20)
    ground.stack.gateway.stop()
    ground.stack.start_gateway()


@pytest.mark.parametrize("restart", [restart_engine, restart_gateway])
def test_a_kill_costs_attempts_and_trains_no_half_rollout(served_model, tmp_path, restart):
    engine = Engine(EngineConfig(model=str(served_model), port=free_port(), log=str(tmp_path / "engine.log")))
    with engine, open_ground(engine, served_model, tmp_path) as ground:
        training = ground.start(ground.config("killed", updates=3, max_attempts=6))
        try:
            wait_until(
                lambda: (
                    training.poll() is not None
                    or (
                        ground.store.updates("killed")
                        and ground.store.rollouts(run_id="killed", status=RolloutStatus.RUNNING)
                    )
                ),
                180,
            )
            assert training.poll() is None, end(training)
            restart(ground)
            code, _, err = end(training, 240)
        finally:
            training.kill()
        assert code == 0, err
        assert served_version(engine.url) == 3
        updates = ground.store.updates("killed")
        assert [update.update_index for update in updates] == [0, 1, 2]
        consumed = [rollout for update in updates for rollout in update.rollout_ids]
        rollouts = {r.rollout_id: r for r in ground.store.rollouts(rollout_ids=consumed)}
        assert {rollout.status for rollout in rollouts.values()} == {RolloutStatus.SUCCEEDED}
        whole = {
            (line["rollout_id"], line["attempt"], tuple(line["response"]["choices"][0]["token_ids"]))
            for line in ground.raw_replies()
        }
        for update in updates:
            for rollout_id in {sample.rollout_id for sample in update.samples}:
                rollout = rollouts[rollout_id]
                mine = [sample for sample in update.samples if sample.rollout_id == rollout_id]
                assert {sample.attempt for sample in mine} == {rollout.attempt}
                assert len(mine) == 2  # the agent makes two calls: no half rollout
                assert len([key for key in whole if key[:2] == (rollout_id, rollout.attempt)]) == 2
