"""History deleted: what is older than a day, or whatever has something to do with one user.

Knows every table of the store, by the names of its columns. Whole units go (`units.py`). Invariants:

* what names a trace, a rollout or a call that goes, goes too, in the tables and in the archive;
* tasks and messages go with the last that used them; updates, metrics and events stay as numbers, without
  the ids and without text;
* a dry run does the same and takes it back, so it counts what would go;
* what is wholly or in part in a damaged partition stays whole, so that the same selection finds it again.

Bytes are in the file until it is written anew (`rewrite.py`), and in dropped files of the archive until
`tidy`: whoever calls `erase` calls `rewrite` next, also where nothing was found, as an earlier run may have
been killed in between.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import duckdb

from spangrad.store.archive import folder as files
from spangrad.store.archive.move import forget_messages, id_table, next_part, write_partition
from spangrad.store.archive.partitions import ARCHIVED
from spangrad.store.archive.units import UNDATED_NS, needed_rollouts, old_units, traces_of, undated, units
from spangrad.store.schema import ARCHIVED_TRACES, ARCHIVES, MESSAGES, TABLES, UPDATES, Table
from spangrad.store.tables.database import Database

_OF_TRACE: Final = "IN (SELECT trace_id FROM gone_traces)"
_MATCHING: Final = """
SELECT trace_id, NULL AS log_id FROM spans
WHERE attributes->>$path = $value OR resource->>$path = $value OR scope_attributes->>$path = $value
  OR list_contains(events->>$events, $value)
UNION SELECT trace_id, CASE WHEN trace_id IS NULL THEN log_id END FROM logs
WHERE attributes->>$path = $value OR resource->>$path = $value OR scope_attributes->>$path = $value
"""
_OTHER_VALUES: Final = """
SELECT DISTINCT value FROM (
  SELECT unnest([attributes->>$path, resource->>$path, scope_attributes->>$path]
    || (events->>$events)) AS value FROM spans WHERE trace_id IN (SELECT unnest($traces))
  UNION SELECT unnest([attributes->>$path, resource->>$path, scope_attributes->>$path])
  FROM logs WHERE trace_id IN (SELECT unnest($traces)))
WHERE value IS NOT NULL ORDER BY value
"""
_ROLLOUTS_OF: Final = """
SELECT DISTINCT coalesce(s.rollout_id, n.rollout_id)
FROM spans s LEFT JOIN sessions n ON n.trace_id = s.trace_id
WHERE s.trace_id IN (SELECT unnest(?::VARCHAR[]))
"""
_HIDDEN: Final = """
SELECT a.trace_id, list_distinct(list_append(flatten(list(a.rollout_ids)), any_value(n.rollout_id)))
FROM archived_traces a LEFT JOIN sessions n USING (trace_id)
WHERE a.part IN (SELECT unnest(?::INTEGER[])) GROUP BY a.trace_id
"""
_WITHOUT_SPANS: Final = """
SELECT rollout_id FROM rollouts WHERE status IN ('succeeded', 'failed')
  AND greatest(enqueued_ns, started_ns, ended_ns) < ? AND rollout_id NOT IN (SELECT rollout_id FROM seen)
"""
_FORGET_ACCOUNTS: Final = """
UPDATE call_keys SET trace_ids = list_filter(trace_ids, lambda t: NOT list_contains(gone.ids, t))
FROM (SELECT list(trace_id) AS ids FROM gone_traces) gone WHERE list_has_any(trace_ids, gone.ids)
"""
"""A call that is told in a trace that goes may be one of a trace that stays."""
_OLD_LOGS: Final = (
    f"SELECT log_id FROM logs WHERE trace_id IS NULL AND greatest(time_ns, observed_ns) >= {UNDATED_NS} "
    "AND greatest(time_ns, observed_ns) < ?"
)


@dataclass(frozen=True, slots=True)
class Selection:
    """What is to go."""

    traces: Sequence[str]
    rollouts: Sequence[str]
    logs: Sequence[str]
    """Records that name no trace."""
    needed: int = 0
    """Rollouts or traces that are old enough and stay: a worker or a run waits for them."""
    damaged: Sequence[str] = ()
    """Files of the archive that are gone or damaged: nobody knows what of their partitions is to go."""
    hidden: int = 0
    """Traces in those partitions."""
    undated: int = 0
    """Rollouts or traces that stay, as they tell no time."""
    joined: Sequence[str] = ()
    """Rollouts of which no trace has the attribute: they go with one that shares a trace with them."""
    others: Sequence[tuple[str, str]] = ()
    """Other values that these attributes have in what goes: other users', say."""


@dataclass(slots=True)
class Erased:
    """How many rows went, or would go."""

    database: dict[str, int] = field(default_factory=dict)
    """By table; of `updates` those that lost ids."""
    archive: dict[str, int] = field(default_factory=dict)


def select_old(database: Database, before_ns: int) -> Selection:
    """What ended before a time and nobody needs, in database and archive."""
    with database.snapshot() as con:
        damaged, hidden = _unite_whole(con, database)
        found = units(con, hidden)
        old, needed = old_units(con, [unit for unit in found if unit.is_whole], before_ns)
        seen = {rollout_id for unit in found for rollout_id in unit.rollouts}.union(*hidden.values())
        con.register("seen", id_table("rollout_id", sorted(seen)))
        idle = {rollout_id for (rollout_id,) in con.execute(_WITHOUT_SPANS, [before_ns]).fetchall()}
        idle -= needed_rollouts(con, before_ns)
        logs = [log_id for (log_id,) in con.execute(_OLD_LOGS, [before_ns]).fetchall()]
    rollouts = idle | {rollout_id for unit in old for rollout_id in unit.rollouts}
    return Selection(
        traces_of(old), sorted(rollouts), logs, needed, damaged, len(hidden), undated=undated(found)
    )


def select_by_attribute(database: Database, attributes: Sequence[tuple[str, str]]) -> Selection:
    """Whatever has an attribute of that name and value, with all that is of the same rollout or session.

    Attributes of spans, of their events, resources and scopes, and of log records; several: any of them.
    """
    traces: set[str] = set()
    logs: set[str] = set()
    with database.snapshot() as con:
        damaged, hidden = _unite_whole(con, database)
        for name, value in attributes:
            for trace_id, log_id in con.execute(_MATCHING, _paths(name) | {"value": value}).fetchall():
                traces |= {trace_id} - {None}
                logs |= {log_id} - {None}
        named = [unit for unit in units(con, hidden) if not traces.isdisjoint(unit.traces)] if traces else []
        found = [unit for unit in named if unit.is_whole]
        going = traces_of(found)
        own = {rollout_id for (rollout_id,) in con.execute(_ROLLOUTS_OF, [sorted(traces)]).fetchall()}
        others = {
            (name, value)
            for name in dict.fromkeys(name for name, _ in attributes)
            for (value,) in con.execute(_OTHER_VALUES, _paths(name) | {"traces": going}).fetchall()
        }
    rollouts = {rollout_id for unit in found for rollout_id in unit.rollouts}
    return Selection(
        going,
        sorted(rollouts),
        sorted(logs),
        damaged=damaged,
        hidden=len(hidden),
        joined=sorted(rollouts - own),
        others=sorted(others - set(attributes)),
    )


def _paths(name: str) -> dict[str, str]:
    """Where an attribute of that name stands in the JSON of a span or log record, and of a span's events."""
    key = '"' + name.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return {"path": f"$.{key}", "events": f"$[*].attributes.{key}"}


def _unite_whole(
    con: duckdb.DuckDBPyConnection, database: Database
) -> tuple[list[str], dict[str, list[str]]]:
    """Let a connection see the partitions whose files are what was written.

    Returns the files that are not, and the traces in their partitions with the rollouts of each.
    """
    damaged = files.damaged(con, database.partitions.folder)
    hidden = con.execute(_HIDDEN, [list(damaged.values())]).fetchall()
    parts = con.execute("SELECT DISTINCT part FROM archives ORDER BY part").fetchall()
    database.partitions.unite(con, [part for (part,) in parts if part not in damaged.values()])
    return list(damaged), dict(hidden)


def erase(database: Database, selection: Selection, *, dry_run: bool = False) -> Erased:
    """Delete what was selected; with `dry_run` count it."""
    folder = database.partitions.folder
    erased = Erased()
    with database.snapshot() as con:
        parts = database.partitions.holding(con, trace_ids=selection.traces)
        named = con.execute(
            "SELECT file, checksum FROM archives WHERE part IN (SELECT unnest(?::INTEGER[]))", [parts]
        ).fetchall()
    if dry_run:
        try:
            with database.transaction() as con:
                _delete(con, selection, erased)
                _count_archived(con, database, parts, erased)
                raise _TakeBack
        except _TakeBack:
            return erased
    for file, checksum in named:
        files.check(folder, file, checksum)
    with database.snapshot() as con:
        days = con.execute("SELECT DISTINCT part, day FROM archives ORDER BY part").fetchall()
        first = next_part(con)
    new = {part: (day, first + place) for place, (part, day) in enumerate(days) if part in set(parts)}
    names = [file for file, _ in named]
    names += [files.file_name(table, day, part) for day, part in new.values() for table in ARCHIVED]
    with files.change(database, names), database.transaction() as con:
        _delete(con, selection, erased)
        _count_archived(con, database, parts, erased)
        for part, (day, number) in new.items():
            _write_rest(con, database, part, day, number)
        con.execute("DROP TABLE gone_traces; DROP TABLE gone_rollouts; DROP TABLE gone_logs")
    with database.snapshot() as con:
        database.partitions.look(con)
    return erased


class _TakeBack(Exception):
    """Ends the transaction of a dry run."""


def _delete(con: duckdb.DuckDBPyConnection, selection: Selection, erased: Erased) -> None:
    for name, ids in (
        ("gone_traces", id_table("trace_id", selection.traces)),
        ("gone_rollouts", id_table("rollout_id", selection.rollouts)),
        ("gone_logs", id_table("log_id", selection.logs)),
    ):
        con.register("given_ids", ids)
        con.execute(f"CREATE TEMP TABLE {name} AS SELECT * FROM given_ids")
        con.unregister("given_ids")
    tasks = con.execute(
        "SELECT DISTINCT task_key FROM rollouts WHERE task_key IS NOT NULL "
        "AND rollout_id IN (SELECT rollout_id FROM gone_rollouts)"
    ).fetchall()
    for table in TABLES:
        if table is not ARCHIVED_TRACES and (where := _names_what_goes(table)):
            ((count,),) = con.execute(f"DELETE FROM {table.name} WHERE {where}").fetchall()
            erased.database[table.name] = int(count)
    ((count,),) = con.execute(
        "DELETE FROM tasks WHERE task_key IN (SELECT unnest(?::VARCHAR[])) "
        "AND task_key NOT IN (SELECT task_key FROM rollouts WHERE task_key IS NOT NULL)",
        [[key for (key,) in tasks]],
    ).fetchall()
    erased.database["tasks"] = int(count)
    erased.database[MESSAGES.name] = forget_messages(con)
    erased.database[UPDATES.name] = _forget_ids(con, selection.rollouts)
    con.execute(_FORGET_ACCOUNTS)


def _forget_ids(con: duckdb.DuckDBPyConnection, rollout_ids: Sequence[str]) -> int:
    """Take rollouts out of what updates consumed, and what events quote. Returns of how many updates."""
    gone = set(rollout_ids)
    sql = "SELECT run_id, update_index, rollout_ids FROM updates WHERE list_has_any(rollout_ids, ?)"
    found = con.execute(sql, [sorted(gone)]).fetchall()
    for run_id, index, consumed in found:
        con.execute("UPDATE events SET text = '' WHERE run_id = ? AND update_index = ?", [run_id, index])
        con.execute(
            "UPDATE updates SET rollout_ids = ?::VARCHAR[] WHERE run_id = ? AND update_index = ?",
            [[one for one in consumed if one not in gone], run_id, index],
        )
    return len(found)


def _names_what_goes(table: Table) -> str:
    """The condition on a row of this table that says that it goes; empty: it has no such column."""
    columns = {column.name for column in table.columns}
    conditions: list[str] = []
    if "trace_id" in columns:
        conditions.append(f"trace_id {_OF_TRACE}")
    if "call_id" in columns:
        conditions.append(f"split_part(call_id, '-', 1) {_OF_TRACE}")
    if "rollout_id" in columns:
        conditions.append("rollout_id IN (SELECT rollout_id FROM gone_rollouts)")
    if "log_id" in columns:
        conditions.append("log_id IN (SELECT log_id FROM gone_logs)")
    return " OR ".join(conditions)


def _count_archived(
    con: duckdb.DuckDBPyConnection, database: Database, parts: Sequence[int], erased: Erased
) -> None:
    for table in ARCHIVED:
        source = database.partitions.source(con, table, parts) if parts and table is not MESSAGES else None
        if source:
            sql = f"SELECT count(*) FROM {source} WHERE trace_id {_OF_TRACE}"
            ((erased.archive[table.name],),) = con.execute(sql).fetchall()


def _write_rest(con: duckdb.DuckDBPyConnection, database: Database, part: int, day: str, number: int) -> None:
    """Put a partition of what stays in the place of one of which something goes."""
    found = {table: database.partitions.source(con, table, [part]) for table in ARCHIVED}
    sources = {table: source for table, source in found.items() if source is not None}
    write_partition(con, database, sources, f"NOT trace_id {_OF_TRACE}", "position", day, number)
    con.execute(f"DELETE FROM {ARCHIVES.name} WHERE part = ?", [part])
    con.execute(f"DELETE FROM {ARCHIVED_TRACES.name} WHERE part = ? AND trace_id {_OF_TRACE}", [part])
    con.execute(f"UPDATE {ARCHIVED_TRACES.name} SET part = ? WHERE part = ?", [number, part])
