"""The loop around rollouts that have already ended: what it makes of them, and what it says."""

import dataclasses
import json
import logging
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.adapters.building import span, text_attributes, token_attributes
from tests.trainer.scripted_crew import ScriptedCrew
from tests.trainer.small_policy import make_policy
from tests.waiting import wait_until

from spangrad.credit.credit_config import CreditConfig
from spangrad.credit.pipeline import CreditedBatch
from spangrad.errors import ConfigError, ConvergedError, EmptyBatchError
from spangrad.store import open_store
from spangrad.store.file_store import FileStore
from spangrad.store.records import Rollout, Span, Update
from spangrad.tracer import conventions as c
from spangrad.trainer.config import TrainConfig, load_config
from spangrad.trainer.crediting import Crediting
from spangrad.trainer.learning.checkpoint import Checkpoint, save_checkpoint
from spangrad.trainer.learning.learner import Learner
from spangrad.trainer.learning.learner_config import LearnerConfig
from spangrad.trainer.loop import Run
from spangrad.trainer.preference_config import PreferenceConfig
from spangrad.trainer.resuming import continues
from spangrad.trainer.rollouts.scheduling import RunKeys, run_rollouts, set_rollouts, worker_config
from spangrad.trainer.update_metrics import Metrics, batch_metrics, checked_books, with_reasons_of_both

AGENT = """
def run(task): ...
def tasks(split, n, seed): return [{"task_id": f"t{i}"} for i in range(n)]
def reward(task, output): return 1.0
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def config(tmp_path: Path, model: Path, engine_url: str) -> TrainConfig:
    (tmp_path / "agent.py").write_text(AGENT)
    file = tmp_path / "run.toml"
    file.write_text(f"""
        [run]
        id = "r"
        updates = 3
        [hub]
        url = "{tmp_path / "store.duckdb"}"
        [serving]
        engine_url = "{engine_url}"
        model = "{model}"
        [agent]
        function = "agent.py:run"
        tasks = "agent.py:tasks"
        reward = "agent.py:reward"
        [rollout]
        groups_per_update = 1
        group_size = 2
        max_staleness = 0
        [credit]
        step = "gigpo"
        gamma = 0.95
    """)
    return load_config(file)


def spans_of(rollout_id: str, trace: str, calls: int, last: int = 4) -> list[Span]:
    """A rollout of so many calls; each continues the one before and sees the same as in any other rollout."""
    names = {c.ROLLOUT_ID: rollout_id, c.ATTEMPT: 0}
    spans = [span("r", trace=trace, attributes={**names, c.SPAN_ROLE: "rollout"}, end_ns=100)]
    ids, messages = [1, 2], [{"role": "user", "parts": [{"type": "text", "content": "q"}]}]
    for index in range(calls):
        seen = {c.INPUT_MESSAGES: json.dumps(messages), c.RESPONSE_ID: f"{rollout_id}-{index}"}
        told = text_attributes(**names, **token_attributes(ids, (3, last), version=0), **seen)
        spans.append(span(f"c{index}", trace=trace, parent="r", start_ns=10 + index, attributes=told))
        ids = [*ids, 3, last, 5]
        for role in ("assistant", "user"):
            messages = [*messages, {"role": role, "parts": [{"type": "text", "content": "on"}]}]
    return spans


Collected = tuple[CreditedBatch, list[Rollout], Metrics]
Rewards = Sequence[float | None]


def collect(run: Run, *sets: Rewards, last: int = 4) -> Collected:
    """What a run makes of its next update; `sets` are the rewards of each set of tasks.

    The first rollout of a group has one call, the next one more, and so on.
    """

    def end(rollout: Rollout) -> tuple[list[Span], float | None]:
        index, member = int(rollout.rollout_id[3:8]), int(rollout.rollout_id[-2:])
        spans = spans_of(rollout.rollout_id, f"{index}{member + 1}", member + 1, last)
        return spans, sets[index][member]

    return collected_by(run, end)


def collected_by(run: Run, end: Callable[[Rollout], tuple[list[Span], float | None]]) -> Collected:
    assert isinstance(run.store, FileStore)
    with run.feed(ScriptedCrew(run.store, end)):
        return run.collect()


def with_refills(config: TrainConfig, refills: int, **more: Any) -> TrainConfig:
    return dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, refills=refills, **more))


@pytest.fixture
def start() -> Iterator[Callable[[TrainConfig], Run]]:
    """Makes runs whose stores are closed at the end."""
    runs: list[Run] = []

    def make(config: TrainConfig) -> Run:
        runs.append(Run(config))
        return runs[-1]

    yield make
    for run in runs:
        run.store.close()


def announced(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "refill" in record.getMessage()]


def test_equal_rewards_of_longer_and_shorter_rollouts_are_refused(config, start):
    run = start(with_refills(config, 0))
    with pytest.raises(EmptyBatchError) as caught:
        collect(run, [1.0, 1.0])
    said = str(caught.value)
    assert said.startswith("update 0: nothing to learn from 2 rollouts: 6 trainable tokens, 0 of 1 groups")
    assert {rollout.consumed_by for rollout in run.store.rollouts(run_id="r")} == {None}


@pytest.mark.parametrize(
    ("before", "now", "is_end"),
    [(0.5, [1.0, 1.0], True), (0.5, [0.0, 0.0], False), (0.5, [1.0, None], False)],
)
def test_equal_rewards_are_the_end_if_they_are_no_worse_than_those_before(config, start, before, now, is_end):
    run = start(with_refills(config, 0))
    told = {"reward/mean": before}
    run.store.commit_update(
        Update("r", 0, 1, rollout_ids=[], samples=[], metrics=told, checkpoint="", time_ns=1)
    )
    with pytest.raises(EmptyBatchError) as caught:
        collect(run, now)
    assert isinstance(caught.value, ConvergedError) == is_end


def test_ids_that_the_model_does_not_have_are_refused(config, start):
    run = start(with_refills(config, 0))
    with pytest.raises(EmptyBatchError, match=r"3 calls refused; first refusal: token ids of another vocab"):
        collect(run, [1.0, 0.0], last=320)  # the model has 320 tokens, 0 to 319


def test_a_refill_is_announced_before_it_and_only_if_it_follows(config, start, caplog):
    run = start(with_refills(config, 1))
    with pytest.raises(EmptyBatchError):
        collect(run, [1.0, 1.0], [1.0, 1.0])
    assert announced(caplog) == [
        "update 0: 0 of the groups of 2 rollouts say something, 1 are wanted; trying other tasks,"
        " refill 1 of 1"
    ]


def test_no_refill_is_announced_if_there_is_none(config, start, caplog):
    run = start(with_refills(config, 0))
    with pytest.raises(EmptyBatchError):
        collect(run, [1.0, 1.0])
    assert announced(caplog) == []


def test_a_refill_that_says_something_is_trained_together_with_what_came_before(config, start):
    run = start(with_refills(config, 1))
    batch, rollouts, metrics = collect(run, [1.0, 1.0], [1.0, 0.0])
    assert len(rollouts) == 4
    assert (batch.diagnostics["groups/informative"], batch.diagnostics["groups/equal"]) == (1, 1)
    assert (metrics["rollout/refills"], metrics["rollout/informative_groups"]) == (1.0, 1.0)


@pytest.mark.parametrize(("second", "informative"), [([0.0, 1.0], 2.0), ([1.0, 1.0], 1.0)])
def test_sets_of_tasks_are_tried_until_enough_groups_say_something_or_there_are_no_more(
    config, start, second, informative
):
    config = with_refills(config, 1, informative_groups=2)
    credit = dataclasses.replace(config.credit, filters=("zero_spread",))
    run = start(dataclasses.replace(config, credit=credit))
    batch, rollouts, metrics = collect(run, [1.0, 0.0], second)
    assert len(rollouts) == 4
    assert metrics["rollout/informative_groups"] == informative
    assert batch.diagnostics["dropped/zero_spread"] == len(rollouts) - 2 * informative
    told = batch_metrics(batch)
    assert told["credit/dropped_zero_spread"] == batch.diagnostics["dropped/zero_spread"]
    assert told["data/sampled_tokens"] == 12.0  # 3 calls of 2 tokens a set, trained or dropped


def test_a_term_that_pays_for_going_in_circles_is_said_and_kept_with_the_update(config, start, caplog):
    Path(config.base_dir, "bonus.py").write_text("def bonus(task, calls):\n    return [1.0 for _ in calls]\n")
    config = dataclasses.replace(
        with_refills(config, 0, group_size=4), credit=CreditConfig(shaping="terms", scores="bonus.py:bonus")
    )
    run = start(config)
    batch, _, _ = collect(run, [1.0, 0.0, 1.0, 0.0])  # the longest is told "on" three times
    told = batch_metrics(batch)
    assert (told["credit/shaping_farming_gain"], told["credit/shaping_passes"]) == (1.0, 0.0)
    assert [line for line in caplog.messages if "earned up to 1 from what credit.shaping adds" in line]
    wrong = dataclasses.replace(config, credit=dataclasses.replace(config.credit, scores="gone.py:bonus"))
    with pytest.raises(ConfigError, match=r"gone\.py.* does not exist"):
        Crediting(wrong, run._model)


def test_a_run_whose_credit_asks_a_critic_trains_one(config, start, monkeypatch):
    """The learner is here instead of in an actor; everything else is a run's."""
    monkeypatch.setattr("spangrad.trainer.loop.call", lambda method, *given, **named: method(*given, **named))
    credit = CreditConfig(episode="none", step="gae", gamma=1.0, gae_lambda=0.5)
    config = dataclasses.replace(with_refills(config, 0), credit=credit)
    run = start(config)
    settings = {"model_path": str(run._model), "threads": 1, "critic": config.critic}
    run.learner = Learner(LearnerConfig(**settings))
    batch, rollouts, _ = collect(run, [1.0, 1.0])  # of one call, and of two; groups would say nothing
    # Nothing is expected yet: (1 + 0.5 * 0) behind; before it 0 + 0.5 * 1
    assert [sample.advantage for sample in batch.samples] == [1.0, 0.5, 1.0]
    metrics = run.learn(batch, rollouts, {})
    assert (metrics["value/states"], metrics["credit/dropped_missing_value"]) == (3.0, 0.0)
    assert metrics["value/loss_fitted"] < metrics["value/loss"]
    expected = run.learner.values(batch.rows)
    assert min(map(min, expected)) > 0.0
    resumed = Learner(LearnerConfig(**settings))
    resumed.load(run._weights)
    assert resumed.values(batch.rows) == expected
    again = Crediting(config, run._model).rows(run.store, rollouts, 0, resumed.values)
    assert again.rows[0].segments[0].value == pytest.approx(expected[0][0])
    assert 0.0 < again.samples[0].advantage < 1.0


def of_objective(config: TrainConfig, objective: str, **preference: Any) -> TrainConfig:
    return dataclasses.replace(
        with_refills(config, 0),
        credit=CreditConfig(),
        learner=LearnerConfig(objective=objective),
        preference=PreferenceConfig(**preference),
    )


def preferences_of(batch: CreditedBatch) -> list[tuple[int, list[bool]]]:
    """Trained tokens of every row, and on which sides it is."""
    return [(int(row.action_mask.sum()), [one.is_good for one in row.preferences]) for row in batch.rows]


def test_the_objective_says_what_becomes_of_the_rollouts(config, start):
    run = start(of_objective(config, "dpo"))

    def collected(objective: str, **preference: Any) -> CreditedBatch:
        run._crediting = Crediting(of_objective(config, objective, **preference), run._model)
        batch, _, _ = collect(run, [1.0, 0.0])  # one call, and two calls, of two tokens each
        return batch

    assert preferences_of(collected("dpo")) == [(2, [True]), (4, [False])]
    assert preferences_of(collected("kto")) == [(2, [True]), (4, [False])]
    assert preferences_of(collected("kto", good_at=-1.0)) == [(2, [True]), (4, [True])]
    assert preferences_of(collected("bc")) == [(2, [])]
    assert preferences_of(collected("bc", good_at=-1.0)) == [(2, []), (4, [])]
    assert preferences_of(collected("bc", good_at=-1.0, per_group=1)) == [(2, [])]
    world = collected("bc", good_at=-1.0, target="observations")
    (row,) = world.rows  # only the longer one has been answered
    assert row.token_ids[row.action_mask].tolist() == [5]
    assert world.refused[0].reason == "what it was answered is trained, not what it sampled"
    learner = Learner(LearnerConfig(model_path=str(run._model), objective="bc", threads=1))
    metrics = batch_metrics(world) | learner.update(world.rows)
    # 6 tokens were sampled, of which 1 was answered: 1 is trained, 6 are not.
    assert checked_books(metrics, where="update 0") == {"data/dropped_tokens": 6.0}
    assert metrics["data/sampled_tokens"] == 7.0
    with pytest.raises(EmptyBatchError, match="what it was answered is trained"):
        collected("bc", target="observations")  # that one was not good
    batch = collected("awr")
    assert [row.advantages.max() for row in batch.rows] == pytest.approx([1.0, 0.0], abs=1e-5)
    with pytest.raises(EmptyBatchError, match=r"no return of its group differs by more than 1\.0"):
        collected("dpo", min_gap=1.0)
    # Both begin with the same call: the longer one has nothing to be told apart by.
    with pytest.raises(EmptyBatchError, match="no call of it differs from one of a better or worse rollout"):
        collected("dpo", level="step")
    batch = collected("dpo")
    assert (batch.diagnostics["preference/pairs"], batch.diagnostics["reward/mean"]) == (1.0, 0.5)


def test_text_trains_what_needs_no_logprobs_and_is_refused_by_what_does(config, start):
    run = start(of_objective(config, "kto"))

    def end(rollout: Rollout) -> tuple[list[Span], float | None]:
        member = int(rollout.rollout_id[-2:])
        names = {c.ROLLOUT_ID: rollout.rollout_id, c.ATTEMPT: 0}
        trace = str(member + 1)
        root = span("r", trace=trace, attributes={**names, c.SPAN_ROLE: "rollout"}, end_ns=100)
        told = text_attributes(**names) | {c.RESPONSE_ID: f"text-{member}"}
        return [root, span("a", trace=trace, parent="r", start_ns=10, attributes=told)], float(member)

    batch, _, _ = collected_by(run, end)
    assert [row.grade for row in batch.rows] == ["text", "text"]
    run._crediting = Crediting(of_objective(config, "ppo"), run._model)
    with pytest.raises(EmptyBatchError, match="2 calls refused; first refusal: grade text, exact is needed"):
        collected_by(run, end)


def test_a_run_that_begins_continues_nothing(config, start):
    run = start(config)
    assert continues(run.store, config, run.checkpoints) is None


def test_a_run_that_ended_in_its_first_update_says_that_it_continues(config, start):
    run = start(config)
    run.store.enqueue(set_rollouts(config, 0, [{"task_id": "t0"}]))
    line = continues(run.store, config, run.checkpoints)
    assert line == "continuing run 'r' at update 0 (no checkpoint yet: from the starting weights)"


@pytest.mark.parametrize(
    ("last", "says"),
    [
        (1, "continuing run 'r' at update 2 (checkpoint {})"),
        (2, "run 'r' has all its 3 updates (checkpoint {}); serving its policy"),
    ],
)
def test_a_run_with_a_checkpoint_says_where_it_continues(config, start, last, says):
    run = start(config)
    update = Update("r", last, last + 1, rollout_ids=[], samples=[], metrics={}, checkpoint="", time_ns=1)
    saved = Checkpoint({"weights": {"w": torch.zeros(1)}}, {}, {"update": dataclasses.asdict(update)})
    newest = save_checkpoint(run.checkpoints, saved, keep=2)
    assert continues(run.store, config, run.checkpoints) == says.format(newest)


def test_what_a_killed_process_held_is_waited_for_and_said_once(config, tmp_path, caplog):
    store = open_store(tmp_path / "leases.duckdb")
    assert isinstance(store, FileStore)
    rollouts = set_rollouts(config, 0, [{"task_id": "t0"}])
    store.enqueue(rollouts)
    store.claim(worker="worker-17", limit=2, lease_s=300.0)
    worker = worker_config(config, RunKeys(), split="train", temperature=1.0, policy_version=0)
    ended: list[Rollout] = []
    waiting = threading.Thread(
        target=lambda: ended.extend(run_rollouts(store, rollouts, worker, workers=1)[0])
    )

    def said() -> list[str]:
        return [record.getMessage() for record in caplog.records if "waiting for" in record.getMessage()]

    with caplog.at_level(logging.WARNING):
        waiting.start()
        try:
            wait_until(said)
        finally:
            for rollout in rollouts:
                store.finish(rollout.rollout_id, 0)
            waiting.join()
    store.close()
    (line,) = said()
    assert line.startswith(
        "waiting for 2 rollouts that another process began (worker-17): if it is gone, their"
    )
    assert re.search(r"leases run out in at most [1-9]\d* s and they are run again$", line)
    assert [rollout.rollout_id for rollout in ended] == [rollout.rollout_id for rollout in rollouts]


def test_tokens_that_credit_and_learner_drop_for_reasons_of_one_name_are_added() -> None:
    credited = {"dropped/zero_weight": 3.0, "dropped/judge": 2.0, "data/sampled_tokens": 15.0}
    learnt = {"dropped/zero_weight": 1.0, "data/trained_tokens": 9.0}
    metrics = credited | with_reasons_of_both(credited, learnt)
    assert metrics["dropped/zero_weight"] == 4.0
    assert checked_books(metrics, where="update 0") == {"data/dropped_tokens": 6.0}
