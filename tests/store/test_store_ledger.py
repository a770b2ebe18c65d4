from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spangrad.errors import StoreError
from spangrad.store.file_store import FileStore
from spangrad.store.records import Policy, Rollout, RunEvent, Update, UpdateRead, UpdateSample


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileStore]:
    with FileStore(tmp_path / "s.duckdb") as opened:
        opened.enqueue([Rollout(f"r{i}", run_id="run") for i in range(6)])
        yield opened


def update(index: int, rollout_ids: list[str], **changes: Any) -> Update:
    samples = [UpdateSample(r, f"call-{r}", 0, 0.5, 12, index, None, 0.25) for r in rollout_ids]
    reads = [UpdateRead(r, call_id=f"call-{r}") for r in rollout_ids]
    fields: dict[str, Any] = {
        "run_id": "run",
        "update_index": index,
        "policy_version": index + 1,
        "rollout_ids": rollout_ids,
        "samples": samples,
        "metrics": {"loss/total": 0.25, "loss/odd": float("inf")},
        "checkpoint": f"ckpt/{index}",
        "time_ns": 7,
        "config": {"learner": {"clip_high": float("inf"), "critic": None}, "run": {"id": "run"}},
        "parent": "models/start",
        "reads": [*reads, UpdateRead("r0", reward_id="w0")],
    }
    return Update(**(fields | changes))


def test_an_update_comes_back_whole_and_marks_its_rollouts(store: FileStore) -> None:
    first, second = update(0, ["r1", "r0"]), update(1, ["r2"])
    assert store.commit_update(first)
    assert store.commit_update(second)
    assert store.updates("run") == store.updates() == [first, second]
    assert store.updates("run", update_index=1) == store.updates(update_index=1) == [second]
    assert store.updates("run", update_index=2) == []
    assert store.last_update("run") == second
    assert store.last_update("other") is None
    assert [r.consumed_by for r in store.rollouts()] == [0, 0, 1, None, None, None]


def test_the_same_update_again_changes_nothing(store: FileStore) -> None:
    assert store.commit_update(update(0, ["r0", "r1"]))
    assert not store.commit_update(update(0, ["r1", "r0"], metrics={"loss/total": 9.0}))
    assert store.updates() == [update(0, ["r0", "r1"])]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (update(2, ["r3"]), "leaves a gap: the next index is 1"),
        (update(0, ["r3"]), "committed before with other rollouts"),
        (update(0, ["r0"], policy_version=9), "another version"),
        (update(1, ["r3", "r0"]), "'r0' was consumed by update 0 of run 'run'"),
        (update(0, ["r0"], run_id="rerun"), "'r0' was consumed by update 0 of run 'run'"),
        (update(1, ["r3", "nobody"]), "no rollout 'nobody'"),
        (update(1, ["r3"], run_id="other"), "the next index is 0"),
    ],
)
def test_updates_that_contradict_the_books_are_refused_whole(
    store: FileStore, bad: Update, message: str
) -> None:
    store.commit_update(update(0, ["r0"]))
    with pytest.raises(StoreError, match=message):
        store.commit_update(bad)
    assert store.updates() == [update(0, ["r0"])]
    assert [r.rollout_id for r in store.rollouts() if r.consumed_by is not None] == ["r0"]
    assert store.stats()["update_samples"] == 1


def test_an_update_that_only_reads_takes_nothing_from_others_and_may_take_what_they_have(
    store: FileStore,
) -> None:
    assert store.commit_update(update(0, ["r0"]))
    first = update(0, ["r0", "r1"], run_id="stored", consumes=False)
    second = update(1, ["r1"], run_id="stored", consumes=False)
    assert store.commit_update(first) and store.commit_update(second)
    assert store.updates("stored") == [first, second]
    assert not store.commit_update(first)
    assert store.commit_update(update(1, ["r1"]))
    assert [one.consumed_by for one in store.rollouts()][:3] == [0, 1, None]
    rows = store.query("SELECT DISTINCT consumed_run FROM rollouts WHERE consumed_by IS NOT NULL")
    assert rows == [{"consumed_run": "run"}]
    with pytest.raises(StoreError, match="no rollout 'nobody'"):
        store.commit_update(update(2, ["nobody"], run_id="stored", consumes=False))


def test_metrics_of_a_publish_join_those_of_their_update(store: FileStore) -> None:
    store.commit_update(update(0, ["r0"]))
    before = dict(store.updates()[0].metrics)
    store.put_metrics("run", 0, {"gap/published_mean": 1e-6, "time/publish_s": 0.5})
    store.put_metrics("run", 0, {"time/publish_s": 0.25})
    assert store.updates()[0].metrics == before | {"gap/published_mean": 1e-6, "time/publish_s": 0.25}
    with pytest.raises(StoreError, match="there is no update 1 of run 'run'"):
        store.put_metrics("run", 1, {"time/publish_s": 0.5})


def test_runs_count_their_updates_separately(store: FileStore) -> None:
    store.commit_update(update(0, ["r0"]))
    store.commit_update(update(0, ["r1"], run_id="other"))
    assert [(u.run_id, u.update_index) for u in store.updates()] == [("other", 0), ("run", 0)]


def test_policies_come_back_in_order_and_a_republished_one_once(store: FileStore) -> None:
    second = Policy(
        "run", 2, "p/2", time_ns=2, parent_version=1, note="gate passed", parent_run="other", model="m/2"
    )
    for policy in (second, Policy("run", 1, "old", time_ns=1), Policy("run", 1, "p/1", time_ns=1), second):
        store.put_policy(policy)
    assert store.policies("run") == store.policies() == [Policy("run", 1, "p/1", time_ns=1), second]
    assert store.policies("other") == []


def test_call_summaries_are_replaced_by_id_and_checked(store: FileStore) -> None:
    row = {
        "call_id": "c",
        "attempt": 0,
        "trace_id": "t",
        "span_id": "s",
        "dialect": "spangrad",
        "grade": "ids",
        "grade_reasons": ["no logprobs"],
        "purpose": "agent",
        "start_ns": 1,
        "end_ns": 2,
    }
    store.put_calls([row])
    store.put_calls([row | {"grade": "exact", "grade_reasons": [], "sampled_tokens": 5}])
    found = store.query("SELECT grade, grade_reasons, sampled_tokens, model FROM calls")
    assert found == [{"grade": "exact", "grade_reasons": [], "sampled_tokens": 5, "model": None}]
    with pytest.raises(StoreError, match=r"\['colour'\] are unknown, \['trace_id'\] are missing"):
        store.put_calls([{k: v for k, v in row.items() if k != "trace_id"} | {"colour": 1}])


def test_a_monitor_has_one_event_of_an_update_and_the_first_stands(store: FileStore) -> None:
    for index in range(2):
        store.commit_update(update(index, [f"r{index}"]))
    later = RunEvent("run", 1, "entropy", 0.04, 0.05, "pause", "entropy fell", time_ns=9)
    first = RunEvent("run", 0, "gap", 0.2, 0.1, "warn", "the gap is wide", time_ns=8)
    assert store.put_events([later, first]) == 2
    assert store.put_events([RunEvent("run", 1, "entropy", 9.0, 9.0, "warn", "again", time_ns=10)]) == 0
    assert store.put_events([]) == 0
    assert store.events("run") == store.events() == [first, later]
    assert store.events("other") == []


def test_an_event_is_of_a_committed_update(store: FileStore) -> None:
    store.commit_update(update(0, ["r0"]))
    known, unknown = (RunEvent("run", index, "gap", 0.2, 0.1, "warn", "t") for index in (0, 1))
    with pytest.raises(StoreError, match="no update 1 of run 'run'; commit it first"):
        store.put_events([known, unknown])
    assert store.events() == []
    store.put_events([known])
    assert store.events()[0].time_ns > 0
