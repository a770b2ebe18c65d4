"""Where rollouts of updates come from, as the loop sees it: made for it, of live agents, or of the store.

while source.wait(is_asked_to_stop):
    taken = source.take()
    ...                    # learn, publish
    source.advance(update_index=1, policy_version=1)
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from spangrad.store.records import Rollout
from spangrad.trainer.update_metrics import Metrics


@dataclass(frozen=True, slots=True)
class Taken:
    """What an update got at once."""

    rollouts: list[Rollout]
    """Ended; all members of their groups, in the order of their admission."""
    cut: int = 0
    """Members that were given up because the update waited for their group alone."""
    outstanding: int = 0
    """Groups that are admitted and that no update has taken."""
    waited_s: float = 0.0
    running: float = 0.0
    """Mean number of rollouts that ran at a time since the update before took its own."""


class Source(Protocol):
    """A `Feeder`, a `Harvest`, or a `Deck`."""

    @property
    def has_others(self) -> bool:
        """Whether what comes next can be learned from, if nothing of what was taken can."""
        ...

    def ended(self) -> str | None:
        """Why there is nothing more to take; None: there is."""
        ...

    def wait(self, is_asked_to_stop: Callable[[], bool]) -> bool:
        """Wait until `take` may be asked; False: somebody asked to stop before."""
        ...

    def take(self, *, is_more: bool = False) -> Taken:
        """What an update takes; with `is_more` further rollouts of the same update."""
        ...

    def meanwhile(self, taken: Taken) -> Metrics:
        """What else there is, when an update takes its own."""
        ...

    def advance(self, *, update_index: int, policy_version: int) -> None:
        """What was taken is learned, and this version is served; said again, it changes nothing."""
        ...
