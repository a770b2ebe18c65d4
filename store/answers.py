"""A question to a store, and its answer in the form that a notebook wants.

Knows Arrow; knows no table and no file. Invariants:

* asked when the answer is first looked at, and once: what was shown is what is converted;
* values are exact: whole numbers of 64 bits with and without NULLs, decimals, lists, nanoseconds (`rows`
  and what is shown have microseconds, as `datetime` has no more);
* what is shown is text: no markup in a trace takes effect.
"""

import html
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa  # type: ignore[import-untyped]

from spangrad.errors import MissingExtraError, StoreError
from spangrad.store.base import Store
from spangrad.store.names import is_known, known_names, unknown

if TYPE_CHECKING:
    import pandas
    import polars

_ROWS_SHOWN: Final = 20
_LONGEST_CELL: Final = 48

Names = Sequence[tuple[str, str, str]]
"""(table, column, name): what must be there if the answer is empty."""


class Query:
    """A question to a store. Its answer is fetched when it is first needed; ask anew for a newer one."""

    def __init__(
        self,
        opened: Callable[[], AbstractContextManager[Store]],
        sql: str,
        parameters: Sequence[Any] | Mapping[str, Any] = (),
        *,
        where: str,
        names: Names = (),
    ) -> None:
        """Nothing is asked yet.

        Args:
            opened: Opens the store for as long as an answer is fetched.
            sql: The statement.
            parameters: Its values.
            where: What the store is called in errors.
            names: What the question names; of an empty answer those that the store does not know are told.
        """
        self.sql = sql
        self.parameters = parameters
        self._opened = opened
        self._where = where
        self._names = names
        self._table: pa.Table | None = None

    def to_arrow(self) -> pa.Table:
        """The answer as a `pyarrow.Table`.

        Raises:
            StoreError: The store refused, or the question names what is not in it.
        """
        if self._table is None:
            with self._opened() as store:
                with store.query_arrow(self.sql, self.parameters) as reader:
                    table = reader.read_all()
                if not table.num_rows:
                    self._check_names(store)
            self._table = table
        return self._table

    def to_pandas(self) -> "pandas.DataFrame":
        """The answer as a DataFrame; whole numbers and booleans are of pandas' types that know NULL.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        frames = _imported("pandas", "to_pandas")
        types = {pa.bool_(): frames.BooleanDtype()}
        for bits in (8, 16, 32, 64):
            types[getattr(pa, f"int{bits}")()] = getattr(frames, f"Int{bits}Dtype")()
            types[getattr(pa, f"uint{bits}")()] = getattr(frames, f"UInt{bits}Dtype")()
        frame: pandas.DataFrame = self.to_arrow().to_pandas(types_mapper=types.get)
        return frame

    def to_polars(self) -> "polars.DataFrame":
        """The answer as a Polars DataFrame.

        Raises:
            MissingExtraError: Polars is not installed.
        """
        frame: polars.DataFrame = _imported("polars", "to_polars").from_arrow(self.to_arrow())
        return frame

    def rows(self) -> list[dict[str, Any]]:
        """The answer as dicts of Python values."""
        return _rows(self.to_arrow())

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The rows."""
        return iter(self.rows())

    def __len__(self) -> int:
        """How many rows there are."""
        return int(self.to_arrow().num_rows)

    def __repr__(self) -> str:
        """The first rows as a table; not more than these are fetched."""
        columns, rows, count = self._shown()
        widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in (columns, *rows)
        ]
        return "\n".join([*lines, count])

    def _repr_html_(self) -> str:
        columns, rows, count = self._shown()
        head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
        body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table><p>{count}</p>"

    def _shown(self) -> tuple[list[str], list[list[str]], str]:
        """Headings, cells of the first rows, and how many rows there are."""
        table = self._head() if self._table is None else self._table
        first = table.slice(0, _ROWS_SHOWN)
        rows = [[_text(value) for value in row.values()] for row in _rows(first)]
        if table.num_rows <= _ROWS_SHOWN:
            count = "1 row" if table.num_rows == 1 else f"{table.num_rows} rows"
        elif self._table is None:
            count = f"the first {_ROWS_SHOWN} rows"
        else:
            count = f"the first {_ROWS_SHOWN} of {table.num_rows} rows"
        return [_text(name) for name in first.schema.names], rows, count

    def _head(self) -> pa.Table:
        """Enough rows to be shown. The whole answer, if it is not longer, is kept."""
        batches: list[pa.RecordBatch] = []
        with self._opened() as store:
            with store.query_arrow(self.sql, self.parameters) as reader:
                is_whole = True
                for batch in reader:
                    batches.append(batch)
                    if sum(map(len, batches)) > _ROWS_SHOWN:
                        is_whole = False
                        break
                table = pa.Table.from_batches(batches, reader.schema)
            if not table.num_rows:
                self._check_names(store)
        if is_whole:
            self._table = table
        return table

    def _check_names(self, store: Store) -> None:
        for table, column, name in self._names:
            if not is_known(store, table, column, name):
                known = known_names(store, table, column, name)
                raise StoreError(unknown(column, name, self._where, known))


def _rows(table: pa.Table) -> list[dict[str, Any]]:
    for index, field in enumerate(table.schema):
        if pa.types.is_timestamp(field.type) and field.type.unit == "ns":
            micro = table.column(index).cast(pa.timestamp("us", field.type.tz), safe=False)
            table = table.set_column(index, field.name, micro)
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


def _text(value: Any) -> str:
    if value is None:
        return "-"
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    short = text if len(text) <= _LONGEST_CELL else text[: _LONGEST_CELL - 1] + "…"
    return "".join(character if character.isprintable() else " " for character in short)


def _imported(name: str, method: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise MissingExtraError(
            f"{method} needs {name}, which is not installed; "
            "install it with `pip install 'spangrad[notebook]'`"
        ) from error
