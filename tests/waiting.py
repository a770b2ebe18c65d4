"""Wait for a condition instead of sleeping."""

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], timeout_s: float = 30.0, interval_s: float = 0.02) -> None:
    """Return as soon as `condition()` is true; fail the test with its last value after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not (last := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"still {last!r} after {timeout_s} s")
        time.sleep(interval_s)
