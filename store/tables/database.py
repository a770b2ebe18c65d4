"""The DuckDB file: opening, locking, transactions, and errors in our own words.

Knows connections; knows no table. Invariants:

* one writer: a process-wide register and DuckDB's own file lock see to it;
* a write is inside `transaction()`: when the block has ended it is on disk (DuckDB syncs
  its log at commit), when it raised there is nothing of it;
* an error that is none of the caller's doing is one of `OUTAGES`;
* somebody else's database is refused and left as it is;
* opened for reading, a file is not changed: a log that a killed writer left is replayed in memory;
* SQL can't reach files or the network, but for the store's archive: external access is off and can't be
  turned on.
"""

import errno
import fcntl
import os
import re
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import duckdb

from spangrad.errors import (
    DatabaseFailedError,
    SchemaVersionError,
    StoreError,
    StoreFullError,
    StoreLockedError,
)
from spangrad.store.archive.folder import tidy
from spangrad.store.archive.partitions import Partitions, archive_folder, literal
from spangrad.store.hub_address import hub_of
from spangrad.store.migrations import SCHEMA_VERSION, check_version, is_empty, migrate

THREADS = 4
MEMORY_LIMIT = "4GB"
KEPT = "32MB"
"""Of the file, in memory, when nobody reads it: DuckDB would keep all it has written, up to the limit."""
WRITES_TENDED = 8
"""Writes after which the rest is given back."""
MERGING_FOLD = 32
"""Of so many times that a log is folded into the file, row groups are merged in one."""
STOP_S = 5.0

_opened: set[Path] = set()
_opened_lock = threading.Lock()

_FULL = ("no space left", "file too large", "disk quota exceeded")
_FOREIGN = ("not a valid duckdb database", "is an existing extension. install it first")
_DAMAGED = ("corrupt database file", "could not read enough bytes")
_PARQUET = re.compile(r"""file ['"]([^'"]+\.parquet)['"]""", re.IGNORECASE)
_UNFIT = (duckdb.DataError, duckdb.IntegrityError, duckdb.NotSupportedError, duckdb.InvalidInputException)
"""What DuckDB says of values that it can't take; anything else is the file's, the disk's or the memory's."""


OUTAGES: Final = (DatabaseFailedError, StoreFullError, StoreLockedError)
"""Errors that say nothing of what was to be stored: keep it, and try again."""


class Database:
    """One open store file."""

    def __init__(self, path: str | os.PathLike[str], *, read_only: bool) -> None:
        """Open (and, for writing, create and migrate) the file."""
        self.path = Path(path).absolute()
        self.read_only = read_only
        self.is_invalidated = False
        """DuckDB met a fatal error: nothing works until the file is opened anew."""
        self._lock = threading.RLock()
        self._cursors: weakref.WeakSet[duckdb.DuckDBPyConnection] = weakref.WeakSet()
        self._is_closed = False
        self._last_stamp = 0
        self._writes = 0
        self._folds = 0
        self._folded_ns = 0
        """When the file itself was written last: each fold of the log does that."""
        self.partitions = Partitions(self.path)
        _check_path(self.path, read_only)
        _register(self.path)
        try:
            if not read_only:
                _remove_empty(self.path)
            is_new = not self.path.exists()
            try:
                self._con = _connect(self.path, read_only)
            except StoreFullError:
                if is_new:  # less than a database: nobody could open it ever after
                    self.path.unlink(missing_ok=True)
                raise
        except BaseException:
            _unregister(self.path)
            raise
        try:
            self._prepare()
        except BaseException:
            self.close()
            raise

    def _prepare(self) -> None:
        try:
            version = check_version(self._con, self.path.name)
            if version == 0 and (self.read_only or not is_empty(self._con)):
                raise StoreError(f"{str(self.path)!r} is a database, but no spangrad store; check the path")
            if not self.read_only:
                migrate(self._con, self.path.name)
            elif version < SCHEMA_VERSION:
                raise SchemaVersionError(
                    f"{self.path.name!r} has schema {version}, this spangrad reads {SCHEMA_VERSION}; "
                    "open it once without read_only=True to bring it up to date"
                )
            self._con.execute("SET allowed_configs = ['memory_limit', 'max_vacuum_tasks']")  # `_tend`
            self._con.execute("SET lock_configuration = true")
            if not self.read_only:
                new_file(self.path).unlink(missing_ok=True)  # of a process that was killed
                tidy(self._con, self.partitions.folder)
            self.partitions.look(self._con)
            self._folded_ns = self.path.stat().st_mtime_ns
        except (duckdb.Error, OSError) as error:
            raise store_error(error, self.path) from error
        except RuntimeError as error:
            raise _interrupted(error) from error

    @contextmanager
    def transaction(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """Write: commits when the block ends, rolls back when it raises. One at a time."""
        self.check_writable()
        with self._lock:
            self._check_open()
            try:
                self._con.begin()
                try:
                    yield self._con
                    self._con.commit()
                except BaseException:
                    self._rollback()
                    raise
                self._tend()
            except (duckdb.Error, OSError) as error:
                raise self._error(error) from error
            except RuntimeError as error:
                raise _interrupted(error) from error

    def _tend(self) -> None:
        """What is due now and then, after a write that is on disk: none of it may fail the write."""
        self._writes += 1
        if self._writes % WRITES_TENDED:
            return
        with suppress(duckdb.Error, OSError):
            self._choose_merging()
        if self._cursors:  # who reads would be in want of memory meanwhile
            return
        with suppress(duckdb.Error):
            try:
                self._con.execute(f"SET memory_limit = '{KEPT}'")  # refused where it needs more
            finally:
                self._con.execute(f"SET memory_limit = '{MEMORY_LIMIT}'")

    def _choose_merging(self) -> None:
        """Whether the next fold merges row groups, and takes out deleted rows.

        The first one of an opening does: many that wrote little may have been there before. Of one that
        writes much each fold is a part of a good size, and merging would write the text of all of them again.
        """
        written_ns = self.path.stat().st_mtime_ns
        if written_ns == self._folded_ns:
            return
        self._folded_ns = written_ns
        self._folds += 1
        merges = self._folds % MERGING_FOLD == 0
        self._con.execute("RESET max_vacuum_tasks" if merges else "SET max_vacuum_tasks = 0")

    @contextmanager
    def snapshot(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """Read: one consistent state, beside a running write; any number at a time."""
        self._check_open()
        with self._lock:
            cursor = self._con.cursor()
            self._cursors.add(cursor)
        try:
            cursor.execute("BEGIN TRANSACTION READ ONLY")
            yield cursor
        except duckdb.Error as error:
            raise self._error(error) from error
        except RuntimeError as error:
            raise _interrupted(error) from error
        finally:
            with self._lock:
                self._cursors.discard(cursor)
                cursor.close()

    def stamp(self) -> int:
        """Unix time, ns, later than all that were given before, whatever the clock does; in a transaction."""
        self._last_stamp = max(time.time_ns(), self._last_stamp + 1)
        return self._last_stamp

    def check_writable(self) -> None:
        """Raise StoreError if the file was opened for reading."""
        if self.read_only:
            raise StoreError(f"{str(self.path)!r} was opened with read_only=True; open it without to write")

    def close(self) -> None:
        """Fold the log into the file and release it. Harmless when repeated."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            for cursor in list(self._cursors):
                _stop(cursor)
            self._con.close()
            _unregister(self.path)

    def _rollback(self) -> None:
        try:
            self._con.rollback()
        except duckdb.Error:
            # A commit that failed has rolled back already.
            return

    def _error(self, error: Exception) -> StoreError:
        if isinstance(error, duckdb.FatalException):
            self.is_invalidated = True
        return store_error(error, self.path)

    def _check_open(self) -> None:
        if self._is_closed:
            raise DatabaseFailedError(f"{str(self.path)!r} is closed; open it again")


def _interrupted(error: RuntimeError) -> BaseException:
    """Ctrl-C, for which DuckDB has an error of its own; any other error is given back."""
    return KeyboardInterrupt() if str(error) == "Query interrupted" else error


def _stop(cursor: duckdb.DuckDBPyConnection) -> None:
    """Close a cursor that another thread may be using, which DuckDB refuses while it is."""
    deadline = time.monotonic() + STOP_S
    while True:
        cursor.interrupt()
        try:
            cursor.close()
            return
        except duckdb.Error:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.005)


def store_error(error: Exception, path: Path) -> StoreError:
    """The same failure as an error of ours that says what to do."""
    text = " ".join(str(error).split())
    name = str(path)
    is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    if is_full or any(phrase in text.lower() for phrase in _FULL):
        return StoreFullError(
            f"no space left to write {name!r}, nothing of this write was stored; "
            f"free space and try again ({text})"
        )
    if "could not set lock" in text.lower():
        holder = re.search(r"PID (\d+)", text)
        return _locked(name, holder.group(1) if holder else "unknown")
    if (file := damaged_partition(text, path)) is not None:
        return StoreError(
            f"{file!r} of the archive is damaged or cut short: put it back from a copy; its rollouts"
            f" can't be read until then ({text.split(' LINE ')[0]})"
        )
    if any(phrase in text.lower() for phrase in _FOREIGN):
        return StoreError(f"{name!r} is no DuckDB database, so no spangrad store; check the path")
    if "replaying wal" in text.lower():
        return DatabaseFailedError(
            f"the log of {name!r} is damaged; move '{name}.wal' aside, open the store again, "
            f"and send the last spans anew ({text})"
        )
    if any(phrase in text.lower() for phrase in _DAMAGED):
        return DatabaseFailedError(
            f"{name!r} is damaged or cut short; put a copy in its place, "
            f"or move it aside to begin a new store ({text})"
        )
    return (StoreError if isinstance(error, _UNFIT) else DatabaseFailedError)(f"{name!r}: {text}")


def damaged_partition(text: str, path: Path) -> str | None:
    """The file of a store's archive that DuckDB says it could not read."""
    file = _PARQUET.search(text)
    is_ours = file is not None and Path(file.group(1)).is_relative_to(archive_folder(path))
    return file.group(1) if file is not None and is_ours else None


def _locked(name: str, pid: Any) -> StoreLockedError:
    if (url := hub_of(name, str(pid))) is not None:
        return StoreLockedError(
            f"{name!r} is served by the hub at {url} (process {pid}); use that address instead of the path"
            f" (`--store {url}`, with --key if the hub has keys), or stop the hub"
        )
    return StoreLockedError(
        f"{name!r} is held by process {pid}; stop it, or if it is a hub, "
        "use the hub's URL instead of the path"
    )


def _check_path(path: Path, read_only: bool) -> None:
    if path.is_dir():
        raise StoreError(f"{str(path)!r} is a folder; a store is one file, such as 'spans.duckdb'")
    if path.exists():
        if read_only and path.is_file() and path.stat().st_size == 0:
            raise StoreError(f"{str(path)!r} is an empty file, no spangrad store; check the path")
        return
    if read_only:
        raise StoreError(f"there is no store at {str(path)!r}; check the path")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise store_error(error, path) from error


def _remove_empty(path: Path) -> None:
    """Remove a file without a byte, which a full disk leaves and DuckDB can't open.

    DuckDB's own lock tells whether another process is just about to fill it.
    """
    file = path.resolve()
    if not file.is_file() or file.stat().st_size or path.with_name(path.name + ".wal").exists():
        return
    try:
        with file.open("r+b") as opened:
            fcntl.lockf(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(opened.fileno()).st_size == 0:
                file.unlink()
    except BlockingIOError:
        return  # connecting names the holder
    except OSError as error:
        raise store_error(error, path) from error


def _connect(path: Path, read_only: bool) -> duckdb.DuckDBPyConnection:
    config: dict[str, Any] = {
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
        "python_enable_replacements": False,
        "threads": min(THREADS, os.cpu_count() or 1),
        "memory_limit": MEMORY_LIMIT,
    }
    try:
        con = duckdb.connect(str(path), read_only=read_only, config=config)
        con.execute(f"SET allowed_directories = [{literal(str(archive_folder(path)))}]")
        con.execute("SET enable_external_access = false")
        return con
    except (duckdb.Error, OSError) as error:
        raise store_error(error, path) from error
    except RuntimeError as error:
        raise _interrupted(error) from error


def _register(path: Path) -> None:
    with _opened_lock:
        if path.resolve() in _opened:
            raise _locked(str(path), f"{os.getpid()} (this one)")
        _opened.add(path.resolve())


def _unregister(path: Path) -> None:
    with _opened_lock:
        _opened.discard(path.resolve())


@contextmanager
def registered(path: Path) -> Iterator[None]:
    """Keep other `Database`s of this process away from a file: DuckDB's lock is for other processes."""
    _register(path)
    try:
        yield
    finally:
        _unregister(path)


def wal_file(path: Path) -> Path:
    """DuckDB's log of a file."""
    return path.with_name(path.name + ".wal")


def new_file(path: Path) -> Path:
    """Where a store's file is written anew before it takes the old one's place."""
    return path.with_name(path.name + ".rewriting")
