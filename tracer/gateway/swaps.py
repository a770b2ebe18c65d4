"""An engine whose weights are being replaced: until that ends, other engines get its calls, or they wait.

    begin(longest_s) -> calls wait in over() -> end()

Invariant: it ends after `longest_s` at the latest, also if whoever began it died; nothing waits for
an engine of which nobody said so.

Knows the clock. Knows no engines and no calls.
"""

import asyncio
import contextlib
import logging
import time

logger = logging.getLogger(__name__)


class Swap:
    """The replacement of one engine's weights, from when it is announced to its end."""

    __slots__ = ("_engine", "_over", "_until")

    def __init__(self, engine: str) -> None:
        """Nothing is replaced; `engine` is for the log."""
        self._engine = engine
        self._until: float | None = None
        self._over = asyncio.Event()

    @property
    def is_on(self) -> bool:
        """Whether the engine should be left alone now."""
        if self._until is not None and time.monotonic() >= self._until:
            logger.warning(
                "engine %s: nobody said that its new weights are there, it gets calls again", self._engine
            )
            self.end()
        return self._until is not None

    def begin(self, longest_s: float) -> None:
        """Weights are about to be replaced; beginning again starts the time anew."""
        self._over.clear()
        self._until = time.monotonic() + longest_s

    def end(self) -> None:
        """They were, or it was given up."""
        self._until = None
        self._over.set()

    async def over(self) -> None:
        """Return when it has ended, or `longest_s` have passed."""
        while self.is_on:
            assert self._until is not None
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), self._until - time.monotonic())
