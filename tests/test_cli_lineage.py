"""`spangrad why` and `spangrad replay` on a file and on a hub."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from spangrad.cli import app
from spangrad.errors import StoreError
from spangrad.store.file_store import FileStore
from tests.command_line import listed
from tests.store.hub_process import HubProcess
from tests.trainer.made_updates import GROUPS, Training, config_of
from tests.trainer.small_policy import make_policy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with two updates of run `r`; feedback came after the second."""
    folder = tmp_path_factory.mktemp("trained")
    training = Training(config_of(folder, make_policy(folder / "model"), credit={"step": "gigpo"}))
    training.update(training.collect(GROUPS, failed=1))
    training.update(training.collect([*GROUPS, ((None, (3, 4)), (1.0, (3, 5)))]))
    training.reward("u1-g0-m0", -7.0)
    training.close()
    return folder


@pytest.fixture(scope="module", params=["file", pytest.param("hub", marks=pytest.mark.slow)])
def store(folder: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    path = folder / "store.duckdb"
    if request.param == "file":
        yield str(path)
        return
    with HubProcess(path) as hub:
        yield hub.url


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, arguments)


def test_each_trained_call_is_listed_with_what_it_did_to_the_loss(store: str) -> None:
    rows = listed("why", "--update", "1", "--store", store, "--json")
    by_rollout: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_rollout.setdefault(row["rollout"], []).append(row)
    assert set(by_rollout) == {"u1-g0-m0", "u1-g0-m1", "u1-g0-m2", "u1-g1-m0", "u1-g1-m1", "u1-g2-m1"}
    first, second = by_rollout["u1-g0-m0"]
    assert first["call"] == f"{first['trace_id']}-{first['span_id']}"
    assert (first["run"], first["update"], first["attempt"]) == ("r", 1, 0)
    assert (first["tokens"], second["tokens"]) == (3, 2)
    assert first["versions"] == [{"version": 1, "tokens": 3}]
    assert (first["policy_version"], first["staleness"]) == (1, 0)
    assert first["reward"] == 1.0  # not what was said of it after the update
    assert first["said"] == "reply (3, 9, 4)"
    assert first["advantage"] > 0 > by_rollout["u1-g0-m1"][0]["advantage"]
    # token-mean: 15 tokens of the first group, 10 of the second, 4 of one that nothing is compared with.
    alone = by_rollout.pop("u1-g2-m1")
    assert [(row["advantage"], row["tokens"], row["weight"]) for row in alone] == [(0.0, 0, 0.0)] * 2
    weights = [row["weight"] for mine in by_rollout.values() for row in mine]
    assert weights == [pytest.approx(1 / 29)] * 10


def test_one_rollout_can_be_asked_for(store: str) -> None:
    rows = listed("why", "-u", "1", "--run", "r", "-r", "u1-g1-m0", "--store", store, "--json")
    assert [row["said"] for row in rows] == ["reply (5, 6)", "reply (12, 13)"]


def test_the_table_ends_with_books_that_balance(store: str) -> None:
    done = run("why", "--update", "1", "--store", store)
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert lines[0].split("\t") == [
        *("rollout", "call", "advantage", "weight", "tokens", "staleness", "versions", "reward", "said")
    ]
    assert len(lines) == 1 + 14 - 2 + 1
    trained = sum(int(line.split("\t")[4]) for line in lines[1:-1])
    assert f"tokens sampled = {trained} trained + " in lines[-1] and "reward is missing" in lines[-1]


def test_books_that_do_not_balance_are_said_with_exit_code_1(folder: Path) -> None:
    copy = folder / "tampered.duckdb"
    copy.write_bytes((folder / "store.duckdb").read_bytes())
    with FileStore(copy) as opened, opened.database.transaction() as con:
        con.execute("UPDATE update_samples SET trained_tokens = 7 WHERE rollout_id = 'u1-g0-m0'")
    done = run("why", "--update", "1", "--store", str(copy))
    assert done.exit_code == 1 and "THE BOOKS DO NOT BALANCE" in done.stdout
    done = run("replay", "--update", "1", "--store", str(copy))
    assert done.exit_code == 1
    assert "is not what the store and its config make of it" in done.stdout
    assert any(line.startswith("trained_tokens\t7\t3\tNO\t") for line in done.stdout.splitlines())


def test_a_replay_says_the_loss_of_then_and_now(store: str) -> None:
    done = run("replay", "--update", "1", "--store", store)
    assert done.exit_code == 0, done.output
    rows = {line.split("\t")[0]: line.split("\t")[1:] for line in done.stdout.splitlines() if "\t" in line}
    recorded, replayed, same, _ = rows["loss/total"]
    assert recorded == replayed and float(recorded) != 0 and same == "yes"
    assert rows["advantage of calls"][1] == "12 of 12 the same"
    assert "update 1 of run 'r' was made again" in done.stdout
    numbers = listed("replay", "--update", "1", "--store", store, "--json")
    assert {number["what"] for number in numbers} >= {"grad/norm", "advantage", "rewards read"}
    assert all(number["same"] for number in numbers)


def test_a_replay_without_weights_says_what_it_lacks(folder: Path) -> None:
    copy = folder / "moved.duckdb"
    copy.write_bytes((folder / "store.duckdb").read_bytes())
    with FileStore(copy) as opened, opened.database.transaction() as con:
        con.execute("UPDATE updates SET parent = '/gone/checkpoint-000001'")
    done = run("replay", "--update", "1", "--store", str(copy))
    assert done.exit_code == 0
    assert "that could be made again are the same; no loss was" in done.stdout
    assert "'/gone/checkpoint-000001'" in done.stderr and "run.keep_checkpoints" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--update", "7"), "run 'r' has no update 7; its last one is 1"),
        (("--update", "0", "--run", "s"), "has no update of run 's'; it has some of r"),
    ],
)
@pytest.mark.parametrize("command", ["why", "replay"])
def test_an_update_that_is_not_there_is_said(store: str, command: str, arguments: Any, says: str) -> None:
    done = run(command, *arguments, "--store", store)
    assert done.exit_code == 1 and isinstance(done.exception, StoreError)
    assert says in str(done.exception)


def test_a_rollout_of_another_update_is_said(store: str) -> None:
    done = run("why", "--update", "0", "--rollout", "u1-g0-m0", "--store", store)
    assert "update 0 of run 'r' consumed no rollout 'u1-g0-m0'" in str(done.exception)


def test_a_store_without_updates_and_one_with_two_runs_are_said(tmp_path: Path, folder: Path) -> None:
    FileStore(tmp_path / "s.duckdb").close()
    done = run("why", "--update", "0", "--store", str(tmp_path / "s.duckdb"))
    assert "has no update of any run" in str(done.exception)
    copy = tmp_path / "two.duckdb"
    copy.write_bytes((folder / "store.duckdb").read_bytes())
    with FileStore(copy) as opened, opened.database.transaction() as con:
        con.execute("INSERT INTO updates SELECT * REPLACE ('s' AS run_id) FROM updates")
    done = run("why", "--update", "0", "--store", str(copy))
    assert "updates of 2 runs; name one: r, s (--run)" in str(done.exception)


def test_json_of_why_is_one_object_a_line_and_the_books_are_beside_it(store: str) -> None:
    done = run("why", "--update", "0", "--store", store, "--json")
    assert [json.loads(line)["update"] for line in done.stdout.splitlines()] == [0] * 8
    assert "rollout did not succeed" in done.stderr and "tokens sampled =" in done.stderr
