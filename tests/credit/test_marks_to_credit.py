"""From `spangrad.step`, `state` and `reward` in an agent to calls, anchors and step rewards."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import spangrad
from spangrad.adapters import ModelCall, Purpose, calls_of
from spangrad.adapters.calls import record_calls
from spangrad.credit.anchors import anchor_of
from spangrad.credit.rewards import rewards_of
from spangrad.store.file_store import FileStore
from tests.tracer.stub_server import ModelServer, model_server


@pytest.fixture
def model() -> Iterator[ModelServer]:
    with model_server() as server:
        yield server


@pytest.fixture
def store(model: ModelServer, tmp_path: Path) -> Iterator[FileStore]:
    """Two rollouts that look at the same rooms in another order."""

    def ask(prompt: str) -> None:
        body = {"model": "policy", "messages": [{"role": "user", "content": prompt}]}
        httpx.post(f"{model.url}/chat/completions", json=body)

    spangrad.init(store=tmp_path / "s.duckdb")
    try:
        for number, rooms in enumerate((("hall", "kitchen"), ("kitchen", "hall"))):
            with spangrad.rollout(rollout_id=f"r-{number}") as handle:
                for index, room in enumerate(rooms):
                    with spangrad.step(f"walk{index}"):
                        spangrad.state(room)
                        ask(f"think {number} {index}")
                        ask(f"walk {number} {index}")
                        with spangrad.purpose("judge"):
                            ask("judge")
                        spangrad.reward(0.5 * index)
                handle.reward(1.0)
    finally:
        assert spangrad.shutdown()
    with FileStore(tmp_path / "s.duckdb") as opened:
        yield opened


def acting(store: FileStore, rollout_id: str) -> list[ModelCall]:
    return [call for call in calls_of(store, [rollout_id]) if call.purpose is Purpose.AGENT]


def test_calls_know_their_step_their_state_and_what_is_above_them(store: FileStore) -> None:
    calls = calls_of(store, ["r-0"])
    places = [(call.step_name, call.step_index, call.state_key, call.purpose) for call in calls]
    assert places == [
        ("walk0", 0, "hall", Purpose.AGENT),
        ("walk0", 0, "hall", Purpose.AGENT),
        ("walk0", 0, "hall", Purpose.JUDGE),
        ("walk1", 1, "kitchen", Purpose.AGENT),
        ("walk1", 1, "kitchen", Purpose.AGENT),
        ("walk1", 1, "kitchen", Purpose.JUDGE),
    ]
    names = {span.span_id: span.name for span in store.spans(["r-0"])}
    above = [[names[span_id] for span_id in call.ancestor_span_ids] for call in calls]
    assert above == [["walk0", "rollout"]] * 3 + [["walk1", "rollout"]] * 3
    assert [names[str(call.parent_span_id)] for call in calls] == ["walk0"] * 3 + ["walk1"] * 3
    assert [call.purpose_reason for call in calls] == [None, None, "hint"] * 2


def test_the_same_state_in_another_rollout_is_the_same_anchor(store: FileStore) -> None:
    first = [anchor_of(call) for call in acting(store, "r-0")]
    second = [anchor_of(call) for call in acting(store, "r-1")]
    assert first == second[2:] + second[:2]
    assert len(set(first)) == 2


def test_a_reward_in_a_step_is_for_the_last_call_in_it_that_acts(store: FileStore) -> None:
    (rollout,) = store.rollouts(rollout_ids=["r-0"])
    calls = acting(store, "r-0")
    given = store.rewards(["r-0"])
    found = rewards_of(rollout, given, calls_of(store, ["r-0"]), authors=["agent"])
    assert found.outcome == 1.0
    assert found.steps == {calls[1].call_id: 0.0, calls[3].call_id: 0.5}


def test_the_table_of_calls_has_step_state_and_purpose(store: FileStore) -> None:
    record_calls(store, calls_of(store, ["r-1"]))
    columns = "step_name, step_index, state_key, purpose, purpose_reason"
    rows = store.query(f"SELECT {columns} FROM calls ORDER BY start_ns LIMIT 3")
    assert [tuple(row.values()) for row in rows] == [
        ("walk0", 0, "kitchen", "agent", None),
        ("walk0", 0, "kitchen", "agent", None),
        ("walk0", 0, "kitchen", "judge", "hint"),
    ]
