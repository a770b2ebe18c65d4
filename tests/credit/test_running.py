"""Rollouts without a group, compared with earlier ones of their kind."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from spangrad.credit.assign import assign
from spangrad.credit.credit_config import CreditConfig
from spangrad.credit.history import nothing_before
from spangrad.credit.pipeline import credited_rows
from spangrad.credit.running import baseline_advantages, rollouts_remembered, running_baselines
from spangrad.credit.types import Step, Trajectory
from spangrad.errors import CreditError
from spangrad.store.base import Store
from spangrad.store.client import HubClient
from spangrad.store.file_store import FileStore
from spangrad.store.otlp import encode_request
from spangrad.store.records import Reward, RewardAuthor, Rollout
from tests.credit.test_pipeline import spans_of
from tests.store.hub_process import HubProcess

CONFIG = CreditConfig(episode="running_baseline", baseline_decay=0.5)
streams = st.lists(st.tuples(st.sampled_from([0.0, 0.25, 1.0, -3.0]), st.integers(0, 1)), max_size=12)


def reference(returns, kinds, decay):
    """The sums of the definition, each on its own."""
    found = []
    for m, kind in enumerate(kinds):
        before = [j for j in range(m) if kinds[j] == kind]
        weights = [decay ** (len(before) - 1 - n) for n in range(len(before))]
        weighted = sum(w * returns[j] for w, j in zip(weights, before, strict=True))
        found.append(weighted / sum(weights) if before else np.nan)
    return found


def baselines(stream, decay, constant=0.0):
    returns = np.array([value + constant for value, _ in stream])
    return running_baselines(returns, np.array([kind for _, kind in stream], dtype=np.int64), decay=decay)


def test_the_baseline_is_the_running_mean_of_what_came_before():
    found = running_baselines(np.array([1.0, 0, 7, 1]), np.array([0, 0, 1, 0]), decay=0.5)
    # (0 + 0.5 * 1) / 1.5 = 1/3.
    assert_allclose(found, [np.nan, 1, np.nan, 1 / 3])
    assert_allclose(baseline_advantages(np.array([1.0, 0, 7, 1]), found), [0, -1, 0, 2 / 3])


@settings(max_examples=30)
@given(streams, st.sampled_from([0.0, 0.5, 0.95]), st.sampled_from([1.0, -2.5]))
def test_baselines_are_those_of_the_definition_and_move_with_a_constant(stream, decay, constant):
    found = baselines(stream, decay)
    expected = reference([value for value, _ in stream], [kind for _, kind in stream], decay)
    assert_allclose(found, expected, atol=1e-12)
    assert_allclose(baselines(stream, decay, constant), found + constant, atol=1e-12)


def test_equal_rewards_give_exactly_zero_and_what_has_no_baseline_is_counted():
    expected = running_baselines(np.full(9, 0.1), np.zeros(9, dtype=np.int64))
    batch = [
        Trajectory(f"r{i}", None, 0.1, [Step("0", 0)], baseline=None if i == 0 else value)
        for i, value in enumerate(expected.tolist())
    ]
    found = assign(batch, CONFIG)
    assert set(found.advantages.values()) == {0.0}
    assert found.diagnostics.metrics()["baseline/missing"] == 1
    assert "baseline/missing" not in assign(batch, CreditConfig()).diagnostics.metrics()


def test_only_what_still_weighs_something_is_remembered():
    assert rollouts_remembered(0.95) == 270  # 0.95^270 = 9.7e-7
    assert rollouts_remembered(0.0) == 1


def test_what_makes_no_sense_is_refused():
    one = np.array([1.0])
    for wrong in (1.0, -0.1):
        with pytest.raises(CreditError, match="decay"):
            running_baselines(one, np.array([0]), decay=wrong)
    with pytest.raises(CreditError, match="shape"):
        running_baselines(one, np.array([0, 1]))
    with pytest.raises(CreditError, match="shape"):
        baseline_advantages(one, np.array([0.0, 1.0]))
    with pytest.raises(CreditError, match="finite"):
        running_baselines(np.array([np.nan]), np.array([0]))


@pytest.fixture
def store(tmp_path):
    with FileStore(tmp_path / "store.duckdb") as opened:
        yield opened


def ended(store: FileStore, *rollouts: Rollout, rewards: dict[str, float]) -> None:
    """Run these, one after the other."""
    store.enqueue(rollouts)
    for each in rollouts:
        (claimed,) = store.claim(worker="w", limit=1)
        store.put_otlp(encode_request(spans_of(each.rollout_id, f"{ord(each.rollout_id):x}")))
        store.finish(each.rollout_id, claimed.attempt)
        given = [Reward(each.rollout_id, rewards[each.rollout_id], attempt=0)]
        store.put_rewards(given, author=RewardAuthor.EVALUATOR)


def advantages(store: Store, config: CreditConfig, *ids: str) -> dict[str, float]:
    batch = credited_rows(store, store.rollouts(rollout_ids=list(ids)), config)
    return {sample.rollout_id: sample.advantage for sample in batch.samples}


def test_a_batch_is_compared_with_what_the_store_has_of_its_kind_before_it(store):
    ended(
        store,
        Rollout("a", run_id="run", task={"type": "sql", "n": 1}),
        Rollout("b", run_id="run", task={"type": "mail", "n": 2}),
        Rollout("c", run_id="other", task={"type": "sql"}),
        Rollout("d", run_id="run", task={"type": "sql"}, split="eval"),
        Rollout("e", run_id="run", task={"type": "sql", "n": 3}),
        Rollout("f", run_id="run", task="no type"),
        rewards={"a": 1.0, "b": 5.0, "c": 7.0, "d": 9.0, "e": 0.0, "f": 1.0},
    )
    by_type = dataclasses.replace(CONFIG, baseline_key="task.type")
    # e and f: a is the only one of the same run, split and type before e; f has no type.
    assert advantages(store, by_type, "e", "f") == {"e": -1.0, "f": 0.0}
    # The same again after more has come, as when a trainer restarts.
    ended(store, Rollout("g", run_id="run", task={"type": "sql"}), rewards={"g": 4.0})
    assert advantages(store, by_type, "e", "f") == {"e": -1.0, "f": 0.0}
    # a 1, e 0 before g: (0 + 0.5) / 1.5.
    assert advantages(store, by_type, "g") == {"g": pytest.approx(4 - 1 / 3)}
    # All are one kind: a 1, b 5 before e, (5 + 0.5) / 1.5; then e 0.
    every = dataclasses.replace(CONFIG, baseline_key="all")
    mean = 5.5 / 1.5
    assert advantages(store, every, "e", "f") == {
        "e": pytest.approx(-mean),
        "f": pytest.approx(1 - (0 + 0.5 * 5 + 0.25) / 1.75),
    }
    # No task_id is known: nothing to compare with.
    assert set(advantages(store, CONFIG, "e", "f").values()) == {0.0}


def test_a_key_that_no_rollout_of_the_batch_has_is_told_with_those_that_there_are(store, caplog):
    ended(
        store,
        Rollout("a", run_id="run", task={"type": "sql", "n": {"m": 1, "no": None}}),
        Rollout("b", run_id="run", task_id="t", task="text"),
        rewards={"a": 1.0, "b": 5.0},
    )
    for key, warns in (("task.typ", True), ("task.n.no", True), ("task.n.m", False), ("all", False)):
        caplog.clear()
        advantages(store, dataclasses.replace(CONFIG, baseline_key=key), "a", "b")
        says = (
            f"none of 2 rollouts has a {key}, which credit.baseline_key names, so none has a baseline; there"
            " is all, task.n, task.n.m, task.type, task_id"
        )
        assert caplog.messages == [says] * warns


def test_a_batch_in_which_most_have_nothing_before_them_is_told(store):
    ended(
        store,
        *(Rollout(name, run_id="run", task_id=name, task={"type": "sql"}) for name in ("a", "b")),
        Rollout("c", run_id="run", task_id="a", task={"type": "sql"}),
        rewards={"a": 1.0, "b": 5.0, "c": 0.0},
    )

    def told(config: CreditConfig, *ids: str) -> str | None:
        rollouts = store.rollouts(rollout_ids=list(ids))
        return nothing_before(credited_rows(store, rollouts, config).diagnostics, rollouts, config)

    assert told(CONFIG, "a", "b") == (
        "2 of 2 rollouts train nothing: by credit.baseline_key 'task_id' none of their kind ended before"
        " them, so a running baseline has nothing to compare them with; name what tasks have in common,"
        " all, task.type"
    )
    assert "2 of 3 rollouts train nothing" in str(told(CONFIG, "a", "b", "c"))
    assert told(CONFIG, "c") is None
    assert told(dataclasses.replace(CONFIG, baseline_key="all"), "a", "b", "c") is None  # 1 of 3
    assert told(CreditConfig(), "a", "b") is None


def test_rewards_of_steps_count_in_the_history(store):
    ended(
        store,
        *(Rollout(name, run_id="run", task_id="t") for name in ("a", "b")),
        rewards={"a": 1.0, "b": 1.0},
    )
    (first, *_) = [span for span in store.spans(["a"]) if span.start_ns == 10]
    step = Reward("a", 0.5, attempt=0, call_id=f"{first.trace_id}-{first.span_id}")
    store.put_rewards([step], author=RewardAuthor.EVALUATOR)
    assert advantages(store, CONFIG, "b") == {"b": -0.5}


def test_only_the_last_rollouts_of_a_kind_before_the_batch_are_read(store, monkeypatch):
    ended(
        store,
        *(Rollout(name, run_id="run", task_id="t") for name in ("a", "b", "c", "d")),
        rewards={"a": 9.0, "b": 1.0, "c": 3.0, "d": 0.0},
    )
    monkeypatch.setattr("spangrad.credit.running.FORGOTTEN", 0.25)  # 0.5^2: two are remembered
    assert advantages(store, CONFIG, "d") == {"d": pytest.approx(-(3 + 0.5 * 1) / 1.5)}
    assert advantages(store, CONFIG, "c", "d")["d"] == pytest.approx(-(3 + 0.5 * 1 + 0.25 * 9) / 1.75)


def test_more_of_a_history_is_read_than_a_query_returns_at_most(tmp_path, monkeypatch):
    path = Path(tmp_path, "store.duckdb")
    for kind in (FileStore, HubClient):  # 13,809 are remembered of a kind with a decay of 0.999
        monkeypatch.setitem(kind.query.__kwdefaults__, "row_limit", 2)
    with FileStore(path) as file:
        ended(
            file,
            *(Rollout(name, run_id="run", task_id="t") for name in ("a", "b", "c", "d")),
            rewards={"a": 4.0, "b": 2.0, "c": 0.0, "d": 0.0},
        )
        expected = {"d": pytest.approx(-(2 * 0.5 + 4 * 0.25) / 1.75)}
        assert advantages(file, CONFIG, "d") == expected
    with HubProcess(path) as hub, HubClient(hub.url) as client:
        assert advantages(client, CONFIG, "d") == expected
