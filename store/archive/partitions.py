"""The Parquet partitions beside a store's file: which there are, and how their rows are read.

    spans.duckdb
    spans.duckdb.archive/day=2026-01-31/spans-7.parquet, logs-7.parquet, messages-7.parquet

Knows the tables `archives` and `archived_traces`. Does not know how rows get there.

Invariants:
* a file counts only if `archives` names it;
* who reads rollouts or traces opens only the partitions that hold some of them, and who reads none that are
  archived opens none;
* a connection sees archived rows only after `unite`: those that write see the tables alone;
* a file of an older schema is read as it is: what migrations add to an archived table is NULL in it;
* a span without a rollout has the one that `archived_owners` gives it.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import duckdb

from spangrad.errors import StoreError
from spangrad.store.schema import ARCHIVED_OWNERS, LOGS, MESSAGES, SPANS, Table
from spangrad.store.views import VIEWS

ARCHIVED: Final = (SPANS, LOGS, MESSAGES)
"""Tables whose rows can be in partitions: what never changes. The others stay in the database."""
_SINGLE_LOOKUPS: Final = 8
"""Up to here DuckDB looks listed values up in an index; beyond, one scan is faster."""

Connection = duckdb.DuckDBPyConnection


def archive_folder(store: Path) -> Path:
    """Where the partitions of a store's file are."""
    file = store.resolve()
    return file.with_name(file.name + ".archive")


class Partitions:
    """The partitions of one store."""

    def __init__(self, store: Path) -> None:
        """Know the folder; `look` tells whether anything is in it."""
        self.folder = archive_folder(store)
        self.is_empty = True
        self._catalog = ""

    def look(self, con: Connection) -> None:
        """See whether there are any."""
        ((self._catalog,),) = con.execute("SELECT current_database()").fetchall()
        self.is_empty = not con.execute("SELECT 1 FROM archives LIMIT 1").fetchall()

    def live(self, table: Table) -> str:
        """What stands behind FROM to read the table alone, also where a view of its name stands before it."""
        catalog = self._catalog.replace('"', '""')
        return f'"{catalog}".main.{table.name}'

    def holding(
        self, con: Connection, *, rollout_ids: Sequence[str] = (), trace_ids: Sequence[str] = ()
    ) -> list[int]:
        """Partitions with spans or log records of these rollouts or traces."""
        if self.is_empty:
            return []
        wanted = list(trace_ids)
        if rollout_ids:
            sql = "SELECT DISTINCT trace_id FROM archived_traces WHERE list_has_any(rollout_ids, ?)"
            wanted += [trace_id for (trace_id,) in con.execute(sql, [list(rollout_ids)]).fetchall()]
        given: list[Any]
        if len(wanted) <= _SINGLE_LOOKUPS:
            where, given = f"trace_id IN ({', '.join('?' for _ in wanted)})", wanted
        else:
            where, given = "trace_id IN (SELECT unnest(?))", [wanted]
        if not wanted:
            return []
        found = con.execute(f"SELECT DISTINCT part FROM archived_traces WHERE {where} ORDER BY part", given)
        return [part for (part,) in found.fetchall()]

    def rows(self, con: Connection, table: Table, columns: str, trace_ids: Sequence[str]) -> list[Any]:
        """Columns of the archived rows of these traces."""
        parts = self.holding(con, trace_ids=trace_ids)
        source = self.source(con, table, parts) if parts else None
        if source is None:
            return []
        sql = f"SELECT {columns} FROM {source} WHERE trace_id IN (SELECT unnest(?))"
        return con.execute(sql, [list(trace_ids)]).fetchall()

    def messages(self, con: Connection, ids: Sequence[str], parts: Sequence[int] | None) -> dict[str, str]:
        """Contents of messages that are in these partitions (all without)."""
        source = None if self.is_empty else self.source(con, MESSAGES, parts)
        if source is None or not ids:
            return {}
        sql = f"SELECT message_id, content FROM {source} WHERE message_id IN (SELECT unnest(?))"
        return dict(con.execute(sql, [list(ids)]).fetchall())

    def unite(
        self,
        con: Connection,
        parts: Sequence[int] | None = None,
        *,
        tables: Sequence[Table] = ARCHIVED,
    ) -> None:
        """Let the names of these tables mean the rows in these partitions (all without) and in the tables.

        Only for this connection: it then has views under these names, and the file's own views read them.
        """
        if self.is_empty or parts == []:
            return
        for table in tables:
            select = f"SELECT {_columns(table)} FROM {self.live(table)}"
            if source := self.source(con, table, parts):
                select = f"SELECT {_columns(table)} FROM {source} UNION ALL {select}"
            if table is MESSAGES:  # partitions share some
                select = (
                    f"SELECT message_id, any_value(content) AS content FROM ({select}) GROUP BY message_id"
                )
            con.execute(f"CREATE OR REPLACE TEMP VIEW {table.name} AS {select}")

    @contextmanager
    def united(self, con: Connection, trace_ids: Sequence[str]) -> Iterator[None]:
        """Inside a transaction, let `spans` mean the archived ones of these traces too: to read alone."""
        parts = self.holding(con, trace_ids=trace_ids)
        self.unite(con, parts, tables=(SPANS,))
        yield
        if parts:
            con.execute(f"DROP VIEW temp.{SPANS.name}")

    def unite_for(self, con: Connection, sql: str) -> None:
        """`unite` all that a statement may ask for."""
        if not self.is_empty and _NAMES_ARCHIVED.search(sql):
            self.unite(con)

    def unite_unread(self, con: Connection) -> None:
        """`unite` the spans of traces whose calls are to be read: of an archived one late spans have come."""
        if not self.is_empty:
            unread = con.execute("SELECT DISTINCT trace_id FROM unread_traces").fetchall()
            parts = self.holding(con, trace_ids=[trace_id for (trace_id,) in unread])
            self.unite(con, parts, tables=(SPANS,))

    def in_order(self, con: Connection, table: Table, parts: Sequence[int] | None) -> str:
        """What stands behind FROM to read rows in the order in which they came: `place, position`."""
        live = f"SELECT {_columns(table)}, NULL AS place, rowid AS position FROM {self.live(table)}"
        source = None if self.is_empty or parts == [] else self.source(con, table, parts)
        return f"({live})" if source is None else f"(FROM {source} UNION ALL {live})"

    def source(self, con: Connection, table: Table, parts: Sequence[int] | None = None) -> str | None:
        """What stands behind FROM to read a table's rows in these partitions (all without); None: no file.

        With `place` (the file) and `position` (the row in it) behind the columns.
        """
        where, given = ("", []) if parts is None else (" AND part IN (SELECT unnest(?))", [list(parts)])
        sql = f"SELECT file, schema_version FROM archives WHERE table_name = ?{where} ORDER BY part"
        found = con.execute(sql, [table.name, *given]).fetchall()
        files = [self.folder / file for file, _ in found]
        if missing := [file for file in files if not file.exists()]:
            raise StoreError(
                f"{len(missing)} files of the archive are gone, {str(missing[0])!r} for one; the store "
                f"needs the folder {str(self.folder)!r} beside it: put it back"
            )
        if not files:
            return None
        listed = ", ".join(literal(str(file)) for file in files)
        options = "filename = 'place', file_row_number = true, hive_partitioning = false"
        if len({version for _, version in found}) > 1:
            options += ", union_by_name = true"
        read = f"SELECT * RENAME (file_row_number AS position) FROM read_parquet([{listed}], {options})"
        # The table comes first, without its rows: for its types, and for columns that older files lack.
        head = (
            f"SELECT *, NULL::VARCHAR AS place, NULL::BIGINT AS position FROM {self.live(table)} WHERE false"
        )
        rows = f"({head} UNION ALL BY NAME {read})"
        if table is SPANS and con.execute(f"SELECT 1 FROM {ARCHIVED_OWNERS.name} LIMIT 1").fetchall():
            rows = (
                "(SELECT s.* REPLACE (coalesce(s.rollout_id, o.rollout_id) AS rollout_id, "
                "if(s.rollout_id IS NULL, o.attempt, s.attempt) AS attempt) "
                f"FROM {rows} s LEFT JOIN {ARCHIVED_OWNERS.name} o "
                "ON o.trace_id = s.trace_id AND o.span_id = s.span_id)"
            )
        return f"(SELECT {_columns(table)}, place, position FROM {rows})"


def _columns(table: Table) -> str:
    return ", ".join(column.name for column in table.columns)


def _archived_names() -> list[str]:
    """Tables with archived rows, and the views over them."""
    names = [table.name for table in ARCHIVED]
    for view in VIEWS:
        if re.search(rf"\b({'|'.join(names)})\b", view.select):
            names.append(view.name)
    return names


_NAMES_ARCHIVED: Final = re.compile(rf"\b({'|'.join(_archived_names())})\b", re.IGNORECASE)


def literal(text: str) -> str:
    """A text as SQL writes it."""
    return "'" + text.replace("'", "''") + "'"
