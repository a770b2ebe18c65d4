"""Which rollouts a listing is about, and what it says if its filters fit nothing.

Knows the options that name rollouts. Does not know what is shown of them.

* A name that the store does not know is an error that names the nearest one that it knows.
* Nothing to show is said in one line on standard error, never passed over in silence.
* Without a split, training rows are of rollouts that a trainer trains on.
"""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from spangrad.commands.output import note
from spangrad.errors import ConfigError, StoreError
from spangrad.store.names import is_known, known_names, nearest, unknown
from spangrad.store.records import RewardAuthor, Rollout

if TYPE_CHECKING:
    from spangrad.store.base import Store

_IDS_AT_ONCE: Final = 10_000
"""Rows that a query returns at most."""
_TRAINED: Final = "train"
_CLONED: Final = "expert"
_MEASURED: Final = "eval"
"""Splits of a run: what updates learn from, what a warm start clones, how those that only measure begin."""


def rollouts_that_fit(
    store: "Store", target: str, *, rollouts: Sequence[str] | None, run: str | None, split: str | None
) -> list[Rollout]:
    """Rollouts that match every filter, in order of enqueueing; says why if there are none.

    Raises:
        StoreError: A filter names what is not in the store.
    """
    found = store.rollouts(rollout_ids=rollouts, run_id=run, split=split)
    if rollouts is not None and len(found) < len(set(rollouts)):
        known = {rollout.rollout_id for rollout in store.rollouts(rollout_ids=rollouts)}
        for name in rollouts:
            if name not in known:
                raise StoreError(_unknown(store, target, "rollout_id", name))
    if found:
        return found
    for column, wanted in (("run_id", run), ("split", split)):
        if wanted is not None and not is_known(store, "rollouts", column, wanted):
            raise StoreError(_unknown(store, target, column, wanted))
    asked = [f"--rollout {name}" for name in rollouts or ()]
    asked += [f"{option} {value}" for option, value in (("--run", run), ("--split", split)) if value]
    note(f"no rollout in {target!r} fits {' and '.join(asked)}" if asked else _no_rollouts(store, target))
    return []


def rollouts_named_by(store: "Store", sql: str) -> set[str]:
    """Ids in the column rollout_id of a SELECT, some thousand at a time: a query returns no more.

    Raises:
        StoreError: It is no SELECT, or has no such column.
    """
    page = (
        f"SELECT DISTINCT rollout_id::VARCHAR AS rollout_id FROM (\n{sql.strip().rstrip(';')}\n)"
        f" WHERE rollout_id > $last ORDER BY 1 LIMIT {_IDS_AT_ONCE}"
    )
    found: set[str] = set()
    last = ""
    while True:
        try:
            rows = store.query(page, {"last": last})
        except StoreError as error:
            raise StoreError(f"--sql needs a SELECT with a column rollout_id: {error}") from error
        found.update(str(row["rollout_id"]) for row in rows)
        if len(rows) < _IDS_AT_ONCE:
            return found
        last = str(rows[-1]["rollout_id"])


def check_authors(authors: Sequence[str]) -> None:
    """Raise ConfigError if one of them can be nobody's."""
    known = [str(author) for author in RewardAuthor]
    for author in authors:
        if author not in known:
            raise ConfigError(
                f"--author is {author!r}, expected one of {', '.join(known)}{nearest(author, known)}"
            )


def trained_on(rollouts: Sequence[Rollout], *, clone: bool) -> list[Rollout]:
    """Those that a trainer learns from (with `clone`: that a warm start clones); says what is left out.

    A store without any, of recorded agents, say: all but those that only measure.
    """
    split = _CLONED if clone else _TRAINED
    kept = [rollout for rollout in rollouts if rollout.split == split]
    kept = kept or [rollout for rollout in rollouts if not is_measured(rollout)]
    splits = Counter(rollout.split for rollout in rollouts) - Counter(rollout.split for rollout in kept)
    if splits:
        named = ", ".join(f"{name} ({count})" for name, count in sorted(splits.items()))
        note(f"not trained on, left out: rollouts of split {named}; --split NAME shows them")
    return kept


def is_measured(rollout: Rollout) -> bool:
    """Whether it is of an evaluation: no update trains on it."""
    return rollout.split.startswith(_MEASURED)


def _unknown(store: "Store", target: str, column: str, name: str) -> str:
    known = known_names(store, "rollouts", column, name)
    there = None
    if not known:
        there = _no_rollouts(store, target)
    elif column == "rollout_id":
        there = "`spangrad rollouts` lists what is there"
    return unknown(column, name, target, known, there=there)


def _no_rollouts(store: "Store", target: str) -> str:
    (row,) = store.query("SELECT count(*) AS spans FROM spans")
    if row["spans"] == 0:
        return f"{target!r} is empty: nothing was recorded into it yet"
    return f"{target!r} has spans but no rollouts; `spangrad calls` lists their model calls"
