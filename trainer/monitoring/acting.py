"""What follows from an alarm with the action `rollback`: whether the run can go back, and on what grounds.

Knows decisions, events and numbers. Does not know: stores, weights, metrics of updates.

Invariants:
* a version is given up once, whoever gave it up;
* between two promotions monitors go back `monitor.max_rollbacks` times; after that they pause.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from spangrad.store.records import Decision, PolicyDecision, RunEvent, promoted_version

_ALARM: Final = "monitor/"
"""A rollback whose numbers have a name like this is a monitor's."""


def reason_of(events: Iterable[RunEvent]) -> str:
    """Why a run goes back, without what texts of events quote: decisions are kept for good."""
    return "; ".join(
        f"monitor {event.monitor} in update {event.update_index}: {event.value:.3g},"
        f" monitor.{event.monitor} is {event.threshold:g}"
        for event in events
    )


def numbers_of(events: Iterable[RunEvent]) -> dict[str, float]:
    """The numbers behind a decision that follows from these events."""
    return {f"{_ALARM}{event.monitor}": event.value for event in events}


def is_given_up(version: int | None, decisions: Iterable[PolicyDecision]) -> bool:
    """Whether the run went back from a version, or from one that was made from it."""
    return version is not None and any(
        one.decision is Decision.ROLLED_BACK
        and one.to_version is not None
        and one.to_version < version <= one.policy_version
        for one in decisions
    )


def why_not_back(version: int, decisions: Sequence[PolicyDecision], *, most: int) -> str | None:
    """Why monitors can't go back from a version; None: they can.

    Args:
        version: That of the update with the alarm.
        decisions: About the run, in order.
        most: `monitor.max_rollbacks`.
    """
    promoted = promoted_version(decisions)
    if promoted is None or promoted >= version:
        return f"there is nothing to go back to: the promoted version is {promoted}"
    made = 0
    for one in decisions:
        if one.decision is Decision.PROMOTED:
            made = 0
        elif one.decision is Decision.ROLLED_BACK:
            made += any(name.startswith(_ALARM) for name in one.metrics)
    if made >= most:
        return f"{made} rollbacks by monitors since a version was promoted are monitor.max_rollbacks"
    return None
