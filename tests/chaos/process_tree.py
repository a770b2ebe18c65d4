"""The processes below one, by the words of their command lines (Linux)."""

import contextlib
from collections.abc import Iterator
from pathlib import Path


def below(pid: int) -> Iterator[tuple[int, str]]:
    """Every process that `pid` started, or that those did: its id, its command line."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            fields = stat.read_text().rpartition(")")[2].split()
            parents.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    waiting = list(parents.get(pid, ()))
    while waiting:
        child = waiting.pop()
        waiting += parents.get(child, ())
        with contextlib.suppress(OSError):
            yield child, Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def find(pid: int, words: str) -> list[int]:
    """Those below `pid` whose command line has these words."""
    return sorted(child for child, command in below(pid) if words in command)
