"""Rows in, through Arrow: one INSERT for any number of rows.

Knows how schema types map to Arrow types. Knows no particular table.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Literal

import duckdb
import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]

from spangrad.errors import StoreError
from spangrad.store.schema import Column, Table

_ARROW: Final[Mapping[str, pa.DataType]] = {
    "VARCHAR": pa.string(),
    "JSON": pa.string(),
    "INTEGER": pa.int32(),
    "BIGINT": pa.int64(),
    "UBIGINT": pa.uint64(),
    "DOUBLE": pa.float64(),
    "BOOLEAN": pa.bool_(),
    "VARCHAR[]": pa.list_(pa.string()),
    "INTEGER[]": pa.list_(pa.int32()),
    "FLOAT[]": pa.list_(pa.float32()),
}
LOOKED_UP: Final = 1000
"""Longest list that DuckDB looks up by index, and not by reading the whole column."""
_NUMBERS: Final[Mapping[str, str]] = {"INTEGER[]": "i4", "FLOAT[]": "f4"}


def insert_rows(
    con: duckdb.DuckDBPyConnection,
    table: Table,
    rows: Sequence[Mapping[str, Any]],
    *,
    conflict: Literal["fail", "ignore", "replace"] = "fail",
) -> int:
    """Insert rows (a column that a row lacks becomes NULL). Returns how many were new or replaced.

    Raises StoreError if a value does not fit into its column.
    """
    if not rows:
        return 0
    arrays = [_array([row.get(column.name) for row in rows], table, column) for column in table.columns]
    con.register("new_rows", pa.table(arrays, names=[column.name for column in table.columns]))
    how = {"fail": "INSERT", "ignore": "INSERT OR IGNORE", "replace": "INSERT OR REPLACE"}[conflict]
    try:
        return int(con.execute(f"{how} INTO {table.name} SELECT * FROM new_rows").fetchall()[0][0])
    finally:
        with suppress(duckdb.Error):  # after a failed INSERT all is refused until the rollback
            con.unregister("new_rows")


def update_rows(con: duckdb.DuckDBPyConnection, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
    """Change columns of rows that are there, found by the table's key, which is one column.

    All rows name the same columns, the key among them. The cost follows their number, not the table's.

    Raises StoreError if a value does not fit into its column.
    """
    (key,) = table.key
    for first in range(0, len(rows), LOOKED_UP):
        some = rows[first : first + LOOKED_UP]
        columns = [column for column in table.columns if column.name in some[0]]
        arrays = [_array([row[column.name] for row in some], table, column) for column in columns]
        names = [column.name for column in columns]
        con.register("new_rows", pa.table(arrays, names=names))
        name, ids = table.name, [row[key] for row in some]
        assignments = ", ".join(f"{one} = new_rows.{one}" for one in names if one != key)
        try:
            con.execute(  # the list is what DuckDB looks up by index: a join alone reads the whole column
                f"UPDATE {name} SET {assignments} FROM new_rows"
                f" WHERE {name}.{key} = new_rows.{key} AND {name}.{key} IN ({marks(ids)})",
                ids,
            )
        finally:
            with suppress(duckdb.Error):
                con.unregister("new_rows")


def _array(values: Sequence[Any], table: Table, column: Column) -> pa.Array:
    try:
        if column.type in _NUMBERS:
            return _lists(values, _NUMBERS[column.type])
        return pa.array(values, _ARROW[column.type])
    except (ValueError, TypeError, OverflowError) as error:  # pyarrow's errors are such, too
        raise StoreError(
            f"a value does not fit into the column {column.name!r} of {table.name!r}, "
            f"which is {column.type}: {error}"
        ) from error


def _lists(values: Sequence[Any], kind: str) -> pa.Array:
    """Lists of numbers by their bytes: `pa.array` takes them one by one."""
    arrays = [np.asarray(() if value is None else value, kind) for value in values]
    offsets = np.cumsum([0, *(len(array) for array in arrays)], dtype="i4")
    mask = pa.array([value is None for value in values], pa.bool_())
    return pa.ListArray.from_arrays(offsets, np.concatenate(arrays), mask=mask)


def looked_up(values: Sequence[Any]) -> Iterator[tuple[str, list[Any]]]:
    """The values some at a time with marks for `IN`: a short list is found by index, a long one by a scan."""
    for first in range(0, len(values), LOOKED_UP):
        some = list(values[first : first + LOOKED_UP])
        yield f"({marks(some)})", some


def marks(values: Sequence[Any]) -> str:
    """Placeholders for a short list; DuckDB looks those up by index."""
    return ", ".join("?" * len(values))


def select_dicts(
    con: duckdb.DuckDBPyConnection, sql: str, parameters: Sequence[Any] | Mapping[str, Any] = ()
) -> list[dict[str, Any]]:
    """All rows of a query, as dicts."""
    result = con.execute(sql, parameters) if parameters else con.execute(sql)
    names = [column[0] for column in result.description or ()]
    return [dict(zip(names, row, strict=True)) for row in result.fetchall()]


def traces_of_sessions(con: duckdb.DuckDBPyConnection, rollout_ids: Sequence[str]) -> list[str]:
    """Traces that were found to be of these rollouts."""
    if not rollout_ids:
        return []
    sql = "SELECT trace_id FROM sessions WHERE rollout_id IN (SELECT unnest(?))"
    return [trace_id for (trace_id,) in con.execute(sql, [list(rollout_ids)]).fetchall()]
