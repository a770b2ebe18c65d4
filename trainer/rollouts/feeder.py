"""Keeps rollouts coming for the updates of a run, while the learner learns.

A thread beside the loop, which admits sets of tasks, sends workers when there is something to claim, and
looks which groups are complete. What it knows is in the store: after a crash it goes on from there.

    with feeder.started(update_index=0, policy_version=0):
        taken = feeder.take()  # waits
        ...                    # learn, publish
        feeder.advance(update_index=1, policy_version=1)

* How far rollouts run ahead, and what an update takes, is said in `admission.py`.
* A group is admitted whole, in one transaction; a restart counts the groups in the store and goes on behind
  them.
* What goes wrong in the thread is raised by the next `take`.
* Knows no Ray: whoever does the rollouts is a `Crew`. Knows nothing of credit, learning or publishing.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Protocol

from spangrad.adapters.accounts import account_rollouts
from spangrad.store.base import Store
from spangrad.store.records import Rollout
from spangrad.trainer.rollouts.admission import Group, Pace
from spangrad.trainer.rollouts.agent_process import WorkerConfig
from spangrad.trainer.rollouts.endings import WorkerReport
from spangrad.trainer.rollouts.scheduling import ENDED, say_held
from spangrad.trainer.rollouts.source import Taken
from spangrad.trainer.update_metrics import Metrics

logger = logging.getLogger(__name__)

STRAGGLER: Final = "StragglerError"
"""`error_type` of a rollout that was given up because an update waited for it."""
LOOK_S: Final = 0.2
"""How often the store is asked."""
STOP_S: Final = 2.0
"""How long to wait for the thread, which may be in the middle of a request."""

_LOOK: Final = """
    SELECT group_id,
      count(*) FILTER (WHERE status IN ('queued', 'running')) AS unfinished,
      count(*) FILTER (WHERE status = 'queued' OR (status = 'running' AND lease_until_ns < ?)) AS claimable,
      count(*) FILTER (WHERE status = 'running') AS running,
      min(coalesce(policy_version, -1)) FILTER (WHERE status IN ('running', 'succeeded')) AS oldest_version,
      max(ended_ns) AS last_end_ns
    FROM rollouts WHERE run_id = ? AND split = 'train' AND group_id IN (SELECT unnest(?::VARCHAR[]))
    GROUP BY group_id
"""


class Crew(Protocol):
    """Whoever does rollouts that are queued."""

    @property
    def has_idle(self) -> bool:
        """Whether any could be sent."""
        ...

    @property
    def is_working(self) -> bool:
        """Whether any has not come back."""
        ...

    def send(self, worker: WorkerConfig) -> None:
        """Send the idle ones to work until nothing is left to claim."""
        ...

    def returned(self) -> list[WorkerReport]:
        """Reports of those that came back."""
        ...

    def stop(self) -> None:
        """Dismiss all."""
        ...


class Feeder:
    """Rollouts of one run, asked for ahead of the learner."""

    def __init__(
        self,
        store: Store,
        run_id: str,
        pace: Pace,
        *,
        make_set: Callable[[int], Sequence[Sequence[Rollout]]],
        crew: Crew,
        worker: Callable[[], WorkerConfig],
        before_round: Callable[[], None],
        slots: int,
        straggler_s: float | None = None,
    ) -> None:
        """Nothing happens before `started`.

        Args:
            store: The hub.
            run_id: Whose rollouts.
            pace: How far they may run ahead.
            make_set: Gives the groups of a set of tasks, by its number and what the store knows: those that
                are there as they are, so that a restart asks for the same.
            crew: Does them.
            worker: How, now.
            before_round: Called before anybody is sent: publishes the right weights if the engine serves
                others.
            slots: How many rollouts can run at a time.
            straggler_s: See `rollout.straggler_s`.
        """
        self._store = store
        self._run_id = run_id
        self._pace = pace
        self._make_set = make_set
        self._crew = crew
        self._worker = worker
        self._before_round = before_round
        self._slots = slots
        self._straggler_s = straggler_s
        self._changed = threading.Condition()
        """Guards what follows."""
        self._out: dict[str, Group] = {}
        self._admitted = self._learned = self._taken = self._refills = 0
        self._update_index = self._version = 0
        self._waiting_since_ns: int | None = None
        self._failure: BaseException | None = None
        self._running_s = 0.0
        """Seconds that rollouts ran, added up over rollouts."""
        self._is_ending = False
        self._wake = threading.Event()
        # The thread's own.
        self._set: tuple[int, Sequence[Sequence[Rollout]]] | None = None
        self._told: set[tuple[str, int]] = set()
        self._looked = self._counted_since = time.monotonic()

    @contextmanager
    def started(self, *, update_index: int, policy_version: int) -> Iterator["Feeder"]:
        """Take up what is in the store, and go on for as long as the block lasts."""
        groups: dict[str, list[Rollout]] = {}
        for rollout in self._store.rollouts(run_id=self._run_id, split="train"):
            groups.setdefault(rollout.group_id or rollout.rollout_id, []).append(rollout)
        self._update_index, self._version = update_index, policy_version
        self._admitted = len(groups)
        left = [name for name, members in groups.items() if members[0].consumed_by is None]
        self._learned = self._admitted - len(left)
        self._out = {name: Group(name, unfinished=len(groups[name])) for name in left}
        thread = threading.Thread(target=self._run, daemon=True, name="feeder")
        thread.start()
        try:
            yield self
        finally:
            self._is_ending = True
            self._wake.set()
            thread.join(STOP_S)
            self._crew.stop()

    @property
    def has_others(self) -> bool:
        """No: refills have been tried."""
        return False

    def ended(self) -> None:
        """Never: tasks are drawn again."""

    def wait(self, is_asked_to_stop: Callable[[], bool]) -> bool:
        """Rollouts come by themselves: `take` waits for them."""
        return not is_asked_to_stop()

    def take(self, *, is_more: bool = False) -> Taken:
        """Wait for the groups that an update takes; with `is_more` for further ones of the same update.

        Raises:
            RolloutError: The agent can't be started.
            EngineError: The engine stayed away.
        """
        began = time.monotonic()
        with self._changed:
            self._refills = self._refills + 1 if is_more else 0
            self._waiting_since_ns = time.time_ns()
            self._wake.set()
            while (chosen := self._pace.taken(list(self._out.values()), self._version)) is None:
                if self._failure is not None:
                    raise self._failure
                self._changed.wait(1.0)
            self._waiting_since_ns = None
            names = [group.group_id for group in chosen]
            for name in names:
                del self._out[name]
            self._taken += len(names)
            outstanding, now = len(self._out), time.monotonic()
            running = self._running_s / max(now - self._counted_since, 1e-9)
            if not is_more:
                self._running_s, self._counted_since = 0.0, now
        rollouts = self._store.rollouts(run_id=self._run_id, group_ids=names, split="train")
        account_rollouts(self._store, [rollout.rollout_id for rollout in rollouts])
        cut = sum(rollout.error_type == STRAGGLER for rollout in rollouts)
        return Taken(rollouts, cut, outstanding, now - began, running)

    def meanwhile(self, taken: Taken) -> Metrics:
        """How far rollouts ran ahead, and how busy they kept their slots."""
        return {
            "rollout/outstanding": float(taken.outstanding),
            "rollout/busy_share": taken.running / self._slots,
        }

    def advance(self, *, update_index: int, policy_version: int) -> None:
        """What was taken is learned, and its weights are served: others may follow."""
        with self._changed:
            self._learned += self._taken
            self._taken = self._refills = 0
            self._update_index, self._version = update_index, policy_version
        self._wake.set()

    def _run(self) -> None:
        try:
            while not self._is_ending:
                self._wake.clear()
                self._admit()
                claimable = self._look()
                self._cut_straggler()
                self._send(claimable)
                self._wake.wait(LOOK_S)
        except BaseException as error:  # it is the loop's
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _admit(self) -> None:
        with self._changed:
            first = self._admitted
            room = self._pace.room(
                admitted=first,
                learned=self._learned,
                update_index=self._update_index,
                refills=self._refills,
            )
        groups = [self._group(number) for number in range(first, first + room)]
        if not groups:
            return
        self._store.enqueue([rollout for members in groups for rollout in members])
        with self._changed:
            self._admitted += len(groups)
            for members in groups:
                name = str(members[0].group_id)
                self._out[name] = Group(name, unfinished=len(members))

    def _group(self, number: int) -> Sequence[Rollout]:
        index, place = divmod(number, self._pace.groups_per_update)
        if self._set is None or self._set[0] != index:
            self._set = (index, self._make_set(index))
        return self._set[1][place]

    def _look(self) -> int:
        """Learn what has ended; returns how many rollouts can be claimed."""
        with self._changed:
            names = [name for name, group in self._out.items() if group.unfinished]
        rows = self._store.query(_LOOK, [time.time_ns(), self._run_id, names]) if names else []
        claimable, running = (sum(int(row[name]) for row in rows) for name in ("claimable", "running"))
        now = time.monotonic()
        with self._changed:
            self._running_s += running * (now - self._looked)
            for row in rows:
                self._out[row["group_id"]] = Group(
                    row["group_id"], row["unfinished"], row["oldest_version"], row["last_end_ns"]
                )
            self._changed.notify_all()
        self._looked = now
        if running and not claimable and not self._crew.is_working:
            found = self._store.rollouts(run_id=self._run_id, group_ids=names, split="train")
            say_held([rollout for rollout in found if rollout.status not in ENDED], self._told)
        return claimable

    def _cut_straggler(self) -> None:
        with self._changed:
            since_ns, groups, version = self._waiting_since_ns, list(self._out.values()), self._version
        if since_ns is None or self._straggler_s is None:
            return
        late = self._pace.straggler(
            groups, version, after_s=self._straggler_s, waiting_since_ns=since_ns, now_ns=time.time_ns()
        )
        if late is None:
            return
        found = self._store.rollouts(run_id=self._run_id, group_ids=[late.group_id], split="train")
        cut = self._store.give_up(
            [rollout.rollout_id for rollout in found if rollout.status not in ENDED],
            error_type=STRAGGLER,
            error=f"the update waited {self._straggler_s:g} s for this group alone (rollout.straggler_s)",
        )
        logger.warning(
            "update %d waited %g s for %s alone: %d of its %d rollouts are cut (rollout.straggler_s)",
            *(self._update_index, self._straggler_s, late.group_id, cut, len(found)),
        )

    def _send(self, claimable: int) -> None:
        for report in self._crew.returned():
            if report.first_error is not None:
                logger.warning("%s", report.first_error)
        if claimable and self._crew.has_idle and self._update_index < self._pace.updates:
            self._before_round()
            if not self._is_ending:
                self._crew.send(self._worker())
