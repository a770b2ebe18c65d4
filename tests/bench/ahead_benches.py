"""How busy rollouts that run ahead of the learner keep what they run on.

Hub, queue and feeder are real; agents sleep, for times whose logarithm has a standard deviation of 1, and the
learner sleeps too. The bound is what the slots can do: one rollout a slot at any time.
"""

import random
import tempfile
import threading
import time
from functools import partial

import numpy as np

from spangrad.store.client import HubClient
from spangrad.store.records import Rollout, Update
from spangrad.trainer.rollouts.admission import Pace
from spangrad.trainer.rollouts.agent_process import WorkerConfig
from spangrad.trainer.rollouts.endings import WorkerReport
from spangrad.trainer.rollouts.feeder import Feeder
from tests.bench.figures import Figure
from tests.bench.hub_load import hub
from tests.trainer.idle_worker import IDLE

GROUPS, MEMBERS = 8, 4
SLOTS = GROUPS * MEMBERS // 2
MEAN_S, LEARN_S = 2.0, 0.2
"""Mean time of a rollout; of an update with its publish."""


class Sleepers:
    """Agents, one a slot, that do nothing for a while."""

    def __init__(self, url: str, run_id: str, slots: int) -> None:
        self.version = 0
        self.slept: list[tuple[float, float]] = []
        """When rollouts began and ended, on the monotonic clock."""
        self._store = HubClient(url)
        self._run_id = run_id
        self._rng = random.Random(0)
        self._is_stopping = False
        self._slots = [threading.Thread() for _ in range(slots)]

    @property
    def has_idle(self) -> bool:
        """Whether a slot is free."""
        return any(not slot.is_alive() for slot in self._slots)

    @property
    def is_working(self) -> bool:
        """Whether any slot is not."""
        return any(slot.is_alive() for slot in self._slots)

    def send(self, worker: WorkerConfig) -> None:
        """Let the free slots claim until nothing is left."""
        for index, slot in enumerate(self._slots):
            if not slot.is_alive():
                self._slots[index] = threading.Thread(target=self._work, daemon=True)
                self._slots[index].start()

    def _work(self) -> None:
        claim = partial(self._store.claim, worker="sleeper", run_id=self._run_id, split="train")
        while not self._is_stopping and (claimed := claim(policy_version=self.version)):
            began, seconds = time.monotonic(), self._rng.lognormvariate(np.log(MEAN_S) - 0.5, 1.0)
            time.sleep(seconds)
            self.slept.append((began, began + seconds))
            self._store.finish(claimed[0].rollout_id, claimed[0].attempt)

    def returned(self) -> list[WorkerReport]:
        """Nothing to tell."""
        return []

    def stop(self) -> None:
        """Wait for those that sleep."""
        self._is_stopping = True
        for slot in self._slots:
            if slot.is_alive():
                slot.join()
        self._store.close()


def bench_ahead(*, updates: int = 24) -> list[Figure]:
    """Rollouts done a second, of what the slots can do, for several `rollout.max_staleness`."""
    with tempfile.TemporaryDirectory() as folder:
        process, _ = hub(folder, "ahead")
        with process:
            ahead = _busy(process.url, staleness=8, slots=SLOTS, updates=updates)
            default = _busy(process.url, staleness=1, slots=SLOTS, updates=updates // 2)
            waiting = _busy(process.url, staleness=0, slots=SLOTS, updates=updates // 4)
            alone = _busy(process.url, staleness=0, slots=GROUPS * MEMBERS, updates=updates // 4)
            process.terminate()
    times = np.random.default_rng(0).lognormal(-0.5, 1.0, (100_000, GROUPS * MEMBERS))
    longest = times.max(axis=1).mean()
    expected = MEAN_S / (MEAN_S * longest + LEARN_S)
    size = f"{GROUPS} groups of {MEMBERS}"
    return [
        Figure(
            f"rollouts/s, of what {SLOTS} slots can do, {size}: staleness 8",
            *(ahead, "", None, 0.9),
            note=f"1: {default:.2f}; 0: {waiting:.2f}",
        ),
        Figure(
            f"likewise, {GROUPS * MEMBERS} slots, staleness 0",
            *(alone, ""),
            note=f"mean time of that of the longest: {1 / longest:.2f}, with learning {expected:.2f}",
        ),
    ]


def _busy(url: str, *, staleness: int, slots: int, updates: int) -> float:
    """Share of the slots' time that rollouts took, while the run was in its stride."""
    run_id = f"ahead-{staleness}-{slots}"
    store = HubClient(url)
    crew = Sleepers(url, run_id, slots)
    feeder = Feeder(
        store,
        run_id,
        Pace(GROUPS, staleness, updates),
        make_set=partial(_set, run_id),
        crew=crew,
        worker=lambda: IDLE,
        before_round=lambda: None,
        slots=slots,
    )
    ends: list[float] = []
    with feeder.started(update_index=0, policy_version=0):
        for index in range(updates):
            ids = [rollout.rollout_id for rollout in feeder.take().rollouts]
            time.sleep(LEARN_S)
            store.commit_update(Update(run_id, index, index + 1, ids, [], {}, ""))
            crew.version = index + 1
            feeder.advance(update_index=index + 1, policy_version=index + 1)
            ends.append(time.monotonic())
    store.close()
    # Behind these updates slots empty, for nothing is asked for that none would learn.
    since, until = ends[0], ends[updates - staleness - 2]
    busy_s = sum(max(0.0, min(end, until) - max(began, since)) for began, end in crew.slept)
    return busy_s / (slots * (until - since))


def _set(run_id: str, index: int) -> list[list[Rollout]]:
    return [
        [Rollout(f"{run_id}-{index}-{g}-{m}", None, f"{run_id}-{index}-{g}", run_id) for m in range(MEMBERS)]
        for g in range(GROUPS)
    ]
