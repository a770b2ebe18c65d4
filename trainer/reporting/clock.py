"""Say how long a part of a command takes."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console


class Clock:
    """Says what is going on, how far it is, and how long it took."""

    def __init__(self, console: Console) -> None:
        """Say it to this console."""
        self._console = console

    @contextmanager
    def __call__(self, what: str) -> Iterator[Callable[[str, int, int], None]]:
        """Time a block; gives a function that is told (phase, done, all)."""
        started = time.monotonic()
        with self._console.status(f"{what} ...") as status:

            def progress(phase: str, done: int, total: int) -> None:
                status.update(f"{what} ... {phase} {done}/{total}")

            yield progress
        self._console.print(f"{what}: {time.monotonic() - started:.1f} s")
