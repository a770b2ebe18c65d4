"""Get a set of rollouts done: enqueue them, send Ray workers, wait for the last one.

Knows the queue and Ray. Knows nothing of credit, learning or publishing.

* Rollout ids are derived from run, update and place, so that enqueueing again after a
  crash adds nothing and what is finished is not run twice.
* The calls of all these rollouts, whatever they are for, are in the table `calls` afterwards.
* A rollout that a dead worker held becomes claimable when its lease runs out; until
  then `run_rollouts` waits for it.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray

from spangrad.adapters.accounts import account_rollouts
from spangrad.errors import RolloutError
from spangrad.store.base import Store
from spangrad.store.keys import Keys
from spangrad.store.records import Rollout, RolloutStatus
from spangrad.trainer.cluster import wait_for
from spangrad.trainer.config import TrainConfig
from spangrad.trainer.rollouts.agent_process import WorkerConfig
from spangrad.trainer.rollouts.worker import RolloutWorker, WorkerReport

logger = logging.getLogger(__name__)

ENDED = (RolloutStatus.SUCCEEDED, RolloutStatus.FAILED)


@dataclass(frozen=True, slots=True)
class RunKeys:
    """The keys that a run uses, one a role; None on a hub without keys."""

    agent: str | None = None
    evaluator: str | None = None
    trainer: str | None = None

    @classmethod
    def of(cls, keys: Keys) -> "RunKeys":
        """All three keys of a hub."""
        return cls(agent=keys.agent, evaluator=keys.evaluator, trainer=keys.trainer)


def update_rollouts(
    config: TrainConfig, update_index: int, refill: int, tasks: Sequence[dict[str, Any]]
) -> list[Rollout]:
    """The rollouts that an update learns from: `group_size` of each task."""
    stem = f"{config.run.id}-u{update_index:05d}" + (f"r{refill}" if refill else "")
    return [
        Rollout(
            rollout_id=f"{stem}-g{g:03d}-m{m:02d}",
            task_id=task["task_id"],
            group_id=f"{stem}-g{g:03d}",
            run_id=config.run.id,
            task=task,
            max_attempts=config.agent.max_attempts,
            split="train",
        )
        for g, task in enumerate(tasks)
        for m in range(config.rollout.group_size)
    ]


def worker_config(
    config: TrainConfig,
    keys: RunKeys,
    *,
    split: str,
    temperature: float,
    policy_version: int | None,
    reward: bool = True,
    check_version: bool = False,
) -> WorkerConfig:
    """What a rollout worker of this run needs."""
    return WorkerConfig(
        store=config.hub.url,
        evaluator_key=keys.evaluator,
        agent_key=keys.agent,
        gateway_url=config.serving.gateway_url,
        engine_url=config.serving.engine_url if check_version else None,
        model=config.serving.served_name,
        function=config.agent.function,
        reward=config.agent.reward if reward else None,
        base_dir=config.base_dir,
        run_id=config.run.id,
        split=split,
        concurrency=config.agent.concurrency,
        timeout_s=config.agent.timeout_s,
        temperature=temperature,
        log=str(config.folder / "agent.log"),
        policy_version=policy_version,
        env=config.agent.env,
        engine_wait_s=config.serving.engine_wait_s,
        reward_names=tuple(config.credit.reward_weights),
    )


def run_rollouts(
    store: Store,
    rollouts: Sequence[Rollout],
    worker: WorkerConfig,
    *,
    workers: int,
    before_round: Callable[[], None] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[list[Rollout], list[WorkerReport]]:
    """Enqueue rollouts and return them ended, with the workers' reports.

    `before_round` is called each time before workers start: it publishes the right weights if the engine
    serves others. A worker of a config with `check_version` comes back when it finds others.

    Raises:
        RolloutError: The agent can't be started.
        EngineError: The engine stayed away.
    """
    store.enqueue(rollouts)
    ids = [rollout.rollout_id for rollout in rollouts]
    reports: list[WorkerReport] = []
    told: set[tuple[str, int]] = set()
    while True:
        ended = store.rollouts(rollout_ids=ids)
        waiting = [rollout for rollout in ended if rollout.status not in ENDED]
        if on_progress is not None:
            on_progress(len(ended) - len(waiting), len(ids))
        if not waiting:
            account_rollouts(store, ids)
            return ended, reports
        if not any(_is_claimable(rollout) for rollout in waiting):
            held = {(rollout.rollout_id, rollout.attempt) for rollout in waiting}
            if not held <= told:
                logger.warning("%s", _held(waiting))
                told |= held
            time.sleep(0.2)
            continue
        if before_round is not None:
            before_round()
        done = _POOL.run(worker, workers)
        for text in sorted({one.other_names for one in done if one.other_names is not None}):
            logger.warning("%s", text)
        reports += done


class _Pool:
    """The rollout workers of this process; they keep their agents' processes from update to update."""

    def __init__(self) -> None:
        self._actors: list[Any] = []

    def run(self, worker: WorkerConfig, count: int) -> list[WorkerReport]:
        kind = ray.remote(RolloutWorker).options(num_cpus=0)
        while len(self._actors) < count:
            self._actors.append(kind.remote())
        configs = [replace(worker, log=f"{worker.log}.{n}" if n else worker.log) for n in range(count)]
        working = [
            actor.run.remote(config) for actor, config in zip(self._actors[:count], configs, strict=True)
        ]
        try:
            reports: list[WorkerReport] = wait_for(working)
        except ray.exceptions.RayActorError as error:
            self._actors.clear()
            raise RolloutError(f"a rollout worker died: {error}") from error
        return reports


_POOL = _Pool()


def _held(waiting: Sequence[Rollout]) -> str:
    """What there is to wait for, and for how long at most, while other workers hold all that is left."""
    workers = ", ".join(sorted({rollout.worker for rollout in waiting if rollout.worker}))
    until_ns = max(rollout.lease_until_ns or 0 for rollout in waiting)
    left_s = max(0.0, (until_ns - time.time_ns()) / 1e9)
    return (
        f"waiting for {len(waiting)} rollouts that another process began ({workers}): if it is gone, their"
        f" leases run out in at most {left_s:.0f} s and they are run again"
    )


def _is_claimable(rollout: Rollout) -> bool:
    if rollout.status is RolloutStatus.QUEUED:
        return True
    return rollout.lease_until_ns is not None and rollout.lease_until_ns < time.time_ns()
