"""Whole updates with a curriculum: turns rise with the updates, refills draw other tasks, metrics tell it."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.adapters.building import span, text_attributes, token_attributes
from tests.trainer.scripted_crew import ScriptedCrew
from tests.trainer.small_policy import make_policy
from tests.trainer.stub_weights import stub_weights

from spangrad.store.file_store import FileStore
from spangrad.store.records import Rollout, Span
from spangrad.tracer import conventions as c
from spangrad.trainer.config import load_config
from spangrad.trainer.learning.learner import Learner
from spangrad.trainer.learning.learner_config import LearnerConfig
from spangrad.trainer.loop import Run
from spangrad.trainer.update_metrics import Metrics

UPDATES, GROUPS, SIZE = 4, 3, 2
AGENT = """
def run(task): ...
def tasks(split, n, seed): return [{"task_id": f"t{i}"} for i in range(n)]
def reward(task, output): ...
"""


def end(rollout: Rollout) -> tuple[list[Span], float]:
    """Every other task can't be solved, others are by a group's first member; the last is out of turns."""
    rng, names = random.Random(rollout.rollout_id), {c.ROLLOUT_ID: rollout.rollout_id, c.ATTEMPT: 0}
    trace = f"{rng.getrandbits(64):x}"
    tokens = token_attributes(
        [1, 2], [rng.randrange(3, 300) for _ in range(4)], version=rollout.policy_version
    )
    spans = [
        span("r", trace=trace, attributes={**names, c.SPAN_ROLE: "rollout"}, end_ns=100),
        span(
            "a",
            trace=trace,
            parent="r",
            start_ns=10,
            attributes=text_attributes(**names, **tokens) | {c.RESPONSE_ID: rollout.rollout_id},
        ),
    ]
    is_first, is_solvable = rollout.rollout_id.endswith("m00"), int(str(rollout.task_id)[1:]) % 2 == 0
    if not is_first:
        own = {c.SYNTHETIC: c.NO_TURN_LEFT, c.RESPONSE_ID: f"{rollout.rollout_id}-beyond"}
        told = text_attributes(**names) | own
        spans.append(span("b", trace=trace, parent="r", start_ns=30, scope=c.SCOPE_GATEWAY, attributes=told))
    return spans, float(is_first and is_solvable)


@pytest.fixture
def make_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Run]]:
    """Makes runs on one store, whose learner is here instead of in an actor."""
    monkeypatch.setattr("spangrad.trainer.loop.call", lambda method, *given, **named: method(*given, **named))
    model = make_policy(tmp_path / "policy")
    (tmp_path / "agent.py").write_text(AGENT)
    made: list[Run] = []
    with stub_weights() as engine:
        (tmp_path / "run.toml").write_text(f"""
            [run]
            id = "r"
            updates = {UPDATES}
            [hub]
            url = "{tmp_path / "store.duckdb"}"
            [serving]
            engine_url = "{engine.url}"
            gateway_url = "{engine.url}"
            model = "{model}"
            [agent]
            function = "agent.py:run"
            tasks = "agent.py:tasks"
            reward = "agent.py:reward"
            [rollout]
            groups_per_update = {GROUPS}
            group_size = {SIZE}
            max_staleness = 0
            informative_groups = {GROUPS}
            refills = 1
            [curriculum]
            turns = {{start = 1, step = 2, every = 2, limit = 4}}
            sampling = {{pool = 12}}
        """)

        def make() -> Run:
            run = Run(load_config(tmp_path / "run.toml"))
            run.learner = Learner(LearnerConfig(model_path=str(model), lr=1e-2, threads=1))
            made.append(run)
            return run

        yield make
    for run in made:
        run.store.close()


def all_updates(run: Run) -> list[Metrics]:
    history: list[Metrics] = []
    run.served.publish(0, run.learner.export_weights)
    assert isinstance(run.store, FileStore)
    with run.feed(ScriptedCrew(run.store, end)):
        while run.update_index < UPDATES:
            history.append(run.learn(*run.collect()))
            run.served.publish(run.policy_version, run.learner.export_weights)
            run.source.advance(update_index=run.update_index, policy_version=run.policy_version)
    return history


def test_turns_rise_and_refills_draw_other_tasks(make_run: Callable[[], Run]) -> None:
    run = make_run()
    history = all_updates(run)
    rollouts = run.store.rollouts(run_id="r", split="train")
    turns = [{one.turn_budget for one in rollouts if one.consumed_by == update} for update in range(UPDATES)]
    assert turns == [{1}, {1}, {3}, {3}]
    assert [metrics["curriculum/turns"] for metrics in history] == [1.0, 1.0, 3.0, 3.0]
    assert {metrics["curriculum/out_of_turns"] for metrics in history} == {0.5}
    assert history[0]["curriculum/seen"] == 0.0 and history[-1]["curriculum/seen"] > 0.4
    assert history[0]["curriculum/entropy"] == pytest.approx(1.0)
    assert sum(metrics["rollout/refills"] for metrics in history) > 0
    for update in range(UPDATES):  # one set, or with a refill two: no task twice
        taken = {one.group_id: one.task_id for one in rollouts if one.consumed_by == update}
        assert len(taken) in (GROUPS, 2 * GROUPS) and len(set(taken.values())) == len(taken)
    # Members of a group differ where the task can be solved, also beyond their turns: their rewards count.
    assert all(metrics["rollout/informative_groups"] > 0 for metrics in history)
