from collections.abc import Iterator
from pathlib import Path

import duckdb
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from spangrad.errors import StoreError
from spangrad.store.client import HubClient
from spangrad.store.file_store import FileStore
from spangrad.store.records import Ending, Rollout, RolloutStatus
from spangrad.store.tables import claims
from tests.store.hub_process import HubProcess


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileStore]:
    with FileStore(tmp_path / "s.duckdb") as opened:
        yield opened


def test_many_attempts_end_at_once_each_in_its_own_way(store: FileStore) -> None:
    names = ["good", "retried", "freed", "exhausted", "failed"]
    store.enqueue([Rollout(name, max_attempts=1 if name == "exhausted" else 2) for name in names])
    store.claim(worker="w", limit=9)
    endings = [
        Ending("good", 0, output={"a": [1, None]}),
        Ending("retried", 0, error_type="E", error="e", retry=True),
        Ending("freed", 0, error_type="E", retry=True, free=True),
        Ending("exhausted", 0, error_type="E", retry=True),
        Ending("failed", 0, RolloutStatus.FAILED, error="no"),
    ]
    assert store.finish_many(endings) == []
    assert store.finish_many(endings) == []  # the same again changes nothing
    found = {r.rollout_id: r for r in store.rollouts()}
    assert {name: (str(r.status), r.attempt, r.max_attempts) for name, r in found.items()} == {
        "good": ("succeeded", 0, 2),
        "retried": ("queued", 1, 2),
        "freed": ("queued", 1, 3),
        "exhausted": ("failed", 0, 1),
        "failed": ("failed", 0, 2),
    }
    assert found["good"].output == {"a": [1, None]}
    assert found["failed"].failure == "no"
    assert all((r.ended_ns is None) == (str(r.status) == "queued") for r in found.values())
    assert all(r.lease_until_ns is None for r in found.values())


def test_a_lost_lease_is_said_and_costs_no_other_ending(store: FileStore) -> None:
    store.enqueue([Rollout("mine"), Rollout("requeued")])
    store.claim(worker="w", limit=2)
    store.finish("requeued", 0, retry=True, free=True)
    assert store.finish_many([Ending("requeued", 0, output=1), Ending("mine", 0, output=2)]) == ["requeued"]
    assert [(r.rollout_id, str(r.status)) for r in store.rollouts()] == [
        ("mine", "succeeded"),
        ("requeued", "queued"),
    ]


def test_endings_that_are_wrong_end_nothing(store: FileStore) -> None:
    store.enqueue([Rollout("a")])
    store.claim(worker="w")
    with pytest.raises(StoreError, match="no rollout 'b'"):
        store.finish_many([Ending("a", 0), Ending("b", 0)])
    with pytest.raises(StoreError, match="succeeded or failed"):
        store.finish_many([Ending("a", 0, RolloutStatus.QUEUED)])
    assert store.rollouts()[0].status is RolloutStatus.RUNNING


def test_more_endings_than_are_looked_up_at_once(store: FileStore) -> None:
    store.enqueue([Rollout(f"r{i}") for i in range(2_500)])
    claimed = store.claim(worker="w", limit=2_500)
    assert store.finish_many([Ending(r.rollout_id, r.attempt, output=r.rollout_id) for r in claimed]) == []
    assert [r.output for r in store.rollouts(status=RolloutStatus.SUCCEEDED)] == [
        f"r{i}" for i in range(2_500)
    ]


def test_a_hub_ends_many_attempts_too(tmp_path: Path) -> None:
    with HubProcess(tmp_path / "s.duckdb") as process, HubClient(process.url) as client:
        client.enqueue([Rollout("a"), Rollout("b")])
        client.claim(worker="w", limit=2)
        assert client.finish_many([Ending("a", 0, output="x"), Ending("b", 7)]) == ["b"]
        assert [r.output for r in client.rollouts(status=RolloutStatus.SUCCEEDED)] == ["x"]
        with pytest.raises(StoreError, match="'attempt' of a Ending is 'zero'"):
            client._call("finish_many", {"endings": [{"rollout_id": "a", "attempt": "zero"}]})
        process.terminate()


_OPERATIONS = st.lists(
    st.sampled_from(["enqueue", "enqueue other", "claim", "finish", "fail", "requeue", "delete last"]),
    max_size=40,
)


@given(_OPERATIONS)
@example(["enqueue", "claim", "finish", "claim", "delete last", "enqueue"])
@example(["enqueue", "enqueue", "claim", "finish", "claim", "requeue", "claim"])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_nothing_that_is_queued_is_overlooked_behind_a_long_stretch(
    tmp_path_factory: pytest.TempPathFactory, operations: list[str]
) -> None:
    """The search skips what has ended; with a stretch of 0 it asks at every claim where that ends."""
    with (
        pytest.MonkeyPatch.context() as patch,
        FileStore(tmp_path_factory.mktemp("claims") / "s.duckdb") as store,
    ):
        patch.setattr(claims, "STRETCH", 0)
        queued: list[str] = []
        running: list[Rollout] = []
        ended: list[str] = []
        count = 0
        for operation in operations:
            if operation.startswith("enqueue"):
                count += 1
                run = "other" if operation.endswith("other") else "run"
                store.enqueue([Rollout(f"r{count}", run_id=run, max_attempts=99)])
                queued += [f"r{count}"] if run == "run" else []
            elif operation == "claim":
                claimed = store.claim(worker="w", run_id="run")
                assert [r.rollout_id for r in claimed] == queued[:1]
                running += claimed
                queued = queued[1:]
            elif operation in ("finish", "fail") and running:
                one = running.pop()
                store.finish(one.rollout_id, one.attempt, retry=operation == "fail")
                if operation == "fail":
                    queued = sorted([*queued, one.rollout_id], key=lambda name: int(name[1:]))
                else:
                    ended.append(one.rollout_id)
            elif operation == "requeue" and ended:
                store.requeue([ended[-1]])
                queued = sorted([*queued, ended.pop()], key=lambda name: int(name[1:]))
            elif operation == "delete last" and ended:  # as retention does
                with store.database.transaction() as con:
                    con.execute("DELETE FROM rollouts WHERE rollout_id = ?", [ended.pop()])
        everything = store.claim(worker="w", limit=99, run_id="run")
        assert [r.rollout_id for r in everything] == queued


def test_a_lease_reads_only_the_end_of_a_long_history(tmp_path: Path) -> None:
    path = tmp_path / "s.duckdb"
    FileStore(path).close()
    with duckdb.connect(str(path)) as plain:
        plain.execute(
            "INSERT INTO rollouts BY NAME SELECT i AS seq, 'old-' || i AS rollout_id, 'run' AS run_id,"
            " 'train' AS split, 0 AS attempt, 1 AS max_attempts, 'succeeded' AS status, 1 AS enqueued_ns,"
            " false AS is_recorded FROM range(20000) AS t(i)"
        )
    with FileStore(path) as store:
        store.enqueue([Rollout("new", run_id="run")])
        assert store.claim(worker="w", run_id="run", limit=0) == []
        assert [r.rollout_id for r in store.claim(worker="w", run_id="run")] == ["new"]
        assert store._floors == {("run", None): 20_000}
        store.finish("new", 0)
        store.requeue(["old-7"])
        assert [r.rollout_id for r in store.claim(worker="w", run_id="run")] == ["old-7"]
