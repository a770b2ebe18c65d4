"""When to log again what happens often. Knows the clock only."""

import time

_LOG_EVERY_S = 30.0


class Periodically:
    """Says at most once in 30 s that it is time to log."""

    def __init__(self) -> None:
        """The first time is due."""
        self._next = float("-inf")

    def due(self) -> bool:
        """Whether the last time was long enough ago."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + _LOG_EVERY_S
        return True
