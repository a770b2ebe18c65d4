"""What a process has captured and not exported yet, in a file that outlives SIGKILL.

    file   = record of the head | half | half      at 0, 64 KiB, 64 KiB + half of the bound
    record = header | meta | content | header again
    header = number (uint64 LE) | length of meta | length of content (uint32 LE each)
    meta   = JSON of the head; marshal of anything else

One file a process, `<time>-<pid>-<random>.journal` in the spool's folder. The kernel keeps what a killed
process has written. Half by half, what was exported makes room: a half is written from its start again when
nothing in it is waiting. Knows files and locks; what a record means is `recovery.py`'s business.

Invariants:
* `append` neither raises nor waits for a disk to write: it copies into the page cache, by a mapping where
  the file system keeps the room that it has promised, else by a system call. What does not fit is not kept,
  and counted.
* A record counts only if it is whole: its second header is written last. Records of a half have
  consecutive numbers, so an older one behind them is none of them.
* The owner holds the file's `flock` as long as it lives; whoever gets that lock may recover the file. A child
  made by fork lets go of its parent's and has one of its own.
* A file that can't be read, or that an earlier start of the machine left (what reached the disk then may have
  holes), is put aside as `.bad` and said; nothing of it is recorded.
* Nobody but the owner of the files can read them (0600), and nobody else recovers them: marshal is not for
  what others have written.
"""

import contextlib
import fcntl
import json
import logging
import mmap
import os
import secrets
import struct
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from spangrad.tracer.spool import Spool

logger = logging.getLogger(__name__)

MAX_BYTES = 32 * 2**20
_ALLOCATED_AT_ONCE = 2**20
_KEEPS_ITS_PROMISE = frozenset({"ext2", "ext3", "ext4", "xfs", "tmpfs"})
"""File systems where a write into allocated room can't fail: in a mapping that would end the agent."""
_FORMAT = 1
_HEADER = struct.Struct("<QII")
_BESIDE = 2 * _HEADER.size
_pack, _pwritev = _HEADER.pack, os.pwritev
_HEAD_BYTES = 64 * 2**10
_SUFFIX = ".journal"

T = TypeVar("T")
Record = tuple[bytes, bytes, bytes]
"""Meta, and content in two pieces: one less to copy."""


class Journal(Generic[T]):
    """The journal of this process. Not for two threads at once: `Worker` holds its lock."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        head: Mapping[str, Any],
        record_of: Callable[[T], Record],
        *,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        """The file is made with the first record; `head` is what all records share, as JSON."""
        self.directory = Path(directory).absolute()
        self.skipped = 0
        """Items that were not written, for they did not fit or could not be."""
        self.problem: str | None = None
        """Why there is no journal; for the caller to say, who may hold a lock now."""
        self._head = head
        self._record_of = record_of
        self._half_bytes = max_bytes // 2
        self._starts = (_HEAD_BYTES, _HEAD_BYTES + self._half_bytes)
        self._is_closed = False
        self._is_busy: bool
        self._number: int
        self._half: int
        self._ends: list[int]
        self._waiting: list[int]
        self._allocated: list[int]
        """Bytes of each half for which there is room on the disk."""
        self._mapped: mmap.mmap | None
        self._fd: int | None = None
        self._own_process()

    @property
    def is_kept(self) -> bool:
        """Whether what is appended is written."""
        return not self._is_closed

    def append(self, item: T) -> int | None:
        """Write an item. Returns what `release` wants to know; None: it was not written."""
        if self._is_closed or self._is_busy:  # busy: a garbage collection or a signal handler is in here
            return None
        self._is_busy = True
        try:
            meta, first, second = self._record_of(item)
            size = len(first) + len(second)
            whole = _BESIDE + len(meta) + size
            half = self._half
            end = self._ends[half] + whole
            fd = self._fd
            if end > self._half_bytes or fd is None:
                fd = fd if fd is not None else self._open()
                half = self._half = self._with_room(whole)
                end = self._ends[half] + whole
            header = _pack(self._number, len(meta), size)
            at = self._starts[half] + end - whole
            if self._mapped is not None and (end <= self._allocated[half] or self._allocate(half, end)):
                _copy(self._mapped, at, (header, meta, first, second, header))
            elif _pwritev(fd, (header, meta, first, second, header), at) != whole:
                raise OSError("the disk is full")
            self._number += 1
            self._ends[half] = end
            self._waiting[half] += 1
            return half
        except OSError as error:
            if self._fd is None:
                self._is_closed = True
                self.problem = f"no journal in {str(self.directory)!r} ({error})"
        except Exception:  # the boundary: the item is exported all the same, and what is skipped is counted
            pass
        finally:
            self._is_busy = False
        self.skipped += 1
        return None

    def release(self, halves: Collection[int | None]) -> None:
        """Items have been exported; `halves`: what `append` returned for them."""
        self._is_busy = True
        try:
            for half in (0, 1):
                count = sum(1 for released in halves if released == half)
                self._waiting[half] -= count
                if count and not self._waiting[half] and self._fd is not None:
                    self._ends[half] = 0
                    self._blank(self._fd, half)
        except OSError:  # they would be recorded again, and ignored
            pass
        finally:
            self._is_busy = False

    def _blank(self, fd: int, half: int) -> None:
        """Have no record at the begin of a half."""
        if self._mapped is not None and self._allocated[half]:
            _copy(self._mapped, self._starts[half], (bytes(_HEADER.size),))
        else:
            os.pwrite(fd, bytes(_HEADER.size), self._starts[half])

    def close(self) -> None:
        """Remove the file; nothing is written any more."""
        self._is_closed = True
        if self._fd is not None:
            self._path.unlink(missing_ok=True)
            self._let_go()

    def after_fork_in_child(self) -> None:
        """Leave the parent's file to the parent."""
        if self._fd is not None:
            self._let_go()  # the lock is the parent's as long as the parent has it open
        self._own_process()

    def _let_go(self) -> None:
        assert self._fd is not None
        if self._mapped is not None:
            self._mapped.close()
            self._mapped = None
        os.close(self._fd)
        self._fd = None

    def _own_process(self) -> None:
        self._number = 1
        self._half = 0
        self._ends = [0, 0]
        self._waiting = [0, 0]
        self._allocated = [0, 0]
        self._mapped = None
        self._is_busy = False

    def _with_room(self, size: int) -> int:
        """A half into which a record fits. Raises ValueError if there is none."""
        for half in (self._half, 1 - self._half):
            is_free = half == self._half or not self._waiting[half]
            if is_free and self._ends[half] + size <= self._half_bytes:
                return half
        raise ValueError("the journal is full")

    def _open(self) -> int:
        """Make the file. It gets its name, by which others find it, when it is locked and has a head."""
        head = json.dumps(
            {"format": _FORMAT, "boot": _boot(), "half_bytes": self._half_bytes, **self._head}
        ).encode()
        header = _pack(0, len(head), 0)
        if _BESIDE + len(head) > _HEAD_BYTES:
            raise OSError("the resource's attributes are too long")
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        name = f"{time.time_ns():020d}-{os.getpid()}-{secrets.token_hex(4)}"
        unnamed = self.directory / f"{name}.new"
        fd = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.pwrite(fd, header + head + header, 0)
            self._path = unnamed.with_suffix(_SUFFIX)
            unnamed.rename(self._path)
        except BaseException:
            os.close(fd)
            unnamed.unlink(missing_ok=True)
            raise
        self._fd = fd
        if _file_system(fd) in _KEEPS_ITS_PROMISE:
            with contextlib.suppress(OSError, ValueError):  # then it is written by system calls
                os.truncate(fd, self._starts[1] + self._half_bytes)
                self._mapped = mmap.mmap(fd, 0)
        return fd

    def _allocate(self, half: int, end: int) -> bool:
        """Have room on the disk up to `end` of a half. Returns False if the disk is full."""
        assert self._fd is not None
        wanted = min(end + _ALLOCATED_AT_ONCE, self._half_bytes)
        begin = self._allocated[half]
        try:
            os.posix_fallocate(self._fd, self._starts[half] + begin, wanted - begin)
        except OSError:
            return False
        self._allocated[half] = wanted
        return True


def _copy(mapped: mmap.mmap, at: int, pieces: Iterable[bytes]) -> None:
    for piece in pieces:
        end = at + len(piece)
        mapped[at:end] = piece
        at = end


def _file_system(fd: int) -> str | None:
    """Type of the file system that a file is on; None: not known."""
    device = os.fstat(fd).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return None
    for mount in mounts:
        fields, _, described = mount.partition(" - ")
        if fields.split()[2] == wanted:
            return described.split()[0]
    return None


def recover(spool: Spool) -> int:
    """Put into `spool` what killed processes have left in its folder. Returns how many journals.

    Never raises. A span may be in the store already; stores ignore spans that they have.
    """
    try:
        paths = sorted(path for path in spool.directory.iterdir() if path.suffix == _SUFFIX)
    except OSError:
        return 0
    return sum(_recover(path, spool) for path in paths)


def read(data: bytes) -> tuple[dict[str, Any], list[tuple[bytes, bytes]]]:
    """Head, and meta and content of all records, of a journal's bytes. Raises ValueError if it is none."""
    found = _record(data, 0, _HEAD_BYTES)
    if found is None:
        raise ValueError("it has no head")
    head = json.loads(found[1])
    if head["format"] != _FORMAT:
        raise ValueError(f"its format is {head['format']!r}, this spangrad reads {_FORMAT}")
    if head["boot"] != _boot():
        raise ValueError("it is of an earlier start of the machine")
    half_bytes = head["half_bytes"]
    halves = [list(_half(data, _HEAD_BYTES + half * half_bytes, half_bytes)) for half in (0, 1)]
    # Numbers say which half was written first.
    return head, [(meta, content) for _, meta, content in sorted(halves[0] + halves[1])]


def _half(data: bytes, start: int, size: int) -> Iterator[tuple[int, bytes, bytes]]:
    at, expected = start, None
    while (found := _record(data, at, start + size)) is not None and expected in (None, found[0]):
        yield found
        expected = found[0] + 1
        at += _BESIDE + len(found[1]) + len(found[2])


def _record(data: bytes, at: int, end: int) -> tuple[int, bytes, bytes] | None:
    """Number, meta and content of the record at a place; None if there is no whole one."""
    if at + _HEADER.size > min(end, len(data)):
        return None
    header = data[at : at + _HEADER.size]
    number, meta_length, content_length = _HEADER.unpack(header)
    at += _HEADER.size
    middle, last = at + meta_length, at + meta_length + content_length
    if not meta_length or last + _HEADER.size > end or data[last : last + _HEADER.size] != header:
        return None
    meta = data[at:middle]
    return number, meta, data[middle:last]


def _recover(path: Path, spool: Spool) -> int:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0  # recovered by somebody else meanwhile, or not ours to read
    with os.fdopen(fd, "rb") as file:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            status = os.fstat(fd)
            if not status.st_nlink or status.st_uid != os.geteuid():
                return 0
        except OSError:
            return 0  # its process lives
        try:
            from spangrad.tracer.recovery import requests_of  # it loads OTel's SDK

            for request in requests_of(*read(file.read())):  # no mapping: a hole is a page on a full tmpfs
                spool.append(request)  # what does not fit is lost, as ever, and counted there
            path.unlink(missing_ok=True)
        except Exception as error:  # the boundary: it must not hold up what else there is
            logger.warning("journal %r can't be read (%s); it is put aside as .bad", str(path), error)
            with contextlib.suppress(OSError):
                path.rename(path.with_suffix(".bad"))
            return 0
    return 1


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
