"""Scores of traces and of sessions, where several traces are one rollout."""

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest

from spangrad.adapters.accounts import account_unread
from spangrad.adapters.calls import calls_of
from spangrad.adapters.exports.rewards import MANY_SESSIONS, NO_SESSION, put_scores
from spangrad.adapters.exports.score import Score
from spangrad.adapters.ingest import ingest
from spangrad.adapters.scoring.reward_files import put_reward_files
from spangrad.credit.rewards import rewards_of
from spangrad.store.file_store import FileStore
from spangrad.store.otlp import encode_logs, encode_request
from spangrad.store.records import LogRecord, Span, SpanEvent
from spangrad.tracer import conventions as c
from tests.adapters.building import span
from tests.adapters.captured import captured
from tests.adapters.conversing import joined, state, traces_of, turn, written

CHAT = "cart-8812"
TURNS = [turn(number, [f"question {number}"], conversation=CHAT) for number in (1, 2, 3)]
BOTH = "openinference_langchain_plus_openai/multi_turn"


@pytest.fixture
def store(tmp_path):
    with FileStore(tmp_path / "store.duckdb") as opened:
        yield opened


def score(trace: Span | None, value: float = 1.0, **more) -> Score:
    told = {"label": None, "explanation": None, "author": None, "time_ns": 5, "name": "reward", **more}
    return Score(None if trace is None else trace.trace_id, None, value=value, source="test", **told)


def given(store) -> set[tuple[str, str | None, str, float]]:
    return {(r.rollout_id, r.call_id, r.name, r.value) for r in store.rewards()}


def call_id(trace: Span) -> str:
    return f"{trace.trace_id}-{trace.span_id}"


def test_the_score_of_a_lone_trace_is_the_rollouts(store, tmp_path):
    ingest(written(tmp_path, TURNS[:1]), store)
    report = put_scores(store, [score(TURNS[0])])
    assert (report.new_rewards, report.kept_at_last_call) == (1, 0)
    assert given(store) == {(TURNS[0].trace_id, None, "reward", 1.0)}


def test_scores_of_traces_inside_a_longer_rollout_are_kept_at_their_last_calls(store, tmp_path):
    ingest(written(tmp_path, TURNS), store)
    scores = [score(trace, value) for trace, value in zip(TURNS, (0.0, 1.0, 0.5), strict=True)]
    report = put_scores(store, scores)
    assert (report.new_rewards, report.kept_at_last_call) == (3, 3)
    first = TURNS[0].trace_id
    assert given(store) == {
        (first, call_id(trace), "reward", value) for trace, value in zip(TURNS, (0.0, 1.0, 0.5), strict=True)
    }
    [rollout] = store.rollouts()
    found = rewards_of(rollout, store.rewards(), calls_of(store))
    assert found.outcome is None  # nobody said what the whole was worth
    assert found.steps == {call_id(TURNS[0]): 0.0, call_id(TURNS[1]): 1.0, call_id(TURNS[2]): 0.5}
    assert put_scores(store, scores).new_rewards == 0


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("time_ns", [5, None])
def test_the_order_in_which_traces_and_scores_come_changes_no_reward(store, tmp_path, order, time_ns):
    for number in order:
        ingest(written(tmp_path / str(number), [TURNS[number]]), store)
        put_scores(store, [score(TURNS[number], float(number), time_ns=time_ns)])
    assert given(store) == {
        (TURNS[0].trace_id, call_id(trace), "reward", float(number)) for number, trace in enumerate(TURNS)
    }
    again = [score(trace, float(number), time_ns=time_ns) for number, trace in enumerate(TURNS)]
    assert put_scores(store, again).new_rewards == 0


def test_a_score_leaves_with_a_trace_that_turns_out_to_be_a_rollout_of_its_own(store, tmp_path):
    ingest(written(tmp_path, TURNS[:2]), store)
    put_scores(store, [score(TURNS[0], 0.0), score(TURNS[1])])
    ingest(written(tmp_path, TURNS[:2]), store, join=())
    assert joined(store) == [[1], [2]]
    assert given(store) == {
        (TURNS[0].trace_id, None, "reward", 0.0),
        (TURNS[1].trace_id, None, "reward", 1.0),
    }


def test_a_score_of_a_trace_and_one_of_its_last_call_add_up(store, tmp_path):
    ingest(written(tmp_path, TURNS), store)
    of_call = Score(TURNS[0].trace_id, TURNS[0].span_id, "reward", 0.5, None, None, None, 5, "test")
    assert put_scores(store, [score(TURNS[0]), of_call]).new_rewards == 2
    [rollout] = store.rollouts()
    found = rewards_of(rollout, store.rewards(), calls_of(store))
    assert found.steps == {call_id(TURNS[0]): 1.5}


def test_a_trace_with_another_account_of_its_calls_is_a_whole_rollout(store, tmp_path):
    spans = captured(BOTH)
    ingest(written(tmp_path, *traces_of(spans)), store)
    [rollout] = store.rollouts()
    named = next(each for each in spans if each.trace_id == calls_of(store)[0].trace_id)
    other = next(each for each in spans if each.trace_id != named.trace_id)
    report = put_scores(store, [score(named), score(other, 0.5, name="client")])
    assert report.kept_at_last_call == 0
    assert given(store) == {
        (rollout.rollout_id, None, "reward", 1.0),
        (rollout.rollout_id, None, "client", 0.5),
    }


def test_a_score_of_a_session_is_the_whole_rollouts(store, tmp_path):
    ingest(written(tmp_path, TURNS), store)
    report = put_scores(store, [score(None, 0.25, session_id=CHAT, project="shop"), score(TURNS[2])])
    assert (report.new_rewards, report.kept_at_last_call) == (2, 1)
    [rollout] = store.rollouts()
    assert rewards_of(rollout, store.rewards(), calls_of(store)).outcome == 0.25
    assert put_scores(store, [score(None, session_id=CHAT, project="other", name="x")]).new_rewards == 1


def test_a_session_of_no_rollout_or_of_several_gets_no_reward(store, tmp_path):
    apart = turn(9, ["later"], conversation=CHAT, start=3e6)
    ingest(written(tmp_path, [*TURNS, apart, turn(8, ["x"], conversation="thread-1")]), store)
    scores = [score(None, session_id=told, project="shop") for told in (CHAT, "other-77", "thread-1")]
    report = put_scores(store, scores)
    assert dict(report.left_out) == {MANY_SESSIONS: 1, NO_SESSION: 2}
    assert given(store) == set()


def test_scores_of_an_export_are_told_in_the_report(store, tmp_path):
    rows: list[dict[str, Any]] = []
    for number in (1, 2):
        times = {"start_time": f"2026-11-29 14:0{number}:00", "end_time": f"2026-11-29 14:0{number}:30"}
        ids: dict[str, Any] = {
            "id": f"o{number}",
            "trace_id": f"t{number}",
            "project_id": "p",
            "session_id": CHAT,
        }
        told: dict[str, Any] = {
            "input": [{"role": "user", "content": f"{number}"}],
            "output": {"role": "assistant", "content": "ok"},
        }
        rows.append({**ids, **times, **told, "type": "GENERATION", "level": "DEFAULT", "model": "m"})
        part: dict[str, Any] = {"trace_id": f"t{number}", "observation_id": None, "project_id": "p"}
        rows.append({**part, "id": f"s{number}", "name": "good", "value": number, "data_type": "NUMERIC"})
    about: dict[str, Any] = {"trace_id": None, "observation_id": None, "session_id": CHAT, "project_id": "p"}
    rows.append({**about, "id": "s", "name": "reward", "value": 7, "data_type": "NUMERIC"})
    file = tmp_path / "langfuse.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    report = ingest([file], store)
    assert (report.scores, report.new_rewards, report.scores_of_parts, report.scores_left_out) == (
        3,
        3,
        2,
        {},
    )
    [rollout] = store.rollouts()
    last = {call.call_id for call in calls_of(store)}
    assert {(name, call) for _, call, name, _ in given(store)} == {
        ("reward", None),
        *(("good", call) for call in last),
    }
    assert rewards_of(rollout, store.rewards(), calls_of(store)).outcome == 7
    before = state(store)
    again = ingest([file], store)
    assert (again.new_rewards, again.scores_of_parts) == (0, 2)
    assert state(store) == before


def test_a_file_of_rewards_that_names_traces_rewards_their_parts(store, tmp_path):
    ingest(written(tmp_path, TURNS), store)
    rows = [{"trace_id": trace.trace_id, "value": 1.0} for trace in TURNS[:2]]
    rows.append({"rollout_id": TURNS[0].trace_id, "trace_id": TURNS[2].trace_id, "value": 0.5})
    file = tmp_path / "rewards.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    assert put_reward_files([file], store).new_rewards == 3
    first = TURNS[0].trace_id
    assert given(store) == {
        (first, call_id(TURNS[0]), "reward", 1.0),
        (first, call_id(TURNS[1]), "reward", 1.0),
        (first, None, "reward", 0.5),
    }
    assert put_reward_files([file], store).new_rewards == 0


def test_what_an_event_or_a_record_says_of_a_trace_is_of_its_part(store):
    told = {c.REWARD_VALUE: 0.25, c.REWARD_NAME: "polite"}
    root = replace(span("root", trace="2"), start_ns=TURNS[1].start_ns, resource=TURNS[1].resource)
    below = replace(TURNS[1], parent_span_id=root.span_id)
    judged = replace(root, events=(SpanEvent(c.REWARD_EVENT, 5, told),), attributes={})
    store.put_otlp(encode_request([TURNS[0], judged, below]))
    record = LogRecord(root.trace_id, root.span_id, 7, 9, c.REWARD_EVENT, attributes={c.REWARD_VALUE: 1.0})
    store.put_logs(encode_logs([record]))
    account_unread(store)
    first = TURNS[0].trace_id
    expected = {(first, call_id(TURNS[1]), "polite", 0.25), (first, call_id(TURNS[1]), "reward", 1.0)}
    assert given(store) == expected
