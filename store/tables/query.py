"""Questions in SQL that can only read.

Knows no table. Two fences beside the connection's own (no files, no network): only one
SELECT or EXPLAIN statement is run, and it runs in a read-only transaction, so neither
`WITH x AS (INSERT ...)` nor EXPLAIN ANALYZE of a write gets through.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from datetime import date, time
from decimal import Decimal
from typing import Any, Final

import duckdb
import pyarrow as pa  # type: ignore[import-untyped]

from spangrad.errors import StoreError
from spangrad.store.tables.database import Database, damaged_partition, store_error

ROW_LIMIT: Final = 10_000
TIMEOUT_S: Final = 30.0
ARROW_TIMEOUT_S: Final = 600.0
_BATCH_ROWS: Final = 1000
_PATIENCE_S: Final = 0.02
"""Between two words to DuckDB that it should stop."""

_ASKERS_FAULT: Final = (
    duckdb.ProgrammingError,
    duckdb.DataError,
    duckdb.NotSupportedError,
    duckdb.PermissionException,
    duckdb.SequenceException,
    duckdb.DependencyException,
    duckdb.TransactionException,  # an attempt to write
)

_FILES_FAULT: Final = ("IO Error", "Corrupt", "Serialization Error", "FATAL", "INTERNAL", "Out of Memory")
"""How DuckDB's messages begin of what is not the asker's fault, where only they come through."""

Parameters = Sequence[Any] | Mapping[str, Any]


def run_query(
    database: Database,
    sql: str,
    parameters: Parameters = (),
    *,
    row_limit: int = ROW_LIMIT,
    timeout_s: float = TIMEOUT_S,
) -> list[dict[str, Any]]:
    """Rows of one read-only statement; StoreError if it writes, takes too long or returns too much."""
    with _asked(database, sql, timeout_s) as (con, _), _interruptible(con) as run:
        result = run(lambda: con.execute(sql, parameters) if parameters else con.execute(sql))
        rows = run(lambda: result.fetchmany(row_limit + 1))
        if len(rows) > row_limit:
            raise StoreError(
                f"the query returns more than {row_limit} rows; add LIMIT, count and group, "
                "or take all as Arrow: `spangrad sql --parquet`, `SpanStore`, `query_arrow`"
            )
        names = distinct_names([column[0] for column in result.description or ()])
        return [dict(zip(names, map(plain, row), strict=True)) for row in rows]


@contextmanager
def run_arrow_query(
    database: Database, sql: str, parameters: Parameters = (), *, timeout_s: float = ARROW_TIMEOUT_S
) -> Iterator[pa.RecordBatchReader]:
    """The answer to one read-only statement while it is computed: any number of rows, types exact.

    StoreError if it writes, or is not read to its end within `timeout_s`: until then it keeps a state of
    the file, whatever is written meanwhile.
    """
    with _asked(database, sql, timeout_s) as (con, failure), _interruptible(con) as run:
        relation = con.sql(sql, params=parameters) if parameters else con.sql(sql)
        # Of `con.execute` it would be a copy of all rows.
        reader: Any = run(lambda: relation.to_arrow_reader(_BATCH_ROWS))
        names = distinct_names(reader.schema.names)
        schema = pa.schema(
            [field.with_name(name) for field, name in zip(reader.schema, names, strict=True)],
            reader.schema.metadata,
        )

        def batches() -> Iterator[pa.RecordBatch]:
            try:
                while (batch := run(lambda: next(reader, None))) is not None:
                    yield batch.rename_columns(names)
            except OSError as error:  # DuckDB's, come through Arrow
                raise failure(error) from error

        try:
            yield pa.RecordBatchReader.from_batches(schema, batches())
        finally:
            reader.close()


@contextmanager
def _asked(
    database: Database, sql: str, timeout_s: float
) -> Iterator[tuple[duckdb.DuckDBPyConnection, Callable[[Exception], Exception]]]:
    """A connection to ask this on, and what to raise instead of an error of asking it."""
    with database.snapshot() as con:
        is_late = threading.Event()

        def stop() -> None:
            is_late.set()
            with suppress(duckdb.ConnectionException):  # closed meanwhile
                con.interrupt()

        def failure(error: Exception) -> Exception:
            if is_late.is_set():
                return StoreError(f"the query took longer than {timeout_s:g} s and was stopped; ask for less")
            if damaged_partition(str(error), database.path) is not None:
                return store_error(error, database.path)
            if isinstance(error, duckdb.Error) and not isinstance(error, _ASKERS_FAULT):
                return error
            if isinstance(error, OSError) and str(error).startswith(_FILES_FAULT):
                return store_error(error, database.path)
            return StoreError(f"{str(database.path)!r}: {' '.join(str(error).split())}")

        timer = threading.Timer(timeout_s, stop)
        timer.daemon = True  # Ctrl-C may come before it can be cancelled: the process ends all the same
        try:
            timer.start()
            _check(con, sql)
            database.partitions.unite_for(con, sql)
            yield con, failure
        except duckdb.Error as error:
            raise failure(error) from error
        finally:
            timer.cancel()


@contextmanager
def _interruptible(con: duckdb.DuckDBPyConnection) -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """Runs work so that Ctrl-C ends it: DuckDB looks for no signal, reading as Arrow or between its tasks."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda work: work()
        return
    with ThreadPoolExecutor(1) as pool:

        def run(work: Callable[[], Any]) -> Any:
            done = pool.submit(work)
            try:
                return done.result()
            except KeyboardInterrupt:
                done.cancel()
                while not done.done():  # what has not begun yet does not hear it
                    con.interrupt()
                    wait([done], timeout=_PATIENCE_S)
                raise

        yield run


def distinct_names(names: Sequence[str]) -> list[str]:
    """Names of columns, those that are the same told apart: a second `a` is `a_1`, as in DuckDB's Parquet."""
    counts: dict[str, int] = {}
    told: list[str] = []
    for name in names:
        own = name
        while own.lower() in counts:
            own = f"{name}_{counts[name.lower()]}"
            counts[name.lower()] += 1
        counts[own.lower()] = 1
        told.append(own)
    return told


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
