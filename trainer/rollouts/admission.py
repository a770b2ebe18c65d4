"""How far rollouts may run ahead of the learner, and which of them an update takes.

With B = `rollout.groups_per_update` and k = `rollout.max_staleness`:

    admitted <= learned + (k + 1 + refills) B      learned: by updates whose weights are published
    update u waits for B complete groups, and for every begun one whose oldest version is u - k or older;
    it takes the latter, and then others in the order in which they were admitted until it has B

So no trained token is older than k, nothing is thrown away, and with k = 0 one set after the other is asked
for: the synchronous algorithm. With k = 0 and k = 1 an update has B groups: those that began under version
u - 1 or before were admitted when at most 2 B were out, and update u - 1 has taken B of them. With k above 1
it may have more: updates before it may have taken younger groups that were complete sooner, and then all that
can't wait are taken at once.

Pure. Knows no store, no clock, no workers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Group:
    """Rollouts of one task that were asked for and that no update has taken yet."""

    group_id: str
    unfinished: int
    """Members that have not ended."""
    oldest_version: int | None = None
    """Oldest policy version under which a member began that runs or succeeded; None: there is none."""
    last_end_ns: int | None = None
    """When a member last ended; None: none has."""


@dataclass(frozen=True, slots=True)
class Pace:
    """The rules of one run; groups are given in the order of their admission."""

    groups_per_update: int
    max_staleness: int
    updates: int
    """Updates that the run makes: nothing is asked for that none of them would take."""

    def room(self, *, admitted: int, learned: int, update_index: int, refills: int) -> int:
        """How many more groups may be admitted.

        Args:
            admitted: Groups that were admitted so far.
            learned: Those of them that updates took whose weights are published.
            update_index: The update that is collected for, or learned.
            refills: Further sets that it takes.
        """
        ahead = min(self.max_staleness + 1, self.updates - update_index) + refills
        return max(0, learned + ahead * self.groups_per_update - admitted)

    def taken(self, groups: Sequence[Group], version: int) -> list[Group] | None:
        """What an update of the weights `version` takes now, B groups or more; None: it has to wait."""
        due = {group.group_id for group in groups if self._is_due(group, version)}
        complete = [group for group in groups if not group.unfinished]
        if len(complete) < self.groups_per_update or any(g.unfinished for g in groups if g.group_id in due):
            return None
        free = self.groups_per_update - len(due)
        others = [group.group_id for group in complete if group.group_id not in due][: max(0, free)]
        return [group for group in complete if group.group_id in due or group.group_id in others]

    def straggler(
        self, groups: Sequence[Group], version: int, *, after_s: float, waiting_since_ns: int, now_ns: int
    ) -> Group | None:
        """The one group for which an update waits, if nothing else that it takes has ended for `after_s`.

        Nothing of the group itself either, nor did the update begin to wait later. Before anything has
        ended there is nothing to go on with, and nobody is late.
        """
        running = [group for group in groups if group.unfinished]
        awaited = [group for group in running if self._is_due(group, version)] or running
        if len(awaited) != 1 or self.taken(groups, version) is not None:
            return None
        (last,) = awaited
        wanted = self.taken([replace(g, unfinished=0) if g is last else g for g in groups], version)
        ends = [group.last_end_ns for group in wanted or () if group.last_end_ns is not None]
        if not ends or now_ns - max(waiting_since_ns, *ends) < after_s * 1e9:
            return None
        return last

    def _is_due(self, group: Group, version: int) -> bool:
        """Whether it would be too old for the next update."""
        return group.oldest_version is not None and group.oldest_version <= version - self.max_staleness
