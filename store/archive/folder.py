"""The files of an archive: written whole, removed when nothing names them.

Knows files and the table `archives`; knows no rows. A change of the archive is one transaction of the
database, with files around it:

    note the files in `unfinished` -> write the new ones -> commit -> remove what `archives` does not name

Invariants: a file that `archives` names is whole and on disk; after `tidy`, which whoever opens the store to
write calls, no file is left that a change wrote or dropped; other files in the folder are let be.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import TYPE_CHECKING, Final

import duckdb

from spangrad.errors import StoreError
from spangrad.store.archive.partitions import literal
from spangrad.store.migrations import SCHEMA_VERSION
from spangrad.store.schema import Table

if TYPE_CHECKING:
    from spangrad.store.tables.database import Database

_UNFINISHED: Final = "unfinished"
_ROW_GROUP: Final = 8192
"""Rows that are read or passed over together: one rollout is some dozens, and a span has kilobytes."""


@dataclass(frozen=True, slots=True)
class File:
    """One file of the archive: a row of `archives`."""

    file: str
    """Path below the archive's folder."""
    part: int
    table_name: str
    day: str
    schema_version: int
    row_count: int
    size_bytes: int
    checksum: str


@contextmanager
def change(database: "Database", files: Sequence[str]) -> Iterator[None]:
    """A change of the archive that may write these files, or drop them; the block is its transaction."""
    folder = database.partitions.folder
    folder.mkdir(parents=True, exist_ok=True)
    note = folder / _UNFINISHED
    temporary = _temporary(note)
    temporary.write_text("".join(f"{file}\n" for file in files))
    sync(temporary)
    temporary.replace(note)
    sync(folder)
    sync(folder.parent)
    try:
        yield
    finally:
        with database.snapshot() as con:
            tidy(con, folder)


def tidy(con: duckdb.DuckDBPyConnection, folder: Path) -> None:
    """Remove what the last change left that is not in `archives`."""
    note = folder / _UNFINISHED
    _temporary(note).unlink(missing_ok=True)
    if not note.exists():
        return
    named = {file for (file,) in con.execute("SELECT file FROM archives").fetchall()}
    for file in note.read_text().splitlines():
        path = folder / file
        _temporary(path).unlink(missing_ok=True)
        if file not in named:
            path.unlink(missing_ok=True)
        with suppress(OSError):  # not empty, or not there
            path.parent.rmdir()
    sync(folder)
    note.unlink()
    sync(folder)
    with suppress(OSError):
        folder.rmdir()


def write(
    con: duckdb.DuckDBPyConnection, select: str, folder: Path, table: Table, day: str, part: int
) -> File | None:
    """Write the rows of a SELECT to a file of a partition, whole and on disk; None if there are none."""
    name = file_name(table, day, part)
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    temporary = _temporary(path)
    ((rows,),) = con.execute(
        f"COPY ({select}) TO {literal(str(temporary))} "
        f"(FORMAT parquet, COMPRESSION zstd, ROW_GROUP_SIZE {_ROW_GROUP}, USE_TMP_FILE false)"
    ).fetchall()
    if not rows:
        temporary.unlink()
        return None
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)
    sync(folder)
    return File(name, part, table.name, day, SCHEMA_VERSION, rows, path.stat().st_size, checksum(path))


def file_name(table: Table, day: str, part: int) -> str:
    """Path of a file below the archive's folder."""
    return f"day={day}/{table.name}-{part}.parquet"


def check(folder: Path, file: str, expected: str) -> None:
    """Raise StoreError if a file is not what was written."""
    if not _is_whole(folder / file, expected):
        raise StoreError(
            f"{str(folder / file)!r} is gone, or is not what `spangrad archive` wrote: put it back from a "
            "copy; nothing was changed"
        )


def damaged(con: duckdb.DuckDBPyConnection, folder: Path) -> dict[str, int]:
    """Files that are gone or not what was written, each with the number of its partition; reads all."""
    named = con.execute("SELECT file, part, checksum FROM archives ORDER BY part, file").fetchall()
    return {
        str(folder / file): part for file, part, expected in named if not _is_whole(folder / file, expected)
    }


def _is_whole(path: Path, expected: str) -> bool:
    try:
        return checksum(path) == expected
    except OSError:  # also a disk that can't read it
        return False


def checksum(path: Path) -> str:
    """BLAKE2b-128 of a file, hex."""
    with path.open("rb") as file:
        return file_digest(file, lambda: blake2b(digest_size=16)).hexdigest()


def sync(path: Path) -> None:
    """Have a file's or a folder's state on disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _temporary(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")
