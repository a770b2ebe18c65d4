"""A verifier over stored rollouts: rewards for those that it has given none yet.

Knows the order of things: who is due, run, store, count. `verifier_pool.py` knows processes.

Invariants:
* only rollouts that succeeded are judged, their current attempt, as a trainer would;
* without `again`, one is left alone that has a reward of this name by this author, or rewards that this
  verifier named itself;
* the rewards of a rollout are stored together, soon after they were given; what was stored stays when the
  process is interrupted or killed, and the same command goes on from there;
* no opinion and no answer are no reward, not 0; they are counted, failures with their first error.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Final

from spangrad.adapters.scoring.stored_rollout import stored_rollouts
from spangrad.adapters.scoring.verifier_pool import Outcome, Verdict, check, verdicts
from spangrad.store.base import Store
from spangrad.store.records import Reward, RewardAuthor, Rollout, RolloutStatus

LOOKED_UP_AT_ONCE: Final = 1000
WRITTEN_AT_ONCE: Final = 100
WRITTEN_EVERY_S: Final = 0.5

Progress = Callable[[int, int], None]
"""Called with (rollouts done, rollouts in all)."""


@dataclass(frozen=True, slots=True)
class Verification:
    """What is asked of a verifier."""

    spec: str
    """`path/to/file.py:name` or `package.module:name`."""
    base_dir: str = "."
    """What a path is relative to."""
    name: str = "reward"
    """Of a reward that comes without one."""
    again: bool = False
    """Judge also what has been judged."""
    workers: int = 1
    """How many processes."""
    timeout_s: float = 60.0
    """For one rollout."""

    @property
    def mark(self) -> str:
        """How rewards that the function named itself say where they are from: their names are not known
        before it is asked."""
        return f"given and named by {self.spec}"

    def explanation(self, values: Mapping[str, float]) -> str:
        """What the rewards of one rollout say of where they are from."""
        return f"given by {self.spec}" if set(values) == {self.name} else self.mark


@dataclass(slots=True)
class VerificationReport:
    """What became of the rollouts."""

    rollouts: int = 0
    not_succeeded: int = 0
    """Left out: waiting, running or failed."""
    already_scored: int = 0
    """Left alone: this author has given them a reward of this name, or with this verifier."""
    by_outcome: Counter[str] = field(default_factory=Counter)
    first_errors: dict[str, str] = field(default_factory=dict)
    """The first error of each kind, with its rollout."""
    new_rewards: int = 0
    """Rewards that the store did not have."""
    rewards: Counter[str] = field(default_factory=Counter)
    """Rewards that were given, by name."""
    sums: dict[str, float] = field(default_factory=dict)
    """Their sums."""

    @property
    def failures(self) -> int:
        """Rollouts that the verifier raised on, hung on or ended its process on."""
        return sum(self.by_outcome[one] for one in (Outcome.RAISED, Outcome.TIMED_OUT, Outcome.DIED))

    def to_json(self) -> dict[str, Any]:
        """The report as a JSON object; means instead of sums."""
        return {
            "rollouts": self.rollouts,
            "not_succeeded": self.not_succeeded,
            "already_scored": self.already_scored,
            "by_outcome": {str(outcome): count for outcome, count in self.by_outcome.items()},
            "first_errors": dict(self.first_errors),
            "new_rewards": self.new_rewards,
            "rewards": dict(self.rewards),
            "means": {name: self.sums[name] / count for name, count in self.rewards.items()},
        }


def verify(
    store: Store,
    rollouts: Sequence[Rollout],
    asked: Verification,
    report: VerificationReport,
    *,
    progress: Progress | None = None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> None:
    """Judge rollouts and store their rewards; `report` counts as it goes, also of what is interrupted.

    Ends between two verdicts when `is_stopped` says so.

    Raises:
        ConfigError: The verifier can't be loaded.
        PermissionDeniedError: The key may give no rewards.
        StoreError: The store refused; what was put before is stored.
    """
    author = store.reward_author()
    report.rollouts += len(rollouts)
    ended = [rollout for rollout in rollouts if rollout.status is RolloutStatus.SUCCEEDED]
    report.not_succeeded += len(rollouts) - len(ended)
    due = ended if asked.again else list(_unscored(store, ended, asked, author))
    report.already_scored += len(ended) - len(due)
    if is_stopped():
        return
    if not due:
        check(asked.spec, base_dir=asked.base_dir, name=asked.name)
        return
    given = verdicts(
        stored_rollouts(store, due),
        asked.spec,
        base_dir=asked.base_dir,
        name=asked.name,
        workers=min(asked.workers, len(due)),
        timeout_s=asked.timeout_s,
        pause_s=WRITTEN_EVERY_S,
    )
    done = 0
    unwritten: list[Reward] = []
    written = time.monotonic()
    with closing(given):
        try:
            for verdict in given:
                if verdict is not None:
                    done += 1
                    _count(verdict, report)
                    unwritten += _rewards(verdict, asked)
                if len(unwritten) >= WRITTEN_AT_ONCE or time.monotonic() - written > WRITTEN_EVERY_S:
                    unwritten = _write(store, unwritten, report)
                    written = time.monotonic()
                if progress is not None:
                    progress(done, len(due))
                if is_stopped():
                    return
        finally:
            _write(store, unwritten, report)


def _unscored(
    store: Store, rollouts: Sequence[Rollout], asked: Verification, author: RewardAuthor
) -> Iterator[Rollout]:
    for start in range(0, len(rollouts), LOOKED_UP_AT_ONCE):
        chunk = rollouts[start : start + LOOKED_UP_AT_ONCE]
        scored = {
            (reward.rollout_id, reward.attempt)
            for reward in store.rewards([rollout.rollout_id for rollout in chunk])
            if reward.author == author
            and reward.call_id is None
            and (reward.name == asked.name or reward.explanation == asked.mark)
        }
        for rollout in chunk:
            if not {(rollout.rollout_id, rollout.attempt), (rollout.rollout_id, None)} & scored:
                yield rollout


def _count(verdict: Verdict, report: VerificationReport) -> None:
    report.by_outcome[verdict.outcome] += 1
    if verdict.error is not None:
        report.first_errors.setdefault(str(verdict.outcome), f"{verdict.rollout_id}: {verdict.error}")
    values: Mapping[str, float] = verdict.values or {}
    for name, value in values.items():
        report.rewards[name] += 1
        report.sums[name] = report.sums.get(name, 0.0) + value


def _rewards(verdict: Verdict, asked: Verification) -> list[Reward]:
    values = verdict.values or {}
    why = asked.explanation(values)
    return [
        Reward(verdict.rollout_id, value, name=name, explanation=why, attempt=verdict.attempt)
        for name, value in values.items()
    ]


def _write(store: Store, rewards: Sequence[Reward], report: VerificationReport) -> list[Reward]:
    """Store them in one transaction; gives back an empty list for those that come."""
    if rewards:
        report.new_rewards += store.put_rewards(rewards)
    return []
