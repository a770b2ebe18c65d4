"""What listings show of calls is what all calls say, at the cost of what is shown."""

from dataclasses import replace
from pathlib import Path

import pytest

from spangrad.adapters import account_unread, ingest
from spangrad.adapters.calls import calls_of
from spangrad.adapters.listing import calls_by_rollout, newest_calls
from spangrad.store.file_store import FileStore
from spangrad.store.otlp import encode_request
from spangrad.store.records import Rollout
from tests.command_line import recorded

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture
def store(tmp_path):
    """Calls of several recorders, with and without a rollout of their own; some traces are unread."""
    with FileStore(tmp_path / "s.duckdb") as opened:
        ingest(sorted(FIXTURES.glob("*/multi_turn.otlp.jsonl"))[:4], opened)
        opened.enqueue([Rollout("r-1"), Rollout("r-2")])
        for number, rollout in enumerate(opened.claim(worker="w", limit=2), start=1):
            opened.put_otlp(recorded(rollout.rollout_id, number))
            opened.finish(rollout.rollout_id, rollout.attempt)
        opened.put_otlp(recorded(None, 2 * 10**9))  # the newest, of no rollout
        yield opened


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 1000])
def test_the_newest_are_the_last_of_all(store, limit):
    every = calls_of(store)
    assert len(every) > 10
    assert newest_calls(store, limit=limit) == (every[-limit:], len(every))
    assert newest_calls(store, limit=0) == (every, len(every))


def test_of_rollouts_those_of_the_current_attempt(store):
    ids = sorted({call.rollout_id for call in calls_of(store) if call.rollout_id is not None})
    assert {"r-1", "r-2"} < set(ids)
    for wanted in (ids, ["r-1"], ids[:2], ["none"]):
        every = calls_of(store, wanted)
        assert newest_calls(store, wanted, limit=3) == (every[-3:], len(every))
        assert calls_by_rollout(store, wanted) == {
            name: count for name in wanted if (count := len(calls_of(store, [name])))
        }
    store.requeue(["r-1"])  # what it did counts no more
    assert newest_calls(store, ["r-1"], limit=3) == ([], 0)
    assert calls_by_rollout(store, ["r-1", "r-2"]) == {"r-2": 1}


def test_no_span_is_read_that_is_not_shown(tmp_path):
    with FileStore(tmp_path / "s.duckdb") as store:
        (tmp_path / "old.pb").write_bytes(recorded("r-1", 1))
        (tmp_path / "new.pb").write_bytes(recorded("r-2", 2))
        ingest([tmp_path / "old.pb", tmp_path / "new.pb"], store)
        with store._database.transaction() as con:  # nobody can read it any more
            con.execute("UPDATE spans SET attributes = '[1]' WHERE rollout_id = 'r-1'")
        with pytest.raises(AttributeError):
            calls_of(store)
        (shown,), known = newest_calls(store, limit=1)
        assert (shown.rollout_id, known) == ("r-2", 2)
        assert calls_by_rollout(store, ["r-1", "r-2"]) == {"r-1": 1, "r-2": 1}


def test_a_call_that_a_trace_tells_again_before_it_was_read_counts_once(tmp_path):
    file = FIXTURES / "genai_openai" / "multi_turn.otlp.jsonl"
    with FileStore(tmp_path / "s.duckdb") as store:
        ingest([file], store)
        told = [one for one in store.spans() if one.attributes.get("gen_ai.response.id")]
        again = [replace(one, trace_id="f" * 32, scope="another", rollout_id=None) for one in told[:1]]
        store.put_otlp(encode_request(again))
        every = calls_of(store)
        assert newest_calls(store, limit=50) == (every, len(every))


def test_what_a_hub_reads_while_calls_are_listed_counts_once(tmp_path):
    with FileStore(tmp_path / "s.duckdb") as store:
        store.put_otlp(recorded("r-1", 1))

        class ReadMeanwhile(FileStore):
            """The store, in which a hub reads traces as soon as they were asked for."""

            def __init__(self) -> None:
                """Nothing is opened."""

            def __getattribute__(self, name):
                return getattr(store, name) if name != "rollouts" else super().__getattribute__(name)

            def rollouts(self, **given):
                account_unread(store)
                return store.rollouts(**given)

        found, known = newest_calls(ReadMeanwhile(), limit=1)
        assert (len(found), known, store.unread_traces()) == (1, 1, [])
