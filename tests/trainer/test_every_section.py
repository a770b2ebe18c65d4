"""Every setting of `[curriculum]`, `[monitor]` and `[production]` changes what it is for, in a real store.

Of a run everything else is left out: what a setting changes is a question to the store. Those that need
calls are walked where those are made (`ELSEWHERE`).
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
from tests.adapters.building import span, text_attributes, token_attributes

from spangrad.adapters import account_unread
from spangrad.credit import CreditConfig
from spangrad.errors import PausedError
from spangrad.store.file_store import FileStore
from spangrad.store.otlp import encode_request
from spangrad.store.records import Reward, RewardAuthor, Rollout, RolloutStatus, Update
from spangrad.tracer import conventions as c
from spangrad.trainer.config import EvalConfig, RolloutConfig, RunConfig, TrainConfig
from spangrad.trainer.curriculum.curriculum_config import CurriculumConfig, SamplingConfig, TurnSchedule
from spangrad.trainer.curriculum.sampler import TaskSampler
from spangrad.trainer.monitoring.monitor_config import MonitorConfig
from spangrad.trainer.monitoring.watch import Watch
from spangrad.trainer.production.harvest import Harvest
from spangrad.trainer.production.production_config import ProductionConfig
from spangrad.trainer.rollouts.agent_config import AgentConfig

ELSEWHERE = {
    "flattery": "test_flattery.py",
    "judge": "test_watch.py: test_an_agent_that_flatters_its_judge_is_told_with_the_phrase",
    "verifier": "test_watch.py: test_a_held_out_reward_that_falls_while_the_trained_one_rises",
    "test_files": "test_watch.py: test_an_agent_that_edits_tests_is_told_with_files_and_rollouts",
    "max_rollbacks": "test_watch.py: test_after_so_many_rollbacks_without_a_promotion_an_alarm_pauses",
}
"""Settings of `[monitor]` -> where they are walked."""
NOBODY = AgentConfig(function="agent.py:run", tasks="agent.py:tasks", reward="agent.py:reward")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileStore]:
    with FileStore(tmp_path / "s.duckdb") as opened:
        yield opened


def commit(store: FileStore, update: int, ids: list[str] | None = None, **metrics: float) -> None:
    store.commit_update(Update("r", update, update + 1, ids or [], [], metrics, f"c{update}", time_ns=1))


# [monitor]

QUIET = {
    **{"reward/mean": 0.4, "reward/spread": 0.35, "policy/entropy": 0.4, "grad/norm": 1.0},
    **{"behavior/first_step_alike": 0.2, "gap/mean": 0.005, "policy/sample_share": 0.95},
    **{"policy/clip_low": 0.02, "policy/clip_high": 0.02, "behavior/test_edits": 0.01},
    **{"behavior/steps_mean": 6.0, "behavior/steps_median": 6.0, "behavior/steps_low": 5.0},
}
Numbers = Callable[[int], dict[str, float]]


def fault(at: int = 9, **numbers: float) -> Numbers:
    """From an update on these numbers are other ones; `__` in a name stands for `/`."""
    told = {name.replace("__", "/"): number for name, number in numbers.items()}
    return lambda update: told if update >= at else {}


def parting(update: int) -> dict[str, float]:
    """The train reward rises, success on held-out tasks falls: z is 3.94 over 10 updates, 3.65 over 9."""
    return {"reward/mean": 0.4 + 0.01 * update, "eval/success_greedy": 0.9 - 0.01 * update}


def growing(update: int) -> dict[str, float]:
    """Update 9 has 1.15^5 = 2.01 times the median of the nine before it, 1.87 times that of eight."""
    return {"policy/entropy": 0.1 * 1.15**update}


def alarms(store: FileStore, monitor: MonitorConfig, numbers: Numbers, updates: int = 10) -> list[str]:
    """What the watch of a run says of its last update, and what is done."""
    config = TrainConfig(
        run=RunConfig("r", updates=99), agent=NOBODY, eval=EvalConfig(every=1), monitor=monitor
    )
    watch = Watch(store, config, roll_back=lambda why, numbers: None, tell=lambda line: None)
    for update in range(updates):
        metrics: dict[str, Any] = {**QUIET, **numbers(update)}
        commit(store, update, **metrics)
    try:
        watch.check()
    except PausedError:
        found = ["paused"]
    else:
        found = []
    return sorted(f"{event.monitor} {event.action}" for event in store.events("r")) + found


RISE, ALARM = fault(policy__entropy=1.2), ["entropy_rise warn"]
MONITOR: dict[str, tuple[Any, Any, Numbers, list[str]]] = {
    "spread": (0.2, 0.01, fault(8, reward__spread=0.02), ["spread warn"]),
    "entropy": (0.05, 0.01, fault(policy__entropy=0.01), ["entropy warn"]),
    "entropy_rise": (2.0, 4.0, RISE, ALARM),
    "gradient": (10.0, 1e6, fault(grad__norm=100.0), ["gradient warn"]),
    "first_steps": (0.5, 0.8, fault(behavior__first_step_alike=0.9), ["first_steps warn"]),
    "gap": (0.1, 0.9, fault(gap__mean=0.5), ["gap warn"]),
    "sample_share": (0.5, 0.2, fault(policy__sample_share=0.3), ["sample_share warn"]),
    "clip": (0.3, 0.9, fault(policy__clip_high=0.6), ["clip warn"]),
    "drift": (3.8, 5.0, parting, ["drift warn"]),
    "steps": (2.0, 4.0, fault(behavior__steps_mean=18.0), ["steps warn"]),
    "early_exits": (0.5, 0.1, fault(behavior__steps_low=1.0, reward__mean=0.6), ["early_exits warn"]),
    "test_edits": (0.05, 0.5, fault(behavior__test_edits=0.3), ["test_edits warn"]),
    "window": (9, 8, growing, ALARM),
    "min_history": (9, 10, fault(policy__entropy=1.2), ALARM),
}
"""Setting -> a value with which there is an alarm, one with which there is none, numbers, the alarm."""


def test_every_setting_of_monitors_is_walked() -> None:
    walked = {*MONITOR, "actions", "continue_after"}
    assert walked.isdisjoint(ELSEWHERE)
    assert walked | ELSEWHERE.keys() == {one.name for one in fields(MonitorConfig)}
    for place in ELSEWHERE.values():
        file, _, name = place.partition(": ")
        assert name in (Path(__file__).parent / file).read_text()


@pytest.mark.parametrize("name", MONITOR)
def test_a_setting_of_monitors_decides_whether_there_is_an_alarm(name: str, tmp_path: Path) -> None:
    before, after, numbers, expected = MONITOR[name]
    found = []
    for place, value in enumerate((before, after)):
        with FileStore(tmp_path / f"{place}.duckdb") as store:
            found.append(alarms(store, MonitorConfig(**{name: value}), numbers))
    assert found == [expected, []]


def test_what_is_done_about_an_alarm_is_a_setting_and_so_is_to_go_on(tmp_path: Path) -> None:
    actions: dict[str, Any] = {"entropy_rise": "pause"}
    found = []
    all_settings: list[dict[str, Any]] = [{}, {"actions": actions}, {"actions": actions, "continue_after": 9}]
    for place, settings in enumerate(all_settings):
        with FileStore(tmp_path / f"{place}.duckdb") as store:
            found.append(alarms(store, MonitorConfig(**settings), RISE))
    assert found == [ALARM, ["entropy_rise pause", "paused"], ["entropy_rise pause"]]


# [production]


@dataclass
class Harvested:
    """What a run on live sessions would do now."""

    taken: list[str]
    waiting: dict[str, int]


def harvested(store: FileStore, **settings: Any) -> Harvested:
    """Of three sessions that ended 300, 200 and 100 s ago, of which the first has no reward."""
    production = ProductionConfig(**{"rollouts_per_update": 1, "idle_s": 60.0, "held_out": 0.0, **settings})
    config = TrainConfig(
        run=RunConfig("r"),
        credit=CreditConfig(episode="running_baseline", baseline_key="all"),
        production=production,
    )
    harvest = Harvest(store, config, production, before_look=lambda: None, on_note=lambda line: None)
    left = iter([False, True])
    with harvest.started(update_index=0, policy_version=0):
        waiting = dict(harvest.waiting())
        harvest.wait(lambda: next(left))
        return Harvested([one.rollout_id for one in harvest.take().rollouts], waiting)


@pytest.fixture
def live_store(store: FileStore) -> FileStore:
    now_ns = time.time_ns()
    for name, ago_s in (("a", 300), ("b", 200), ("c", 100)):
        marks = {c.ROLLOUT_ID: name, c.ATTEMPT: 0, c.RESPONSE_ID: name}
        told = text_attributes(**marks, **token_attributes(version=0))
        at_ns = now_ns - ago_s * 10**9
        one = span(name, trace=name, start_ns=at_ns, scope=c.SCOPE_GATEWAY, attributes=told)
        store.put_otlp(encode_request([one]))
    account_unread(store)
    store.put_rewards([Reward("b", 1.0), Reward("c", 0.0)])
    return store


PRODUCTION: dict[str, tuple[Any, Any, Callable[[Harvested], Any], tuple[Any, Any]]] = {
    "rollouts_per_update": (1, 2, lambda seen: seen.taken, (["b"], ["b", "c"])),
    "idle_s": (60.0, 150.0, lambda seen: (seen.waiting["ready"], seen.waiting["unended"]), ((2, 0), (1, 1))),
    "reward_wait_s": (100.0, 1000.0, lambda seen: seen.taken, (["b"], [])),
    "held_out": (0.0, 0.999, lambda seen: seen.waiting["held_out"], (0, 3)),
}


def test_every_setting_of_production_is_walked() -> None:
    assert PRODUCTION.keys() == {one.name for one in fields(ProductionConfig)}


@pytest.mark.parametrize("name", PRODUCTION)
def test_a_setting_of_production_changes_what_is_taken(name: str, live_store: FileStore) -> None:
    before, after, look, seen = PRODUCTION[name]
    assert tuple(look(harvested(live_store, **{name: value})) for value in (before, after)) == seen


# [curriculum]

RISING = {"start": 1, "step": 1, "every": 2, "limit": 9}
TURNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "start": ({"start": 1}, {"start": 2}),
    "step": (RISING, {**RISING, "step": 2}),
    "every": (RISING, {**RISING, "every": 3}),
    "limit": (RISING, {**RISING, "limit": 2}),
    "beyond": ({"start": 1}, {"start": 1, "beyond": "error"}),
    "reply": ({"start": 1}, {"start": 1, "reply": "[]"}),
}
"""Setting -> tables that differ in it alone."""
SAMPLING: dict[str, tuple[Any, Any, str]] = {
    "band": ((0.2, 0.8), (0.2, 0.3), "curriculum/in_band"),
    "exploration": (0.1, 0.9, "curriculum/entropy"),
    "focus": (0.5, 8.0, "curriculum/entropy"),
    "half_life": (1.0, 100.0, "curriculum/success_mean"),
    "success_at": (1.0, 0.5, "curriculum/success_mean"),
    "pool": (5, 6, "curriculum/tasks"),
}
"""Setting -> two values and the number that they change."""
AGENT = """
def tasks(split, n, seed): return [{"task_id": f"t{i}"} for i in range(n)]
"""


def test_every_setting_of_the_curriculum_is_walked() -> None:
    assert {one.name for one in fields(CurriculumConfig)} == {"turns", "sampling"}
    assert TURNS.keys() == {one.name for one in fields(TurnSchedule)}
    assert SAMPLING.keys() == {one.name for one in fields(SamplingConfig)}


@pytest.mark.parametrize("name", TURNS)
def test_a_setting_of_turns_changes_how_many_there_are_or_what_follows(name: str) -> None:
    first, second = (CurriculumConfig(turns=TurnSchedule(**table)) for table in TURNS[name])
    asked = [
        ([one.turns_at(update) for update in range(6)], one.most_turns, one.turns_reply)
        for one in (first, second)
    ]
    assert asked[0] != asked[1]
    is_of_reply = name in ("beyond", "reply")
    assert (asked[0][2] != asked[1][2]) == is_of_reply and (asked[0][0] != asked[1][0]) != is_of_reply


@pytest.mark.parametrize("name", SAMPLING)
def test_a_setting_of_sampling_changes_what_is_drawn(name: str, store: FileStore, tmp_path: Path) -> None:
    """Task 0 never succeeds, 1 does by half, 2 ever more often, 3 always; of the others nothing is known."""
    (tmp_path / "agent.py").write_text(AGENT)
    for update in range(4):
        rewards = {0: [0.0, 0.0], 1: [0.5, 0.5], 2: [float(update > 1), float(update > 0)], 3: [1.0, 1.0]}
        made = {
            f"u{update}-t{task}-{member}": (task, value)
            for task, told in rewards.items()
            for member, value in enumerate(told)
        }
        store.enqueue(
            [
                Rollout(
                    rollout_id,
                    task_id=f"t{task}",
                    task={"task_id": f"t{task}"},
                    group_id=f"u{update}-t{task}",
                    run_id="r",
                    split="train",
                    status=RolloutStatus.SUCCEEDED,
                )
                for rollout_id, (task, _) in made.items()
            ]
        )
        given = [Reward(rollout_id, value, attempt=0) for rollout_id, (_, value) in made.items()]
        store.put_rewards(given, author=RewardAuthor.EVALUATOR)
        commit(store, update, list(made))
    before, after, number = SAMPLING[name]
    found = []
    for value in (before, after):
        config = TrainConfig(
            run=RunConfig("r"),
            agent=NOBODY,
            rollout=RolloutConfig(groups_per_update=2),
            curriculum=CurriculumConfig(sampling=SamplingConfig(**{"pool": 6, name: value})),
            base_dir=str(tmp_path),
        )
        sampler = TaskSampler(config, store)
        assert len(sampler.tasks(9)) == 2
        found.append(sampler.metrics()[number])
    assert found[0] != found[1]
