"""Wait for a condition instead of sleeping."""

import time
from collections.abc import Callable
from pathlib import Path


def wait_until(condition: Callable[[], object], timeout_s: float = 30.0, interval_s: float = 0.02) -> None:
    """Return as soon as `condition()` is true; fail the test with its last value after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not (last := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"still {last!r} after {timeout_s} s")
        time.sleep(interval_s)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that only its parent has not taken note of does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
