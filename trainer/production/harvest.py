"""What the updates of a run take of live sessions, in the place of the feeder, which has rollouts made.

    while harvest.wait(is_asked_to_stop):
        taken = harvest.take()
        ...  # learn, publish
        harvest.advance(update_index=1, policy_version=1)

Knows the store. Does not know: agents, gateways, learners. What it knows is in the store: a restart goes on
from there.

Invariants:
* no session is given twice before the update that it was given for is made; one that was made consumes it;
* it only reads.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from spangrad.adapters.model_call import Grade
from spangrad.credit.pipeline import ended_with_calls, trajectories_of
from spangrad.store.base import Store
from spangrad.tracer.periodically import Periodically
from spangrad.trainer.config import TrainConfig
from spangrad.trainer.learning.objectives import OBJECTIVES
from spangrad.trainer.production.eligibility import Moment, Rules, held_out, ready, states
from spangrad.trainer.production.production_config import ProductionConfig
from spangrad.trainer.rollouts.source import Taken
from spangrad.trainer.update_metrics import Metrics

LOOK_S: Final = 2.0
"""How often the store is asked."""


def rules_of(config: TrainConfig, production: ProductionConfig) -> Rules:
    """What the updates of a run take, by its settings."""
    return Rules(
        idle_s=production.idle_s,
        reward_wait_s=production.reward_wait_s,
        held_out=production.held_out,
        min_grade=Grade(OBJECTIVES[config.learner.objective].min_grade),
        max_staleness=config.rollout.max_staleness,
        authors=config.rollout.reward_authors,
        names=tuple(config.credit.reward_weights),
    )


class Harvest:
    """Sessions that have ended and have a reward, for one update after the other."""

    def __init__(
        self,
        store: Store,
        config: TrainConfig,
        production: ProductionConfig,
        *,
        before_look: Callable[[], None],
        on_note: Callable[[str], None],
    ) -> None:
        """Nothing is asked before `wait`.

        Args:
            store: The hub, which reads the calls of live traces.
            config: Of the run.
            production: Its section `[production]`.
            before_look: Called before the store is asked: publishes the right weights if the engine serves
                others.
            on_note: Called with a line that says what waits for what.
        """
        self._store = store
        self._config = config
        self._rules = rules_of(config, production)
        self._count = production.rollouts_per_update
        self._before_look = before_look
        self._on_note = on_note
        self._version = 0
        self._spoken_for: set[str] = set()
        """What was given since the last update was made."""
        self._found: list[str] = []
        """What the next update takes."""
        self._waited_s = 0.0
        self._said = Periodically()

    @contextmanager
    def started(self, *, update_index: int, policy_version: int) -> Iterator["Harvest"]:
        """Look for sessions of this version, and behind it, for as long as the block lasts."""
        self.advance(update_index=update_index, policy_version=policy_version)
        yield self

    @property
    def has_others(self) -> bool:
        """Yes: agents go on."""
        return True

    def ended(self) -> None:
        """Never: agents go on."""

    def wait(self, is_asked_to_stop: Callable[[], bool]) -> bool:
        """Wait until there are sessions for an update; False: somebody asked to stop before."""
        began = time.monotonic()
        while not is_asked_to_stop():
            self._before_look()
            self._found = ready(self._store, self._rules, self._now(), most=self._count)
            if len(self._found) == self._count:
                self._waited_s = time.monotonic() - began
                return True
            if self._said.due():
                self._on_note(self.told())
            time.sleep(LOOK_S)
        return False

    def take(self, *, is_more: bool = False) -> Taken:
        """The sessions that were waited for, in the order in which they ended."""
        ids, self._found = self._found, []
        self._spoken_for.update(ids)
        by_id = {rollout.rollout_id: rollout for rollout in self._store.rollouts(rollout_ids=ids)}
        rollouts = [by_id[name] for name in ids if name in by_id]
        return Taken(rollouts)

    def advance(self, *, update_index: int, policy_version: int) -> None:
        """What was given is consumed, or may be given again; these weights are served."""
        self._spoken_for.clear()
        self._version = policy_version

    def waiting(self) -> Mapping[str, int]:
        """How many sessions are in each state of `eligibility.py`; those that were given are in none."""
        return states(self._store, self._rules, self._now())

    def told(self) -> str:
        """One line that says what waits for what."""
        found = self.waiting()
        return (
            f"{found['ready']} sessions are ready of {self._count} that an update takes; waiting:"
            f" {found['unended']} have not ended, {found['unrewarded']} have no reward;"
            f" left out: {found['failed']} failed, {found['no_grade']} by their grade,"
            f" {found['too_old']} too old, {found['trained']} trained in another session;"
            f" {found['held_out']} held out"
        )

    def meanwhile(self, taken: Taken) -> Metrics:
        """What waits for what, and how good the held-out sessions are on average."""
        found: Metrics = {f"production/{state}": float(n) for state, n in self.waiting().items()}
        values = self._held_out_values()
        if values:
            found["eval/held_out_reward"] = sum(values) / len(values)
        return found | {
            "eval/held_out_sessions": float(len(values)),
            "production/wait_s": self._waited_s,
        }

    def _held_out_values(self) -> list[float]:
        ids = held_out(self._store, self._rules, self._now())
        ended, calls = ended_with_calls(self._store, self._store.rollouts(rollout_ids=ids) if ids else [], [])
        trajectories = trajectories_of(
            self._store,
            ended,
            calls,
            None,
            authors=self._config.rollout.reward_authors,
            reward_weights=self._config.credit.reward_weights,
        )
        return [one.total_reward for one in trajectories if one.total_reward is not None]

    def _now(self) -> Moment:
        return Moment(self._version, time.time_ns(), frozenset(self._spoken_for))
