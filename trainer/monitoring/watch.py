"""Looks at a run after each update: what monitors find is written down, told, and acted on.

    watch = Watch(store, config, tell=print)
    watch.check()  # after an update with all its metrics, and before the first of a process

Invariants:
* what is found follows from the store and the settings alone: a process that restarts finds the same, and
  looks again at the last update, whose check a crash may have cut off;
* an event is written once for an update and monitor, where a threshold is passed that was not passed one
  update before;
* it never changes rollouts, updates or weights: a pause is an error of its own, when all is durable.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from spangrad.errors import PausedError
from spangrad.store.base import Store
from spangrad.store.records import RunEvent
from spangrad.trainer.config import TrainConfig
from spangrad.trainer.monitoring.examples import example_of
from spangrad.trainer.monitoring.finding import Finding
from spangrad.trainer.monitoring.flattery import Spoken, flattery, spoken
from spangrad.trainer.monitoring.hacking import VERIFIED
from spangrad.trainer.monitoring.history import History, last_update, read_history
from spangrad.trainer.monitoring.monitors import MONITORS, metrics_of
from spangrad.trainer.monitoring.outputs import outputs_of, rollouts_of, verified

logger = logging.getLogger(__name__)


class Watch:
    """The monitors of one run."""

    def __init__(
        self, store: Store, config: TrainConfig, *, tell: Callable[[str], None] | None = None
    ) -> None:
        """Nothing is read yet.

        Args:
            store: Where the run's updates and rollouts are.
            config: Of the run; `monitor` says what is looked at.
            tell: Called with a line for each event; by default it is logged as a warning.
        """
        self._store, self._config = store, config
        self._run_id, self._monitor = config.run.id, config.monitor
        self._tell = tell or (lambda line: logger.warning("%s", line))
        self._on = [name for name in MONITORS if self._monitor.threshold(name) is not None]
        self._idle_told = False
        self._spoken: dict[int, Spoken] = {}

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
        found = {name: finding for name in self._on if (finding := self._onset(name, history)) is not None}
        if (finding := self._flattery(last)) is not None:
            found["flattery"] = finding
        events = [self._event(last, name, finding) for name, finding in found.items()]
        for event in events:
            if self._store.put_events([event]):
                self._tell(_line(event))
        self._pause(last, [event for event in events if event.action == "pause"])

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

    def _onset(self, name: str, history: History) -> Finding | None:
        """What a monitor finds that it did not find one update earlier."""
        find = MONITORS[name].find
        finding = find(history, self._monitor)
        is_old = finding is not None and find(history.earlier(), self._monitor) is not None
        return None if is_old else finding

    def _flattery(self, last: int) -> Finding | None:
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
        is_old = finding is not None and flattery(updates[:-1], threshold, least=least) is not None
        return None if is_old else finding

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

    def _pause(self, last: int, events: Sequence[RunEvent]) -> None:
        after = self._monitor.continue_after
        has_ended = last + 1 >= self._config.run.updates
        if not events or has_ended or (after is not None and last <= after):
            return
        why = "; ".join(f"monitor {event.monitor}: {event.text}" for event in events)
        raise PausedError(
            f"run {self._run_id!r} is paused after update {last}: {why}. All that was trained is kept. To go"
            f" on, add `--set monitor.continue_after={last}` to the same command;"
            " `spangrad sql 'SELECT * FROM alarms'` lists what monitors saw"
        )

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


def _line(event: RunEvent) -> str:
    return (
        f"update {event.update_index}: monitor {event.monitor} ({event.action}): {event.text};"
        f" monitor.{event.monitor} is {event.threshold:g}"
    )
