"""`examples/04_langfuse_export`: what the script prints and leaves behind is true."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from spangrad.adapters import Grade, calls_of
from spangrad.adapters.exports import langfuse
from spangrad.store.file_store import FileStore
from tests.examples.loading import EXAMPLES

EXAMPLE = "04_langfuse_export"
REAL = Path(__file__).parents[1] / "adapters" / "fixtures" / "exports" / "langfuse"
TRACES = 160

pytestmark = pytest.mark.slow


def script(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, EXAMPLES / EXAMPLE / "clone_export.py", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"COLUMNS": "100"},
    )


@dataclass(frozen=True)
class Ran:
    folder: Path
    printed: str
    result: dict[str, Any]

    def rows(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "export" / name).read_text().splitlines()]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("langfuse_export")
    done = script("--folder", folder, "--traces", str(TRACES), "--steps", "60")
    assert done.returncode == 0, done.stderr
    return Ran(folder, done.stdout, json.loads((folder / "result.json").read_text()))


def real_rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (REAL / name).read_text().splitlines()]


def test_made_rows_have_columns_and_types_of_langfuses_own(ran: Ran) -> None:
    generation = next(row for row in real_rows("observations_v2.jsonl") if row["type"] == "GENERATION")
    root = next(row for row in real_rows("observations_v2.jsonl") if row["type"] == "AGENT")
    made = ran.rows("observations.jsonl")
    kinds = [row["type"] for row in made]
    assert kinds.count("AGENT") == TRACES and kinds.count("GENERATION") > TRACES
    for row in made:
        real = generation if row["type"] == "GENERATION" else root
        assert row.keys() <= real.keys()
        assert {name: type(value) for name, value in row.items()} == {
            name: type(real[name]) for name in row if name != "metadata"
        } | {"metadata": dict}
    (score, *_) = real_rows("scores.jsonl")
    assert {tuple(row) for row in ran.rows("scores.jsonl")} == {tuple(score)}


def test_store_gives_the_rows_back(ran: Ran) -> None:
    with FileStore(ran.folder / "store.duckdb", read_only=True) as store:
        given_back = {row["id"]: row for row in map(langfuse.original, store.spans())}
    assert given_back == {row["id"]: row for row in ran.rows("observations.jsonl")}


def test_every_exchange_is_a_call_that_can_be_cloned_and_every_trace_a_rollout(ran: Ran) -> None:
    with FileStore(ran.folder / "store.duckdb", read_only=True) as store:
        calls, rollouts = calls_of(store), store.rollouts()
    observations = ran.rows("observations.jsonl")
    assert {rollout.rollout_id for rollout in rollouts} == {row["trace_id"] for row in observations}
    assert {call.grade for call in calls} == {Grade.TEXT}
    told = {(call.trace_id, call.span_id): call for call in calls}
    for row in observations:
        if row["type"] == "GENERATION":
            call = told.pop((row["trace_id"], row["id"]))
            assert [*call.messages] == json.loads(row["input"])["messages"]
            assert [*call.tools] == json.loads(row["input"])["tools"]
            assert dict(call.choices[0].message) == json.loads(row["output"])
    assert not told


def test_report_says_what_can_be_trained(ran: Ran) -> None:
    scored = len(ran.rows("scores.jsonl"))
    assert scored == TRACES * 9 // 10
    assert f"{TRACES} rollouts, {scored} with the trusted reward 'right', 0 failed" in ran.printed
    table = [line.split("\t") for line in ran.printed.splitlines()]
    can_train = {line[0]: int(line[2]) for line in table if len(line) == 5 and line[2].isdigit()}
    assert can_train["behaviour cloning"] == TRACES
    assert can_train["weighted cloning, AWR"] == scored
    assert can_train["reinforcement learning"] == 0


def test_only_what_scored_well_is_cloned_and_questions_are_on_one_side(ran: Ran) -> None:
    good = {row["trace_id"] for row in ran.rows("scores.jsonl") if row["value"] == 1}
    trained, held_out = ran.result["trained"], ran.result["held_out"]
    assert set(trained) | set(held_out) <= good
    asked = {
        row["trace_id"]: row["input"] for row in ran.rows("observations.jsonl") if row["type"] == "AGENT"
    }
    asked = {trace_id: json.loads(told)["args"][0]["question"] for trace_id, told in asked.items()}
    assert {asked[name] for name in (*trained, *held_out)} == {asked[name] for name in good}
    assert not {asked[name] for name in trained} & {asked[name] for name in held_out}
    assert len(set(trained)) == len(trained) > 40 and len(held_out) >= 5
    said = f"{len(good)} good rollouts: {len(trained)} conversations are cloned, {len(held_out)} held out"
    assert said in ran.printed


def test_cloned_policy_imitates_held_out_replies_better_than_the_start(ran: Ran) -> None:
    start, cloned = ran.result["start"], ran.result["cloned"]
    assert cloned["loss"] < 0.5 * start["loss"]
    assert cloned["tokens"] > start["tokens"] + 0.4
    for name, found in (("start", start), ("cloned", cloned)):
        (line,) = (line for line in ran.printed.splitlines() if line.startswith(f"{name}  "))
        assert line.split() == [
            name,
            f"{found['loss']:.3f}",
            f"{found['tokens']:.1%}",
            f"{found['replies']:.1%}",
        ]


def test_cloned_policy_is_a_model_folder_that_cloning_goes_on_from(ran: Ran, tmp_path: Path) -> None:
    export = [ran.folder / "export" / name for name in ("observations.jsonl", "scores.jsonl")]
    model = ran.folder / "cloned"
    done = script(*export, "--folder", tmp_path, "--model", model, "--steps", "2", "--lr", "1e-5")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["start"] == pytest.approx(ran.result["cloned"], abs=1e-3)
    assert result["cloned"] == pytest.approx(result["start"], abs=0.05)


def test_an_export_that_langfuse_wrote_is_cloned(tmp_path: Path) -> None:
    export = [REAL / "observations_v2.jsonl", REAL / "scores.jsonl"]
    done = script(*export, "--score", "task_success", "--folder", tmp_path, "--steps", "20")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["cloned"]["loss"] < result["start"]["loss"]


def test_a_score_that_nothing_has_is_said_with_those_that_there_are(tmp_path: Path) -> None:
    done = script(REAL / "observations_v2.jsonl", REAL / "scores.jsonl", "--folder", tmp_path)
    assert done.returncode == 1
    assert "--score 'right'" in done.stderr and "task_success" in done.stderr


def test_help_names_every_option() -> None:
    done = script("--help")
    assert done.returncode == 0
    for option in ("--score", "--at-least", "--model", "--steps", "--lr", "--traces", "--seed", "--folder"):
        assert option in done.stdout
