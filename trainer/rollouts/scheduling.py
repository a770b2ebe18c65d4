"""Get rollouts done: enqueue them, send Ray workers, wait for the last one.

Knows the queue and Ray. Knows nothing of credit, learning or publishing.

* Rollout ids are derived from run, set and place, so that enqueueing again after a
  crash adds nothing and what is finished is not run twice.
* The calls of all these rollouts, whatever they are for, are in the table `calls` afterwards.
* A rollout that a dead worker held becomes claimable when its lease runs out; until
  then `run_rollouts` waits for it. A worker that died is replaced.
* Whoever asks for rollouts has workers of its own: evaluations wait for no training rollouts, nor these for
  them.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import ray

from spangrad.adapters.accounts import account_rollouts
from spangrad.errors import ClusterError, RolloutError
from spangrad.store.base import Store
from spangrad.store.keys import Keys
from spangrad.store.records import Rollout, RolloutStatus
from spangrad.trainer.cluster import idle_workers, wait_for, worker_options
from spangrad.trainer.config import TrainConfig
from spangrad.trainer.rollouts.agent_process import WorkerConfig
from spangrad.trainer.rollouts.endings import WorkerReport
from spangrad.trainer.rollouts.names import group_id, rollout_id
from spangrad.trainer.rollouts.worker import RolloutWorker

logger = logging.getLogger(__name__)

ENDED: Final = (RolloutStatus.SUCCEEDED, RolloutStatus.FAILED)
DEATHS_IN_A_ROW: Final = 5
"""So many workers may die before one has come back; then something is wrong with all of them."""
WAIT_S: Final = 1.0
"""How long to wait for a worker before the queue is looked at again."""


@dataclass(frozen=True, slots=True)
class RunKeys:
    """The keys that a run uses, one a role (it needs no admin's); None on a hub without keys."""

    agent: str | None = None
    evaluator: str | None = None
    trainer: str | None = None

    @classmethod
    def of(cls, keys: Keys) -> "RunKeys":
        """Those of a hub."""
        return cls(agent=keys.agent, evaluator=keys.evaluator, trainer=keys.trainer)


def set_rollouts(
    config: TrainConfig,
    set_index: int,
    tasks: Sequence[dict[str, Any]],
    *,
    turn_budget: int | None = None,
) -> list[Rollout]:
    """The rollouts of one set of tasks: `group_size` of each task, with so many turns."""
    return [
        Rollout(
            rollout_id=rollout_id(group, member),
            task_id=task["task_id"],
            group_id=group,
            run_id=config.run.id,
            task=task,
            max_attempts=config.agent.max_attempts,
            split="train",
            turn_budget=turn_budget,
        )
        for place, task in enumerate(tasks)
        for group in (group_id(config.run.id, set_index, place),)
        for member in range(config.rollout.group_size)
    ]


def worker_config(
    config: TrainConfig,
    keys: RunKeys,
    *,
    split: str,
    temperature: float,
    policy_version: int | None,
    reward: bool = True,
    engine_urls: Sequence[str] = (),
) -> WorkerConfig:
    """What a rollout worker of this run needs; while `engine_urls` serve older weights it claims nothing."""
    return WorkerConfig(
        store=config.hub.url,
        evaluator_key=keys.evaluator,
        agent_key=keys.agent,
        gateway_url=config.serving.gateway_url,
        engine_urls=tuple(engine_urls),
        model=config.serving.served_name,
        function=config.agent.function,
        command=config.agent.command,
        url=config.agent.url,
        headers=config.agent.headers,
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
        turns_reply=config.curriculum.turns_reply,
        transfer=config.serving.transfer,
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
    serves others. A worker of a config with `engine_urls` comes back when it finds older ones.

    Raises:
        RolloutError: The agent can't be started.
        EngineError: The engine stayed away.
    """
    store.enqueue(rollouts)
    ids = [rollout.rollout_id for rollout in rollouts]
    crew = Workers(workers)
    reports: list[WorkerReport] = []
    told: set[tuple[str, int]] = set()
    try:
        while True:
            ended = store.rollouts(rollout_ids=ids)
            waiting = [rollout for rollout in ended if rollout.status not in ENDED]
            if on_progress is not None:
                on_progress(len(ended) - len(waiting), len(ids))
            if not waiting and not crew.is_working:
                account_rollouts(store, ids)
                return ended, reports
            if crew.has_idle and any(is_claimable(rollout) for rollout in waiting):
                if before_round is not None:
                    before_round()
                crew.send(worker)
            elif not crew.is_working:
                say_held(waiting, told)
                time.sleep(0.2)
            reports += crew.returned(within_s=WAIT_S)
    finally:
        crew.stop()


class Workers:
    """Some rollout workers, Ray actors, that are idle or at work.

    They are started when they are first sent. Idle ones go on, with their agent's process, to whoever needs
    some next.
    """

    def __init__(self, count: int) -> None:
        """None is started yet."""
        self._idle = list(range(count))
        self._actors: dict[int, Any] = {}
        self._working: dict[Any, int] = {}
        self._deaths = 0

    @property
    def has_idle(self) -> bool:
        """Whether any could be sent."""
        return bool(self._idle)

    @property
    def is_working(self) -> bool:
        """Whether any has not come back."""
        return bool(self._working)

    def send(self, worker: WorkerConfig) -> None:
        """Send the idle ones to work until nothing is left to claim."""
        idle = idle_workers()
        while self._idle:
            place = self._idle.pop()
            if place not in self._actors:
                hired = ray.remote(RolloutWorker).options(**worker_options(place))
                self._actors[place] = idle.pop() if idle else hired.remote()
            log = f"{worker.log}.{place}" if place else worker.log
            self._working[self._actors[place].run.remote(replace(worker, log=log))] = place

    def returned(self, *, within_s: float = 0.0) -> list[WorkerReport]:
        """Reports of those that came back; waits for one.

        Raises:
            RolloutError: The agent can't be started, or one worker after the other dies.
            EngineError: The engine stayed away.
        """
        if not self._working:
            return []
        came, _ = ray.wait(list(self._working), timeout=within_s)
        return [report for reference in came if (report := self._report(reference)) is not None]

    def stop(self) -> None:
        """Dismiss all; those that don't come back in a moment are ended, with their agents."""
        if self._working:
            ray.wait(list(self._working), num_returns=len(self._working), timeout=WAIT_S)
        for reference, place in self._working.items():
            if not ray.wait([reference], timeout=0)[0]:
                ray.kill(self._actors.pop(place))
        idle_workers().extend(self._actors.values())
        self._actors.clear()
        self._working.clear()

    def _report(self, reference: Any) -> WorkerReport | None:
        place = self._working.pop(reference)
        self._idle.append(place)
        try:
            report: WorkerReport = wait_for(reference)
        except ClusterError as error:
            if not isinstance(error.__cause__, ray.exceptions.RayActorError):
                raise
            del self._actors[place]
            self._deaths += 1
            if self._deaths >= DEATHS_IN_A_ROW:
                raise RolloutError(
                    f"{self._deaths} rollout workers died one after the other: {error}"
                ) from error
            logger.warning(
                "a rollout worker died and is replaced; its rollouts run again when their leases run out: %s",
                error,
            )
            return None
        self._deaths = 0
        if report.other_names is not None and report.other_names not in _TOLD:
            _TOLD.add(report.other_names)
            logger.warning("%s", report.other_names)
        return report


_TOLD: set[str] = set()
"""What workers said of names of rewards, each of them once."""


def say_held(waiting: Sequence[Rollout], told: set[tuple[str, int]]) -> None:
    """Say once that other workers hold all that is left; `told` remembers."""
    held = {(rollout.rollout_id, rollout.attempt) for rollout in waiting}
    if not held <= told:
        logger.warning("%s", _held(waiting))
        told |= held


def _held(waiting: Sequence[Rollout]) -> str:
    """What there is to wait for, and for how long at most, while other workers hold all that is left."""
    workers = ", ".join(sorted({rollout.worker for rollout in waiting if rollout.worker}))
    until_ns = max(rollout.lease_until_ns or 0 for rollout in waiting)
    left_s = max(0.0, (until_ns - time.time_ns()) / 1e9)
    return (
        f"waiting for {len(waiting)} rollouts that another process began ({workers}): if it is gone, their"
        f" leases run out in at most {left_s:.0f} s and they are run again"
    )


def is_claimable(rollout: Rollout) -> bool:
    """Whether a worker that asks would get it."""
    if rollout.status is RolloutStatus.QUEUED:
        return True
    return rollout.lease_until_ns is not None and rollout.lease_until_ns < time.time_ns()
