"""What of a store's history moves or goes together, and what of it is still needed.

Knows the tables that say whose a trace is. A unit is a set of traces and rollouts that no other trace or
rollout is joined to: a rollout with all its traces, a session, or one trace that is of no rollout.

Invariants:
* whatever a span of a unit refers to (messages aside) is in the unit;
* a unit is old when its last span or log record ended before the day that is asked for; one that tells no
  time is not;
* a unit is needed while one of its rollouts is queued or running for a worker, or waits for an update: it
  succeeded, no update has consumed it, and its run was alive (an update, a publish, a rollout of its own) on
  that day or later.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import duckdb

from spangrad.store.tables.compact import MESSAGE_ATTRIBUTES

_TRACES: Final = """
SELECT trace_id, list_distinct(flatten(list(rollouts))), min(first_ns), max(last_ns) FROM (
  SELECT s.trace_id, min(s.start_ns) AS first_ns, max(greatest(s.start_ns, s.end_ns)) AS last_ns,
    coalesce(list(DISTINCT coalesce(s.rollout_id, n.rollout_id)) FILTER (
      WHERE coalesce(s.rollout_id, n.rollout_id) IS NOT NULL), []) AS rollouts
  FROM spans s LEFT JOIN sessions n ON n.trace_id = s.trace_id GROUP BY s.trace_id
  UNION ALL
  SELECT trace_id, NULL, max(greatest(time_ns, observed_ns)), [] FROM logs WHERE trace_id IS NOT NULL
  GROUP BY trace_id)
GROUP BY trace_id ORDER BY trace_id
"""
_MESSAGE_BASES: Final = ", ".join(
    f"""attributes->>'$."{name}"."$messages".base'""" for name in MESSAGE_ATTRIBUTES
)
_BASES: Final = f"""
SELECT DISTINCT trace_id, split_part(base, '-', 1) AS other FROM (
  SELECT trace_id, unnest([prompt_base, {_MESSAGE_BASES}]) AS base FROM spans
  WHERE prompt_base IS NOT NULL OR message_ids IS NOT NULL)
WHERE base IS NOT NULL AND split_part(base, '-', 1) <> trace_id
ORDER BY ALL
"""
_NEEDED: Final = """
SELECT rollout_id FROM rollouts WHERE NOT is_recorded AND (
  status IN ('queued', 'running') OR (
    status = 'succeeded' AND consumed_by IS NULL AND run_id IN (
      SELECT run_id FROM (
        SELECT run_id, time_ns FROM updates
        UNION ALL SELECT run_id, time_ns FROM policies
        UNION ALL SELECT run_id, greatest(enqueued_ns, started_ns, ended_ns) FROM rollouts
        WHERE run_id IS NOT NULL)
      GROUP BY run_id HAVING max(time_ns) >= ?)))
"""
UNDATED_NS: Final = 10**6
"""What ended before this tells no time: rows of an export that has none are numbered from 0."""


@dataclass(slots=True)
class Unit:
    """Traces and rollouts that belong together."""

    traces: list[str] = field(default_factory=list)
    rollouts: list[str] = field(default_factory=list)
    first_ns: int = 2**64 - 1
    """When its first span began."""
    last_ns: int = 0
    """When its last span ended."""
    is_whole: bool = True
    """Whether all of it can be read."""


def units(con: duckdb.DuckDBPyConnection, hidden: Mapping[str, Sequence[str]] | None = None) -> list[Unit]:
    """All units of the spans and log records that this connection sees, by their first trace.

    Those with a trace or rollout of `hidden` (traces that have more rows than it sees, with their
    rollouts) are not whole.
    """
    traces = con.execute(_TRACES).fetchall()
    groups = _Groups()
    for trace_id, rollouts in (hidden or {}).items():
        groups.join([("trace", trace_id), *(("rollout", rollout) for rollout in rollouts)])
    for trace_id, rollouts, _, _ in traces:
        groups.join([("trace", trace_id), *(("rollout", rollout) for rollout in rollouts)])
    for trace_id, other in con.execute(_BASES).fetchall():
        groups.join([("trace", trace_id), ("trace", other)])
    found: dict[tuple[str, str], Unit] = {}
    in_part = {groups.root(("trace", trace_id)) for trace_id in hidden or {}}
    for trace_id, rollouts, first_ns, last_ns in traces:
        root = groups.root(("trace", trace_id))
        unit = found.setdefault(root, Unit(is_whole=root not in in_part))
        unit.traces.append(trace_id)
        unit.rollouts = sorted({*unit.rollouts, *rollouts})
        unit.first_ns = min(unit.first_ns, last_ns if first_ns is None else first_ns)
        unit.last_ns = max(unit.last_ns, last_ns)
    return list(found.values())


def old_units(
    con: duckdb.DuckDBPyConnection, found: Sequence[Unit], before_ns: int
) -> tuple[list[Unit], int]:
    """Units that ended before a time and that nobody needs, and how many old ones are still needed."""
    old = [unit for unit in found if UNDATED_NS <= unit.last_ns < before_ns]
    needed = needed_rollouts(con, before_ns)
    free = [unit for unit in old if needed.isdisjoint(unit.rollouts)]
    return free, len(old) - len(free)


def undated(found: Sequence[Unit]) -> int:
    """How many units tell no time."""
    return sum(unit.last_ns < UNDATED_NS for unit in found)


def needed_rollouts(con: duckdb.DuckDBPyConnection, before_ns: int) -> set[str]:
    """Rollouts that workers or a run that was alive at that time or later wait for."""
    return {rollout_id for (rollout_id,) in con.execute(_NEEDED, [before_ns]).fetchall()}


class _Groups:
    """Which of many things are joined, directly or through others."""

    def __init__(self) -> None:
        self._parents: dict[tuple[str, str], tuple[str, str]] = {}

    def root(self, item: tuple[str, str]) -> tuple[str, str]:
        path = []
        while (parent := self._parents.setdefault(item, item)) != item:
            path.append(item)
            item = parent
        for below in path:
            self._parents[below] = item
        return item

    def join(self, items: Sequence[tuple[str, str]]) -> None:
        first = self.root(items[0])
        for item in items[1:]:
            self._parents[self.root(item)] = first


def traces_of(found: Iterable[Unit]) -> list[str]:
    """All traces of some units."""
    return [trace_id for unit in found for trace_id in unit.traces]
