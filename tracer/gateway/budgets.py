"""How many turns a rollout has, as operators say, and how many of them its agent has taken.

A turn is a call of the trained policy that acts: one of another purpose, of a frozen model or of an embedding
takes none, and one that got no answer gives its turn back.

Invariants:
* nothing in a call can raise a budget; given twice for one attempt, the lower one counts;
* no other attempt of a rollout with a budget than the latest that was given one has turns;
* calls at once take one turn each;
* what is known outlives the process, also one that is killed: the next gateway in the same place goes on with
  it. A disk that fails costs that, and no call.

Knows SQLite. Knows no HTTP and no spans.
"""

import logging
import sqlite3
import time
from collections import OrderedDict
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Final

from spangrad.errors import ConfigError
from spangrad.tracer.periodically import Periodically

logger = logging.getLogger(__name__)

MAX_ROLLOUTS: Final = 65_536
"""Rollouts whose budget is remembered; the one whose turns were asked for longest ago makes way."""
MAX_TURNS: Final = 1_000_000
_WAIT_S: Final = 0.2
"""Longest wait for another gateway that is writing."""
_TABLE: Final = """
CREATE TABLE IF NOT EXISTS budgets (
  rollout_id TEXT PRIMARY KEY, attempt INTEGER NOT NULL, turns INTEGER NOT NULL, taken INTEGER NOT NULL,
  reply TEXT, used_ns INTEGER NOT NULL
) WITHOUT ROWID
"""


@dataclass(frozen=True, slots=True)
class Budget:
    """The turns of one rollout's latest attempt."""

    attempt: int
    turns: int
    """0 or more."""
    taken: int = 0
    reply: str | None = None
    """What the policy is made to say instead of one turn more; None: the call is an error."""


class Budgets:
    """All budgets of a gateway. For one thread at a time."""

    def __init__(self, file: Path | None) -> None:
        """Go on with what `file` knows; None: nothing outlives the process.

        Raises:
            ConfigError: The file is there and can't be read.
        """
        self._file = file
        self._known: OrderedDict[str, Budget] = OrderedDict()
        self._database: sqlite3.Connection | None = None
        self._told = Periodically()
        self.beyond = 0
        """Calls that had no turn left."""
        if file is not None and file.exists():
            try:
                self._known.update(self._read(self._opened(file)))
            except sqlite3.Error as error:
                raise ConfigError(f"budgets of rollouts in {str(file)!r} can't be read ({error})") from error

    def __len__(self) -> int:
        """Rollouts that have one."""
        return len(self._known)

    def give(self, rollout_id: str, attempt: int, turns: int, reply: str | None) -> None:
        """Give an attempt its turns; an earlier one than the latest gets none."""
        known = self._known.get(rollout_id)
        if known is not None and known.attempt > attempt:
            return
        if known is not None and known.attempt == attempt:
            self._set(rollout_id, replace(known, turns=min(known.turns, turns), reply=reply))
        else:
            self._set(rollout_id, Budget(attempt, turns, reply=reply))

    def take(self, rollout_id: str, attempt: int) -> Budget | None:
        """Take a turn; returns the budget if there is none left, and None if the call may be made."""
        known = self._known.get(rollout_id)
        if known is None:
            return None
        if known.attempt != attempt or known.taken >= known.turns:
            self.beyond += 1
            return known
        self._set(rollout_id, replace(known, taken=known.taken + 1))
        return None

    def give_back(self, rollout_id: str, attempt: int) -> None:
        """Undo a `take` that was granted: the call got no answer."""
        known = self._known.get(rollout_id)
        if known is not None and known.attempt == attempt and known.taken:
            self._set(rollout_id, replace(known, taken=known.taken - 1))

    def close(self) -> None:
        """Close the file."""
        if self._database is not None:
            self._database.close()

    def _set(self, rollout_id: str, budget: Budget) -> None:
        self._known[rollout_id] = budget
        self._known.move_to_end(rollout_id)
        gone = self._known.popitem(last=False)[0] if len(self._known) > MAX_ROLLOUTS else None
        if self._file is None:
            return
        try:
            database = self._opened(self._file)
            database.execute(
                "INSERT OR REPLACE INTO budgets VALUES (?, ?, ?, ?, ?, ?)",
                (rollout_id, *astuple(budget), time.time_ns()),
            )
            if gone is not None:
                database.execute("DELETE FROM budgets WHERE rollout_id = ?", (gone,))
        except (sqlite3.Error, OSError) as error:
            if self._told.due():
                logger.warning(
                    "budgets of rollouts can't be written to %s (%s); they are kept in memory alone",
                    *(self._file, error),
                )

    def _opened(self, file: Path) -> sqlite3.Connection:
        """The database; a crash of the machine, after which no rollout goes on, may cost its last writes."""
        if self._database is None:
            file.parent.mkdir(parents=True, exist_ok=True)
            database = sqlite3.connect(file, timeout=_WAIT_S, isolation_level=None, check_same_thread=False)
            try:
                database.execute("PRAGMA journal_mode = WAL")
                database.execute("PRAGMA synchronous = OFF")
                database.execute(_TABLE)
            except BaseException:
                database.close()
                raise
            self._database = database
        return self._database

    def _read(self, database: sqlite3.Connection) -> list[tuple[str, Budget]]:
        """The latest budgets, the one used longest ago first; forgets all older ones."""
        rows = database.execute(
            "SELECT rollout_id, attempt, turns, taken, reply, used_ns FROM budgets "
            "ORDER BY used_ns DESC LIMIT ?",
            (MAX_ROLLOUTS,),
        ).fetchall()
        if rows:
            database.execute("DELETE FROM budgets WHERE used_ns < ?", (rows[-1][-1],))
        return [(row[0], Budget(*row[1:5])) for row in reversed(rows)]
