"""`--checkpoint`: commands that credit what is stored ask the critic of a run."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from spangrad.cli import app
from spangrad.trainer.config import load_config
from tests.command_line import listed
from tests.trainer.played_run import Played, play, played_server, write_run

CRITIC = '[credit]\nepisode = "none"\nstep = "gae"\n'


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Played:
    """Two updates with a critic."""
    folder = tmp_path_factory.mktemp("run")
    tasks = [{"task_id": f"t{k}", "rewards": [1.0, 0.25 * k]} for k in range(4)]
    with played_server() as server:
        return play(load_config(write_run(folder, server.url, tasks, CRITIC)))


def arguments(run: Played, checkpoint: str | None = "checkpoint-000001") -> list[str]:
    folder = Path(run.config.base_dir)
    found = ["--store", run.config.hub.url, "--config", str(folder / "run.toml")]
    return (
        found
        if checkpoint is None
        else [*found, "--checkpoint", str(run.config.folder / "checkpoints" / checkpoint)]
    )


def refusal(*given: str) -> str:
    done = CliRunner().invoke(app, given)
    assert done.exit_code != 0
    return str(done.exception)


def test_rows_have_the_advantages_that_the_update_trained_on(run: Played) -> None:
    trained = {(one.rollout_id, one.call_id): one.advantage for one in run.updates[1].samples}
    assert len(trained) == 10
    rows = listed("transitions", *arguments(run), "--json")
    shown = {
        (row["rollout_id"], segment["call_id"]): _advantage(row, segment)
        for row in rows
        for segment in row["segments"]
    }
    assert {key: shown[key] for key in trained} == pytest.approx(trained, abs=1e-6)
    later = listed("transitions", *arguments(run, "checkpoint-000002"), "--json")
    assert [row["advantages"] for row in later] != [row["advantages"] for row in rows]


def _advantage(row: dict[str, Any], segment: dict[str, Any]) -> float:
    values: Sequence[float] = row["advantages"][segment["start"] : segment["stop"]]
    return sum(values) / len(values)


def test_estimators_that_need_values_are_compared_with_others(run: Played) -> None:
    (found,) = listed("credit", "compare", "-e", "grpo,value_baseline", *arguments(run), "--json")
    assert {one["name"]: one["refused"] for one in found["estimators"]} == {
        "gae": None, "grpo": None, "value_baseline": None
    }  # fmt: skip
    assert all(one["abs_mean"] > 0 for one in found["estimators"])


def test_what_a_critic_can_not_be_asked_for_is_refused_with_what_to_do(run: Played) -> None:
    store, config = run.config.hub.url, str(Path(run.config.base_dir, "run.toml"))
    assert (
        "needs values of states, which a run's critic gives: name a checkpoint of it with --checkpoint"
        in refusal("transitions", *arguments(run, None))
    )
    assert "'x' needs --config" in refusal("credit", "compare", "--store", store, "--checkpoint", "x")
    gone = refusal("transitions", *arguments(run, "checkpoint-000009"))
    assert "is not a complete checkpoint; expected a folder with state.json" in gone
    plain = Path(config).with_name("plain.toml")
    plain.write_text(Path(config).read_text().replace(CRITIC, ""))
    unused = refusal("transitions", "--store", store, "--config", str(plain), "--checkpoint", "x")
    assert "'x' has no effect: no estimator here asks a critic" in unused


def test_a_checkpoint_of_a_run_without_a_critic_is_refused(run: Played, tmp_path: Path) -> None:
    config = load_config(Path(run.config.base_dir, "run.toml"), ["credit.step=none", "credit.episode=grpo"])
    config = replace(config, run=replace(config.run, id="plain", updates=1))
    with played_server() as server:
        serving = replace(config.serving, engine_url=server.url, gateway_url=server.url)
        store = replace(config.hub, url=str(tmp_path / "store.duckdb"))
        assert play(replace(config, serving=serving, hub=store)).error is None
    checkpoint = config.folder / "checkpoints" / "checkpoint-000001"
    said = refusal("transitions", *arguments(run, None), "--checkpoint", str(checkpoint))
    assert f"checkpoint {str(checkpoint)!r} has no critic" in said
