"""Evaluations in log records become rewards: of the judged span's rollout, by whose key they came."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spangrad.store.client import HubClient
from spangrad.store.file_store import FileStore
from spangrad.store.keys import Keys
from spangrad.store.otlp import encode_logs
from spangrad.store.records import LogRecord, Reward, RewardAuthor, Span
from spangrad.tracer import conventions as names
from tests.store.building import new_trace, request, span
from tests.store.hub_process import HubProcess


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileStore]:
    with FileStore(tmp_path / "s.duckdb") as opened:
        yield opened


def call(rollout: str | None = "r-1", response: str = "resp-1", **more: Any) -> Span:
    attributes = {names.OPERATION_NAME: "chat", names.RESPONSE_ID: response}
    return span(new_trace(), rollout=rollout, attempt=0 if rollout else None, attributes=attributes, **more)


def verdict(
    judged: Span | None, value: Any = 0.5, response: str | None = None, **attributes: Any
) -> LogRecord:
    given = {
        names.REWARD_NAME: "correct",
        names.REWARD_VALUE: value,
        names.RESPONSE_ID: response,
        **attributes,
    }
    return LogRecord(
        trace_id=judged.trace_id if judged else None,
        span_id=judged.span_id if judged else None,
        time_ns=7,
        observed_ns=9,
        event_name=names.REWARD_EVENT,
        attributes={name: value for name, value in given.items() if value is not None},
    )


def given(store: Any) -> list[Reward]:
    return [replace(reward, time_ns=None) for reward in store.rewards()]


def rewarded(judged: Span, author: str = "operator", **more: Any) -> Reward:
    call_id = f"{judged.trace_id}-{judged.span_id}"
    fields = {"value": 0.5, "name": "correct", "call_id": call_id, "attempt": 0, **more}
    return Reward(str(judged.rollout_id), author=RewardAuthor(author), **fields)


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("how", ["span", "response", "response, by a judge's span"])
def test_a_verdict_finds_its_call_whichever_comes_first(store: FileStore, how: str, is_first: bool) -> None:
    judged = call()
    judge = span(new_trace(), name="judge")
    record = {
        "span": verdict(judged),
        "response": verdict(None, response="resp-1"),
        "response, by a judge's span": verdict(judge, response="resp-1"),
    }[how]
    if is_first:
        store.put_logs(encode_logs([record]))
        assert given(store) == []
    store.put_otlp(request([judge, judged]))
    store.put_logs(encode_logs([record]))
    assert given(store) == [rewarded(judged)]
    assert store.rewards()[0].time_ns == 7
    store.put_logs(encode_logs([record]))
    store.put_otlp(request([judged]))
    assert len(store.rewards()) == 1


def test_a_store_that_was_opened_anew_still_waits_for_the_span(tmp_path: Path) -> None:
    judged = call()
    with FileStore(tmp_path / "s.duckdb") as store:
        store.put_logs(encode_logs([verdict(judged)]))
    with FileStore(tmp_path / "s.duckdb") as store:
        store.put_otlp(request([judged]))
        assert given(store) == [rewarded(judged)]


def test_a_call_that_learns_of_its_rollout_later_is_rewarded_then(store: FileStore) -> None:
    root = span(new_trace(), rollout="r-1", attempt=0)
    judged = replace(call(None), trace_id=root.trace_id, parent_span_id=root.span_id)
    store.put_otlp(request([judged]))
    store.put_logs(encode_logs([verdict(judged)]))
    assert given(store) == []
    store.put_otlp(request([root]))
    assert given(store) == [rewarded(replace(judged, rollout_id="r-1"))]


def test_a_verdict_on_a_span_that_is_no_call_is_for_the_rollout(store: FileStore) -> None:
    root = span(new_trace(), rollout="r-1", attempt=0)
    store.put_otlp(request([root]))
    label = {"gen_ai.evaluation.score.label": "pass"}
    store.put_logs(encode_logs([verdict(root, 1, **label)]))
    assert given(store) == [rewarded(root, value=1.0, call_id=None, explanation="pass")]


@pytest.mark.parametrize("value", [None, True, "high", float("nan"), float("inf")])
def test_what_is_no_finite_number_is_no_reward(store: FileStore, value: Any) -> None:
    judged = call()
    store.put_otlp(request([judged]))
    assert store.put_logs(encode_logs([verdict(judged, value)])) == 1
    assert given(store) == []


def test_a_response_id_of_two_rollouts_says_nothing(store: FileStore) -> None:
    store.put_otlp(request([call("r-1"), call("r-2")]))
    store.put_logs(encode_logs([verdict(None, response="resp-1")]))
    assert given(store) == []


def test_the_old_name_of_an_event_counts(store: FileStore) -> None:
    judged = call()
    store.put_otlp(request([judged]))
    old = replace(verdict(judged, **{"event.name": names.REWARD_EVENT}), event_name="")
    store.put_logs(encode_logs([old]))
    assert given(store) == [rewarded(judged)]


@pytest.mark.slow
def test_the_author_is_the_callers_key_and_no_agents_verdict_is_trusted(tmp_path: Path) -> None:
    keys = Keys.generate()
    keys.save(tmp_path / "keys.json")
    judged = call()
    batch = encode_logs([verdict(judged)])
    with HubProcess(tmp_path / "s.duckdb", keys=tmp_path / "keys.json") as hub:
        with HubClient(hub.url, keys.agent) as agent:
            agent.put_otlp(request([judged]))
            assert agent.put_logs(batch) == 1
        with HubClient(hub.url, keys.evaluator) as evaluator:
            assert given(evaluator) == [rewarded(judged, "agent")]
            assert evaluator.put_logs(batch) == 1
            assert evaluator.put_logs(batch) == 0
            assert given(evaluator) == [rewarded(judged, "agent"), rewarded(judged, "evaluator")]
        with HubClient(hub.url, keys.trainer) as trainer:
            trainer.put_logs(batch)
            assert [str(reward.author) for reward in trainer.rewards()] == ["agent", "evaluator", "operator"]
