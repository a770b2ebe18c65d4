"""Runs that go back by themselves: monitors that say so, and processes that are killed on the way.

The logprobs of the played agents are never the learner's: the monitor `gap` sees that in every update.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.trainer.killed_run import Moment, run_killed
from tests.trainer.played_run import Played, PlayedServer, play, played_server, write_run

from spangrad.store import open_store
from spangrad.store.records import Decision, DecisionAuthor, PolicyDecision
from spangrad.trainer.config import load_config
from spangrad.trainer.replaying import replay

TASKS: Sequence[dict[str, Any]] = [
    *({"task_id": f"t{i}", "split": "train", "rewards": [1.0, 0.0]} for i in range(8)),
    *({"task_id": f"e{i}", "split": "eval", "rewards": [1.0, 0.0]} for i in range(8)),
]
GOES_BACK = '[monitor]\nclip = "none"\nactions = {gap = "rollback"}\n'
JUDGES = "[promotion]\nevery = 50\ntasks = 5\n"
"""The first version is promoted, and no other in these runs."""
PUBLISHED = "spangrad.trainer.serving.served:ServedPolicy.publish"
STORE = "spangrad.store.file_store:FileStore"
DECIDED = f"{STORE}.decide"
LEARNER = "spangrad.trainer.learning.learner:Learner"


@dataclass
class World:
    """Runs of one folder, and the engine that they publish to."""

    folder: Path
    server: PlayedServer

    def write(self, more: str, *changes: tuple[str, str]) -> Path:
        file = write_run(self.folder, self.server.url, TASKS, more)
        text = file.read_text()
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        file.write_text(text)
        return file

    def served(self) -> torch.Tensor:
        assert self.server.weights is not None
        return weights(self.server.weights)


def weights(file: Path) -> torch.Tensor:
    return load_file(file)["model.layers.0.mlp.up_proj.weight"]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with played_server() as server:
        yield World(tmp_path, server)


def decisions(played: Played) -> list[tuple[str, int, int | None]]:
    with open_store(played.config.hub.url) as store:
        made = store.decisions(played.config.run.id)
    return [(str(one.decision), one.policy_version, one.to_version) for one in made]


def events(played: Played) -> list[tuple[int, str, str]]:
    with open_store(played.config.hub.url) as store:
        return [(one.update_index, one.monitor, one.action) for one in store.events(played.config.run.id)]


def outcome(played: Played) -> dict[str, Any]:
    """All that a run leaves but times."""
    with open_store(played.config.hub.url) as store:
        made = store.decisions("r")
    return {
        "error": played.error,
        "decisions": [(d.decision, d.policy_version, d.to_version, d.reason) for d in made],
        "events": events(played),
        "policies": [(p.policy_version, p.parent_version, Path(p.path).name) for p in played.policies],
        "updates": [
            (
                update.update_index,
                update.policy_version,
                sorted(update.rollout_ids),
                update.samples,
                {
                    name: value
                    for name, value in update.metrics.items()
                    if name.startswith(("loss/", "grad/", "policy/", "data/", "reward/"))
                },
            )
            for update in played.updates
        ],
        "consumed": sorted((one.rollout_id, one.consumed_by) for one in played.of_split("train")),
    }


def test_a_run_goes_back_on_an_alarm_and_on_from_there(world: World) -> None:
    file = world.write(JUDGES + GOES_BACK)
    played = play(load_config(file, ["run.updates=1"]))
    assert played.error is None
    assert decisions(played) == [("promoted", 0, None), ("rolled_back", 1, 0), ("restored", 2, 0)]
    assert events(played) == [(0, "gap", "rollback")]
    assert world.server.version == "2"
    assert torch.equal(world.served(), weights(world.folder / "policy/model.safetensors"))
    with open_store(played.config.hub.url) as store:
        (_, given_up, _) = store.decisions("r")
        (event,) = store.events("r")
    assert given_up.decided_by is DecisionAuthor.TRAINER
    assert given_up.metrics == {"monitor/gap": event.value}
    assert given_up.reason == f"monitor gap in update 0: {event.value:.3g}, monitor.gap is 0.1"
    assert played.updates[0].metrics["promotion/rolled_back"] == 1.0

    played = play(load_config(file))  # the next update starts from what was put back, and so does the alarm
    assert played.error is None
    assert decisions(played)[3:] == [("rolled_back", 3, 2), ("restored", 4, 2)]
    assert {one.policy_version: one.parent_version for one in played.policies} == {
        0: None,
        1: 0,
        2: 0,
        3: 2,
        4: 2,
    }
    assert events(played) == [(0, "gap", "rollback"), (1, "gap", "rollback")]
    assert [update.policy_version for update in played.updates] == [1, 3]
    consumed = [name for update in played.updates for name in update.rollout_ids]
    assert len(consumed) == len(set(consumed)) == 8


def test_without_a_promotion_in_between_monitors_pause_at_last(world: World) -> None:
    file = world.write(JUDGES + GOES_BACK + "max_rollbacks = 1\n", ("updates = 2", "updates = 4"))
    played = play(load_config(file))
    assert decisions(played) == [("promoted", 0, None), ("rolled_back", 1, 0), ("restored", 2, 0)]
    assert events(played) == [(0, "gap", "rollback"), (1, "gap", "rollback")]
    assert played.error is not None
    assert played.error.startswith("run 'r' is paused after update 1: monitor gap: logprobs of engine")
    assert "1 rollbacks by monitors since a version was promoted are monitor.max_rollbacks" in played.error
    again = play(load_config(file))
    assert again.error == played.error and decisions(again) == decisions(played)
    passed = play(load_config(file, ["monitor.continue_after=1", "run.updates=3"]))
    assert passed.error is None  # the alarm lasts, and is no other one
    assert [update.policy_version for update in passed.updates] == [1, 3, 4]


def test_without_anything_to_go_back_to_it_is_refused_before_anything_starts(world: World) -> None:
    file = world.write(GOES_BACK)
    played = play(load_config(file))
    assert played.error is not None and "set promotion.every" in played.error
    assert played.error.startswith("monitor.actions.gap is 'rollback', and run 'r' has no promoted version")
    assert world.server.weights is None and not (world.folder / ".spangrad").exists()


def test_what_was_promoted_by_hand_will_do_and_an_alarm_about_it_pauses(world: World) -> None:
    file = world.write(GOES_BACK)
    assert play(load_config(file, ["monitor={}", "run.updates=1"])).error is None
    with open_store(f"{world.folder}/store.duckdb") as store:
        why = "looks well"
        store.decide(PolicyDecision("r", 1, Decision.PROMOTED, DecisionAuthor.ADMIN, why, time_ns=1))
    played = play(load_config(file))
    assert played.error is not None
    assert "there is nothing to go back to: the promoted version is 1" in played.error
    assert len(played.updates) == 1


def test_an_admins_rollback_needs_no_section_promotion(world: World) -> None:
    file = world.write("")
    assert play(load_config(file)).error is None
    with open_store(f"{world.folder}/store.duckdb") as store:
        why = "it cheats"
        store.decide(PolicyDecision("r", 2, Decision.ROLLED_BACK, DecisionAuthor.ADMIN, why, to_version=1))
    played = play(load_config(file, ["run.updates=3"]))
    assert played.error is None
    assert decisions(played) == [("rolled_back", 2, 1), ("restored", 3, 1)]
    assert [update.policy_version for update in played.updates] == [1, 2, 4]


def test_an_update_that_was_given_up_and_the_one_behind_a_rollback_are_made_again(world: World) -> None:
    file = world.write(JUDGES + GOES_BACK, ("updates = 2", "updates = 3"))
    played = play(load_config(file))
    assert played.error is None
    with open_store(played.config.hub.url) as store:
        for update in played.updates:
            found = replay(store, update)
            assert found.has_loss and not found.notes
            assert [check for check in found.checks if not check.is_same] == []


MOMENTS = (
    Moment("spangrad.trainer.promotion.weights:_link"),
    Moment("spangrad.trainer.promotion.gate:keep"),
    Moment(DECIDED, 1),  # promoted
    Moment(f"{STORE}.commit_update"),
    Moment(PUBLISHED, 2),
    Moment(f"{STORE}.put_events"),
    Moment(DECIDED, 2),  # rolled back
    Moment(f"{LEARNER}.load"),
    Moment(f"{LEARNER}.save", 3),  # of the start, of the update, of what is put back
    Moment(PUBLISHED, 3),
    Moment(f"{STORE}.put_policy", 3),
    Moment(DECIDED, 3),  # restored
    Moment(DECIDED, 4),  # rolled back once more
    Moment(PUBLISHED, 5, "before"),
)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], torch.Tensor]:
    """What the run leaves that nobody kills, and the weights that are served then."""
    with played_server() as server:
        world = World(tmp_path_factory.mktemp("undisturbed"), server)
        played = play(load_config(world.write(JUDGES + GOES_BACK)))
        assert played.error is None
        assert [one[0] for one in decisions(played)] == ["promoted", *("rolled_back", "restored") * 2]
        return outcome(played), world.served()


@pytest.mark.parametrize("moment", MOMENTS, ids=str)
def test_a_run_that_is_killed_on_its_way_forth_or_back_ends_as_if_nothing_had_been(
    world: World, undisturbed: tuple[dict[str, Any], torch.Tensor], moment: Moment
) -> None:
    file = world.write(JUDGES + GOES_BACK)
    run_killed(file, moment)
    played = play(load_config(file))
    expected, weights_then = undisturbed
    found = outcome(played)
    assert found == expected
    assert torch.equal(world.served(), weights_then)
    assert world.server.version == "4"
