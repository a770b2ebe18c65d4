"""What a worker tells the store of rollouts that have ended: rewards, outcomes, and which are run again.

Knows the queue and the reward function. Knows no agent and no gateway.

* Rewards are stored before the endings: who sees a rollout ended sees its reward.
* A reward function that raises gives no reward, not 0; the rollout says why. Names of rewards that differ
  from those that count are told, once.
"""

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Final

from spangrad.store.base import Store
from spangrad.store.records import Ending, Reward, Rollout, RolloutStatus
from spangrad.trainer.rollouts.grading import other_names_told, rewards_given

logger = logging.getLogger(__name__)

REWARD_ERROR: Final = "RewardError"
"""`error_type` of a rollout that succeeded and whose reward could not be given."""


@dataclass(slots=True)
class WorkerReport:
    """What one worker did."""

    finished: int = 0
    failed_attempts: int = 0
    timed_out: int = 0
    lost_leases: int = 0
    reward_errors: int = 0
    engine_changed: bool = False
    """The engine serves no version, or an older one than when the worker was sent: it was restarted."""
    first_error: str | None = None
    """Text of the first failure or reward error, for the person who looks."""
    other_names: str | None = None
    """How names of the function's rewards differ from those that count; None: they don't, or it was said."""


class Endings:
    """Endings that the store was not told yet."""

    def __init__(
        self,
        store: Store,
        reward: Callable[..., Any] | None,
        report: WorkerReport,
        *,
        counted: Collection[str],
        told: set[str],
    ) -> None:
        """None yet.

        Args:
            store: Is told.
            reward: Grades a rollout; None: nothing is.
            report: Is kept up to date.
            counted: Names of rewards that count.
            told: What was said of other names, also before; it is said once.
        """
        self._store = store
        self._reward = reward
        self._report = report
        self._counted = counted
        self._told = told
        self._rewards: list[Reward] = []
        self._endings: list[Ending] = []

    def succeed(self, rollout: Rollout, output: Any) -> None:
        """Grade it."""
        rewards: list[Reward] = []
        failure: str | None = None
        if self._reward is not None:
            try:
                rewards = rewards_given(self._reward, rollout, output)
            except (Exception, SystemExit) as error:  # the reward is missing, not 0
                failure = f"{type(error).__name__}: {error}"
                self._report.reward_errors += 1
                self._remember(f"reward of {rollout.rollout_id}: {failure}")
        other_names = other_names_told(rewards, self._counted)
        if other_names is not None and other_names not in self._told:
            self._told.add(other_names)
            self._report.other_names = other_names
        self._rewards += rewards
        error_type = None if failure is None else REWARD_ERROR
        self._endings.append(
            Ending(rollout.rollout_id, rollout.attempt, output=output, error_type=error_type, error=failure)
        )

    def fail(self, rollout: Rollout, error_type: str, error: str, *, free: bool = False) -> None:
        """Have it run again while attempts are left; with `free` this one uses none up."""
        self._report.failed_attempts += 1
        self._remember(f"{rollout.rollout_id}: {error_type}: {error}")
        failed = RolloutStatus.FAILED
        self._endings.append(
            Ending(rollout.rollout_id, rollout.attempt, failed, None, error_type, error, True, free)
        )

    def hand_in(self) -> list[str]:
        """Tell the store. Returns the ids of all that it was told of."""
        if self._rewards:
            self._store.put_rewards(self._rewards)
        lost = self._store.finish_many(self._endings) if self._endings else []
        self._report.lost_leases += len(lost)
        self._report.finished += sum(
            not ending.retry and ending.rollout_id not in lost for ending in self._endings
        )
        told = [ending.rollout_id for ending in self._endings]
        self._rewards, self._endings = [], []
        return told

    def _remember(self, text: str) -> None:
        if self._report.first_error is None:
            self._report.first_error = text
            logger.warning("%s", text)
