"""Opening a store's file for reading, with all that waits to be taken in; any number of processes can.

Knows who may write when. Does not know what is done with spans that nobody has read yet.
"""

import fcntl
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from spangrad.errors import SchemaVersionError, StoreLockedError
from spangrad.store.file_store import FileStore, spool_folder

logger = logging.getLogger(__name__)


def open_to_read(
    path: str | os.PathLike[str], *, read_traces: Callable[[FileStore], object] | None = None
) -> FileStore:
    """Open a store for reading, with all that tracers have left beside it.

    The file is written only to take that in, to bring a store of an older spangrad up to date, and, with
    `read_traces`, to have unread traces read. While another reader has it, what was left waits, and a warning
    says so.

    Raises StoreLockedError if another process writes to it, StoreError if there is no store.
    """
    file = Path(path).absolute()
    with _one_at_a_time(file.parent):
        is_waiting = _has_spooled(spool_folder(file))
        store = None if is_waiting else _readable(file)
        if store is not None:
            if read_traces is None or not os.access(file, os.W_OK) or not store.unread_traces(limit=1):
                return store
            store.close()
        try:
            with FileStore(file) as writable:
                if read_traces is not None:
                    read_traces(writable)
        except StoreLockedError:
            store = FileStore(file, read_only=True)  # raises if it is a writer that has it
            logger.warning(
                "%r is being read by another process: the newest spans wait %suntil it is done",
                str(file),
                f"in {str(spool_folder(file))!r} " if is_waiting else "to be read ",
            )
            return store
        return FileStore(file, read_only=True)


def _readable(file: Path) -> FileStore | None:
    """The store, opened for reading; None if an older spangrad wrote it."""
    try:
        return FileStore(file, read_only=True)
    except SchemaVersionError:
        return None


def _has_spooled(folder: Path) -> bool:
    return folder.is_dir() and any(Path(entry).suffix in (".seg", ".journal") for entry in os.listdir(folder))


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Let one reader at a time open a store in this folder: taking in what waits keeps all others out."""
    if not folder.is_dir():
        yield
        return
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # a file system without such locks: then a reader may have to try again
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
