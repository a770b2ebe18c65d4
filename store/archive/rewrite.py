"""A store's file written anew, with nothing but what is in it.

DuckDB keeps the blocks of deleted rows: the file does not shrink, and their bytes stay in it. Knows files and
DuckDB's locks; knows no table. Invariants:

* a process that is killed at any moment leaves the old file or the new one, whole;
* nobody writes meanwhile: the old file stays locked until the new one is in its place;
* there is room for both before anything is written, and no log is left.
"""

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import duckdb

from spangrad.errors import StoreFullError
from spangrad.store.archive.folder import sync
from spangrad.store.archive.partitions import literal
from spangrad.store.tables.database import (
    MEMORY_LIMIT,
    Database,
    new_file,
    registered,
    store_error,
    wal_file,
)

SPARE_BYTES: Final = 64 * 2**20
"""Room on the disk beyond the new file: its log, before it is folded in."""
_LOOK_S: Final = 0.2

Progress = Callable[[str, int, int], None]
"""Told what is being done, and how much of it is done of how much."""


def has_holes(database: Database) -> bool:
    """Whether more than a quarter of the file is free: what was deleted, by a move that was killed, say."""
    with database.snapshot() as con:
        total, free = con.execute("SELECT total_blocks, free_blocks FROM pragma_database_size()").fetchall()[
            0
        ]
    return bool(free * 4 > total)


def rewrite(path: str | os.PathLike[str], *, progress: Progress | None = None) -> tuple[int, int]:
    """Write a store's file anew. Returns its size in bytes before and after.

    Raises StoreLockedError if another process writes to it, StoreFullError if there is no room for another.
    """
    file = Path(path).resolve()
    before = file.stat().st_size
    new, spill = new_file(file), file.with_name(file.name + ".tmp")
    with registered(file):
        _remove(new)
        try:
            _fold_log(file)
            config: dict[str, Any] = {"memory_limit": MEMORY_LIMIT, "temp_directory": str(spill)}
            with duckdb.connect(config=config) as con:
                con.execute(
                    f"ATTACH {literal(str(file))} AS old (READ_ONLY)"
                )  # others can't write from here on
                _copy(con, file, new, progress)
                shutil.copymode(file, new)
                sync(new)
                new.replace(file)
                sync(file.parent)
        except (duckdb.Error, OSError) as error:
            raise store_error(error, file) from error
        finally:
            _remove(new)
            shutil.rmtree(spill, ignore_errors=True)  # also what a killed process left there
    return before, file.stat().st_size


def _fold_log(file: Path) -> None:
    while wal_file(file).exists():
        with duckdb.connect(str(file)) as con:
            con.execute("CHECKPOINT")


def _copy(con: duckdb.DuckDBPyConnection, file: Path, new: Path, progress: Progress | None) -> None:
    sizes = con.execute(
        "SELECT block_size * used_blocks FROM pragma_database_size() WHERE database_name = 'old'"
    ).fetchall()
    needed, room = int(sizes[0][0]), shutil.disk_usage(file.parent).free
    if needed + SPARE_BYTES > room:
        raise StoreFullError(
            f"{str(file)!r} can't be written anew: {needed + SPARE_BYTES} bytes are needed beside it and "
            f"{room} are free; free space and run the same again"
        )
    con.execute(f"ATTACH {literal(str(new))} AS fresh")
    with _watched(new, needed, progress):
        con.execute("COPY FROM DATABASE old TO fresh")
        con.execute("CHECKPOINT fresh")
    con.execute("DETACH fresh")


@contextmanager
def _watched(new: Path, needed: int, progress: Progress | None) -> Iterator[None]:
    if progress is None:
        yield
        return
    is_done = threading.Event()

    def watch() -> None:
        while not is_done.wait(_LOOK_S):
            with suppress(OSError):
                progress("writing the file anew", min(new.stat().st_size, needed), needed)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join()


def _remove(new: Path) -> None:
    for file in (new, wal_file(new)):
        file.unlink(missing_ok=True)
