"""Where the hub of a file is: `<file>.hub`, for whoever finds the file locked.

Invariants: the hub writes it when it has the file, and removes it when it ends; what a killed hub left is
not believed, for the process that it names does not hold the file; that it can't be written stops no hub.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def announced(path: str | os.PathLike[str], url: str) -> Iterator[None]:
    """Say that this process serves the file at `url`, for as long as the block runs."""
    file = _file(path)
    with suppress(OSError):
        file.write_text(json.dumps({"url": url, "pid": os.getpid()}))
    try:
        yield
    finally:
        with suppress(OSError):
            file.unlink(missing_ok=True)


def hub_of(path: str | os.PathLike[str], pid: str) -> str | None:
    """URL of the hub that holds the file, if the process that holds it is one."""
    try:
        told = json.loads(_file(path).read_text())
        return str(told["url"]) if str(told["pid"]) == pid else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _file(path: str | os.PathLike[str]) -> Path:
    file = Path(path).resolve()
    return file.with_name(f"{file.name}.hub")
