"""A folder that an agent worked in against the folder that it should have left."""

import os
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from spangrad.errors import CreditError

_BLOCK = 1 << 20


def same_files(found: str | Path, expected: str | Path, *, ignore: Sequence[str] = ()) -> float:
    """Share of all files of both folders that are there on both sides with the same bytes.

    Args:
        found: Folder that the agent left. Links in it are never followed: a link equals nothing.
        expected: Folder as it should be.
        ignore: Patterns of paths, relative to the folder, with `/`, that don't count (`*.pyc`, `.git/*`).

    Returns:
        1.0 only if nothing is missing, changed or added.

    Raises:
        CreditError: One of them is no folder, or no file is left to compare.
    """
    left, right = _files(Path(found), ignore), _files(Path(expected), ignore)
    names = left.keys() | right.keys()
    if not names:
        raise CreditError(f"{str(found)!r} and {str(expected)!r} have no file to compare; see `ignore`")
    equal = sum(_equal(left[name], right[name]) for name in left.keys() & right.keys())
    return equal / len(names)


def _files(folder: Path, ignore: Sequence[str]) -> dict[str, Path]:
    if not folder.is_dir():
        raise CreditError(f"{str(folder)!r} is no folder")
    found: dict[str, Path] = {}
    for place, folders, names in os.walk(folder):
        for name in names + [name for name in folders if Path(place, name).is_symlink()]:
            path = Path(place, name)
            relative = path.relative_to(folder).as_posix()
            if not any(fnmatch(relative, pattern) for pattern in ignore):
                found[relative] = path
    return found


def _equal(left: Path, right: Path) -> bool:
    if left.is_symlink() or right.is_symlink() or not (left.is_file() and right.is_file()):
        return False
    if left.stat().st_size != right.stat().st_size:
        return False
    with left.open("rb") as one, right.open("rb") as other:
        while block := one.read(_BLOCK):
            if block != other.read(_BLOCK):
                return False
    return True
