"""Rollouts that end as a test says, in the place of workers: the store, the queue and the feeder are real."""

from collections.abc import Callable

from spangrad.store.file_store import FileStore
from spangrad.store.otlp import encode_request
from spangrad.store.records import Reward, RewardAuthor, Rollout, Span
from spangrad.trainer.rollouts.agent_process import WorkerConfig
from spangrad.trainer.rollouts.endings import WorkerReport

End = Callable[[Rollout], tuple[list[Span], float | None]]


def end_claimed(store: FileStore, rollout: Rollout, end: End) -> None:
    """Finish a claimed rollout with the spans and the reward that `end` gives it."""
    spans, reward = end(rollout)
    store.put_otlp(encode_request(spans))
    if reward is not None:
        given = Reward(rollout.rollout_id, reward, attempt=rollout.attempt)
        store.put_rewards([given], author=RewardAuthor.EVALUATOR)
    store.finish(rollout.rollout_id, rollout.attempt)


class ScriptedCrew:
    """Ends what is queued at once, in the order of the queue."""

    has_idle, is_working = True, False

    def __init__(self, store: FileStore, end: End) -> None:
        self._store = store
        self._end = end

    def send(self, worker: WorkerConfig) -> None:
        while claimed := self._store.claim(
            worker="w", run_id=worker.run_id, split=worker.split, policy_version=worker.policy_version
        ):
            end_claimed(self._store, claimed[0], self._end)

    def returned(self) -> list[WorkerReport]:
        return []

    def stop(self) -> None:
        pass
