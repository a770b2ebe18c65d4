"""What stored traces train: every rollout counts once, whatever rows it is cut into, and no row is cut short.

From files, through `ingest`, to what is exported. Listed in `CASES.md`.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from spangrad.adapters.ingest import ingest
from spangrad.cli import app
from spangrad.store.file_store import FileStore
from spangrad.store.records import Reward, Span
from spangrad.tracer import conventions as c
from tests.adapters.test_cases_rollouts import exact, exported, stored, trained

TURNS, CAP = 40, 3
"""Turns of a long rollout, and how many tokens each of its replies may have."""


def rollout(number: int, *turns: tuple[tuple[int, ...], tuple[int, ...]]) -> list[Span]:
    """A rollout of these calls; what it was asked first is the same for all."""
    named: Any = {c.ROLLOUT_ID: f"r-{number}", c.REQUEST_MAX_TOKENS: CAP}
    return [
        exact(f"x{at}", *turn, start=10 * at, trace=str(number), **named) for at, turn in enumerate(turns)
    ]


@pytest.fixture
def group(tmp_path: Path) -> Path:
    """Three rollouts of a task: the good one forks into three rows, the two bad ones are a row each.

    Of the second one, 30 tokens are trained; of the third, one.
    """
    good = [((1, 2), (10,)), ((1, 2, 5), (11, 12)), ((1, 2, 6), (13,)), ((1, 2, 10, 7), (14,))]
    long = [((1, 2), tuple(range(20, 50)))]
    spans = [*rollout(1, *good), *rollout(2, *long), *rollout(3, ((1, 2), (60,)))]
    store = stored(tmp_path, *spans)
    with FileStore(store) as opened:
        opened.put_rewards([Reward("r-1", 1.0), Reward("r-2", 0.0), Reward("r-3", 0.0)])
    return store


def advantages_of(row: dict[str, Any]) -> list[float]:
    """The different advantages in a row."""
    return sorted({value for value in row["advantages"] if value is not None})


def test_a_groups_mean_is_over_rollouts_however_many_rows_each_has(group: Path, tmp_path: Path) -> None:
    rows = exported(tmp_path, group, "transitions")
    assert [row["rollout_id"] for row in rows].count("r-1") == 3 and len(rows) == 5
    # Rewards 1, 0, 0: mean 1/3, population deviation sqrt(2)/3. Over rows (1, 1, 1, 0, 0) it were 3/5 and
    # sqrt(6)/5, and the good rollout got 0.816 instead of 1.414.
    good, bad = (2 / 3) / (2**0.5 / 3), (-1 / 3) / (2**0.5 / 3)
    for row in rows:
        expected = good if row["rollout_id"] == "r-1" else bad
        assert advantages_of(row) == [pytest.approx(expected, abs=1e-5)]


def test_a_long_failure_weighs_as_much_as_a_short_one(group: Path, tmp_path: Path) -> None:
    weights: dict[str, float] = {}
    for row in exported(tmp_path, group, "transitions"):
        own = row["loss_weight"] * sum(row["action_mask"])
        weights[row["rollout_id"]] = weights.get(row["rollout_id"], 0.0) + own
    assert weights == {f"r-{number}": pytest.approx(1.0) for number in (1, 2, 3)}


def test_the_reward_that_is_shown_is_per_rollout_and_then_per_task(group: Path, tmp_path: Path) -> None:
    command = ["export", str(tmp_path / "out"), "--format", "transitions", "--store", str(group), "--json"]
    card = json.loads(CliRunner().invoke(app, command, catch_exceptions=False).stdout)
    assert (card["splits"]["train"]["rows"], card["splits"]["train"]["rollouts"]) == (5, 3)
    assert card["splits"]["train"]["rewards"] == {
        "given": 3,
        "missing": 0,
        "lowest": 0.0,
        "mean": pytest.approx(1 / 3),
        "highest": 1.0,
    }
    [task] = exported(tmp_path, group, "trl-grpo")
    assert (task["rollouts"], task["mean_reward"]) == (3, pytest.approx(1 / 3))
    with FileStore(group, read_only=True) as store:
        shown = store.query("SELECT rollout_id, rewards['reward'] AS reward, calls FROM outcomes ORDER BY 1")
    assert [(row["reward"], row["calls"]) for row in shown] == [(1.0, 4), (0.0, 1), (0.0, 1)]


def test_a_row_of_many_turns_is_not_cut_at_what_one_turn_may_have(tmp_path: Path) -> None:
    prompt: tuple[int, ...] = (1, 2)
    turns = []
    for turn in range(TURNS):
        reply = tuple(range(100 + 10 * turn, 100 + 10 * turn + CAP))
        turns.append((prompt, reply))
        prompt = (*prompt, *reply, 5, 6)
    (row,) = exported(tmp_path, stored(tmp_path, *rollout(1, *turns)), "transitions", "--clone")
    assert row["token_ids"] == [*turns[-1][0], *turns[-1][1]]
    assert trained([row]) == [[token for _, reply in turns for token in reply]]
    assert len(row["segments"]) == TURNS


def test_rewards_are_recomputed_over_stored_rollouts_without_running_anything(
    group: Path, tmp_path: Path
) -> None:
    """A second opinion on the same traces: the last one counts, the first one stays."""
    checks = tmp_path / "checks.py"
    checks.write_text("def short(rollout):\n    return float(len(rollout.final_text.split()) == 1)\n")
    command = ["score", "--with", f"{checks}:short", "--store", str(group), "--again"]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    with FileStore(group, read_only=True) as store:
        given = [(reward.rollout_id, reward.value) for reward in store.rewards()]
    first = [("r-1", 1.0), ("r-2", 0.0), ("r-3", 0.0)]
    assert given[:3] == first  # the others as verifiers, which work side by side, end
    assert sorted(given[3:]) == [("r-1", 1.0), ("r-2", 0.0), ("r-3", 1.0)]
    rows = exported(tmp_path, group, "transitions")
    # Rewards 1, 0, 1 now: mean 2/3.
    signs = {row["rollout_id"]: advantages_of(row)[0] > 0 for row in rows}
    assert signs == {"r-1": True, "r-2": False, "r-3": True}


def test_traces_that_somebody_has_are_trained_from(tmp_path: Path) -> None:
    """An export with the exchanges as they were on the wire: ingest, export, rows with the engine's ids."""
    fixture = Path(__file__).parent / "fixtures/exports/plain_chat/request_response.jsonl"
    store = tmp_path / "store.duckdb"
    with FileStore(store) as opened:
        ingest([fixture], opened)
    rows = exported(tmp_path, store, "transitions", "--clone")
    responses = [json.loads(line)["response"] for line in fixture.read_text().splitlines()]
    sampled = [token for response in responses for token in response["choices"][0]["token_ids"]]
    assert sorted(token for own in trained(rows) for token in own) == sorted(sampled)
