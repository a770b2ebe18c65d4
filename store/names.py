"""Names that a question asks for and the store may not know.

Knows tables by name; asks with the names as parameters. Likeness is decided in the
store, as it has any number of rollouts.
"""

import difflib
from collections.abc import Sequence
from typing import Final

from spangrad.store.base import Store

SHOWN: Final = 12
"""Known names that a sentence lists at most."""

_WHAT: Final = {
    "author": "reward of author",
    "group_id": "rollout of group",
    "model": "call of model",
    "name": "name",
    "purpose": "call of purpose",
    "rollout_id": "rollout",
    "run_id": "rollout of run",
    "split": "rollout of split",
    "task_id": "rollout of task",
    "tool": "use of tool",
    "trace_id": "trace",
}


def nearest(name: str, known: Sequence[str]) -> str:
    """`; did you mean ...?`, or nothing if no known name is near."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    return f"; did you mean {near[0]!r}?" if near else ""


def is_known(store: Store, table: str, column: str, name: str) -> bool:
    """Whether a row of the table has that name."""
    return bool(store.query(f"SELECT 1 FROM {table} WHERE {column} = ? LIMIT 1", [name]))


def known_names(store: Store, table: str, column: str, like: str) -> list[str]:
    """Names in a column, the likest first, at most one more than are shown."""
    rows = store.query(
        f"SELECT {column} AS name FROM {table} WHERE {column} IS NOT NULL GROUP BY 1"
        f" ORDER BY jaro_winkler_similarity({column}, ?) DESC, 1 LIMIT {SHOWN + 1}",
        [like],
    )
    return [str(row["name"]) for row in rows]


def unknown(column: str, name: str, where: str, known: Sequence[str], *, there: str | None = None) -> str:
    """What to say of a name that is not in a column: what is there (the known names, if not given)."""
    if there is None:
        more = ", ..." if len(known) > SHOWN else ""
        there = f"known are {', '.join(sorted(known[:SHOWN]))}{more}" if known else "nothing else is, either"
    return f"there is no {_WHAT[column]} {name!r} in {where!r}; {there}{nearest(name, known)}"
