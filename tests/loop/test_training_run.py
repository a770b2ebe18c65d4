"""The whole loop against a real hub, gateway and vLLM, and what happens when its trainer is killed."""

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from spangrad.credit import CreditConfig
from spangrad.credit.pipeline import credited_rows
from spangrad.store.records import RewardAuthor, RolloutStatus
from spangrad.trainer.serving.publish import served_version
from tests.loop.conftest import end
from tests.waiting import wait_until

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def finished_run(ground):
    """A synchronous run of three updates, started from the command line."""
    code, out, err = end(ground.start(ground.config("finished", updates=3, max_staleness=0)))
    assert code == 0, err
    return out


def rows_of(ground, run_id):
    rollouts = ground.store.rollouts(run_id=run_id, split="train")
    batch = credited_rows(ground.store, rollouts, CreditConfig(step="gigpo"), min_grade="exact")
    assert batch.rows, batch.refused
    return batch


def test_a_run_makes_its_updates_and_serves_the_last_version(ground, finished_run):
    assert "3 updates, policy version 3" in finished_run
    assert [update.policy_version for update in ground.store.updates("finished")] == [1, 2, 3]


def test_every_update_reports_a_gap_below_two_hundredths_of_a_nat(ground, finished_run):
    for update in ground.store.updates("finished"):
        assert update.metrics["gap/mean"] < 0.02
        assert update.metrics["gap/published_mean"] < 0.02
        assert update.metrics["gap/published_moved"] > 0
        assert update.metrics["data/staleness_mean"] == 0


def test_masks_cover_exactly_what_the_engine_sampled(ground, finished_run):
    sampled: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
    for line in ground.raw_replies():
        reply = line["response"]
        sampled.setdefault(line["rollout_id"], []).append(
            (tuple(reply["prompt_token_ids"]), tuple(reply["choices"][0]["token_ids"]))
        )
    batch = rows_of(ground, "finished")
    rebuilt: Counter[str] = Counter()
    for row in batch.rows:
        for segment in row.segments:
            prompt = tuple(row.token_ids[: segment.start].tolist())
            completion = tuple(row.token_ids[segment.start : segment.stop].tolist())
            assert (prompt, completion) in sampled[row.rollout_id]
            rebuilt[row.rollout_id] += 1
        covered = np.zeros(len(row.token_ids), dtype=bool)
        for segment in row.segments:
            covered[segment.start : segment.stop] = True
        assert np.array_equal(covered, row.action_mask)
    assert rebuilt == {rollout: len(calls) for rollout, calls in sampled.items() if rollout in rebuilt}
    trained = ground.store.rollouts(run_id="finished", split="train")
    assert set(rebuilt) == {rollout.rollout_id for rollout in trained}
    assert len(rebuilt) >= 3 * 8  # more if a batch said nothing and was refilled


def test_rewards_come_from_the_evaluator_alone(ground, finished_run):
    ids = [rollout.rollout_id for rollout in ground.store.rollouts(run_id="finished")]
    assert {reward.author for reward in ground.store.rewards(ids)} == {RewardAuthor.EVALUATOR}


def test_transitions_with_the_runs_config_are_what_was_trained(ground, finished_run):
    shown = subprocess.run(
        [
            *(sys.executable, "-m", "spangrad", "transitions", "--json", "--run", "finished"),
            *("--config", str(ground.folder / "finished.toml"), "--store", ground.stack.hub_url),
        ],
        env={**os.environ, "SPANGRAD_KEY": ground.stack.keys.evaluator},
        capture_output=True,
        text=True,
        check=True,
    )
    rows = [json.loads(line) for line in shown.stdout.splitlines()]
    advantages: dict[str, list[float]] = {}
    for row in rows:
        for part in row["segments"]:
            trained = row["advantages"][part["start"] : part["stop"]]
            advantages.setdefault(part["call_id"], []).extend(trained)
    samples = {s.call_id: s for update in ground.store.updates("finished") for s in update.samples}
    assert set(advantages) == set(samples)
    for call_id, values in advantages.items():
        assert np.mean(values) == pytest.approx(samples[call_id].advantage)
        # A call that says nothing can be in a row that says something, or was left out.
        assert samples[call_id].trained_tokens in ({len(values)} if any(values) else {0, len(values)})


def test_the_last_update_is_made_again_from_the_store(ground, finished_run):
    again = subprocess.run(
        [
            *(sys.executable, "-m", "spangrad", "replay", "--update", "2", "--run", "finished"),
            *("--store", ground.stack.hub_url),
        ],
        env={**os.environ, "SPANGRAD_KEY": ground.stack.keys.evaluator},
        capture_output=True,
        text=True,
    )
    assert again.returncode == 0, again.stdout + again.stderr
    assert "update 2 of run 'finished' was made again" in again.stdout


def test_a_finished_run_is_not_run_again(ground, finished_run):
    before = ground.store.query("SELECT count(*) AS n FROM rollouts")
    code, out, _ = end(ground.start(ground.config("finished", updates=3, max_staleness=0)))
    assert code == 0 and "3 updates" in out
    assert ground.store.query("SELECT count(*) AS n FROM rollouts") == before


def test_a_monitor_pauses_the_command_and_the_run_goes_on_when_it_is_told_to(ground):
    config, pausing = ground.config("paused", updates=2), ("monitor.gap=1e-12", "monitor.actions.gap=pause")
    for _ in range(2):  # a supervisor that starts it again changes nothing
        code, out, err = end(ground.start(config, *pausing))
        assert code == 3, err
        assert "run 'paused' is paused after update 0: monitor gap: logprobs of engine and learner" in err
        assert [update.update_index for update in ground.store.updates("paused")] == [0]
        assert served_version(ground.engine.url) == 1
    code, out, err = end(ground.start(config, *pausing, "monitor.continue_after=0"))
    assert code == 0 and "2 updates, policy version 2" in out, err
    of_gap = [event for event in ground.store.events("paused") if event.monitor == "gap"]
    assert [(event.update_index, event.action) for event in of_gap] == [(0, "pause")]
    first = ground.store.updates("paused")[0].metrics
    assert 0 < first["policy/sample_share"] <= 1 and first["behavior/steps_mean"] >= 1


def is_past(ground, process, updates):
    return process.poll() is not None or len(ground.store.updates("killed")) >= updates


def happens(rng):
    return rng.random() < 0.1


def test_a_killed_trainer_continues_and_trains_nothing_twice_or_never(ground):
    updates = 7
    config = ground.config("killed", updates=updates)
    rng = random.Random(7)
    for target in (1, 2, 4):
        process = ground.start(config)
        wait_until(partial(is_past, ground, process, target), 180)
        # A moment inside the next update that no line of the loop was chosen for.
        wait_until(partial(happens, rng), 60)
        process.send_signal(signal.SIGKILL)
        _, err = process.communicate()
        assert process.returncode == -signal.SIGKILL, f"it ended before it was killed: {err}"
    code, out, err = end(ground.start(config))
    assert code == 0, err
    assert out.startswith("continuing run 'killed' at update ")
    done = ground.store.updates("killed")
    assert [update.update_index for update in done] == list(range(updates))
    consumed = Counter(rollout for update in done for rollout in update.rollout_ids)
    assert set(consumed.values()) == {1}
    trained = ground.store.rollouts(run_id="killed", split="train")
    assert {rollout.rollout_id for rollout in trained} == set(consumed)
    for update in done:
        for rollout in (r for r in trained if r.rollout_id in set(update.rollout_ids)):
            assert rollout.consumed_by == update.update_index
            assert rollout.status is RolloutStatus.SUCCEEDED
        calls = Counter(sample.call_id for sample in update.samples)
        assert set(calls.values()) == {1}
    # Rollouts ran ahead, and however it was killed, no trained token is older than allowed.
    assert {sample.staleness for update in done for sample in update.samples} <= {0, 1}
    ahead = {sample.policy_version for sample in done[-1].samples}
    assert updates - 2 in ahead, (
        "the last update learned nothing that had begun before its weights were there"
    )
    assert served_version(ground.engine.url) == updates


DIES_BEFORE_THE_COMMIT = """
import os, sys
from pathlib import Path
from spangrad.trainer.config import load_config
from spangrad.trainer.loop import Run

with Run(load_config(Path(sys.argv[1]))) as run:
    run.store.commit_update = lambda update: os._exit(9)
    run.learn(*run.collect())
"""


def test_a_trainer_that_died_between_checkpoint_and_commit_commits_when_it_comes_back(ground):
    config = ground.config("uncommitted", updates=2)
    died = subprocess.run([sys.executable, "-c", DIES_BEFORE_THE_COMMIT, str(config)], timeout=180)
    assert died.returncode == 9
    assert ground.store.updates("uncommitted") == []
    code, _, err = end(ground.start(config))
    assert code == 0, err
    updates = ground.store.updates("uncommitted")
    assert [update.update_index for update in updates] == [0, 1]
    for update in updates:
        assert Path(update.checkpoint).name.startswith("checkpoint-")
        sampled = {sample.call_id for sample in update.samples}
        known = ground.store.query("SELECT call_id FROM calls WHERE list_contains(?, call_id)", [[*sampled]])
        assert {row["call_id"] for row in known} == sampled
    paths = [policy.path for policy in ground.store.policies("uncommitted")]
    assert paths[-1] == updates[-1].checkpoint


def test_a_batch_that_says_nothing_is_one_clear_line_and_nothing_is_consumed(ground):
    changes = {"function": "run_on", "reward": "equal_reward", "refills": 1, "max_staleness": 0}
    hopeless = ground.config("hopeless", **changes)
    code, _, err = end(ground.start(hopeless))
    assert code == 1
    assert err.count("trying other tasks, refill 1 of 1") == 1 and "refill 2" not in err
    last = err.strip().splitlines()[-1]
    assert last.startswith("spangrad: update 0: nothing to learn from 16 rollouts")
    assert "0 of 4 groups with different rewards" in last
    assert ground.store.updates("hopeless") == []
    kept = ground.store.rollouts(run_id="hopeless")
    assert len(kept) == 16 and {rollout.consumed_by for rollout in kept} == {None}


def test_a_run_that_has_nothing_left_to_learn_ends_well(ground, tmp_path, monkeypatch):
    monkeypatch.setenv("GRADED_FILE", str(tmp_path / "graded"))
    changes = {"updates": 3, "reward": "soon_equal_reward", "refills": 0, "max_staleness": 0}
    learned = ground.config("learned", **changes)
    code, out, err = end(ground.start(learned))
    assert code == 0, err
    assert (
        "update 1: the rollouts of each of 2 groups got one reward, 1 on average, no less than before" in out
    )
    assert "training ends 2 updates early" in out
    assert "run learned: 1 updates, policy version 1" in out
    assert served_version(ground.stack.engine_url) == 1
    assert {each.consumed_by for each in ground.store.rollouts(run_id="learned")} == {0, None}


def test_a_broken_grader_gives_no_reward_instead_of_zero(ground):
    code, _, err = end(ground.start(ground.config("ungraded", reward="broken_reward", refills=0)))
    assert code == 1
    assert "nothing to learn from 8 rollouts" in err and "the grader is broken" in err
    ids = [rollout.rollout_id for rollout in ground.store.rollouts(run_id="ungraded")]
    assert ground.store.rewards(ids) == []


def test_a_run_judges_its_versions_and_goes_back_when_it_is_told_to(ground):
    config = ground.config("judged", updates=1)
    config.write_text(f"{config.read_text()}\n[promotion]\nevery = 1\ntasks = 5\nconfidence = 0.95\n")
    code, out, err = end(ground.start(config))
    assert code == 0, err
    assert "version 0 is promoted: the first version that was evaluated" in out
    first, second = ground.store.decisions("judged")
    assert (first.decision, first.policy_version, second.policy_version) == ("promoted", 0, 1)
    assert second.metrics["tasks"] == 5
    (update,) = ground.store.updates("judged")
    assert update.metrics["promotion/success"] == second.metrics["success"]
    asked = ground.store.rollouts(run_id="judged", split="eval-promotion")
    trained = ground.store.rollouts(run_id="judged", split="train")
    assert len(asked) == 10
    assert not {rollout.task_id for rollout in asked} & {rollout.task_id for rollout in trained}

    at = ["--store", ground.stack.hub_url, "--key", ground.stack.keys.admin]
    command = [sys.executable, "-m", "spangrad", "rollback", "judged", "--to", "0", *at]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    config.write_text(config.read_text().replace("updates = 1", "updates = 2"))
    code, _, err = end(ground.start(config))
    assert code == 0, err
    made = [(d.decision, d.policy_version, d.to_version) for d in ground.store.decisions("judged")]
    assert made[2:4] == [("rolled_back", 1, 0), ("restored", 2, 0)]
    parents = {policy.policy_version: policy.parent_version for policy in ground.store.policies("judged")}
    assert parents == {0: None, 1: 0, 2: 0, 3: 2}
    assert served_version(ground.stack.engine_url) == 3
    assert ground.store.updates("judged")[1].metrics["gap/published_mean"] < 0.02
