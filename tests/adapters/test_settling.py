"""Calls and rollouts follow from the traces that a store has, not from the order in which they came."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spangrad.adapters import accounts
from spangrad.adapters.calls import calls_of
from spangrad.adapters.ingest import ingest
from spangrad.adapters.sessions import GUESSED, KeptApart, Rule
from spangrad.store.file_store import FileStore
from spangrad.store.otlp import encode_request
from spangrad.store.records import Reward, Span
from tests.adapters.captured import FIXTURES, captured
from tests.adapters.conversing import joined, state, traces_of, turn, written

BOTH = "openinference_langchain_plus_openai/multi_turn"
DAY = 24 * 3600.0


@pytest.fixture
def store(tmp_path):
    with FileStore(tmp_path / "store.duckdb") as opened:
        yield opened


def after(folder: Path, runs: Sequence[Sequence[Sequence[Span]]]) -> dict[str, Any]:
    """The state of a new store after these runs of `ingest`, each of several files."""
    folder.mkdir(exist_ok=True)
    with FileStore(folder / "store.duckdb") as opened:
        for number, pieces in enumerate(runs):
            ingest(written(folder / str(number), *pieces), opened)
        return state(opened)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_an_account_that_comes_later_is_of_the_same_call(store, tmp_path, order):
    spans = captured(BOTH)
    framework = [each for each in spans if each.scope.endswith("langchain")]
    parts = [framework, [each for each in spans if each not in framework]]
    first, report = (ingest(written(tmp_path / str(number), parts[number]), store) for number in order)
    together = after(tmp_path / "together", [[spans]])
    assert first.calls == report.calls == 4
    assert report.joined_by in ({Rule.ONE_CALL: 4}, {})
    assert state(store) == together
    assert len(together["calls"]) == 4


def test_a_batch_border_between_two_accounts_changes_nothing(store, tmp_path, monkeypatch):
    spans = captured(BOTH)
    together = after(tmp_path / "together", [[spans]])
    for name in ("FIRST_TRACES", "TRACES_AT_ONCE", "JOINED_AT_ONCE"):
        monkeypatch.setattr(accounts, name, 1)
    report = ingest(written(tmp_path, *traces_of(spans)), store)
    assert (report.calls, report.by_grade, report.joined_by) == (4, {"ids": 4}, {Rule.ONE_CALL: 4})
    assert state(store) == together


EQUAL = [
    turn(1, ["hi"]),
    turn(2, ["hi"]),
    turn(3, ["hi", "ok", "a"], "x"),
    turn(4, ["hi", "ok", "b"], "y"),
    turn(5, ["hi", "ok", "a", "x", "c"], "z"),
]
"""Two conversations with equal beginnings, at the same time."""


@pytest.mark.parametrize("order", [(0, 2, 1, 3, 4), (4, 3, 2, 1, 0), (2, 3, 0, 4, 1), (3, 0, 4, 2, 1)])
def test_conversations_with_equal_beginnings_are_told_apart_in_any_order(store, tmp_path, order):
    for number in order:
        ingest(written(tmp_path / str(number), [EQUAL[number]]), store)
    assert joined(store) == [[1, 4], [2, 3, 5]]


def test_the_same_id_months_apart_or_of_other_services_is_other_conversations(store, tmp_path):
    spans = [
        turn(1, ["a"], conversation="cart-8812"),
        turn(2, ["b"], conversation="cart-8812"),
        turn(3, ["c"], conversation="cart-8812", service="bank"),
        turn(4, ["d"], conversation="cart-8812", start=60 * DAY),
        turn(5, ["e"], conversation="cart-8812", start=60 * DAY + 1),
        turn(6, ["f"], conversation="cart-8812", service=None),
        turn(7, ["g"], conversation="cart-8812", service=None),
    ]
    report = ingest(written(tmp_path, spans), store)
    assert joined(store) == [[1, 2], [3], [4, 5], [6, 7]]
    assert report.joined_by == {Rule.CONVERSATION: 3}
    assert report.kept_apart == {KeptApart.GAP: 1}


@pytest.mark.parametrize("told", ["", "1", "None", "default", "thread-1"])
def test_an_id_that_is_written_into_a_program_makes_no_rollout_of_all_its_runs(store, tmp_path, told):
    spans = [
        *(turn(n, [f"question {n}"], conversation=told) for n in range(1, 5)),
        turn(5, ["question 1", "ok", "and then?"], conversation=told),
    ]
    report = ingest(written(tmp_path, spans), store)
    assert joined(store) == [[1, 5], [2], [3], [4]]
    assert report.joined_by == {Rule.PREFIX: 1}
    assert report.kept_apart == ({KeptApart.UNSPECIFIC: 4} if told else {})


def test_rules_that_were_off_stay_off_until_the_traces_are_ingested_again(store, tmp_path):
    first, second = turn(1, ["a"], conversation="cart-8812"), turn(2, ["b"], conversation="cart-8812")
    [one], [two] = written(tmp_path / "1", [first]), written(tmp_path / "2", [second])
    assert ingest([one], store, join=()).joined_by == {}
    assert ingest([two], store).joined_by == {}
    assert joined(store) == [[1], [2]]
    store.put_otlp(encode_request([replace(first, span_id="f" * 16, attributes={})]))
    accounts.account_unread(store)  # a trace that changes keeps to its rules
    assert joined(store) == [[1], [2]]
    assert ingest([one], store).joined_by == {}  # the first of its rollout
    assert joined(store) == [[1, 2]]
    ingest([one, two], store, join=[rule for rule in GUESSED if rule is not Rule.CONVERSATION])
    assert joined(store) == [[1], [2]]
    assert {row["rollout_id"] for row in store.query("SELECT rollout_id FROM calls")} == {
        first.trace_id,
        second.trace_id,
    }
    assert [rollout.rollout_id for rollout in store.rollouts()] == [first.trace_id, second.trace_id]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_reply_out_of_a_cache_in_another_trace_of_the_rollout_trains_nothing(store, tmp_path, order):
    spans = [
        turn(1, ["a"], "ok", conversation="cart-8812", response="resp-a"),
        turn(2, ["b"], "ok", conversation="cart-8812", response="resp-b"),
        turn(3, ["a"], "ok", conversation="cart-8812", response="resp-a"),
    ]
    for number in order:
        assert ingest(written(tmp_path / str(number), [spans[number]]), store).calls == 1
    grades = {row["trace_id"]: row["grade"] for row in store.query("SELECT trace_id, grade FROM calls")}
    assert [grades[each.trace_id] for each in spans] == ["text", "text", "unusable"]
    assert {call.trace_id: str(call.grade) for call in calls_of(store)} == grades


def test_a_reward_of_a_rollout_stays_with_the_trace_that_named_it(store, tmp_path):
    ingest(written(tmp_path / "1", [EQUAL[0]], [EQUAL[2]]), store)
    assert joined(store) == [[1, 3]]
    store.put_rewards([Reward(EQUAL[0].trace_id, 1.0)])
    ingest(written(tmp_path / "2", [EQUAL[1]]), store)
    assert joined(store) == [[1], [2, 3]]
    assert [reward.rollout_id for reward in store.rewards()] == [EQUAL[0].trace_id]


SOME = (
    BOTH,
    "genai_openai/multi_turn",
    "genai_openai/n2",
    "logfire_openai/stream",
    "litellm_otel/multi_turn",
)


def in_runs(pieces: Sequence[Any], chance: random.Random) -> list[list[Any]]:
    """The pieces in another order, in some runs of ingest."""
    shuffled = chance.sample(pieces, len(pieces))
    borders = sorted(chance.sample(range(len(pieces) + 1), 3))
    return [shuffled[a:b] for a, b in itertools.pairwise([0, *borders, len(pieces)]) if a < b]


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.randoms(use_true_random=False))
def test_any_order_in_any_runs_gives_the_same(tmp_path_factory, chance):
    pieces = [piece for name in SOME for piece in traces_of(captured(name))] + [[each] for each in EQUAL]
    folder = tmp_path_factory.mktemp("runs")
    assert after(folder, in_runs(pieces, chance)) == after(folder / "once", [pieces])


@pytest.mark.slow
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.randoms(use_true_random=False))
def test_the_files_of_all_recorders_in_any_order_give_the_same(tmp_path_factory, chance):
    files = sorted(FIXTURES.glob("*/*.otlp.jsonl"))
    states = []
    for number in range(2):
        folder = tmp_path_factory.mktemp("runs")
        with FileStore(folder / "store.duckdb") as opened:
            for run in [files] if number == 0 else in_runs(files, chance):
                ingest(run, opened)
            states.append(state(opened))
    assert states[0] == states[1]


def test_what_an_older_store_has_joined_goes_on(tmp_path):
    """Before schema 8 nothing was kept of services, requests and recorders."""
    path = tmp_path / "store.duckdb"
    told = [turn(number, [f"question {number}"], conversation="order-77a1b2") for number in (1, 2, 3)]
    with FileStore(path) as opened:
        ingest(written(tmp_path / "before", told[:2]), opened)
    with duckdb.connect(str(path)) as con:
        con.execute("DELETE FROM schema_migrations WHERE version >= 8")
        for column in ("conversation_key", "request_key", "recorders", "trace_ids", "rules", "user_id"):
            con.execute(f"ALTER TABLE call_keys DROP COLUMN {column}")
        con.execute("ALTER TABLE sessions DROP COLUMN reason")
        con.execute("ALTER TABLE rewards DROP COLUMN trace_id")
    with FileStore(path) as opened:
        accounts.account_unread(opened)
        assert joined(opened) == [[1, 2]]
        ingest(written(tmp_path / "after", told[2:]), opened)
        assert joined(opened) == [[1, 2, 3]]
