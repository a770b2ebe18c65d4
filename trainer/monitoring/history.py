"""The numbers of a run's updates, as monitors look at them.

Knows the table `metrics`. Invariants:

* a number that is missing, NaN or infinite is not there: it is never 0 and never compared;
* what is read depends on the store alone, so a process that restarts sees what the one before saw.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from spangrad.store.base import Store

_SQL: Final = """
SELECT update_index, name, value FROM metrics
WHERE run_id = $run AND name IN (SELECT unnest($names::VARCHAR[])) AND isfinite(value)
  AND update_index <= $last AND (update_index < $first OR update_index >= $last - $depth)
"""
_LAST: Final = "SELECT max(update_index) AS last FROM updates WHERE run_id = ?"


@dataclass(frozen=True, slots=True)
class History:
    """Metrics of the first updates of a run and of the last ones up to `last`."""

    last: int
    """Index of the update that is looked at."""
    values: Mapping[str, Mapping[int, float]]
    """Metric -> update -> number."""

    def now(self, name: str) -> float | None:
        """The number of the update that is looked at."""
        return self.values.get(name, {}).get(self.last)

    def before(self, name: str, window: int, *, least: int) -> list[float]:
        """Numbers of the `window` updates before it, oldest first; none if there are fewer than `least`."""
        known = self.values.get(name, {})
        found = [known[u] for u in range(self.last - window, self.last) if u in known]
        return found if len(found) >= least else []

    def start(self, name: str, count: int) -> list[float]:
        """Numbers of the first `count` updates, all before it; none if half of them or more are missing."""
        known = self.values.get(name, {})
        found = [known[u] for u in range(count) if u in known]
        return found if self.last >= count and 2 * len(found) > count else []

    def earlier(self) -> "History":
        """What was known one update earlier."""
        return replace(self, last=self.last - 1)


def last_update(store: Store, run_id: str) -> int | None:
    """Index of the last update of a run; None: it has none."""
    index: int | None = store.query(_LAST, [run_id])[0]["last"]
    return index


def read_history(
    store: Store, run_id: str, last: int, names: Collection[str], *, first: int, depth: int
) -> History:
    """Numbers of the first `first` updates, of the last one and of `depth` before it."""
    given: dict[str, Any] = {
        "run": run_id,
        "names": sorted(names),
        "last": last,
        "first": first,
        "depth": depth,
    }
    values: dict[str, dict[int, float]] = {}
    with store.query_arrow(_SQL, given) as answer:  # `query` has a limit of rows
        for row in answer.read_all().to_pylist():
            values.setdefault(row["name"], {})[row["update_index"]] = row["value"]
    return History(last, values)
