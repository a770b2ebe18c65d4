"""How far rollouts run ahead, by hand and in whatever order they begin and end."""

from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spangrad.trainer.rollouts.admission import Group, Pace

S = 10**9


@pytest.mark.parametrize(
    ("staleness", "update_index", "refills", "admitted", "learned", "room"),
    [
        (0, 0, 0, 0, 0, 2),  # one set
        (0, 0, 0, 2, 0, 0),  # not the next one before it is learned, whoever has taken it
        (0, 0, 1, 2, 0, 2),  # another one for the same update
        (0, 1, 0, 4, 4, 2),
        (1, 0, 0, 0, 0, 4),
        (1, 0, 1, 4, 0, 2),
        (1, 1, 0, 4, 2, 2),
        (1, 2, 0, 6, 4, 0),  # the last update: nothing would take a next set
        (1, 3, 0, 6, 6, 0),
        (3, 0, 0, 0, 0, 6),
        (1, 1, 0, 9, 2, 0),  # more than there may be, after a restart
    ],
)
def test_so_many_groups_may_be_out(staleness, update_index, refills, admitted, learned, room):
    pace = Pace(groups_per_update=2, max_staleness=staleness, updates=3)
    given = {"admitted": admitted, "learned": learned, "update_index": update_index, "refills": refills}
    assert pace.room(**given) == room


def ids(groups: list[Group] | None) -> list[str] | None:
    return None if groups is None else [group.group_id for group in groups]


@pytest.mark.parametrize(
    ("version", "groups", "taken"),
    [
        (5, [Group("a", 0, 5), Group("b", 1, 5)], None),
        (5, [Group("a", 0, 5), Group("b", 1, 5), Group("c", 0, 5), Group("d", 0, 5)], ["a", "c"]),
        (5, [Group("a", 0, 5), Group("b", 0, 5), Group("c", 0, 4)], ["a", "c"]),  # c can't wait
        (5, [Group("a", 0, 5), Group("b", 0, 5), Group("c", 1, 4)], None),
        (5, [Group("a", 0, 4), Group("b", 0, 4), Group("c", 0, 3)], ["a", "b", "c"]),  # none can
        (5, [Group("a", 0, None), Group("b", 8, None), Group("c", 0, 5)], ["a", "c"]),  # all of a failed
    ],
)
def test_an_update_takes_what_would_be_too_old_and_then_what_was_admitted_first(version, groups, taken):
    assert ids(Pace(groups_per_update=2, max_staleness=1, updates=9).taken(groups, version)) == taken


@pytest.mark.parametrize(
    ("groups", "since_s", "late"),
    [
        ([Group("a", 0, 5, 10 * S), Group("b", 1, 5, 7 * S)], 0, "b"),
        ([Group("a", 0, 5, 10 * S), Group("b", 1, 5, 7 * S)], 11, None),  # the update waits since then
        ([Group("a", 0, 5, 10 * S), Group("b", 1, 5, 11 * S)], 0, None),  # a member of b has ended since
        ([Group("a", 0, 5, 10 * S), Group("b", 1, 5), Group("c", 1, 5, 11 * S)], 0, None),  # or c may end
        ([Group("a", 0, 5, 10 * S), Group("b", 1, 4), Group("c", 1, 5, 11 * S)], 0, "b"),  # c won't do
        ([Group("a", 0, 5, 10 * S), Group("b", 1, 4), Group("c", 1, 4)], 0, None),
        ([Group("b", 1, 4), Group("c", 1, 5)], 0, None),  # another one is missing, too
        ([Group("b", 1, 4), Group("c", 0, 5)], 0, None),  # nothing has ended by this clock
        ([Group("a", 0, 5, 10 * S), Group("b", 0, 5, 10 * S), Group("c", 1, 5)], 0, None),
    ],
)
def test_a_group_is_late_if_the_update_waits_for_it_alone_and_nothing_ends(groups, since_s, late):
    pace = Pace(groups_per_update=2, max_staleness=1, updates=9)
    found = pace.straggler(groups, 5, after_s=10.0, waiting_since_ns=since_s * S, now_ns=20 * S)
    assert (None if found is None else found.group_id) == late


@dataclass
class Run:
    """A run in which chance says what happens next."""

    pace: Pace
    size: int
    refills: list[int]
    """Further sets that each update takes."""
    rng: Random
    version: int = 0
    learned: int = 0
    taken: list[list[int]] = field(default_factory=list)
    """Groups of each update."""
    stalest: int = 0
    began: dict[int, list[int]] = field(default_factory=dict)
    """Versions under which the members of each group began."""
    running: list[int] = field(default_factory=list)
    """Group of each member that runs."""
    ended: dict[int, int] = field(default_factory=dict)
    learning: list[int] | None = None
    collected: list[int] = field(default_factory=list)
    refill: int = 0

    def groups(self) -> list[Group]:
        gone = {g for update in [*self.taken, self.collected] for g in update}
        return [
            Group(str(g), self.size - self.ended[g], min(versions, default=None))
            for g, versions in self.began.items()
            if g not in gone
        ]

    def admit(self) -> None:
        room = self.pace.room(
            admitted=len(self.began),
            learned=self.learned,
            update_index=len(self.taken) - (self.learning is not None),
            refills=self.refill,
        )
        for group in range(len(self.began), len(self.began) + room):
            self.began[group], self.ended[group] = [], 0
        out = len(self.began) - self.learned
        assert out <= (self.pace.max_staleness + 1 + self.refill) * self.pace.groups_per_update

    def choices(self) -> list[str]:
        can = ["end"] if self.running else []
        can += ["begin"] if any(len(versions) < self.size for versions in self.began.values()) else []
        if self.learning is not None:
            can.append("publish")
        elif len(self.taken) < self.pace.updates and self.pace.taken(self.groups(), self.version) is not None:
            can.append("take")
        return can

    def happen(self, what: str) -> None:
        if what == "begin":  # the oldest that is claimable, as the queue hands them out
            group = next(g for g, versions in self.began.items() if len(versions) < self.size)
            self.began[group].append(self.version)
            self.running.append(group)
        elif what == "end":
            self.ended[self.running.pop(self.rng.randrange(len(self.running)))] += 1
        elif what == "take":
            chosen = self.pace.taken(self.groups(), self.version)
            assert chosen is not None and len(chosen) >= self.pace.groups_per_update
            names = [int(group.group_id) for group in chosen]
            self.collected += names
            self.stalest = max(self.stalest, *(self.version - min(self.began[name]) for name in names))
            if self.refill < self.refills[len(self.taken)]:
                self.refill += 1
            else:
                self.learning = self.collected
                self.taken.append(self.collected)
                self.collected = []
        else:
            assert self.learning is not None
            self.learned += len(self.learning)
            self.version += 1
            self.learning, self.refill = None, 0


@given(
    st.integers(0, 3),
    st.integers(1, 4),
    st.integers(1, 3),
    st.lists(st.sampled_from([0, 0, 0, 1, 2]), min_size=1, max_size=6),
    st.randoms(use_true_random=False),
)
def test_whatever_the_order_nothing_is_too_old_thrown_away_or_stuck(k, b, size, refills, rng):
    run = Run(Pace(groups_per_update=b, max_staleness=k, updates=len(refills)), size, refills, rng)
    run.admit()
    while can := run.choices():
        run.happen(rng.choice(can))
        run.admit()
    if k <= 1:
        assert [len(update) for update in run.taken] == [b * (1 + more) for more in refills]
    assert sorted(g for update in run.taken for g in update) == list(run.began)
    assert run.stalest <= k
    if k == 0:
        assert [g for update in run.taken for g in sorted(update)] == list(run.began)
