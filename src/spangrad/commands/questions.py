"""Commands that answer questions about a store: `spangrad sql`, `spangrad report`."""

from contextlib import suppress
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from spangrad.commands.options import (
    DEFAULT_STORE,
    JsonOption,
    KeyOption,
    StoreOption,
    opened,
    other_names,
)
from spangrad.commands.output import note, print_json, print_rows
from spangrad.errors import SpangradError, StoreError
from spangrad.store.records import DEFAULT_REWARD

if TYPE_CHECKING:
    from spangrad.store.base import Store

_ROW_GROUP_BYTES: Final = 32 * 2**20
TABLES_SQL = """
SELECT table_name AS name, CASE table_type WHEN 'VIEW' THEN 'view' ELSE 'table' END AS kind,
  table_comment AS what FROM (
    SELECT table_name, 'BASE TABLE' AS table_type, comment AS table_comment FROM duckdb_tables()
    WHERE NOT internal AND NOT temporary AND comment IS NOT NULL
    UNION ALL SELECT view_name, 'VIEW', comment FROM duckdb_views()
    WHERE NOT internal AND comment IS NOT NULL)
ORDER BY kind DESC, name
"""


def sql(
    statement: Annotated[
        str | None, typer.Argument(help="A SELECT in DuckDB's SQL. Without: the views and tables there are.")
    ] = None,
    store: StoreOption = DEFAULT_STORE,
    key: KeyOption = None,
    parquet: Annotated[
        Path | None,
        typer.Option("--parquet", help="Write the answer to this Parquet file instead, any number of rows."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Ask the store anything that can be read.

    Views answer what is asked most: steps (an agent's calls in order), tools and
    tool_errors, outcomes (rollouts with their rewards), lineage (what each update
    trained on), grades (what keeps calls from being trained). `DESCRIBE steps` names
    the columns of one.
    """
    question = statement if statement is not None else TABLES_SQL
    with opened(store, key) as asked:
        if parquet is not None:
            note(f"{_write_parquet(asked, question, parquet)} rows in {parquet}")
            return
        rows = asked.query(question)
        columns = list(rows[0]) if rows else _columns(asked, statement)
    if as_json:
        print_json(rows)
    else:
        numbers = [name for name in columns if any(_is_number(row[name]) for row in rows)]
        print_rows(columns, rows, right=numbers, may_be_blocks=True)


def report(
    store: StoreOption = DEFAULT_STORE,
    key: KeyOption = None,
    reward: Annotated[str, typer.Option("--reward", help="Name of the reward that counts.")] = DEFAULT_REWARD,
    as_json: JsonOption = False,
) -> None:
    """Say what the store's calls can train, and what to change where they were recorded to train more.

    Counts rollouts, model calls and sampled tokens by what may be trained on
    them, and names for every reason that keeps calls from a better grade what
    can be done about it.
    """
    from spangrad.adapters.report import report as report_of

    with opened(store, key) as asked:
        found = report_of(asked, reward=reward)
    if as_json:
        print_json([found.to_json()])
        return
    others = "".join(f", {count} {purpose}" for purpose, count in found.other_calls.items())
    print(
        f"{found.rollouts} rollouts, {found.rewarded_rollouts} with the trusted reward {reward!r},"
        f" {found.failed_rollouts} failed, {found.unfinished_rollouts} not ended;"
        f" {found.calls} model calls of agents{others}"
    )
    print("\nRecorded as")
    print_rows(("dialect", "grade", "calls"), list(found.dialects), right=("calls",))
    print("\nCan train")
    columns = ("objective", "needs", "rollouts", "calls", "sampled_tokens")
    can = [asdict(row) | {"sampled_tokens": row.tokens} for row in found.objectives]
    print_rows(columns, can, right=columns[2:])
    if found.reasons:
        print("\nWhat keeps calls from a better grade")
        print_rows(("calls", "reason", "advice"), [asdict(row) for row in found.reasons], right=("calls",))
    if found.unknown_calls:
        print("\nModel calls in an unknown dialect, which no count above has")
        print_rows(("calls", "scope", "example"), list(found.unknown_calls), right=("calls",))
    if left_out := found.failed_rollouts + found.unfinished_rollouts:
        note(
            f"{left_out} rollouts failed or have not ended: `export` and training take none of them, so what"
            " can train has none of their calls"
        )
    if found.other_rewards:
        note(other_names([reward], found.other_rewards))
    if found.unread_traces:
        note(
            f"{found.unread_traces} traces got spans that are not counted yet: a hub reads them when nothing"
            " came of them for some seconds; of a file, the next command that no other reader keeps from it"
        )


def _columns(store: "Store", statement: str | None) -> list[str]:
    """Names of the columns of an answer without rows, for its heading."""
    from spangrad.store.tables.query import distinct_names

    try:
        return distinct_names([str(row["column_name"]) for row in store.query(f"DESCRIBE {statement}")])
    except StoreError:  # what DESCRIBE does not take (SHOW, EXPLAIN) has no columns to name
        return []


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _write_parquet(store: "Store", question: str, path: Path) -> int:
    """Write an answer of any length, whole or not at all. Returns how many rows."""
    import pyarrow as pa  # type: ignore[import-untyped]
    from pyarrow import parquet

    part = Path(f"{path}.part")
    rows = 0
    try:
        with (
            store.query_arrow(question) as answer,
            parquet.ParquetWriter(part, answer.schema, compression="zstd") as writer,
        ):
            waiting: list[Any] = []
            for batch in chain(answer, [None]):
                if waiting and (batch is None or sum(one.nbytes for one in waiting) > _ROW_GROUP_BYTES):
                    writer.write_table(pa.Table.from_batches(waiting))
                    waiting.clear()
                if batch is not None:
                    waiting.append(batch)
                    rows += len(batch)
        part.replace(path)
    except SpangradError:
        raise
    except (OSError, pa.ArrowException) as error:
        raise StoreError(f"the answer can't be written to {str(path)!r}: {error}") from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
    return rows
