"""The engine dies in the middle of a rollout and comes back empty-handed; the run goes on."""

import json
import os
import signal

import pytest

from spangrad.store import open_store
from spangrad.store.records import RolloutStatus
from spangrad.trainer.processes import free_port
from spangrad.trainer.serving.engine import Engine, EngineConfig
from spangrad.trainer.serving.publish import served_version
from spangrad.trainer.up import Stack, UpConfig
from tests.loop.conftest import Ground, end
from tests.waiting import wait_until

pytestmark = pytest.mark.vllm


def rollouts_running(ground):
    return ground.store.rollouts(run_id="engine", status=RolloutStatus.RUNNING)


def test_a_killed_engine_costs_attempts_and_trains_no_half_rollout(served_model, tmp_path):
    engine = Engine(EngineConfig(model=str(served_model), port=free_port(), log=str(tmp_path / "engine.log")))
    engine.start().wait_ready()
    up = UpConfig(
        model=None,
        folder=str(tmp_path),
        store=str(tmp_path / "store.duckdb"),
        hub_port=free_port(),
        gateway_port=free_port(),
        engine_url=engine.url,
        raw_log=str(tmp_path / "engine_replies.jsonl"),
    )
    with Stack(up) as stack:
        stack.start_hub()
        stack.start_gateway()
        store = open_store(stack.hub_url, stack.keys.trainer)
        ground = Ground(stack, engine, served_model, tmp_path, store)
        training = ground.start(ground.config("engine", updates=3, max_attempts=6))
        try:
            wait_until(
                lambda: training.poll() is not None or (store.updates("engine") and rollouts_running(ground)),
                180,
            )
            assert engine.pid is not None
            os.killpg(os.getpgid(engine.pid), signal.SIGKILL)
            wait_until(lambda: not engine.is_alive(), 20)
            engine.stop()
            engine.start().wait_ready()
            code, _, err = end(training, 240)
        finally:
            training.kill()
            engine_version = served_version(engine.url) if engine.is_alive() else None
            engine.stop()
        assert code == 0, err
        updates = store.updates("engine")
        assert [update.update_index for update in updates] == [0, 1, 2]
        assert engine_version == 3
        consumed = [rollout for update in updates for rollout in update.rollout_ids]
        rollouts = store.rollouts(rollout_ids=consumed)
        assert {rollout.status for rollout in rollouts} == {RolloutStatus.SUCCEEDED}
        replies = [json.loads(line) for line in (tmp_path / "engine_replies.jsonl").read_text().splitlines()]
        whole = {
            (line["rollout_id"], line["attempt"], tuple(line["response"]["choices"][0]["token_ids"]))
            for line in replies
            if "choices" in (line["response"] or {})
        }
        for update in updates:
            trained = {sample.rollout_id for sample in update.samples}
            for rollout in (r for r in rollouts if r.rollout_id in trained):
                mine = [sample for sample in update.samples if sample.rollout_id == rollout.rollout_id]
                assert {sample.attempt for sample in mine} == {rollout.attempt}
                assert len(mine) == 2  # the agent makes two calls: no half rollout
                assert len([key for key in whole if key[:2] == (rollout.rollout_id, rollout.attempt)]) == 2
        store.close()
