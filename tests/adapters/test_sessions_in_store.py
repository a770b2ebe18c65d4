"""Calls that name no rollout get one in a real store, in whatever pieces they arrive."""

import json
from typing import Any

import pytest

from spangrad.adapters.calls import calls_of
from spangrad.adapters.ingest import ingest
from spangrad.adapters.sessions import Rule
from spangrad.store.file_store import FileStore
from spangrad.store.records import Reward, RolloutStatus
from tests.adapters.captured import FIXTURES
from tests.adapters.conversing import joined, turn, written

MULTI_TURN = FIXTURES / "genai_openai" / "multi_turn.otlp.jsonl"


@pytest.fixture
def store(tmp_path):
    with FileStore(tmp_path / "store.duckdb") as opened:
        yield opened


def start_of(line):
    return json.loads(line)["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["startTimeUnixNano"]


def pieces(tmp_path, order):
    """The file's traces, each in a file of its own, in this order."""
    lines = [line for line in MULTI_TURN.read_text().splitlines() if "resourceSpans" in line]
    lines.sort(
        key=lambda line: json.loads(line)["resourceSpans"][0]["scopeSpans"][0]["spans"][0][
            "startTimeUnixNano"
        ]
    )
    for number in order:
        file = tmp_path / f"{number}.jsonl"
        file.write_text(lines[number])
        yield file


def test_a_raw_clients_traces_become_one_rollout(store):
    report = ingest([MULTI_TURN], store)
    assert report.joined_by == {str(Rule.PREFIX): 3}
    [rollout] = store.rollouts()
    assert (rollout.split, rollout.status) == ("recorded", RolloutStatus.SUCCEEDED)
    calls = calls_of(store, [rollout.rollout_id])
    assert len(calls) == 4
    assert rollout.rollout_id == calls[0].trace_id
    assert {row["rollout_id"] for row in store.query("SELECT rollout_id FROM calls")} == {rollout.rollout_id}


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)])
def test_the_pieces_may_arrive_in_any_order(store, tmp_path, order):
    for file in pieces(tmp_path, order):
        ingest([file], store)
    [rollout] = store.rollouts()
    calls = calls_of(store, [rollout.rollout_id])
    assert (len(calls), rollout.rollout_id) == (4, calls[0].trace_id)
    assert (rollout.started_ns, rollout.ended_ns) == (calls[0].start_ns, calls[-1].end_ns)


def test_a_reward_moves_with_its_rollout(store, tmp_path):
    files = list(pieces(tmp_path, (1, 0, 2, 3)))
    ingest(files[:1], store)
    [before] = store.rollouts()
    store.put_rewards([Reward(before.rollout_id, 1.0)])
    ingest(files[1:], store)
    [after] = store.rollouts()
    assert before.rollout_id != after.rollout_id
    assert [reward.rollout_id for reward in store.rewards()] == [after.rollout_id]


def test_the_same_file_twice_changes_nothing(store):
    ingest([MULTI_TURN], store)
    before = (store.rollouts(), store.query("SELECT * FROM sessions ORDER BY trace_id"))
    ingest([MULTI_TURN], store)
    assert (store.rollouts(), store.query("SELECT * FROM sessions ORDER BY trace_id")) == before


def test_a_rollout_that_a_span_names_is_left_alone(store, tmp_path):
    text = MULTI_TURN.read_text()
    mark = '{"key": "gen_ai.operation.name"'
    named = tmp_path / "named.jsonl"
    attribute = '{"key": "spangrad.rollout.id", "value": {"stringValue": "mine"}}, '
    named.write_text(text.replace(mark, attribute + mark))
    assert ingest([named], store).joined_by == {}
    assert [rollout.rollout_id for rollout in store.rollouts()] == ["mine"]
    assert store.query("SELECT count(*) AS n FROM sessions") == [{"n": 0}]


def test_a_clock_that_says_anything_keeps_no_rollout_from_being_known(store, tmp_path):
    text = MULTI_TURN.read_text()
    first = json.loads(text.splitlines()[0])["resourceSpans"][0]["scopeSpans"][0]["spans"][0]
    end = first["endTimeUnixNano"]
    skewed = tmp_path / "skewed.jsonl"
    skewed.write_text(text.replace(f'"{end}"', f'"{2**64 - 1}"'))
    ingest([skewed], store)
    assert {rollout.rollout_id for rollout in store.rollouts()} == {
        call.rollout_id for call in calls_of(store)
    }
    assert max(rollout.ended_ns for rollout in store.rollouts()) == 2**63 - 1


@pytest.mark.parametrize("key", ["user.id", "enduser.id"])
def test_users_who_began_alike_are_kept_apart_in_whatever_order_they_come(store, tmp_path, key):
    alice: dict[str, Any] = {key: "alice"}
    bob: dict[str, Any] = {key: "bob"}
    spans = [
        *(turn(1, ["hello"], "hi", **alice), turn(2, ["hello"], "hi", **bob)),
        *(turn(3, ["hello", "hi", "I am A"], **alice), turn(4, ["hello", "hi", "I am B"], **bob)),
    ]
    for file in written(tmp_path / "in", *([spans[n]] for n in (3, 0, 2, 1))):
        ingest([file], store)
    assert joined(store) == [[1, 3], [2, 4]]
