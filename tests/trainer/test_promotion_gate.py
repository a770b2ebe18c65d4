"""The gate around a real learner, a real store and an engine that takes weights: promoted, kept, rolled back.

The rollouts of evaluations have ended already: what the policy of a version solves is said by the test.
"""

import json
import shutil
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.trainer.fake_engine import FakeEngine, fake_engine
from tests.trainer.small_policy import make_policy, make_row

from spangrad.credit.pipeline import CreditedBatch
from spangrad.errors import ConfigError, PublishError, StoreError
from spangrad.store.file_store import FileStore
from spangrad.store.records import (
    Decision,
    DecisionAuthor,
    PolicyDecision,
    Reward,
    RewardAuthor,
    Rollout,
    RolloutStatus,
)
from spangrad.trainer.config import TrainConfig, load_config
from spangrad.trainer.evaluation import held_out_rollouts
from spangrad.trainer.learning.learner import Learner
from spangrad.trainer.learning.learner_config import LearnerConfig
from spangrad.trainer.loop import Run
from spangrad.trainer.promotion.gate import LABEL, Gate
from spangrad.trainer.promotion.weights import keep, kept_folder

TASKS = 8
AGENT = """
def run(task): ...
def tasks(split, n, seed): return [{"task_id": f"{split}-{seed % 89}-{i}"} for i in range(n)]
def shared(split, n, seed): return [{"task_id": f"t{i}"} for i in range(n)]
def few(split, n, seed): return [{"task_id": f"{split}-{i}"} for i in range(min(n, 3))]
def reward(task, output): return 1.0
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def engine(model: Path) -> Iterator[FakeEngine]:
    with fake_engine(model) as served:
        yield served


@pytest.fixture
def config(tmp_path: Path, model: Path, engine: FakeEngine) -> TrainConfig:
    (tmp_path / "agent.py").write_text(AGENT)
    file = tmp_path / "run.toml"
    file.write_text(f"""
        [run]
        id = "r"
        folder = "runs"
        keep_checkpoints = 1
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
        [learner]
        lr = 0.01
        [promotion]
        every = 1
        tasks = {TASKS}
    """)
    return load_config(file)


def with_rule(config: TrainConfig, **rule: Any) -> TrainConfig:
    return replace(config, promotion=replace(config.promotion, **rule))


class World:
    """Runs that begin and die; the last one is `run`."""

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.notes: list[str] = []

    def begin(self, config: TrainConfig) -> Run:
        """Start a process that trains: the last one is gone, what it had in memory too."""
        self.close()
        run = Run(config, on_note=self.notes.append)
        self.runs.append(run)
        run.learner = Learner(LearnerConfig(model_path=str(run._model), threads=1, lr=0.01))
        run._resume()
        return run

    @property
    def run(self) -> Run:
        return self.runs[-1]

    @property
    def gate(self) -> Gate:
        assert self.run.gate is not None
        return self.run.gate

    def solves(self, version: int, places: Collection[int], *, failed: Collection[int] = ()) -> None:
        """Say which held-out tasks a version solves."""
        store = self.run.store
        assert isinstance(store, FileStore)
        rollouts = held_out_rollouts(self.run.config, LABEL, version, TASKS)
        store.enqueue(rollouts)
        store.claim(worker="w", limit=TASKS, split=rollouts[0].split)
        for place, rollout in enumerate(rollouts):
            reward = Reward(rollout.rollout_id, float(place in places), attempt=0)
            store.put_rewards([reward], author=RewardAuthor.EVALUATOR)
            status = RolloutStatus.FAILED if place in failed else RolloutStatus.SUCCEEDED
            store.finish(rollout.rollout_id, 0, status=status)

    def publish_update(self) -> None:
        """Learn from something, and publish."""
        rows = [make_row(10 * self.run.update_index + i) for i in range(2)]
        rows = [replace(row, policy_versions=row.policy_versions.clip(max=0)) for row in rows]
        sampled = sum(int(row.action_mask.sum()) for row in rows)
        self.run.learn(CreditedBatch(rows, (), {}, (), sampled_tokens=sampled), [], {})
        self.run._publish_weights()

    def update(
        self, solves: Collection[int] | None = None, *, failed: Collection[int] = ()
    ) -> dict[str, float]:
        """Learn, publish, and let the gate judge."""
        self.publish_update()
        if solves is not None:
            self.solves(self.run.policy_version, solves, failed=failed)
        return self.gate.check()

    def standing(self) -> dict[int, str]:
        rows = self.run.store.query("SELECT policy_version, status FROM policy_lineage ORDER BY 1")
        return {
            row["policy_version"]: row["status"] for row in sorted(rows, key=lambda r: r["policy_version"])
        }

    def decisions(self) -> list[tuple[str, int, int | None]]:
        return [(str(d.decision), d.policy_version, d.to_version) for d in self.run.store.decisions("r")]

    def close(self) -> None:
        if self.runs:
            self.run.store.close()


@pytest.fixture
def world(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A run of which version 0 solves two of the eight held-out tasks; its learner is in this process."""
    monkeypatch.setattr("spangrad.trainer.loop.call", lambda method, *given, **named: method(*given, **named))
    made = World()
    made.begin(config)
    made.solves(0, {0, 1})
    yield made
    made.close()


def weights(source: Any) -> torch.Tensor:
    """One tensor of a learner, an engine, or a folder of weights."""
    tensors = (
        load_file(source / "weights.safetensors") if isinstance(source, Path) else source.model.state_dict()
    )
    return tensors["model.layers.0.mlp.up_proj.weight"].detach().clone()


def test_the_first_version_is_promoted_and_a_better_one_takes_its_place(
    world: World, engine: FakeEngine
) -> None:
    started = weights(world.run.learner)
    assert world.gate.check()["promotion/promoted"] == 1.0
    assert world.update({0, 1, 2, 3})["promotion/promoted"] == 0.0  # 2 gained: p = 1/4
    metrics = world.update({0, 2, 3, 4, 5, 6, 7})  # 6 gained, 1 lost: 8 of 128 throws
    assert metrics["promotion/p_value"] == 8 / 128
    assert metrics["promotion/promoted"] == 0.0
    metrics = world.update(range(8))  # 6 gained: p = 1/64
    time_s = metrics.pop("time/promotion_s")
    assert time_s > 0
    assert metrics == {
        "promotion/success": 1.0,
        "promotion/promoted_success": 0.25,
        "promotion/p_value": 1 / 64,
        "promotion/promoted": 1.0,
    }
    assert world.standing() == {0: "superseded", 1: "candidate", 2: "candidate", 3: "promoted"}
    assert "better: 1 of 8 tasks, version 0 had 0.25; 6 gained, 0 lost, p = 0.016" in world.notes[-1]
    # Both are on disk, though only the newest checkpoint is.
    folder = world.run.folder
    assert len(list((folder / "checkpoints").iterdir())) == 1
    assert torch.equal(weights(kept_folder(folder, 0)), started)
    assert torch.equal(weights(kept_folder(folder, 3)), weights(world.run.learner))
    assert torch.equal(weights(engine), weights(world.run.learner))
    assert engine.published == [0, 1, 2, 3]


def test_only_every_so_many_updates_are_judged(world: World, config: TrainConfig) -> None:
    world.begin(with_rule(config, every=2))
    world.gate.check()
    assert world.update() == {}  # nobody says what version 1 solves: it is not asked
    assert world.update({0})["promotion/success"] == 0.125
    assert world.decisions() == [("promoted", 0, None), ("kept", 2, None)]


def test_a_rollback_after_so_many_worse_candidates_in_a_row(
    world: World, config: TrainConfig, engine: FakeEngine
) -> None:
    run = world.begin(with_rule(config, rollback_after=2))
    world.gate.check()
    started = weights(run.learner)
    world.update({0})  # worse
    world.update({0, 1})  # as good: the row ends
    world.update({1})  # worse
    assert [status for status in world.standing().values()] == ["promoted"] + ["candidate"] * 3
    trained = weights(run.learner)
    metrics = world.update({1})  # worse, the second in a row
    assert metrics["promotion/rolled_back"] == 1.0
    assert world.decisions()[-2:] == [("rolled_back", 4, 0), ("restored", 5, 0)]
    assert world.standing() == {0: "superseded", **dict.fromkeys((1, 2, 3, 4), "rolled_back"), 5: "promoted"}
    assert (run.policy_version, run.parent_version, engine.published[-1]) == (5, 0, 5)
    for holder in (run.learner, engine, run._weights):
        assert torch.equal(weights(holder), started)
    assert not torch.equal(trained, started)
    assert "2 evaluations in a row" in world.notes[-2]
    # Training goes on: the next version is judged against what the restored weights solved as version 0.
    assert world.update(range(8))["promotion/promoted"] == 1.0
    (last,) = [one for one in run.store.policies("r") if one.policy_version == 6]
    assert last.parent_version == 5
    assert world.standing()[6] == "promoted"
    assert world.standing()[5] == "superseded"


def test_a_rollback_at_once_after_a_drop(world: World, config: TrainConfig) -> None:
    world.begin(with_rule(config, rollback_drop=0.25))
    world.gate.check()
    world.update({0})  # 1 of 8 less
    assert world.decisions()[-1] == ("kept", 1, None)
    world.update(())  # 2 of 8 less
    assert world.decisions()[-2:] == [("rolled_back", 2, 0), ("restored", 3, 0)]


def test_a_failed_rollout_is_no_success(world: World) -> None:
    world.gate.check()
    assert world.update(range(8), failed=range(7))["promotion/success"] == 0.125


def test_a_restart_judges_what_the_last_process_published(world: World, config: TrainConfig) -> None:
    world.gate.check()
    world.publish_update()
    world.begin(config)
    world.solves(1, range(8))
    assert world.gate.check()["promotion/promoted"] == 1.0
    assert world.gate.check() == {}
    world.begin(config)
    assert world.gate.check() == {}
    assert world.decisions() == [("promoted", 0, None), ("promoted", 1, None)]


def test_weights_that_were_kept_before_the_process_died_are_promoted(
    world: World, config: TrainConfig
) -> None:
    world.gate.check()
    world.publish_update()
    folder = keep(world.run.checkpointed(), world.run.folder, 1)
    world.begin(config)
    world.solves(1, range(8))
    world.gate.check()
    assert world.run.store.decisions("r")[-1].path == str(folder)


def promoted_by_hand(version: int) -> PolicyDecision:
    return PolicyDecision("r", version, Decision.PROMOTED, DecisionAuthor.ADMIN, "nicer", time_ns=3)


def by_admin(version: int, to: int) -> PolicyDecision:
    why = "it cheats"
    return PolicyDecision(
        "r", version, Decision.ROLLED_BACK, DecisionAuthor.ADMIN, why, to_version=to, time_ns=9
    )


@pytest.mark.parametrize("restarts", [False, True])
def test_an_admins_rollback_is_carried_out_by_the_trainer(
    world: World, config: TrainConfig, engine: FakeEngine, restarts: bool
) -> None:
    """With a restart: as after a process that died between its own decision and what follows."""
    world.gate.check()
    started = weights(world.run.learner)
    world.update({0})
    world.run.store.decide(by_admin(1, 0))
    if restarts:
        world.begin(config)
        assert engine.published == [0, 1, 1]
        world.gate.check()
        assert world.decisions()[1:] == [("kept", 1, None), ("rolled_back", 1, 0), ("restored", 2, 0)]
    else:
        world.update()  # was trained from what is given up
        assert world.decisions()[2:] == [("rolled_back", 1, 0), ("rolled_back", 2, 0), ("restored", 3, 0)]
    newest = 2 if restarts else 3
    assert world.standing() == {
        0: "superseded",
        **dict.fromkeys(range(1, newest), "rolled_back"),
        newest: "promoted",
    }
    assert torch.equal(weights(engine), started)
    assert world.gate.check() == {}


def test_a_process_that_died_while_it_put_weights_back_does_it_again(
    world: World, config: TrainConfig, engine: FakeEngine
) -> None:
    """It died after the checkpoint and before the publish; the next one serves the new version once."""
    world.gate.check()
    started = weights(world.run.learner)
    world.update({0})
    world.run.store.decide(by_admin(1, 0))
    engine.fails = True
    with pytest.raises(PublishError):
        world.gate.check()
    engine.fails = False
    assert world.decisions()[-1] == ("rolled_back", 1, 0)
    run = world.begin(config)
    assert (run.policy_version, run.parent_version, run.update_index) == (2, 0, 1)
    assert engine.published == [0, 1, 2]
    world.gate.check()
    assert world.decisions()[-2:] == [("rolled_back", 1, 0), ("restored", 2, 0)]
    assert engine.published == [0, 1, 2]
    assert torch.equal(weights(engine), started)
    run = world.begin(config)  # and the one after it goes on from there
    assert (run.policy_version, run.parent_version) == (2, 0)
    assert world.update({0})["promotion/success"] == 0.125
    assert [update.policy_version for update in run.store.updates("r")] == [1, 3]


def test_a_process_that_died_before_it_said_that_weights_are_back_only_says_so(
    world: World, config: TrainConfig, engine: FakeEngine
) -> None:
    world.gate.check()
    world.update({0})
    world.run.store.decide(by_admin(1, 0))
    world.run.go_back(kept_folder(world.run.folder, 0), 0)
    world.begin(config)
    published = list(engine.published)
    world.gate.check()
    assert engine.published == published
    assert world.decisions()[-1] == ("restored", 2, 0)


def test_weights_that_a_person_put_back_meanwhile_are_the_learners_too(
    world: World, config: TrainConfig
) -> None:
    """`spangrad rollback --engine` took number 2 while nobody trained the run."""
    world.gate.check()
    started = weights(world.run.learner)
    world.update({0})
    store, admin = world.run.store, DecisionAuthor.ADMIN
    store.decide(by_admin(1, 0))
    store.put_policy(replace(store.policies("r")[0], policy_version=2, parent_version=0))
    store.decide(PolicyDecision("r", 2, Decision.RESTORED, admin, "by hand", to_version=0, time_ns=10))
    run = world.begin(config)
    world.gate.check()
    assert run.policy_version == 3
    assert torch.equal(weights(run.learner), started)
    assert world.standing() == {0: "superseded", 1: "rolled_back", 2: "superseded", 3: "promoted"}


def test_productions_engine_gets_promoted_versions_alone(
    world: World, config: TrainConfig, engine: FakeEngine, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with fake_engine(model) as production:
        world.begin(with_rule(config, engine_url=production.url, rollback_drop=0.5))
        world.gate.check()
        world.update({0})
        assert production.published == [0]
        production.fails = True
        world.update(range(8))  # promoted; production can't take it, and training goes on
        assert "the promoted version 2 is not served in production" in caplog.text
        production.fails = False
        production.version = "default"  # it was started again
        world.update({0, 1, 2, 3, 4, 5, 6})
        assert production.published == [0, 2]
        assert torch.equal(weights(production), weights(kept_folder(world.run.folder, 2)))
        world.update(())  # 8 of 8 less
        assert world.decisions()[-2:] == [("rolled_back", 4, 2), ("restored", 5, 2)]
        assert production.published == [0, 2, 5]
        assert torch.equal(weights(production), weights(kept_folder(world.run.folder, 2)))
        world.begin(with_rule(config, engine_url=production.url))
        world.gate.check()  # the same number may be another run's
        world.gate.check()
        assert production.published == [0, 2, 5, 5]
        world.run.store.decide(promoted_by_hand(2))
        world.gate.check()
        assert production.published == [0, 2, 5, 5]
        assert "`spangrad rollback r --to 2` serves its weights under a new number" in caplog.text


def test_adapters_alone_are_no_weights_for_production(world: World, config: TrainConfig) -> None:
    adapters = replace(config, learner=replace(config.learner, lora_rank=4))
    world.close()
    with pytest.raises(ConfigError, match="have adapters alone"):
        Run(with_rule(adapters, engine_url="http://127.0.0.1:1"))


def test_a_rollback_to_weights_that_are_gone_says_so(world: World) -> None:
    world.gate.check()
    world.update({0})
    shutil.rmtree(world.run.folder / "promoted")
    world.run.store.decide(by_admin(1, 0))
    with pytest.raises(StoreError, match="rolled back to version 0, whose weights are gone"):
        world.gate.check()


def test_what_was_promoted_by_hand_is_kept_and_judged_against(world: World) -> None:
    world.gate.check()
    world.update({0})
    world.run.store.decide(promoted_by_hand(1))
    world.update(range(8))
    assert not kept_folder(world.run.folder, 1).exists()  # its checkpoint went with the update
    assert world.run.store.decisions("r")[-1].metrics["promoted_success"] == 0.125
    assert world.standing() == {0: "superseded", 1: "superseded", 2: "promoted"}


def test_a_version_promoted_by_hand_is_kept_while_its_checkpoint_is_there(world: World) -> None:
    world.gate.check()
    world.update({0})
    world.run.store.decide(promoted_by_hand(1))
    expected = weights(world.run.learner)
    world.gate.check()
    world.update({0})
    assert torch.equal(weights(kept_folder(world.run.folder, 1)), expected)


def test_a_version_that_was_never_asked_is_nothing_to_compare_with(world: World, config: TrainConfig) -> None:
    world.begin(with_rule(config, every=2))
    world.gate.check()
    world.update()
    world.run.store.decide(promoted_by_hand(1))
    world.update(range(8))
    last = world.run.store.decisions("r")[-1]
    assert last.decision is Decision.KEPT
    assert "can't be compared: version 1 was never evaluated on these tasks" in last.reason


def test_training_never_gets_a_held_out_task(world: World, config: TrainConfig, tmp_path: Path) -> None:
    for index in range(5):
        trained = {rollout.task_id for group in world.run._set(index) for rollout in group}
        held_out = {rollout.task_id for rollout in held_out_rollouts(config, LABEL, 0, TASKS)}
        assert len(trained) == config.rollout.groups_per_update
        assert not trained & held_out
    shared = replace(config, agent=replace(config.agent, tasks="agent.py:shared"))
    with pytest.raises(ConfigError, match=r"task 't0' of .* is for training, and held out"):
        world.begin(shared)._set(0)
    file = tmp_path / "tasks.jsonl"
    lines = [{"task_id": f"t{i}", "split": "train" if i < 3 else "eval"} for i in range(11)]
    file.write_text("\n".join(json.dumps(line) for line in [*lines, {"task_id": "t5", "split": "train"}]))
    with pytest.raises(ConfigError, match=r"task 't5' of 'tasks.jsonl' is for training, and held out"):
        world.begin(replace(config, agent=replace(config.agent, tasks="tasks.jsonl")))._set(0)


def test_a_candidate_is_not_judged_by_what_the_run_was_trained_on(world: World) -> None:
    (first, *_) = held_out_rollouts(world.run.config, LABEL, 0, TASKS)
    world.run.store.enqueue([Rollout("r-u0", task_id=first.task_id, run_id="r", split="train")])
    with pytest.raises(ConfigError, match=f"was trained on task '{first.task_id}', which is held out"):
        world.gate.check()
    assert world.decisions() == []


def test_too_few_held_out_tasks_are_refused_before_anything_starts(world: World, config: TrainConfig) -> None:
    few = replace(config, agent=replace(config.agent, tasks="agent.py:few"))
    world.close()
    with pytest.raises(ConfigError, match=r"has 3 held-out tasks .*promotion.tasks is 8"):
        Run(few)
