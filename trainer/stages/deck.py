"""Stored rollouts for one update after the other, in the place of the feeder, which has rollouts made.

    while deck.ended() is None:
        taken = deck.take()
        ...  # learn
        deck.advance(update_index=1, policy_version=1)

All are dealt once, group by group, in an order that the run's seed and the pass say; then again, in another
one. Knows the store and the run's folder. Does not know: agents, engines, learners.

Invariants:
* which rollouts there are is chosen once, before the first update, and kept in the run's folder: what comes
  to the store later changes nothing;
* how far the deck was dealt is a metric of each update: a restart goes on behind the last one that is
  committed, with the same groups;
* an update takes no group twice; it only reads.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from spangrad.adapters import account_unread
from spangrad.adapters.grading import at_least
from spangrad.adapters.model_call import Grade
from spangrad.credit.history import totals_of
from spangrad.errors import ConfigError, StoreError
from spangrad.store.base import Store
from spangrad.trainer.config import TrainConfig
from spangrad.trainer.learning import checkpoint
from spangrad.trainer.rollouts.source import Taken
from spangrad.trainer.stages.stored_config import MEASURED, OWN, StoredConfig, stored_settings
from spangrad.trainer.update_metrics import Metrics

DEALT: Final = "stored/dealt"
"""Groups that were dealt before an update and for it, those of all passes."""
_AT_ONCE: Final = 1_000
_CHOSEN: Final = """
SELECT rollout_id, coalesce(group_id, rollout_id) AS group_id
FROM (SELECT * FROM outcomes{where})
WHERE status = 'succeeded' AND NOT starts_with(split, $own_measured)
  AND worst_grade IN (SELECT unnest($own_grades::VARCHAR[]))
  AND (len($own_splits::VARCHAR[]) = 0 OR split IN (SELECT unnest($own_splits::VARCHAR[])))
  AND (len($own_runs::VARCHAR[]) = 0 OR run_id IN (SELECT unnest($own_runs::VARCHAR[])))
ORDER BY rollout_id
"""
_THERE: Final = """
SELECT split, status, count(*) AS count FROM rollouts GROUP BY ALL ORDER BY split, status
"""

Groups = list[list[str]]
"""Ids of rollouts that are compared with each other."""


class Deck:
    """The stored rollouts of one run."""

    def __init__(
        self, store: Store, config: TrainConfig, stored: StoredConfig, *, on_note: Callable[[str], None]
    ) -> None:
        """Choose the rollouts, or read which were chosen, and go on behind the last committed update.

        Args:
            store: Where they are.
            config: Of the run, whose folder is there.
            stored: Its section `[stored]`.
            on_note: Called with a line that says what was chosen.

        Raises:
            ConfigError: None fits, `stored.where` is no condition, or the run was begun with other settings.
        """
        self._store = store
        self._groups = _kept(store, config, stored, on_note)
        self._seed, self._passes = config.run.seed, stored.passes
        self._size = config.rollout.groups_per_update
        last = store.last_update(config.run.id)
        self._dealt = 0 if last is None else int(last.metrics[DEALT])
        self._learned = self._dealt

    @property
    def has_others(self) -> bool:
        """Whether a group is left that was not dealt since something was learned."""
        return self._dealt - self._learned < len(self._groups)

    def ended(self) -> str | None:
        """Why there is nothing more to take; None: there is."""
        if self._passes is None or self._dealt < self._passes * len(self._groups):
            return None
        return f"stored.passes: {self._passes} over {len(self._groups)} groups of stored rollouts"

    def wait(self, is_asked_to_stop: Callable[[], bool]) -> bool:
        """All is there: nothing is waited for."""
        return not is_asked_to_stop()

    def take(self, *, is_more: bool = False) -> Taken:
        """The groups of the next update: `rollout.groups_per_update`, or what is left of the pass.

        Raises:
            StoreError: A rollout is no longer in the store.
        """
        done, place = divmod(self._dealt, len(self._groups))
        order = np.random.default_rng((self._seed, done)).permutation(len(self._groups))
        ids = [name for index in order[place : place + self._size] for name in self._groups[index]]
        self._dealt += min(self._size, len(self._groups) - place)
        found = {rollout.rollout_id: rollout for rollout in self._store.rollouts(rollout_ids=ids)}
        if missing := [name for name in ids if name not in found]:
            raise StoreError(
                f"{len(missing)} of the rollouts that were chosen for this run are no longer in the store,"
                f" {missing[0]!r} among them; begin another run without them"
            )
        return Taken([found[name] for name in ids])

    def advance(self, *, update_index: int, policy_version: int) -> None:
        """What was dealt is learned."""
        self._learned = self._dealt

    def meanwhile(self, taken: Taken) -> Metrics:
        """How far the deck is dealt."""
        return {
            DEALT: float(self._dealt),
            "stored/groups": float(len(self._groups)),
            "stored/rollouts": float(sum(map(len, self._groups))),
            "stored/passes": self._dealt / len(self._groups),
        }


def _kept(store: Store, config: TrainConfig, stored: StoredConfig, on_note: Callable[[str], None]) -> Groups:
    """The groups that were chosen when the run began; chosen now, if it begins."""
    file, settings = config.folder / "stored.json", stored_settings(stored)
    if file.is_file():
        kept: dict[str, Any] = json.loads(file.read_text())
        for name, was in kept["settings"].items():
            if was != settings[name]:
                raise ConfigError(
                    f"run {config.run.id!r} was begun with stored.{name} = {was!r}, now it is"
                    f" {settings[name]!r}; choose another run.id"
                )
        groups: Groups = kept["groups"]
        return groups
    account_unread(store)
    groups = choose(store, config, stored)
    on_note(
        f"run {config.run.id!r} trains {sum(map(len, groups))} stored rollouts in {len(groups)} groups"
        f" ({file} names them)"
    )
    part = file.with_suffix(".part")
    with checkpoint.writing("the choice of rollouts", file, "nothing was begun"):
        part.write_text(json.dumps({"settings": settings, "groups": groups}))
        part.replace(file)
    return groups


def choose(store: Store, config: TrainConfig, stored: StoredConfig) -> Groups:
    """The stored rollouts that fit, by group, in order of their ids; one without a group is a group.

    Raises:
        ConfigError: None fits, or `stored.where` is no condition.
    """
    least = Grade.UNUSABLE if stored.min_grade == "any" else Grade(stored.min_grade)
    own = {
        "measured": MEASURED,
        "grades": [str(grade) for grade in Grade if at_least(grade, least)],
        "splits": list(stored.splits),
        "runs": list(stored.runs),
    }
    given = dict(stored.parameters) | {f"{OWN}{name}": value for name, value in own.items()}
    sql = _CHOSEN.format(where=f" WHERE (\n{stored.where}\n)" if stored.where else "")
    try:
        with store.query_arrow(sql, given) as answer:  # `query` has a limit of rows
            rows = answer.read_all().to_pylist()
    except StoreError as error:
        if not stored.where:
            raise
        raise ConfigError(
            f"stored.where = {stored.where!r} with stored.parameters {dict(stored.parameters)!r} is no"
            f" condition over the view outcomes: {error}"
        ) from error
    if stored.min_reward is not None:
        rewarded = _rewarded(store, config, [row["rollout_id"] for row in rows], stored.min_reward)
        rows = [row for row in rows if row["rollout_id"] in rewarded]
    groups: dict[str, list[str]] = {}
    for row in rows:
        groups.setdefault(row["group_id"], []).append(row["rollout_id"])
    if not groups:
        counts = store.query(_THERE)
        there = ", ".join(f"{one['count']} {one['status']} of split {one['split']}" for one in counts)
        raise ConfigError(
            f"no rollout in the store fits [stored] of run {config.run.id!r}; there are {there or 'none'}"
            " (`spangrad sql 'SELECT * FROM outcomes'` has what is compared)"
        )
    return list(groups.values())


def _rewarded(store: Store, config: TrainConfig, ids: Sequence[str], least: float) -> set[str]:
    """Those whose reward, as credit counts it, is at least this."""
    authors, weights = config.rollout.reward_authors, config.credit.reward_weights
    found: set[str] = set()
    for start in range(0, len(ids), _AT_ONCE):
        totals = totals_of(store, ids[start : start + _AT_ONCE], authors, weights)
        found |= {name for name, total in totals.items() if total >= least}
    return found
