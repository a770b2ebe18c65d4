"""Questions in SQL that can only read.

Knows no table. Two fences beside the connection's own (no files, no network): only one
SELECT or EXPLAIN statement is run, and it runs in a read-only transaction, so neither
`WITH x AS (INSERT ...)` nor EXPLAIN ANALYZE of a write gets through.
"""

import threading
from collections.abc import Mapping, Sequence
from datetime import date, time
from decimal import Decimal
from typing import Any, Final

import duckdb

from spangrad.errors import StoreError
from spangrad.store.tables.database import Database

ROW_LIMIT: Final = 10_000
TIMEOUT_S: Final = 30.0

_ASKERS_FAULT: Final = (
    duckdb.ProgrammingError,
    duckdb.DataError,
    duckdb.NotSupportedError,
    duckdb.PermissionException,
    duckdb.SequenceException,
    duckdb.DependencyException,
    duckdb.TransactionException,  # an attempt to write
)


def run_query(
    database: Database,
    sql: str,
    parameters: Sequence[Any] | Mapping[str, Any] = (),
    *,
    row_limit: int = ROW_LIMIT,
    timeout_s: float = TIMEOUT_S,
) -> list[dict[str, Any]]:
    """Rows of one read-only statement; StoreError if it writes, takes too long or returns too much."""
    with database.snapshot() as con:
        is_late = threading.Event()

        def stop() -> None:
            is_late.set()
            con.interrupt()

        timer = threading.Timer(timeout_s, stop)
        timer.start()
        try:
            _check(con, sql)
            database.partitions.unite_for(con, sql)
            result = con.execute(sql, parameters) if parameters else con.execute(sql)
            rows = result.fetchmany(row_limit + 1)
        except duckdb.InterruptException as error:
            if not is_late.is_set():
                raise
            raise StoreError(
                f"the query took longer than {timeout_s:g} s and was stopped; ask for less"
            ) from error
        except _ASKERS_FAULT as error:
            raise StoreError(f"{str(database.path)!r}: {' '.join(str(error).split())}") from error
        finally:
            timer.cancel()
        if len(rows) > row_limit:
            raise StoreError(f"the query returns more than {row_limit} rows; add LIMIT, or count and group")
        names = [column[0] for column in result.description or ()]
        return [dict(zip(names, map(plain, row), strict=True)) for row in rows]


def plain(value: Any) -> Any:
    """A value as the hub would send it: decimals as floats, times and UUIDs as text."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, date | time):
        return value.isoformat()
    return value if value is None or isinstance(value, str | int | float | bytes) else str(value)


def _check(con: duckdb.DuckDBPyConnection, sql: str) -> None:
    statements = con.extract_statements(sql)
    kinds = [statement.type for statement in statements]
    if len(kinds) != 1:
        raise StoreError(f"one statement at a time can be asked, got {len(kinds)}")
    if kinds[0] not in (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN):
        raise StoreError(
            f"only reading is allowed here, got a statement of type {kinds[0].name}; "
            "use SELECT, WITH, DESCRIBE or SHOW"
        )
