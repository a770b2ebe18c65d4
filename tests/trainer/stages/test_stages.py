"""A recipe from stored rollouts to rollouts of its own: hand-over, lineage, another run, and being killed."""

import json
import math
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.command_line import listed, spangrad
from tests.trainer.made_updates import GROUPS
from tests.trainer.played_run import PlayedServer, played_server
from tests.trainer.small_policy import make_policy
from tests.trainer.stages.played_recipe import RECIPE, play_recipe
from tests.trainer.stages.recorded import record

from spangrad.errors import ConfigError, EmptyBatchError
from spangrad.store.file_store import FileStore
from spangrad.store.records import Policy, Update
from spangrad.trainer.replaying import replay
from spangrad.trainer.stages.running import StageReport

STAGES = ("world", "clone", "prefer", "rl")


@dataclass
class Ground:
    folder: Path
    file: Path
    server: PlayedServer

    @property
    def store(self) -> FileStore:
        return FileStore(self.folder / "store.duckdb")

    def updates(self, run_id: str) -> list[Update]:
        with self.store as store:
            return store.updates(run_id)

    def policies(self, run_id: str) -> list[Policy]:
        with self.store as store:
            return store.policies(run_id)

    def model(self, run_id: str) -> Path:
        return Path(str(self.policies(run_id)[-1].model))


def make_ground(folder: Path, server: PlayedServer) -> Ground:
    """A store with rollouts of an expert, and a recipe."""
    folder.mkdir(parents=True, exist_ok=True)
    make_policy(folder / "policy")
    tasks = [{"task_id": f"t{k}", "rewards": [1.0, 0.0]} for k in range(4)]
    (folder / "tasks.jsonl").write_text("\n".join(map(json.dumps, tasks)))
    (folder / "agent.py").write_text("def run(task): ...\ndef reward(task, output): ...\n")
    file = folder / "recipe.toml"
    file.write_text(RECIPE.format(folder=folder, url=server.url, model=folder / "policy"))
    ground = Ground(folder, file, server)
    with ground.store as store:
        record(store, [*GROUPS, *GROUPS[:1]], failed=1)
    return ground


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    with played_server() as server:
        yield make_ground(tmp_path_factory.mktemp("ground"), server)


@pytest.fixture(scope="module")
def reports(ground: Ground) -> list[StageReport]:
    """What an undisturbed training of the whole recipe did."""
    return play_recipe(ground.file)


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Ground]:
    with played_server() as server:
        yield make_ground(tmp_path / "fresh", server)


def set_stage(ground: Ground, old: str, new: str) -> None:
    text = ground.file.read_text()
    assert text.count(old) == 1
    ground.file.write_text(text.replace(old, new))


def weights(folder: Path) -> Mapping[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def are_same(one: Path, other: Path) -> bool:
    ours, theirs = weights(one), weights(other)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_each_stage_ends_by_its_own_rule_and_starts_from_the_weights_of_the_one_before(ground, reports):
    assert [(one.run_id, one.report.updates) for one in reports] == [
        ("calc.world", 2),  # 3 groups, 2 an update, one pass
        ("calc.clone", 3),
        ("calc.prefer", 2),
        ("calc.rl", 2),
    ]
    ended = [str(one.report.ended) for one in reports]
    assert ended[0] == "stored.passes: 1 over 3 groups of stored rollouts"
    assert ended[1] == "run.updates: 3 updates"
    for before, stage in pairwise(STAGES):
        first, *_, last = ground.policies(f"calc.{stage}")
        assert (first.policy_version, first.parent_run) == (0, f"calc.{before}")
        assert first.parent_version == ground.policies(f"calc.{before}")[-1].policy_version
        assert last.note == str(reports[STAGES.index(stage)].report.ended)
        parent = ground.updates(f"calc.{stage}")[0].parent
        assert parent == str(ground.model(f"calc.{before}"))
        assert not are_same(ground.model(f"calc.{before}"), ground.model(f"calc.{stage}"))


def test_stored_rollouts_are_trained_by_several_stages_and_consumed_by_none(ground, reports):
    with ground.store as store:
        stored = {one.rollout_id: one.consumed_by for one in store.rollouts(run_id="old")}
        made = [one.consumed_by for one in store.rollouts(run_id="calc.rl")]
    assert set(stored.values()) == {None} and None not in made
    taken = {
        stage: set().union(*(one.rollout_ids for one in ground.updates(f"calc.{stage}"))) for stage in STAGES
    }
    assert len(taken["world"]) == 7 and taken["clone"] < taken["world"] == taken["prefer"]
    assert not taken["rl"] & taken["world"]
    assert [one.consumes for one in ground.updates("calc.clone")] == [False] * 3
    assert [one.consumes for one in ground.updates("calc.rl")] == [True] * 2
    (first, *_) = ground.updates("calc.clone")
    assert first.metrics["data/rollouts"] == 3 and "data/staleness_mean" not in first.metrics
    assert {sample.staleness for sample in first.samples} == {None}  # version 7 is another run's


def test_a_stage_on_stored_rollouts_asks_no_engine(fresh):
    set_stage(fresh, '\n[[stage]]\nname = "rl"\nrun = {updates = 2}\n', "")
    text = fresh.file.read_text()
    for line in ("engine_url", "gateway_url", "function", "tasks", "reward", "group_size", "max_staleness"):
        text = "\n".join(each for each in text.split("\n") if not each.startswith(f"{line} ="))
    fresh.file.write_text(text.replace("[agent]\n", ""))
    assert len(play_recipe(fresh.file)) == 3
    assert fresh.server.asked == []


def test_updates_of_stored_rollouts_are_made_again_to_the_last_bit_and_explained(ground, reports):
    for stage in ("world", "clone", "prefer"):
        with ground.store as store:
            update = store.updates(f"calc.{stage}")[-1]
            found = replay(store, update)
        assert found.is_same and found.has_loss and not found.notes, (
            stage,
            [c for c in found.checks if not c.is_same],
        )
    told = spangrad(
        "why", "--update", "1", "--run", "calc.prefer", "--store", str(ground.folder / "store.duckdb")
    )
    assert "old-expert-g" in told.stdout and "tokens sampled = " in told.stdout


def test_policies_shows_lineage_over_stages(ground, reports):
    asked = ("policies", "--store", str(ground.folder / "store.duckdb"))
    rows = listed(*asked, "--json")
    parents = {(row["run"], row["version"]): row["parent"] for row in rows}
    assert parents["calc.clone", 0] == 2 and parents["calc.clone", 1] == 0
    assert {row["run"]: row["parent_run"] for row in rows if row["version"] == 0} == {
        **{"calc.world": None, "calc.clone": "calc.world"},
        **{"calc.prefer": "calc.clone", "calc.rl": "calc.prefer"},
    }
    assert "calc.prefer 2" in spangrad(*asked, "--run", "calc.rl").stdout


def test_the_same_command_again_does_nothing_and_one_stage_can_be_run_again_alone(fresh):
    play_recipe(fresh.file)
    before = {stage: fresh.model(f"calc.{stage}").stat().st_mtime_ns for stage in STAGES}
    notes: list[str] = []
    assert play_recipe(fresh.file, notes=notes) == []
    assert notes == [
        "stage 'world' (run 'calc.world') has ended: stored.passes: 1 over 3 groups of stored rollouts",
        *(f"stage {name!r} (run 'calc.{name}') has ended: run.updates: {n} updates" for name, n in
          (("clone", 3), ("prefer", 2), ("rl", 2))),
    ]  # fmt: skip
    set_stage(fresh, "run = {updates = 3}", "run = {updates = 1}")
    (again,) = play_recipe(fresh.file, only="clone")
    assert (again.run_id, again.report.updates) == ("calc.clone-2", 1)
    assert fresh.policies("calc.clone-2")[0].parent_run == "calc.world"
    assert before == {stage: fresh.model(f"calc.{stage}").stat().st_mtime_ns for stage in STAGES}
    notes.clear()
    assert play_recipe(fresh.file, notes=notes) == []
    assert "(run 'calc.clone-2') has ended: run.updates: 1 updates" in notes[1]
    assert "it started from run 'calc.clone', and 'calc.clone-2' is newer: --stage prefer runs it" in notes[2]
    (later,) = play_recipe(fresh.file, only="prefer")
    assert later.run_id == "calc.prefer-2"
    assert fresh.policies("calc.prefer-2")[0].parent_run == "calc.clone-2"


def test_a_stage_alone_needs_what_the_one_before_hands_over(fresh):
    with pytest.raises(ConfigError, match="starts from the weights of stage 'world', which has not ended"):
        play_recipe(fresh.file, only="clone")
    (first,) = play_recipe(fresh.file, only="world")
    (second,) = play_recipe(fresh.file, only="clone")
    assert [first.run_id, second.run_id] == ["calc.world", "calc.clone"]


def test_a_metric_ends_a_stage_and_one_that_no_update_has_is_an_error(fresh):
    set_stage(fresh, "run = {updates = 3}", 'run = {updates = 9}\nstop = {metric = "loss/bc", reaches = 5.5}')
    play_recipe(fresh.file, only="world")
    (report,) = play_recipe(fresh.file, only="clone")
    losses = [one.metrics["loss/bc"] for one in fresh.updates("calc.clone")]
    assert losses[-1] <= 5.5 < min(losses[:-1]) and len(losses) < 9
    assert str(report.report.ended).startswith("loss/bc is ")
    set_stage(fresh, 'metric = "loss/bc"', 'metric = "loss/cb"')
    with pytest.raises(
        ConfigError, match=r"stop.metric is 'loss/cb', which update 0 .* did you mean 'loss/bc'"
    ):
        play_recipe(fresh.file, only="clone")
    assert len(fresh.updates("calc.clone-2")) == 1


def test_what_says_nothing_is_passed_by_and_a_source_that_says_nothing_is_an_error(fresh):
    with fresh.store as store:
        record(store, [((1.0, (3, 9)), (1.0, (3, 8)))] * 3, run_id="dull")
    set_stage(fresh, 'runs = ["old"]', 'runs = ["old", "dull"], passes = 1')
    set_stage(
        fresh,
        'run = {updates = 2}\nlearner = {objective = "dpo"}',
        'learner = {objective = "dpo"}\nrollout = {groups_per_update = 1}',
    )
    for stage in ("world", "clone"):
        play_recipe(fresh.file, only=stage)
    notes: list[str] = []
    play_recipe(fresh.file, only="prefer", notes=notes)
    assert len(fresh.updates("calc.prefer")) == 3  # of 6 groups
    passed = [line for line in notes if "nothing to learn from 2 rollouts" in line]
    assert len(passed) == 3 and all(line.endswith("they are passed by") for line in passed)
    set_stage(fresh, 'runs = ["old", "dull"]', 'runs = ["dull"]')
    with pytest.raises(
        EmptyBatchError, match="none of the stored rollouts can be learned from; the last ones:"
    ):
        play_recipe(fresh.file, only="prefer")


POINTS = (
    ("behind a commit", 1),  # of the first update of world
    ("before a model", 1),  # world has ended, and nobody knows
    ("behind a model", 1),  # between world and clone
    ("before a commit", 2),  # in clone, with a checkpoint that the store does not know
    ("behind a first version", 1),  # prefer has begun
    ("before a commit", 3),  # the two of prefer, and the first one of rl
)


@pytest.mark.slow
@pytest.mark.timeout(900)  # seven processes, each of which loads torch
def test_killed_within_and_between_stages_it_goes_on_and_does_nothing_twice(ground, reports, fresh):
    for point, count in POINTS:
        killed = child(fresh, point, count)
        assert killed.returncode == -signal.SIGKILL, (point, killed.stderr)
    done = child(fresh, "never", 1)
    assert done.returncode == 0, done.stderr
    for stage in STAGES:
        run = f"calc.{stage}"
        assert are_same(fresh.model(run), ground.model(run)), stage
        ours, theirs = fresh.updates(run), ground.updates(run)
        assert [one.rollout_ids for one in ours] == [one.rollout_ids for one in theirs]
        assert [lasting(one) for one in ours] == [lasting(one) for one in theirs]
        assert [shape(one) for one in fresh.policies(run)] == [shape(one) for one in ground.policies(run)]


def child(ground: Ground, point: str, count: int) -> "subprocess.CompletedProcess[str]":
    command = [
        sys.executable,
        "-m",
        "tests.trainer.stages.played_recipe",
        str(ground.file),
        point,
        str(count),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[3])


def lasting(update: Update) -> dict[str, float]:
    """Metrics that do not depend on when something happened."""
    late = ("time/", "rollout/busy", "rollout/outstanding", "gap/published", "serving/")
    return {
        name: value
        for name, value in update.metrics.items()
        if not name.startswith(late) and not math.isnan(value)
    }


def shape(policy: Policy) -> tuple[Any, ...]:
    return (
        policy.policy_version,
        policy.parent_version,
        policy.parent_run,
        policy.note,
        policy.model is None,
    )
