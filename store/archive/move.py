"""Old history out of the database, into Parquet partitions: one day after the other.

Knows which rows a unit of history has, and how a partition is written. Invariants:

* a day's rows are in the database until the transaction that removes them names the files that have them: a
  process that is killed leaves each row in exactly one of the two;
* a partition has every message that its spans refer to; those that others use stay in the database too;
* the same rows give the same bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Final

import duckdb
import pyarrow as pa  # type: ignore[import-untyped]

from spangrad.store.archive import folder as files
from spangrad.store.archive.partitions import ARCHIVED
from spangrad.store.archive.rewrite import Progress
from spangrad.store.archive.units import Unit, old_units, traces_of, undated, units
from spangrad.store.schema import ARCHIVED_TRACES, ARCHIVES, LOGS, MESSAGES, SPANS, Table
from spangrad.store.tables.database import Database
from spangrad.store.tables.rows import insert_rows

ORDER: Final[Mapping[Table, str]] = {
    SPANS: "rollout_id NULLS FIRST, trace_id, start_ns, span_id",
    LOGS: "trace_id, if(time_ns = 0, observed_ns, time_ns)",
    MESSAGES: "message_id",
}


@dataclass(frozen=True, slots=True)
class Moved:
    """What is to move, or has been moved."""

    days: int
    rollouts: int
    """Those of traces that name none are not counted."""
    traces: int
    spans: int
    logs: int
    needed: int
    """Rollouts or traces that are as old and stay: a worker or a run that goes on waits for them."""
    undated: int
    """Rollouts or traces that stay, as they tell no time."""
    size_bytes: int
    """Of the Parquet files written."""


def move(
    database: Database, before_ns: int, *, dry_run: bool = False, progress: Progress | None = None
) -> Moved:
    """Move what ended before a time into partitions; with `dry_run` only count."""
    with database.snapshot() as con:
        found = units(con)
        old, needed = old_units(con, found, before_ns)
        counts = _count(con, traces_of(old))
    by_day: dict[str, list[Unit]] = {}
    for unit in sorted(old, key=lambda one: (one.last_ns, one.traces)):
        by_day.setdefault(day_of(unit.last_ns), []).append(unit)
    size_bytes = 0
    if not dry_run:
        for done, (day, found) in enumerate(by_day.items()):
            if progress:
                progress("moving days", done, len(by_day))
            size_bytes += _move_day(database, day, found)
        with database.transaction() as con:
            forget_messages(con)
    return Moved(
        days=len(by_day),
        rollouts=sum(len(unit.rollouts) for unit in old),
        traces=sum(len(unit.traces) for unit in old),
        spans=counts[0],
        logs=counts[1],
        needed=needed,
        undated=undated(found),
        size_bytes=size_bytes,
    )


def day_of(time_ns: int) -> str:
    """The UTC day of a time."""
    return datetime.fromtimestamp(time_ns / 1e9, UTC).date().isoformat()


def _count(con: duckdb.DuckDBPyConnection, trace_ids: Sequence[str]) -> tuple[int, int]:
    con.register("moving", id_table("trace_id", trace_ids))
    of_moving = "WHERE trace_id IN (SELECT trace_id FROM moving)"
    sql = f"SELECT (SELECT count(*) FROM spans {of_moving}), (SELECT count(*) FROM logs {of_moving})"
    spans, logs = con.execute(sql).fetchall()[0]
    return spans, logs


def _move_day(database: Database, day: str, found: Sequence[Unit]) -> int:
    with database.snapshot() as con:
        part = next_part(con)
    names = [files.file_name(table, day, part) for table in ARCHIVED]
    with files.change(database, names), database.transaction() as con:
        con.register("moving", id_table("trace_id", traces_of(found)))
        # `|| ''` keeps DuckDB from the index, by which it takes a millisecond to fetch the lists of a row.
        moving = "(trace_id || '') IN (SELECT trace_id FROM moving)"
        first_ns, last_ns = min(unit.first_ns for unit in found), max(unit.last_ns for unit in found)
        spans = (
            f"(FROM spans WHERE start_ns BETWEEN {first_ns} AND {last_ns})"  # most of a table is passed over
        )
        sources = {SPANS: spans, LOGS: LOGS.name, MESSAGES: MESSAGES.name}
        written = write_partition(con, database, sources, moving, "rowid", day, part)
        for table in (SPANS, LOGS):
            con.execute(f"DELETE FROM {table.name} WHERE trace_id IN (SELECT trace_id FROM moving)")
        rows = [
            {"trace_id": trace_id, "rollout_ids": unit.rollouts, "part": part}
            for unit in found
            for trace_id in unit.traces
        ]
        insert_rows(con, ARCHIVED_TRACES, rows)
        con.unregister("moving")
    database.partitions.is_empty = False
    return sum(file.size_bytes for file in written)


def write_partition(
    con: duckdb.DuckDBPyConnection,
    database: Database,
    sources: Mapping[Table, str],
    traces: str,
    position: str,
    day: str,
    part: int,
) -> list[files.File]:
    """Write the rows of some traces, out of tables or files, as a partition, and name it in `archives`.

    Args:
        con: The transaction.
        database: Whose archive it is.
        sources: What stands behind FROM to read each table.
        traces: The condition on `trace_id` that says which.
        position: The column that tells in which order log records came.
        day: The day of the partition.
        part: Its number.
    """
    written: list[files.File] = []
    for table, source in sources.items():
        columns = ", ".join(column.name for column in table.columns)
        where, order = traces, ORDER[table]
        if table is LOGS:
            order += f", {position}"
        if table is MESSAGES:
            if SPANS not in sources:
                continue
            where = f"message_id IN (SELECT unnest(message_ids) FROM {sources[SPANS]} WHERE {where})"
        select = f"SELECT {columns} FROM {source} WHERE {where} ORDER BY {order}"
        file = files.write(con, select, database.partitions.folder, table, day, part)
        if file is not None:
            written.append(file)
    insert_rows(con, ARCHIVES, [asdict(file) for file in written])
    return written


def forget_messages(con: duckdb.DuckDBPyConnection) -> int:
    """Delete messages that no span in the database refers to. Returns how many."""
    sql = "DELETE FROM messages WHERE message_id NOT IN (SELECT unnest(message_ids) FROM spans)"
    return int(con.execute(sql).fetchall()[0][0])


def next_part(con: duckdb.DuckDBPyConnection) -> int:
    """A number that no partition has."""
    return int(con.execute("SELECT coalesce(max(part), 0) + 1 FROM archives").fetchall()[0][0])


def id_table(name: str, ids: Sequence[str]) -> pa.Table:
    """A table of one column, to be registered."""
    return pa.table({name: pa.array(ids, pa.string())})
