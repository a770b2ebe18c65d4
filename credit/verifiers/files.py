"""A folder that an agent worked in against the folder that it should have left."""

import os
import stat
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import IO

from spangrad.credit.verifiers.arguments import strings
from spangrad.errors import CreditError

_BLOCK = 1 << 20


def same_files(found: str | Path, expected: str | Path, *, ignore: Sequence[str] = ()) -> float:
    """Share of all files of both folders that are there on both sides with the same bytes.

    Args:
        found: Folder that the agent left. Links in it are never followed: a link equals nothing, nor does a
            pipe, a socket, a device, or what can't be read.
        expected: Folder as it should be.
        ignore: Patterns of paths, relative to the folder, with `/`, that don't count (`*.pyc`, `.git/*`).

    Returns:
        1.0 only if nothing is missing, changed or added.

    Raises:
        CreditError: One of them is no folder, no file is left to compare, or `ignore` is no list of strings.
        OSError: `expected` can't be read.
    """
    ignore = strings(ignore, "patterns in `ignore`")
    left = _files(Path(found), ignore, is_agents=True)
    right = _files(Path(expected), ignore, is_agents=False)
    names = left.keys() | right.keys()
    if not names:
        raise CreditError(f"{str(found)!r} and {str(expected)!r} have no file to compare; see `ignore`")
    equal = sum(_equal(left[name], right[name]) for name in left.keys() & right.keys())
    return equal / len(names)


def _files(folder: Path, ignore: Sequence[str], *, is_agents: bool) -> dict[str, Path]:
    """All that is no folder, by path; of the agent's also folders that can't be read: they may hide some."""
    if not folder.is_dir():
        raise CreditError(f"{str(folder)!r} is no folder")
    found: dict[str, Path] = {}

    def add(path: Path, end: str = "") -> None:
        relative = path.relative_to(folder).as_posix() + end
        if not any(fnmatch(relative, pattern) for pattern in ignore):
            found[relative] = path

    def unreadable(error: OSError) -> None:
        if not is_agents:
            raise error
        add(Path(error.filename), "/")

    for place, folders, names in os.walk(folder, onerror=unreadable):
        for name in names + [name for name in folders if os.path.islink(Path(place, name))]:
            add(Path(place, name))
    return found


def _equal(found: Path, expected: Path) -> bool:
    """Whether both are files of the same bytes; what can't be read of the agent's is none."""
    right = expected.lstat()
    if not stat.S_ISREG(right.st_mode):
        return False
    with expected.open("rb") as wanted:
        try:
            left = found.lstat()
            if not stat.S_ISREG(left.st_mode) or left.st_size != right.st_size:
                return False
            given = found.open("rb")
        except OSError:
            return False
        with given:
            while block := wanted.read(_BLOCK):
                if block != _read(given):
                    return False
    return True


def _read(file: IO[bytes]) -> bytes:
    try:
        return file.read(_BLOCK)
    except OSError:
        return b""
