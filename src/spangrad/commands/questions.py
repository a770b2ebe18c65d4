"""Commands that answer questions about a store: `spangrad sql`, `spangrad report`."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spangrad.commands.options import (
    DEFAULT_STORE,
    JsonOption,
    KeyOption,
    RewardOption,
    StoreOption,
    opened,
    other_names,
)
from spangrad.commands.output import note, print_json, print_rows
from spangrad.errors import StoreError
from spangrad.store.records import DEFAULT_REWARD

if TYPE_CHECKING:
    from spangrad.store.base import Store

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
        Path | None, typer.Option("--parquet", help="Write the answer to this Parquet file instead.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Ask the store anything that can be read.

    Views answer what is asked most: steps (an agent's calls in order), tools and
    tool_errors, outcomes (rollouts with their rewards), lineage (what each update
    trained on), grades (what keeps calls from being trained). `DESCRIBE steps` names
    the columns of one.
    """
    with opened(store, key) as asked:
        rows = asked.query(statement if statement is not None else TABLES_SQL)
        columns = list(rows[0]) if rows else _columns(asked, statement)
    if parquet is not None:
        _write_parquet(rows, columns, parquet)
        note(f"{len(rows)} rows in {parquet}")
    elif as_json:
        print_json(rows)
    else:
        numbers = [name for name in columns if any(_is_number(row[name]) for row in rows)]
        print_rows(columns, rows, right=numbers)


def report(
    store: StoreOption = DEFAULT_STORE,
    key: KeyOption = None,
    reward: RewardOption = DEFAULT_REWARD,
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
        f" {found.failed_rollouts} failed; {found.calls} model calls of agents{others}"
    )
    print("\nRecorded as")
    print_rows(("dialect", "grade", "calls"), list(found.dialects), right=("calls",))
    print("\nCan train")
    columns = ("objective", "needs", "rollouts", "calls", "sampled_tokens")
    print_rows(columns, [asdict(row) for row in found.objectives], right=columns[2:])
    if found.reasons:
        print("\nWhat keeps calls from a better grade")
        print_rows(("calls", "reason", "advice"), [asdict(row) for row in found.reasons], right=("calls",))
    if found.other_rewards:
        note(other_names(reward, found.other_rewards))
    if found.unread_traces:
        note(
            f"{found.unread_traces} traces got spans that are not counted yet: a hub reads them when nothing"
            " came of them for some seconds; of a file, the next command that no other reader keeps from it"
        )


def _columns(store: "Store", statement: str | None) -> list[str]:
    """Names of the columns of an answer without rows, for its heading."""
    try:
        return [str(row["column_name"]) for row in store.query(f"DESCRIBE {statement}")]
    except StoreError:  # what DESCRIBE does not take (SHOW, EXPLAIN) has no columns to name
        return []


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _write_parquet(rows: Sequence[dict[str, Any]], columns: Sequence[str], path: Path) -> None:
    import pyarrow as pa  # type: ignore[import-untyped]
    from pyarrow import parquet

    try:
        table = pa.table({name: pa.array([row[name] for row in rows]) for name in columns})
        parquet.write_table(table, path, compression="zstd")
    except (OSError, pa.ArrowException) as error:
        raise StoreError(f"the answer can't be written to {str(path)!r}: {error}") from error
