"""How listings are printed: a table on a terminal, tab-separated lines elsewhere, JSON lines on request.

Knows rows as dicts. Text of a trace is printed as text: no markup and no terminal codes in it take effect.
"""

import base64
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

LONGEST_ID = 20
"""Characters of a word in a table that is too wide for the terminal."""
READABLE = 8
"""Characters that a column needs, if it has so many."""
_PADDING = 2


def print_json(rows: Iterable[Mapping[str, Any]]) -> None:
    """Print one JSON object a line; NaN and infinity are text (`"NaN"`, `"-Infinity"`), bytes base64."""
    for row in rows:
        print(json.dumps(_plain(row), allow_nan=False, default=str))


def print_rows(
    columns: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    *,
    right: Sequence[str] = (),
    names: Sequence[str] = (),
    may_be_blocks: bool = False,
) -> None:
    """Print the named columns of rows; what is not known is `-`.

    Args:
        columns: Keys of the rows, also the headings.
        rows: What to print.
        right: Columns to align on the right.
        names: Columns called what a user would type: their underscores stay in the heading.
        may_be_blocks: Print lines `column: value` for each row where a terminal has no width for a table.
    """
    if not columns:
        return
    if not sys.stdout.isatty():
        print("\t".join(columns))
        for row in rows:
            print("\t".join(cell(row.get(column)) for column in columns))
        return
    console = Console()
    if may_be_blocks and rows and _least_width(columns, rows) > console.width:
        _print_blocks(console, columns, rows)
        return
    table = _table(columns, rows, right, names, cell)
    if console.measure(table).maximum > console.width:
        table = _table(columns, rows, right, names, lambda value: _short(cell(value)))
    console.print(table)


def _least_width(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> int:
    """Characters that a table takes in which every column can be read."""
    longest = (max(len(column), *(len(cell(row.get(column))) for row in rows)) for column in columns)
    return sum(min(width, READABLE) + _PADDING for width in longest)


def _print_blocks(console: Console, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    for number, row in enumerate(rows, 1):
        console.print(Text(f"row {number}", style="bold"))
        for column in columns:
            console.print(Text(f"{cell(column)}: {cell(row.get(column))}"), soft_wrap=True)


def _table(
    columns: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    right: Sequence[str],
    names: Sequence[str],
    text_of: Callable[[Any], str],
) -> Table:
    table = Table(box=None, padding=(0, _PADDING, 0, 0), header_style="bold", pad_edge=False)
    for column in columns:
        side: Literal["left", "right"] = "right" if column in right else "left"
        heading = Text(column if column in names else column.replace("_", " "))
        table.add_column(heading, justify=side, overflow="fold")
    for row in rows:
        table.add_row(*(Text(text_of(row.get(column))) for column in columns))
    return table


def _short(text: str) -> str:
    """A long id with its middle left out; `--json` and pipes have all of it."""
    if len(text) <= LONGEST_ID or " " in text:
        return text
    half = LONGEST_ID // 2
    return f"{text[:half]}…{text[-half:]}"


def note(text: str) -> None:
    """Say something about a listing, in one line, without mixing it into the listing."""
    print(cell(text), file=sys.stderr)


def cell(value: Any) -> str:
    """One value as one line of printable text."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    if isinstance(value, list | tuple):
        return ", ".join(cell(entry) for entry in value)
    text = value if isinstance(value, str) else str(value)
    return "".join(character if character.isprintable() else " " for character in text)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else _word(value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value


def _word(value: float) -> str:
    """What JSON has no number for, as protobuf's JSON and OTLP write it."""
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on standard error, moved by (done, in all); None where that is no terminal."""
    with step_bar(what) as bar:
        yield None if bar is None else lambda done, total: bar(what, done, total)


@contextmanager
def step_bar(what: str = "") -> Iterator[Callable[[str, int, int], None] | None]:
    """A bar for several steps, moved by (what is done, done, in all); None where that is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda step, done, total: bar.update(task, description=step, completed=done, total=total)
