"""Looks at a run after each update: what monitors find is written down, told, and acted on.

    watch = Watch(store, config, tell=print)
    watch.check()  # after an update with all its metrics, and before the first of a process

Invariants:
* what is found follows from the store and the settings alone: a process that restarts finds the same, and
  looks again at the last update, whose check a crash may have cut off;
* an event is written once for an update and monitor, where a threshold is passed that was not passed one
  update before, or where that update was given up;
* it never changes rollouts, updates or weights itself: it is told how to go back, and a pause is an error of
  its own, when all is durable.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from spangrad.errors import PausedError
from spangrad.store.base import Store
from spangrad.store.records import PolicyDecision, RunEvent
from spangrad.trainer.config import TrainConfig
from spangrad.trainer.monitoring.acting import is_given_up, numbers_of, reason_of, why_not_back
from spangrad.trainer.monitoring.examples import example_of
from spangrad.trainer.monitoring.finding import Finding
from spangrad.trainer.monitoring.flattery import Spoken, flattery, spoken
from spangrad.trainer.monitoring.hacking import VERIFIED
from spangrad.trainer.monitoring.history import History, last_update, read_history
from spangrad.trainer.monitoring.monitor_config import OF_ROLLOUTS
from spangrad.trainer.monitoring.monitors import MONITORS, metrics_of
from spangrad.trainer.monitoring.outputs import outputs_of, rollouts_of, verified

logger = logging.getLogger(__name__)

_VERSION: Final = "SELECT policy_version FROM updates WHERE run_id = ? AND update_index = ?"


class Watch:
    """The monitors of one run."""

    def __init__(
        self,
        store: Store,
        config: TrainConfig,
        *,
        roll_back: Callable[[str, Mapping[str, float]], None],
        tell: Callable[[str], None] | None = None,
    ) -> None:
        """Nothing is read yet.

        Args:
            store: Where the run's updates and rollouts are.
            config: Of the run; `monitor` says what is looked at.
            roll_back: Goes back to the promoted version, for a reason and the numbers behind it.
            tell: Called with a line for each event; by default it is logged as a warning.
        """
        self._store, self._config = store, config
        self._run_id, self._monitor = config.run.id, config.monitor
        self._roll_back = roll_back
        self._tell = tell or (lambda line: logger.warning("%s", line))
        blind = () if config.stored is None else OF_ROLLOUTS
        seeing = [name for name in MONITORS if name not in blind]
        self._on = [name for name in seeing if self._monitor.threshold(name) is not None]
        self._idle_told = False
        self._spoken: dict[int, Spoken] = {}

    @property
    def may_roll_back(self) -> bool:
        """Whether an alarm may give the last version up."""
        return "rollback" in self._monitor.actions.values()

    def check(self) -> None:
        """Look at the last update, if there is one.

        Raises:
            PausedError: A monitor pauses the run.
        """
        last = last_update(self._store, self._run_id)
        if last is None:
            return
        history = self._history(last)
        self._tell_idle(history)
        decisions = self._store.decisions(self._run_id)
        is_anew = is_given_up(self._version(last - 1), decisions)
        found = {
            name: finding
            for name in self._on
            if (finding := self._onset(name, history, is_anew=is_anew)) is not None
        }
        if (finding := self._flattery(last, is_anew=is_anew)) is not None:
            found["flattery"] = finding
        events = [self._event(last, name, finding) for name, finding in found.items()]
        for event in events:
            if self._store.put_events([event]):
                self._tell(_line(event))
        self._act(last, events, decisions)

    def _history(self, last: int) -> History:
        monitor = self._monitor
        every = max(1, self._config.eval.every) if monitor.verifier is None else 1
        names = {metric for name in self._on for metric in metrics_of(name, monitor)} | {VERIFIED}
        depth = (monitor.window + 2) * every  # monitors look one update back, and once more for the onset
        history = read_history(self._store, self._run_id, last, names, first=monitor.min_history, depth=depth)
        return history if monitor.verifier is None else self._with_verified(history, monitor.verifier)

    def _with_verified(self, history: History, name: str) -> History:
        """With the held-out reward of the window's updates, which may come long after the update."""
        first = max(0, history.last - self._monitor.window - 1)
        found = verified(self._store, self._run_id, name, first, history.last)
        known = history.values.get(VERIFIED, {})
        for update, mean in found.items():
            if known.get(update) != mean:
                self._store.put_metrics(self._run_id, update, {VERIFIED: mean})
        return replace(history, values={**history.values, VERIFIED: {**known, **found}})

    def _onset(self, name: str, history: History, *, is_anew: bool) -> Finding | None:
        """What a monitor finds that it did not find one update earlier, or finds again after a rollback."""
        find = MONITORS[name].find
        finding = find(history, self._monitor)
        is_old = finding is not None and not is_anew and find(history.earlier(), self._monitor) is not None
        return None if is_old else finding

    def _flattery(self, last: int, *, is_anew: bool) -> Finding | None:
        """The same of phrases, for which outputs are read, once each."""
        threshold, judge = self._monitor.threshold("flattery"), self._monitor.judge
        if threshold is None or judge is None:
            return None
        window, least = self._monitor.window, self._monitor.min_history
        authors = self._config.rollout.reward_authors
        self._spoken = {
            update: self._spoken.get(update)
            or spoken(outputs_of(self._store, self._run_id, update, judge, authors))
            for update in range(max(0, last - window - 1), last + 1)
        }
        updates = list(self._spoken.values())
        finding = flattery(updates[-window - 1 :], threshold, least=least)
        if finding is None or is_anew:
            return finding
        return finding if flattery(updates[:-1], threshold, least=least) is None else None

    def _event(self, last: int, name: str, finding: Finding) -> RunEvent:
        threshold = self._monitor.threshold(name)
        assert threshold is not None  # a monitor that is off finds nothing
        example = example_of(
            name, lambda: rollouts_of(self._store, self._run_id, last), self._store, self._monitor
        )
        return RunEvent(
            run_id=self._run_id,
            update_index=last,
            monitor=name,
            value=finding.value,
            threshold=threshold,
            action=self._monitor.action(name),
            text=finding.text + example,
        )

    def _act(self, last: int, events: Sequence[RunEvent], decisions: Sequence[PolicyDecision]) -> None:
        """Go back first: a pause that comes with it, or in its place, is about what is served then."""
        after, version = self._monitor.continue_after, self._version(last)
        assert version is not None
        if after is not None and last <= after:
            return
        why = [_why(event) for event in events if event.action == "pause"]
        back = [event for event in events if event.action == "rollback"]
        if back and not is_given_up(version, decisions):
            obstacle = why_not_back(version, decisions, most=self._monitor.max_rollbacks)
            if obstacle is None:
                self._roll_back(reason_of(back), numbers_of(back))
            else:
                why.append(f"{'; '.join(map(_why, back))}; {obstacle}")
        if why and last + 1 < self._config.run.updates:
            raise PausedError(
                f"run {self._run_id!r} is paused after update {last}: {'; '.join(why)}. All that was trained"
                f" is kept. To go on, add `--set monitor.continue_after={last}` to the same command;"
                " `spangrad sql 'SELECT * FROM alarms'` lists what monitors saw"
            )

    def _version(self, update_index: int) -> int | None:
        """The version that an update made; None: there is no such update."""
        given = [self._run_id, update_index]
        rows = self._store.query(_VERSION, given)
        return int(rows[0]["policy_version"]) if rows else None

    def _tell_idle(self, history: History) -> None:
        """Say once which monitors see nothing, when what they need should have come."""
        if self._idle_told or history.last + 1 < max(self._monitor.min_history, self._config.eval.every):
            return
        self._idle_told = True
        lacking = {
            name: [metric for metric in metrics_of(name, self._monitor) if not history.values.get(metric)]
            for name in self._on
        }
        told = [f"{name} (no {', '.join(metrics)})" for name, metrics in lacking.items() if metrics]
        if told:
            self._tell(f"monitors that see nothing in this run: {', '.join(told)}")


def _why(event: RunEvent) -> str:
    return f"monitor {event.monitor}: {event.text}"


def _line(event: RunEvent) -> str:
    return (
        f"update {event.update_index}: monitor {event.monitor} ({event.action}): {event.text};"
        f" monitor.{event.monitor} is {event.threshold:g}"
    )
