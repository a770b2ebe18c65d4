"""Which rollouts go out: filters, the best of each task, repeats, and the side of the split.

Reads the store twice, some rollouts at a time: once to choose, once to write what was chosen. Knows calls,
rewards by what it is told, and tasks; knows no formats.

Invariants:
* the same store and filters choose the same rollouts in the same order, by task and rollout id;
* a task is on one side of the split, and stays there whatever the filters are and when the store grows;
* whatever is left out is counted with its reason.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from typing import Final, TypeVar

from spangrad.adapters.calls import calls_of
from spangrad.adapters.datasets.conversation import Exported, task_key
from spangrad.adapters.grading import at_least, reason_kind
from spangrad.adapters.model_call import Grade, ModelCall, Purpose
from spangrad.errors import ConfigError
from spangrad.store.base import Store
from spangrad.store.records import Rollout, RolloutStatus

ROLLOUTS_AT_ONCE: Final = 100
_HASH_BITS: Final = 64

Item = TypeVar("Item")
Outcomes = Callable[[Sequence[Rollout], Mapping[str, Sequence[ModelCall]]], Mapping[str, float | None]]
"""Rollouts and their calls -> rollout id -> reward; None where nobody gave one."""
Progress = Callable[[int, int], None]
"""Called with (rollouts done, rollouts in all)."""


@dataclass(frozen=True, slots=True)
class Filters:
    """What may go out."""

    min_grade: Grade = Grade.TEXT
    """Calls with a worse grade are left out."""
    min_reward: float | None = None
    """Rollouts with less, or with no reward, are left out."""
    policy: str | None = None
    """Only calls of this model."""
    per_task: int | None = None
    """Only so many rollouts of a task, those with the best reward."""
    drop_repeats: bool = True
    """Leave out a rollout whose conversations say what another one's of its task do."""
    heldout: float = 0.0
    """Share of the tasks that is kept apart; 0 to 1."""

    def __post_init__(self) -> None:
        """Check ranges."""
        if not 0.0 <= self.heldout < 1.0:
            raise ConfigError(f"the held-out share is {self.heldout!r}; expected 0 or more, below 1")
        if self.per_task is not None and self.per_task < 1:
            raise ConfigError(f"rollouts per task is {self.per_task!r}; expected 1 or more")
        if self.min_reward is not None and not math.isfinite(self.min_reward):
            raise ConfigError(f"the least reward is {self.min_reward!r}; expected a finite number")
        if self.min_grade is Grade.UNUSABLE:
            raise ConfigError("grade 'unusable' trains nothing; expected exact, ids or text")


@dataclass(frozen=True, slots=True)
class Chosen:
    """A rollout that may go out, and what choosing needs to know of it."""

    rollout: Rollout
    task_key: str
    reward: float | None
    fingerprint: str


@dataclass(slots=True)
class Refused:
    """What was left out, by reason."""

    rollouts: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    rows: Counter[str] = field(default_factory=Counter)
    """Of what a format can't tell, and of secrets."""

    def add(self, other: "Refused") -> None:
        """Count what was left out elsewhere, too."""
        self.rollouts += other.rollouts
        self.calls += other.calls
        self.rows += other.rows


@dataclass(slots=True)
class Selection:
    """What goes out, in order of task and rollout id."""

    chosen: Sequence[Chosen]
    refused: Refused
    seen: int = 0
    """Rollouts that were looked at."""
    tasks: Mapping[str, str] = field(default_factory=dict)
    """rollout id -> key of its task, of every rollout with a usable call, chosen or not."""

    def side(self, heldout: float, *, is_heldout: bool) -> list[Chosen]:
        """Those on one side of the split."""
        return [one for one in self.chosen if in_heldout(one.task_key, heldout) == is_heldout]


@dataclass(slots=True)
class Looked:
    """What was seen of some rollouts: enough to choose among them."""

    found: list[Chosen] = field(default_factory=list)
    """Those that may go out, as far as each says by itself."""
    refused: Refused = field(default_factory=Refused)
    tasks: dict[str, str] = field(default_factory=dict)
    """As `Selection.tasks`."""


def select(
    store: Store,
    rollouts: Sequence[Rollout],
    filters: Filters,
    outcomes: Outcomes,
    progress: Progress | None = None,
) -> Selection:
    """Choose among rollouts. Memory: the calls of `ROLLOUTS_AT_ONCE` of them."""
    parts = in_parts(rollouts, ROLLOUTS_AT_ONCE)
    looked = (look(store, part, filters, outcomes) for part in parts)
    return choose(looked, rollouts, filters, progress)


def look(store: Store, rollouts: Sequence[Rollout], filters: Filters, outcomes: Outcomes) -> Looked:
    """Read the calls of some rollouts."""
    looked = Looked()
    refused = looked.refused
    ended = [rollout for rollout in rollouts if _has_ended(rollout, refused)]
    calls = _calls_by_rollout(store, ended)
    rewards = outcomes(ended, calls)
    for rollout in ended:
        usable = usable_calls(calls[rollout.rollout_id], filters, refused)
        reward = rewards.get(rollout.rollout_id)
        if not usable:
            refused.rollouts["no usable call"] += 1
            continue
        key = task_key(rollout.task_id, rollout.group_id, _first(calls[rollout.rollout_id]))
        exported = _exported(rollout, usable, reward, key)
        looked.tasks[rollout.rollout_id] = exported.task_key
        if filters.min_reward is not None and (reward is None or reward < filters.min_reward):
            why = "no reward" if reward is None else f"reward below {filters.min_reward:g}"
            refused.rollouts[why] += 1
            continue
        looked.found.append(Chosen(rollout, exported.task_key, reward, exported.fingerprint))
    return looked


def choose(
    looked: Iterable[Looked], rollouts: Sequence[Rollout], filters: Filters, progress: Progress | None = None
) -> Selection:
    """Choose among rollouts, of which each `ROLLOUTS_AT_ONCE` were looked at together, in their order."""
    found: list[Chosen] = []
    refused = Refused()
    tasks: dict[str, str] = {}
    for number, one in enumerate(looked, start=1):
        found += one.found
        tasks |= one.tasks
        refused.add(one.refused)
        if progress is not None:
            progress(min(number * ROLLOUTS_AT_ONCE, len(rollouts)), len(rollouts))
    chosen = _best(_without_repeats(found, refused) if filters.drop_repeats else found, filters, refused)
    chosen.sort(key=lambda one: (one.task_key, one.rollout.rollout_id))
    return Selection(chosen, refused, seen=len(rollouts), tasks=tasks)


def read(store: Store, chosen: Sequence[Chosen], filters: Filters) -> Iterator[Exported]:
    """The chosen rollouts with their usable calls, in their order."""
    for part in in_parts(chosen, ROLLOUTS_AT_ONCE):
        calls = _calls_by_rollout(store, [one.rollout for one in part])
        for one in part:
            usable = usable_calls(calls[one.rollout.rollout_id], filters)
            if usable:
                yield _exported(one.rollout, usable, one.reward, one.task_key)


def usable_calls(
    calls: Sequence[ModelCall], filters: Filters, refused: Refused | None = None
) -> list[ModelCall]:
    """The calls of a rollout that may be trained; the others are counted."""
    usable: list[ModelCall] = []
    for call in calls:
        reason = _refused_because(call, filters)
        if reason is None:
            usable.append(call)
        elif refused is not None:
            refused.calls[reason] += 1
    return usable


def in_heldout(key: str, share: float) -> bool:
    """Whether a task is held out: by its hash alone, so whatever else is in the store."""
    digest = blake2b(key.encode("utf-8", "surrogatepass"), digest_size=_HASH_BITS // 8).digest()
    return bool(int.from_bytes(digest, "big") < share * 2**_HASH_BITS)


def in_parts(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """The items, so many at a time."""
    rest = iter(items)
    while part := list(islice(rest, size)):
        yield part


def _has_ended(rollout: Rollout, refused: Refused) -> bool:
    if rollout.status is RolloutStatus.SUCCEEDED:
        return True
    because = f" ({rollout.error_type})" if rollout.error_type else ""
    refused.rollouts[f"rollout did not succeed: {rollout.status}{because}"] += 1
    return False


def _refused_because(call: ModelCall, filters: Filters) -> str | None:
    if call.purpose is not Purpose.AGENT:
        return f"purpose is not to act: {call.purpose}"
    if not call.is_trained_policy:
        return "frozen policy"
    if filters.policy is not None and call.model != filters.policy:
        return f"made by another model: {call.model}"
    if not at_least(call.grade, filters.min_grade):
        why = "; ".join(sorted({reason_kind(reason) for reason in call.grade_reasons}))
        return f"grade {call.grade}: {why}"
    return None


def _calls_by_rollout(store: Store, rollouts: Sequence[Rollout]) -> dict[str, list[ModelCall]]:
    found: dict[str, list[ModelCall]] = {rollout.rollout_id: [] for rollout in rollouts}
    for call in calls_of(store, list(found)) if found else ():
        if call.rollout_id in found:
            found[call.rollout_id].append(call)
    return found


def _first(calls: Sequence[ModelCall]) -> ModelCall | None:
    """What the agent was first shown, usable or not: filters and failures make no other task of it."""
    return next((call for call in calls if call.purpose is Purpose.AGENT and call.messages), None)


def _exported(rollout: Rollout, usable: Sequence[ModelCall], reward: float | None, key: str) -> Exported:
    return Exported(rollout.rollout_id, key, usable, reward, rollout.task)


def _rank(one: Chosen) -> tuple[bool, float, str]:
    """The best first; one without a reward last."""
    return (one.reward is None, -(one.reward or 0.0), one.rollout.rollout_id)


def _without_repeats(found: Sequence[Chosen], refused: Refused) -> list[Chosen]:
    kept: dict[tuple[str, str], Chosen] = {}
    for one in sorted(found, key=_rank):
        kept.setdefault((one.task_key, one.fingerprint), one)
    if repeats := len(found) - len(kept):
        refused.rollouts["says what another rollout of its task does"] += repeats
    return list(kept.values())


def _best(found: Sequence[Chosen], filters: Filters, refused: Refused) -> list[Chosen]:
    if filters.per_task is None:
        return list(found)
    counts: Counter[str] = Counter()
    kept: list[Chosen] = []
    for one in sorted(found, key=_rank):
        counts[one.task_key] += 1
        if counts[one.task_key] <= filters.per_task:
            kept.append(one)
        else:
            refused.rollouts[f"not among the best {filters.per_task} of its task"] += 1
    return kept
