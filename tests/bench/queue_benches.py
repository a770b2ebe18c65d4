"""How many rollouts a second the queue keeps the books of, and whether leases cost more as it grows.

Each rollout is enqueued, claimed, rewarded, ended and consumed; workers extend leases once an update.
"""

import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import duckdb

from spangrad.store.client import HubClient
from spangrad.store.file_store import FileStore
from spangrad.store.records import Ending, Reward, Rollout, Update
from tests.bench.capture_benches import cpu_s
from tests.bench.figures import Figure
from tests.bench.hub_load import hub

GROUPS, MEMBERS = 16, 8
"""Of an update."""
CLAIMED = 32
"""Rollouts that a worker claims and ends at a time."""
WORKERS = 4
RUN = "run"


def bench_queue(*, updates: int = 24, largest: int = 1_000_000) -> list[Figure]:
    """The books of `updates` updates through a hub, then leases on stores of more and more rollouts."""
    return [*_rate(updates), _growth(largest)]


def _rate(updates: int) -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        process, _ = hub(folder, "queue")
        with process:
            with HubClient(process.url) as trainer:
                _update(trainer, 0, _enqueue(trainer, 0), process.url)  # warms up
                used, started = cpu_s(process.process.pid), time.perf_counter()
                for index in range(1, updates + 1):
                    _update(trainer, index, _enqueue(trainer, index), process.url)
                seconds = time.perf_counter() - started
            used = cpu_s(process.process.pid) - used
            process.terminate()
    count = updates * GROUPS * MEMBERS
    note = f"{WORKERS} workers"
    return [
        Figure("rollouts whose books are kept", count / seconds, "/s", at_least=500, note=note),
        Figure("books of a rollout, CPU of the hub", used / count * 1e3, "ms"),
    ]


def _enqueue(trainer: HubClient, index: int) -> list[str]:
    rollouts = [
        Rollout(f"{index}-{g}-{m}", f"task-{g}", f"{index}-{g}", RUN, task={"question": f"{index} + {g}"})
        for g in range(GROUPS)
        for m in range(MEMBERS)
    ]
    trainer.enqueue(rollouts)
    return [rollout.rollout_id for rollout in rollouts]


def _update(trainer: HubClient, index: int, rollout_ids: list[str], url: str) -> None:
    """Everything that happens to the rollouts of an update."""
    threads = [threading.Thread(target=_work, args=(url, f"worker-{n}")) for n in range(WORKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    trainer.commit_update(Update(RUN, index, index + 1, rollout_ids, [], {"reward/mean": 0.5}, ""))


def _work(url: str, name: str) -> None:
    with HubClient(url) as store:
        store.heartbeat([(f"0-{g}-0", 0) for g in range(GROUPS)], worker=name)
        while claimed := store.claim(worker=name, limit=CLAIMED, run_id=RUN, split="train"):
            store.put_rewards([Reward(one.rollout_id, 1.0, attempt=one.attempt) for one in claimed])
            store.finish_many([Ending(one.rollout_id, one.attempt, output=1) for one in claimed])


def _growth(largest: int) -> Figure:
    """A claim on a store of so many ended rollouts, against one on a store of a thousand."""
    sizes = [1_000, largest]
    with tempfile.TemporaryDirectory() as folder:
        stores = [_large(Path(folder, f"{size}.duckdb"), size) for size in sizes]
        leases = [_leases(store) for store in stores]
        spent = [min(statistics.median(lease() for _ in range(10)) for _ in range(5)) for lease in leases]
        for store in stores:
            store.close()
    return Figure(
        f"a lease with {largest:,} stored rollouts, of one with {sizes[0]:,}",
        spent[1] / spent[0],
        "of it",
        at_most=1.2,
        note=f"{spent[0] * 1e3:.1f} and {spent[1] * 1e3:.1f} ms CPU for {MEMBERS} rollouts",
    )


def _large(path: Path, count: int) -> FileStore:
    FileStore(path).close()
    with duckdb.connect(str(path)) as plain:
        plain.execute(
            "INSERT INTO rollouts BY NAME SELECT i AS seq, 'old-' || i AS rollout_id,"
            " 'task-' || i % 997 AS task_id,"
            " 'g-' || i // 8 AS group_id, 'run' AS run_id, 'train' AS split, 0 AS attempt, 3 AS max_attempts,"
            " CASE WHEN i % 50 = 7 THEN 'failed' ELSE 'succeeded' END AS status, 1 AS enqueued_ns,"
            " 2 AS ended_ns, false AS is_recorded, 'run' AS consumed_run, i // 128 AS consumed_by"
            " FROM range(?) AS t(i)",
            [count],
        )
    store = FileStore(path)
    store.enqueue([Rollout(f"new-{i}", "task", f"new-{i // MEMBERS}", RUN) for i in range(MEMBERS * 100)])
    return store


def _leases(store: FileStore) -> Callable[[], float]:
    def lease() -> float:
        used = time.process_time()
        claimed = store.claim(worker="worker", limit=MEMBERS, run_id=RUN, split="train")
        used = time.process_time() - used
        assert len(claimed) == MEMBERS, "the queue has run out"
        return used

    return lease
