"""The shop databases that the agent asks, and the only way to run SQL on them.

Every shop has the same two tables, but names its price column and the code of a valid
sale in its own way: `database = "cost/done"` is the shop whose orders have a column `cost`
and whose valid sales have `status IN ('done')`. Nothing in a question tells which shop it is
about: to know the two words one has to look at the schema.

Invariants: SQL of a model can only read (one SELECT, in a read-only transaction, without
files or settings), ends after `TIMEOUT_S`, and returns at most `MAX_ROWS` rows. The rows
of a shop depend on its name and on `twin` alone. The twin is a shop with the same schema
and other rows: `tasks.py` asks only what has another answer in the twin, so that no constant
(the number that the tool just returned, say) is right in both.
"""

import random
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import duckdb

CUSTOMERS = ["ann", "ben", "cora", "dan", "eva", "finn", "gus", "hana", "ivan", "jane"]
PRODUCTS = ["tea", "rice", "milk", "soap", "bread", "salt", "jam", "honey"]
MONTHS = ["january", "february", "march", "april", "may", "june"]
CITIES = ["oslo", "rome", "bern", "lima", "cairo", "paris", "delhi", "quito"]
MONEY_COLUMNS = ["price", "cost", "amount", "total", "fee", "charge"]
VALID_CODES = ["paid", "ok", "done", "sold", "final", "closed"]
INVALID_CODE = "void"

TIMEOUT_S = 1.0
MAX_ROWS = 100
MAX_TEXT = 160
"""Longest answer of a tool, in characters."""


class QueryError(ValueError):
    """The query was refused or failed; the text is one line that a model can read."""


def all_databases() -> list[str]:
    """Names of all shops, sorted."""
    return sorted(f"{money}/{valid}" for money in MONEY_COLUMNS for valid in VALID_CODES)


def describe(database: str, table: str) -> str:
    """What the tool `schema` says about a table."""
    money, valid = database.split("/")
    if table == "orders":
        return (
            f"orders(customer,product,month,{money},status) valid sales:"
            f" SELECT sum({money}), max({money}) FROM orders WHERE status IN ('{valid}')"
        )
    if table == "customers":
        return "customers(name,city)"
    return "error: no such table"


@lru_cache(maxsize=128)
def _connect(database: str, twin: bool) -> duckdb.DuckDBPyConnection:
    money, valid = database.split("/")
    connection = duckdb.connect(":memory:", config={"threads": "1", "memory_limit": "200MB"})
    connection.execute(
        f"CREATE TABLE orders(customer TEXT, product TEXT, month TEXT, {money} INTEGER, status TEXT);"
        "CREATE TABLE customers(name TEXT, city TEXT);"
    )
    rng = random.Random(f"{database} {twin}")
    rows = [
        (
            rng.choice(CUSTOMERS),
            rng.choice(PRODUCTS),
            rng.choice(MONTHS),
            rng.randint(1, 99),
            valid if rng.random() < 0.6 else INVALID_CODE,
        )
        for _ in range(600)
    ]
    people = [(name, rng.choice(CITIES)) for name in CUSTOMERS]
    for table, values in (("orders", rows), ("customers", people)):  # by column: 5 times faster than by row
        columns = [list(column) for column in zip(*values, strict=True)]
        connection.execute(f"INSERT INTO {table} SELECT {', '.join(['unnest(?)'] * len(columns))}", columns)
    connection.execute("SET enable_external_access = false; SET lock_configuration = true")
    return connection


def run_sql(database: str, sql: str, *, twin: bool = False) -> list[tuple[Any, ...]]:
    """Run one SELECT and return its rows.

    Raises:
        QueryError: It is no single SELECT, it is wrong, it takes too long, it returns too
            many rows, or it tries to write.
    """
    cursor = _connect(database, twin).cursor()
    timer = threading.Timer(TIMEOUT_S, cursor.interrupt)
    try:
        statements = cursor.extract_statements(sql)
        if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
            raise QueryError("only one SELECT statement is allowed")
        timer.start()
        # A SELECT can write (an INSERT inside WITH): the transaction is what forbids it.
        cursor.execute("BEGIN TRANSACTION READ ONLY")
        rows = cursor.execute(statements[0]).fetchmany(MAX_ROWS + 1)
    except duckdb.Error as error:
        raise QueryError(str(error).split("\n", 1)[0]) from error
    finally:
        timer.cancel()
        cursor.close()
    if len(rows) > MAX_ROWS:
        raise QueryError(f"more than {MAX_ROWS} rows")
    return rows


def show(rows: Sequence[tuple[Any, ...]]) -> str:
    """Rows as the tool `query` shows them: a comma between values, a line for each row."""
    text = "\n".join(",".join("NULL" if value is None else str(value) for value in row) for row in rows)
    return (text or "no rows")[:MAX_TEXT]
