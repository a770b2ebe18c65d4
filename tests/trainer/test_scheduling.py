"""Getting a set of rollouts done, where they have ended already: neither Ray nor an agent is needed."""

from dataclasses import replace
from pathlib import Path

from tests.command_line import recorded
from tests.trainer.idle_worker import IDLE

from spangrad.adapters.calls import calls_of
from spangrad.store.file_store import FileStore
from spangrad.store.records import Rollout, RolloutStatus
from spangrad.trainer.cluster import idle_workers, stop_ray
from spangrad.trainer.rollouts.scheduling import run_rollouts


def test_calls_of_every_rollout_that_was_asked_for_are_in_the_table(tmp_path: Path) -> None:
    rollouts = [Rollout(split, split=split, max_attempts=1) for split in ("train", "eval-before", "expert")]
    worker = replace(IDLE, base_dir=str(tmp_path), run_id="a")
    with FileStore(tmp_path / "s.duckdb") as store:
        store.enqueue(rollouts)
        for number, rollout in enumerate(store.claim(worker="w", limit=3), start=1):
            store.put_otlp(recorded(rollout.rollout_id, number))
            failed = rollout.split == "train"
            store.finish(
                rollout.rollout_id, 0, status=RolloutStatus.FAILED if failed else RolloutStatus.SUCCEEDED
            )
        ended, _ = run_rollouts(store, rollouts, worker, workers=1)
        assert len(ended) == 3
        rows = store.query("SELECT call_id FROM calls")
        assert {row["call_id"] for row in rows} == {call.call_id for call in calls_of(store)}
        assert len(rows) == 3


def test_idle_workers_end_with_their_cluster() -> None:
    """The next stage of a recipe has a cluster of its own, in which nobody knows them."""
    idle_workers().append("an actor")
    stop_ray()
    assert idle_workers() == []
