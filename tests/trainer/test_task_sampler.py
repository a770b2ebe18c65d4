"""Tasks drawn by what a store knows of them: a real store, played runs."""

import itertools
import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.adapters.building import call

from spangrad.adapters.purpose import NO_TURN_LEFT
from spangrad.credit.rewards import by_rollout, rewards_of
from spangrad.errors import ConfigError
from spangrad.store.file_store import FileStore
from spangrad.store.records import Reward, RewardAuthor, Rollout, RolloutStatus, Update
from spangrad.trainer.config import RolloutConfig, RunConfig, TrainConfig
from spangrad.trainer.curriculum.curriculum_config import CurriculumConfig, SamplingConfig
from spangrad.trainer.curriculum.evidence import successes_by_task
from spangrad.trainer.curriculum.sampler import TaskSampler, turn_metrics
from spangrad.trainer.plugins import load_tasks
from spangrad.trainer.rollouts.agent_config import AgentConfig
from spangrad.trainer.rollouts.scheduling import set_rollouts

AUTHORS = ("evaluator", "operator")


def config_of(folder: Path, rates, *, groups=4, size=4, sampling=None, **curriculum) -> TrainConfig:
    """A run on one task a planted rate of success."""
    lines = [json.dumps({"task_id": f"t{n:03d}", "rate": rate}) for n, rate in enumerate(rates)]
    (folder / "tasks.jsonl").write_text("\n".join(lines))
    return TrainConfig(
        run=RunConfig("r"),
        agent=AgentConfig(function="a.py:run", tasks="tasks.jsonl", reward="a.py:reward"),
        rollout=RolloutConfig(groups_per_update=groups, group_size=size),
        curriculum=CurriculumConfig(sampling=sampling or SamplingConfig(), **curriculum),
        base_dir=str(folder),
    )


def play(store, config, sampler, update, rng):
    """Ask for a set, let its rollouts end by their tasks' rates, learn from it; gives informative groups."""
    rollouts = set_rollouts(config, update, sampler.tasks(update))
    store.enqueue([replace(one, status=RolloutStatus.SUCCEEDED) for one in rollouts])
    rewards = [Reward(one.rollout_id, float(rng.random() < one.task["rate"]), attempt=0) for one in rollouts]
    store.put_rewards(rewards, author=RewardAuthor.EVALUATOR)
    commit(store, update, [one.rollout_id for one in rollouts])
    seen: dict[str | None, set[float]] = {}
    for one, reward in zip(rollouts, rewards, strict=True):
        seen.setdefault(one.group_id, set()).add(reward.value)
    return sum(len(values) > 1 for values in seen.values())


def commit(store, update, ids, run="r"):
    store.commit_update(
        Update(run, update, update + 1, rollout_ids=ids, samples=[], metrics={}, checkpoint="", time_ns=1)
    )


def ids(tasks):
    return [task["task_id"] for task in tasks]


@pytest.fixture(scope="module")
def kept_store(tmp_path_factory):
    """One for many runs, and a counter to tell them apart."""
    with FileStore(tmp_path_factory.mktemp("kept") / "store.duckdb") as opened:
        yield opened, itertools.count()


@pytest.fixture
def store(tmp_path):
    with FileStore(tmp_path / "store.duckdb") as opened:
        yield opened


def test_more_groups_say_something_than_by_uniform_drawing(store, tmp_path):
    # Of 120 tasks 50 are hopeless, 50 are solved, 20 are learnable. A group of 6 says something with
    # probability 1 - p^6 - (1 - p)^6: 0 for 0 and 1, 0.969 for 0.5. Drawn alike: 20 / 120 * 0.969 = 0.161.
    rates, says = [0.0] * 50 + [1.0] * 50 + [0.5] * 20, 1 - 2 * 0.5**6
    config = config_of(tmp_path, rates, groups=8, size=6, sampling=SamplingConfig(half_life=50.0))
    sampler, rng = TaskSampler(config, store), random.Random(1)
    informative = [play(store, config, sampler, update, rng) for update in range(40)]
    assert sum(informative[20:]) / (20 * 8) > 3 * 20 / 120 * says
    # What is told of the drawing is what was drawn: the binomial prediction of these groups holds.
    rows = store.query("SELECT DISTINCT group_id, task_id FROM rollouts WHERE consumed_by >= 20")
    learnable = sum(int(row["task_id"][1:]) >= 100 for row in rows)
    spread = (learnable * says * (1 - says)) ** 0.5
    assert abs(sum(informative[20:]) - learnable * says) < 4 * spread
    metrics = sampler.metrics()
    assert metrics["curriculum/tasks"] == 120 and metrics["curriculum/seen"] > 0.9
    assert 0.1 < metrics["curriculum/in_band"] < 0.4 and 0.5 < metrics["curriculum/entropy"] < 1.0
    assert metrics["curriculum/success_spread"] > 0.25
    # Nothing is lost: tasks outside the band still come.
    assert Counter(int(row["task_id"][1:]) >= 100 for row in rows)[False] > 0


def test_what_is_drawn_follows_from_the_store_and_outlives_the_process(store, tmp_path):
    config = config_of(tmp_path, np.linspace(0, 1, 30))
    rng = random.Random(2)
    for update in range(5):
        play(store, config, TaskSampler(config, store), update, rng)
    first, again = (TaskSampler(config, store).tasks(5) for _ in range(2))
    assert first == again and len(set(ids(first))) == 4
    assert first != TaskSampler(config, store).tasks(6)
    other_seed = replace(config, run=replace(config.run, seed=1))
    assert first != TaskSampler(other_seed, store).tasks(5)


def test_a_set_that_is_in_the_store_is_never_drawn_again(store, tmp_path):
    config = config_of(tmp_path, [0.5] * 20)
    sampler = TaskSampler(config, store)
    asked = sampler.tasks(3)
    store.enqueue(set_rollouts(config, 3, asked))
    for update in range(3):  # what was drawn earlier is learned from
        play(store, config, sampler, update, random.Random(3))
    fresh = FileStore(tmp_path / "other.duckdb")
    assert TaskSampler(config, fresh).tasks(3) == asked  # nothing was known
    fresh.close()
    assert TaskSampler(config, store).tasks(3) == asked
    assert TaskSampler(config, store).tasks(4) != asked


def test_a_set_that_is_there_in_part_is_completed_without_a_task_twice(store, tmp_path):
    config = config_of(tmp_path, [0.5] * 6)
    asked = TaskSampler(config, store).tasks(0)
    there = [
        one for one in set_rollouts(config, 0, asked) if one.group_id in ("r-u00000-g001", "r-u00000-g003")
    ]
    store.enqueue(there)
    completed = TaskSampler(config, store).tasks(0)
    assert [completed[1], completed[3]] == [asked[1], asked[3]]
    assert len(set(ids(completed))) == 4


def test_a_refill_tries_other_tasks(store, tmp_path):
    config = config_of(tmp_path, [0.5] * 9)
    sampler = TaskSampler(config, store)
    asked = sampler.tasks(0)
    store.enqueue(set_rollouts(config, 0, asked))
    refill = sampler.tasks(1)
    assert not set(ids(asked)) & set(ids(refill))
    store.enqueue(set_rollouts(config, 1, refill))
    last = ids(sampler.tasks(2))  # one task is left, then those that wait come again
    assert len(set(last)) == 4 and last[0] not in {*ids(asked), *ids(refill)}


def test_without_sampling_tasks_depend_on_seed_and_set_alone(store, tmp_path):
    config = replace(config_of(tmp_path, [0.5] * 9), curriculum=CurriculumConfig())
    sampler = TaskSampler(config, store)
    before = [sampler.tasks(index) for index in (2, 3)]
    play(store, config, sampler, 0, random.Random(4))
    assert [TaskSampler(config, store).tasks(index) for index in (2, 3)] == before
    assert before[0] != before[1] and sampler.metrics() == {}


def test_a_pool_of_a_function_is_drawn_once_with_its_size(store, tmp_path):
    (tmp_path / "pool_tasks.py").write_text(
        "ASKED = []\n"
        "def tasks(split, n, seed):\n"
        "    ASKED.append((split, n, seed))\n"
        "    return [{'task_id': f'{seed}-{i}'} for i in range(n)]\n"
    )
    config = config_of(tmp_path, [0.5] * 4)
    agent = replace(config.agent, tasks="pool_tasks.py:tasks")
    config = replace(config, agent=agent, curriculum=CurriculumConfig(sampling=SamplingConfig(pool=7)))
    sampler = TaskSampler(config, store)
    drawn = {task for update in range(20) for task in ids(sampler.tasks(update))}
    assert len(drawn) == 7 and sampler.metrics()["curriculum/tasks"] == 7
    assert set(ids(TaskSampler(config, store).tasks(0))) <= drawn


def test_pools_that_can_not_be_drawn_from_are_refused(store, tmp_path):
    config = config_of(tmp_path, [0.5] * 3)
    with pytest.raises(ConfigError, match="has 3 tasks of split 'train' for 4 groups an update"):
        TaskSampler(config, store)
    (tmp_path / "tasks.jsonl").write_text('{"task_id": "a"}\n' * 5)
    with pytest.raises(ConfigError, match="5 tasks have the id 'a'"):
        TaskSampler(config, store)
    (tmp_path / "tasks.jsonl").write_text("")
    with pytest.raises(ConfigError, match="no task of split 'train'"):
        TaskSampler(config, store)


NAMES = ("reward", "style")
GIVEN = st.tuples(
    st.sampled_from(["a", "b"]),  # rollout
    st.sampled_from([*NAMES, "other"]),
    st.sampled_from(list(RewardAuthor)),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.sampled_from([None, 0, 1]),  # attempt
    st.sampled_from([None, "c"]),  # call
    st.integers(1, 3),  # time
)


@given(
    st.lists(GIVEN, max_size=14),
    st.sampled_from([("evaluator",), AUTHORS, ("agent", "evaluator", "operator")]),
    st.sampled_from([{"reward": 1.0}, {"reward": 1.0, "style": 0.5}]),
)
@settings(max_examples=40, deadline=None)
def test_what_counts_is_what_credit_counts(kept_store, given_rewards, authors, weights):
    store, number = kept_store
    run, names = f"r{next(number)}", ("a", "b")
    rollouts = [
        Rollout(f"{run}-{name}", task_id=name, run_id=run, attempt=1, status=RolloutStatus.SUCCEEDED)
        for name in names
    ]
    store.enqueue(rollouts)
    for rollout, name, author, value, attempt, call_id, time_ns in given_rewards:
        one = Reward(f"{run}-{rollout}", value, name, call_id=call_id, attempt=attempt, time_ns=time_ns)
        store.put_rewards([one], author=author)
    consumed = [one.rollout_id for one in rollouts]
    commit(store, 0, consumed, run)
    stored = by_rollout(store.rewards(consumed))
    expected = {}
    for rollout in rollouts:
        mine = stored.get(rollout.rollout_id, ())
        outcome = rewards_of(rollout, mine, (), authors=authors, weights=weights).outcome
        if outcome is not None:
            expected[rollout.task_id] = (float(outcome >= 1.0), float(outcome < 1.0))
    found = successes_by_task(store, run, half_life=5.0, success_at=1.0, authors=authors, weights=weights)
    assert found == expected


def test_older_rollouts_count_less_and_others_not_at_all(store):
    def ended(name, **fields):
        return Rollout(name, task_id="t", run_id="r", status=RolloutStatus.SUCCEEDED, **fields)

    everyone = [
        *(ended(f"u{update}") for update in range(3)),
        ended("failed", **{"error": "x"}),
        ended("waits"),
        ended("eval", split="eval-between"),
        replace(ended("other"), run_id="q"),
    ]
    everyone[3] = replace(everyone[3], status=RolloutStatus.FAILED)
    store.enqueue(everyone)
    values = {"u0": 1.0, "u1": 0.0}
    rewards = [Reward(one.rollout_id, values.get(one.rollout_id, 1.0), attempt=0) for one in everyone]
    store.put_rewards(rewards, author=RewardAuthor.EVALUATOR)
    for update, consumed in enumerate((["u0", "failed"], ["u1", "eval"], ["u2"])):
        commit(store, update, consumed)
    found = successes_by_task(
        store, "r", half_life=2.0, success_at=1.0, authors=AUTHORS, weights={"reward": 1.0}
    )
    # u2 is of the newest update, u1 one older, u0 two: 1 + 2^-1 successes, 2^-0.5 failures.
    assert found.keys() == {"t"} and found["t"] == pytest.approx((1.5, 0.5**0.5))
    within = successes_by_task(
        store, "r", half_life=0.1, success_at=1.0, authors=AUTHORS, weights={"reward": 1.0}
    )
    assert within == {"t": (1.0, 0.0)}  # ten half-lives are one update


def test_turns_of_rollouts_are_told():
    rollouts = [Rollout("a", turn_budget=2), Rollout("b", turn_budget=5), Rollout("c")]
    beyond = [call(name, (), rollout_id=name, purpose_reason=NO_TURN_LEFT) for name in ("a", "c")]
    assert turn_metrics(rollouts, beyond) == {"curriculum/turns": 3.5, "curriculum/out_of_turns": 0.5}
    assert turn_metrics(rollouts, [call("a", (), rollout_id="a")])["curriculum/out_of_turns"] == 0.0
    assert turn_metrics(rollouts[2:], beyond) == {}


def test_uniform_tasks_are_those_of_a_plain_loop(store, tmp_path):
    config = replace(config_of(tmp_path, [0.5] * 9), curriculum=CurriculumConfig())
    seed = random.Random("0-7").getrandbits(31)
    plain = load_tasks("tasks.jsonl", "train", 4, seed=seed, base_dir=str(tmp_path))
    assert TaskSampler(config, store).tasks(7) == plain
