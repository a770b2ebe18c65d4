"""`spangrad policies`, `promote` and `rollback`: over a file, over a hub with keys, and into an engine."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from spangrad.cli import app
from spangrad.errors import SpangradError
from spangrad.store.file_store import FileStore
from spangrad.store.keys import Keys
from spangrad.store.records import Policy, Update
from spangrad.trainer.learning.checkpoint import Checkpoint, save_checkpoint
from spangrad.trainer.promotion.weights import keep, kept_folder
from spangrad.trainer.resuming import hold_folder
from tests.command_line import listed
from tests.store.hub_process import HubProcess
from tests.trainer.fake_engine import FakeEngine, fake_engine
from tests.trainer.small_policy import make_policy


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def engine(model: Path) -> Iterator[FakeEngine]:
    with fake_engine(model) as served:
        yield served


@pytest.fixture
def run(tmp_path: Path, model: Path) -> Path:
    """The store of run "r": versions 0 (a model folder) to 4, of which keep_checkpoints deleted 1."""
    weights = load_file(model / "model.safetensors")
    with FileStore(tmp_path / "s.duckdb") as store:
        store.put_policy(Policy("r", 0, str(model), 10**18))
        for version in range(1, 5):
            moved = {name: tensor + version for name, tensor in weights.items()}
            saved = Checkpoint({"weights": moved}, {"adapter": None}, {})
            folder = save_checkpoint(tmp_path / "runs/r/checkpoints", saved, keep=3)
            store.commit_update(
                Update("r", version - 1, version, [], [], {"reward/mean": version / 8}, str(folder))
            )
            store.put_policy(Policy("r", version, str(folder), 10**18 + version, version - 1))
    return tmp_path / "s.duckdb"


def told(*arguments: Any) -> str:
    """What a command says on standard error."""
    done = CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stderr


def refused(*arguments: Any) -> str:
    """Why a command ends with 1."""
    with pytest.raises(SpangradError) as caught:
        CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)
    return str(caught.value)


def statuses(store: Path | str, *more: str) -> dict[int, str]:
    rows = listed("policies", "--store", str(store), "--json", *more)
    return {row["version"]: row["status"] for row in rows}


def test_policies_lists_versions_with_where_they_stand(run: Path) -> None:
    told("promote", "r", 2, "--store", run, "--reason", "checked by eye")
    rows = listed("policies", "--store", str(run), "--run", "r", "--json")
    assert [row["version"] for row in rows] == [0, 1, 2, 3, 4]
    assert rows[2] | {"decided": None, "published": None} == {
        "run": "r",
        "version": 2,
        "parent_run": None,
        "parent": 1,
        "status": "promoted",
        "update": 1,
        "reward": 0.25,
        "success": None,
        "decided_by": "admin",
        "reason": "checked by eye",
        "metrics": {},
        "decided": None,
        "published": None,
        "path": str(kept_folder(run.parent / "runs/r", 2)),
        "note": "",
        "model": None,
    }
    assert listed("policies", "--store", str(run), "--run", "other", "--json") == []
    shown = CliRunner().invoke(app, ["policies", "--store", str(run)]).stdout.splitlines()
    assert shown[0].split("\t")[:4] == ["run", "version", "parent", "status"]
    assert shown[3].split("\t")[:4] == ["r", "2", "1", "promoted"]


def test_promoted_weights_stay_when_checkpoints_are_deleted(run: Path, model: Path) -> None:
    told("promote", "r", 2, "--store", run)
    shutil.rmtree(run.parent / "runs/r/checkpoints")
    kept = kept_folder(run.parent / "runs/r", 2)
    expected = load_file(model / "model.safetensors")
    for name, tensor in load_file(kept / "weights.safetensors").items():
        assert torch.equal(tensor, expected[name] + 2)
    assert "is no complete checkpoint" in refused("promote", "r", 3, "--store", run)


def test_a_torn_folder_of_kept_weights_is_made_anew(run: Path) -> None:
    source = run.parent / "runs/r/checkpoints/checkpoint-000003"
    folder = keep(source, run.parent / "runs/r", 3)
    (folder / "weights.safetensors").unlink()
    assert keep(source, run.parent / "runs/r", 3) == folder
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert sizes == {path.name: path.stat().st_size for path in source.iterdir()}
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["promote", "r", "9"], "run 'r' never published version 9; the newest are: 0, 1, 2, 3, 4"),
        (["promote", "x", "1"], "there is no run 'x' with published versions; there are: ['r']"),
        (["promote", "r", "1"], "the weights of version 1 can't be kept"),
        (["rollback", "r"], "no version of run 'r' was promoted before the present one, None"),
        (["rollback", "r", "--to", "4"], "to_version is 4, which is no earlier version"),
        (["rollback", "r", "--to", "7"], "never published version 7"),
        (["promote", "r", "2", "--gateway", "http://127.0.0.1:1"], "has no effect without --engine"),
    ],
)
def test_what_can_not_be_done_is_said_and_changes_nothing(
    run: Path, command: list[str], message: str
) -> None:
    assert message in refused(*command, "--store", run)
    with FileStore(run) as store:
        assert store.decisions() == []


def test_rollback_goes_to_the_version_that_was_promoted_before(run: Path) -> None:
    for version in (2, 3):
        told("promote", "r", version, "--store", run)
    assert "version 2 of run 'r' is the promoted one, those up to 4" in told("rollback", "r", "--store", run)
    stand = {0: "candidate", 1: "candidate", 2: "promoted", 3: "rolled_back", 4: "rolled_back"}
    assert statuses(run) == stand
    with FileStore(run) as store:  # it is the only one that was promoted and not given up
        assert [one.to_version for one in store.decisions("r")] == [None, None, 2]
    assert "was promoted before the present one, 2" in refused("rollback", "r", "--store", run)


def test_promote_serves_a_newer_version_and_no_older_one(run: Path, engine: FakeEngine) -> None:
    serving = ("--engine", engine.url, "--gateway", engine.url)
    assert "serves it" in told("promote", "r", 3, "--store", run, *serving)
    assert (engine.published, engine.swaps) == ([3], 1)
    why = refused("promote", "r", 2, "--store", run, "--engine", engine.url)
    assert "serves version 3, and version numbers only grow there" in why
    assert "`spangrad rollback r --to 2`" in why
    assert statuses(run)[3] == "promoted"
    assert engine.published == [3]


def test_rollback_serves_the_old_weights_as_a_new_version(run: Path, engine: FakeEngine, model: Path) -> None:
    for version in (2, 4):
        told("promote", "r", version, "--store", run, "--engine", engine.url)
    said = told("rollback", "r", "--store", run, "--engine", engine.url, "--reason", "it cheats")
    assert f"the engine at {engine.url} serves its weights as version 5" in said
    assert engine.published == [2, 4, 5]
    name, tensor = next(iter(load_file(model / "model.safetensors").items()))
    assert torch.equal(engine.model.state_dict()[name], tensor + 2)
    last = listed("policies", "--store", str(run), "--json")[-1]
    found = [last[key] for key in ("version", "parent", "status", "reason")]
    assert found == [5, 2, "promoted", "it cheats"]
    assert last["path"] == str(kept_folder(run.parent / "runs/r", 2))
    assert statuses(run) == {
        **{0: "candidate", 1: "candidate", 2: "superseded"},
        **{3: "rolled_back", 4: "rolled_back", 5: "promoted"},
    }
    # Version 5 is version 2: going back once more would have to go behind both.
    assert "promoted before the present one, 5" in refused("rollback", "r", "--store", run)


def test_rollback_leaves_publishing_to_a_trainer_that_runs(run: Path, engine: FakeEngine) -> None:
    lock = hold_folder(run.parent / "runs/r")
    assert lock is not None
    with lock:
        said = told("rollback", "r", "--to", 3, "--store", run, "--engine", engine.url)
    assert "the run is being trained: its trainer publishes the weights" in said
    assert engine.published == []
    assert statuses(run)[3] == "promoted"


def test_a_rollback_whose_publish_failed_is_done_by_the_same_command(run: Path, engine: FakeEngine) -> None:
    engine.fails = True
    command = ("rollback", "r", "--to", "3", "--store", str(run), "--engine", engine.url)
    assert "version 5 was not published" in refused(*command)
    assert statuses(run) == {**dict.fromkeys((0, 1, 2), "candidate"), 3: "promoted", 4: "rolled_back"}
    engine.fails = False
    assert "as version 5" in told(*command)
    assert statuses(run)[5] == "promoted"


def test_over_a_hub_only_the_admin_decides_by_hand(run: Path, tmp_path: Path) -> None:
    keys = Keys.generate()
    keys.save(tmp_path / "keys.json")
    assert keys.admin is not None
    with HubProcess(run, keys=tmp_path / "keys.json") as hub:
        for key in (keys.agent, keys.evaluator, keys.trainer):
            why = refused("promote", "r", 2, "--store", hub.url, "--key", key)
            assert f"this is the {key.split('-')[1]} key" in why
        assert set(statuses(hub.url, "--key", keys.evaluator).values()) == {"candidate"}
        told("promote", "r", 2, "--store", hub.url, "--key", keys.admin)
        assert statuses(hub.url, "--key", keys.evaluator)[2] == "promoted"


def test_weights_on_another_machine_are_left_to_the_trainer(tmp_path: Path) -> None:
    with FileStore(tmp_path / "s.duckdb") as store:
        store.put_policy(Policy("r", 1, "/nowhere/runs/r/checkpoints/checkpoint-000001"))
    said = told("promote", "r", 1, "--store", tmp_path / "s.duckdb")
    assert "is not on this machine: the run's trainer keeps the weights" in said
    assert statuses(tmp_path / "s.duckdb") == {1: "promoted"}


def test_adapters_alone_are_not_served_as_weights(run: Path, engine: FakeEngine) -> None:
    state = run.parent / "runs/r/checkpoints/checkpoint-000004/state.json"
    changed = json.loads(state.read_text())
    changed["counters"]["adapter"] = [8, 16, ["q_proj"]]
    state.write_text(json.dumps(changed))
    why = refused("promote", "r", 4, "--store", run, "--engine", engine.url)
    assert "has adapters alone" in why
    assert engine.published == []
