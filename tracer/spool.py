"""A bounded queue of byte records on disk, shared by any number of processes.

    record  = length (uint32 LE) | crc32 (uint32 LE), its complement once the record is sent | payload
    segment = records, in a file `<time>-<pid>-<random>.seg` that one process appends to

Knows files and locks. It does not know what a record means.

Invariants:
* `append` never raises: a full spool or a broken disk costs the newest record, which is counted, and leaves
  no empty file behind.
* A record that `append` returned True for survives SIGKILL of the process.
* Whoever writes to or reads from a segment holds its `flock`. Between appends it is free, so that
  another process can drain the segment of a living one; the owner then goes on in a new file.
* A segment is deleted only after each of its records was sent. If `send` raises, or wants to keep a record,
  those that were sent are marked, and the others are sent later. Only a process that is killed in between
  sends records twice: receivers ignore what they already have.
* A torn tail (a process that died while writing) costs that one record.
* Nobody but the owner of the files can read them (0700 / 0600).
"""

import errno
import fcntl
import logging
import os
import secrets
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

_HEADER = struct.Struct("<II")
_CHECKSUM = struct.Struct("<I")
_ALL_BITS = 0xFFFFFFFF
_SUFFIX = ".seg"
_SEGMENT_BYTES = 16 * 2**20
_SCAN_EVERY_S = 1.0
_LOCK_TRIES = 20
_LOCK_RETRY_S = 0.005

KEEP: Final = object()
"""What `send` returns for a record that is to stay, while those behind it go on."""


class Spool:
    """Records in a folder, at most `max_bytes` of them; the newest are dropped when it is full."""

    def __init__(self, directory: str | os.PathLike[str], max_bytes: int = 256 * 2**20) -> None:
        """The folder is made with the first record."""
        self.directory = Path(directory).absolute()
        self.max_bytes = max_bytes
        self.dropped = 0
        """Records that were refused or could not be written, in this process."""
        self.problem = ""
        """Why the last of them was."""
        self.is_disk_full = False
        """Whether that was the disk, not `max_bytes`."""
        self._own_process()

    def append(self, record: bytes) -> bool:
        """Write one record. Returns False, and counts, if the spool is full or the disk refuses."""
        if self._pid != os.getpid():  # after a fork the lock may be held by a thread that is gone
            self._own_process()
        with self._lock:
            written = self._written(_HEADER.pack(len(record), zlib.crc32(record)), record)
            if not written:
                self.dropped += 1
            return written

    def check(self) -> None:
        """Raise OSError if the folder can't be made or no file can be written in it."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        name = self.directory / f".{os.getpid()}-{secrets.token_hex(4)}"
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, b"x")
        finally:
            os.close(fd)
            name.unlink()

    def drain(self, send: Callable[[bytes], object]) -> int:
        """Send every record, oldest segment first, and delete what was sent. Returns how many were sent.

        Segments that another process is draining are skipped. A record for which `send` returns `KEEP` stays.
        An error from `send` ends the drain and is passed on.
        """
        sent = 0
        for path in self._segments():
            sent += self._drain_segment(path, send)
        return sent

    def size_bytes(self) -> int:
        """Bytes that wait on disk, of all processes."""
        return sum(_size(path) for path in self._segments())

    def close(self) -> None:
        """Let go of the file; a later `append` opens a new one."""
        if self._pid != os.getpid():
            self._own_process()
        with self._lock:
            self._close_segment()

    def _own_process(self) -> None:
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._fd: int | None = None
        self._total = 0
        self._scanned_at = float("-inf")

    def _written(self, header: bytes, record: bytes) -> bool:
        for _ in range(2):
            try:
                return self._append(header, record)
            except OSError as error:
                self.problem, self.is_disk_full = error.strerror or str(error), True
                self._close_segment()
                if error.errno != errno.EFBIG:  # `ulimit -f`: a new file may have room
                    break
        return False

    def _append(self, header: bytes, record: bytes) -> bool:
        size = len(header) + len(record)
        now = time.monotonic()
        if now - self._scanned_at > _SCAN_EVERY_S:
            self._total, self._scanned_at = self.size_bytes(), now
        if self._total + size > self.max_bytes:
            self.problem = f"{self._total} of at most {self.max_bytes} bytes wait there"
            self.is_disk_full = False
            return False
        fd = self._lock_segment(size)
        try:
            end = os.fstat(fd).st_size
            try:
                written = os.writev(fd, (header, record))
                while written < size:  # a disk that is almost full takes a part
                    rest = (header + record)[written:]
                    written += os.write(fd, rest)
            except OSError:
                os.ftruncate(fd, end)
                if not end:  # nobody takes it: it is ours and locked
                    self._path.unlink(missing_ok=True)
                raise
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)
        self._total += size
        return True

    def _lock_segment(self, size: int) -> int:
        """Our segment, locked: the open one, or a new one if a drainer took it or it is long enough."""
        if self._fd is not None:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._close_segment()
            else:
                status = os.fstat(self._fd)
                if status.st_nlink and status.st_size + size <= _SEGMENT_BYTES:
                    return self._fd
                self._close_segment()
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        name = f"{time.time_ns():020d}-{self._pid}-{secrets.token_hex(4)}{_SUFFIX}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._path = self.directory / name
        self._fd = os.open(self._path, flags, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        if not os.fstat(self._fd).st_nlink:  # a drainer found it empty before we had the lock
            self._close_segment()
            return self._lock_segment(size)
        return self._fd

    def _close_segment(self) -> None:
        if self._fd is not None:
            os.close(self._fd)  # drops the lock too
            self._fd = None

    def _segments(self) -> list[Path]:
        try:
            return sorted(path for path in self.directory.iterdir() if path.suffix == _SUFFIX)
        except OSError:
            return []

    def _drain_segment(self, path: Path, send: Callable[[bytes], object]) -> int:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return 0  # drained by somebody else meanwhile, or not ours to read
        sent: list[int] = []
        is_kept = False
        with os.fdopen(fd, "rb") as file:
            if not _lock(fd) or not os.fstat(fd).st_nlink:
                return 0
            try:
                for position, record in _records(file.read, fd, path):
                    if send(record) is KEEP:
                        is_kept = True
                    else:
                        sent.append(position)
            except BaseException:
                _mark(fd, sent)
                raise
            if is_kept:
                _mark(fd, sent)
            else:
                path.unlink(missing_ok=True)
        return len(sent)


def _records(read: Callable[[int], bytes], fd: int, path: Path) -> Iterator[tuple[int, bytes]]:
    """Position and payload of all that is not sent yet; a torn tail is cut off."""
    position, size = 0, os.fstat(fd).st_size
    while position < size:
        header = read(_HEADER.size)
        if len(header) == _HEADER.size:
            length, checksum = _HEADER.unpack(header)
            record = read(length) if position + _HEADER.size + length <= size else b""
            found = zlib.crc32(record)
            if len(record) == length and checksum in (found, found ^ _ALL_BITS):
                if checksum == found:
                    yield position, record
                position += _HEADER.size + length
                continue
        logger.warning(
            "spool segment %r ends in %d bytes that are no whole record; they are dropped",
            str(path),
            size - position,
        )
        os.ftruncate(fd, position)
        return


def _mark(fd: int, positions: Iterable[int]) -> None:
    """Note that the records at these positions are sent."""
    for position in positions:
        _, checksum = _HEADER.unpack(os.pread(fd, _HEADER.size, position))
        os.pwrite(fd, _CHECKSUM.pack(checksum ^ _ALL_BITS), position + _HEADER.size - _CHECKSUM.size)


def _lock(fd: int) -> bool:
    """Take the lock, waiting out an append in progress but not a drain."""
    for attempt in range(_LOCK_TRIES):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if attempt + 1 < _LOCK_TRIES:
                time.sleep(_LOCK_RETRY_S)
        else:
            return True
    return False


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
