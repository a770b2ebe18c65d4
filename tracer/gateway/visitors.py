"""Engines that join a gateway while it runs, for as long as somebody goes on saying that they are there.

    join(url, for_s) -> asked how it is, then calls -> joins again in time, leaves, or for_s is over

Invariants: an engine for which nobody speaks any more gets no calls, since something else may have its
address by then; the calls that it has go on. Joining again changes nothing but the time.

Knows the clock. Knows no calls, and no engines of a gateway's config.
"""

import asyncio
import logging

from spangrad.tracer.gateway.engine import Engine

logger = logging.getLogger(__name__)


class Visitors:
    """The engines that have joined; used from one event loop."""

    def __init__(self, *, interval_s: float, timeout_s: float) -> None:
        """None has joined; both as for `Engine.watch`."""
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._ends: dict[Engine, asyncio.TimerHandle] = {}
        self._watches: dict[Engine, asyncio.Task[None]] = {}

    @property
    def engines(self) -> tuple[Engine, ...]:
        """All of them, in the order in which they came."""
        return tuple(self._ends)

    async def join(self, engine: Engine, for_s: float) -> None:
        """Let an engine in, or let it stay for longer."""
        is_new = engine not in self._ends
        if not is_new:
            self._ends[engine].cancel()
        self._ends[engine] = asyncio.get_running_loop().call_later(for_s, self._over, engine)
        if is_new:
            engine.problem = "it has just joined and was not asked yet"
            self._watches[engine] = asyncio.create_task(engine.watch(self._interval_s, self._timeout_s))
            await engine.check(self._timeout_s)

    def leave(self, engine: Engine) -> bool:
        """Give it no more calls; False if it had not joined."""
        if engine not in self._ends:
            return False
        self._ends.pop(engine).cancel()
        self._watches.pop(engine).cancel()
        return True

    def close(self) -> None:
        """Stop asking how they are."""
        for engine in self.engines:
            self.leave(engine)

    def _over(self, engine: Engine) -> None:
        logger.warning("engine %s leaves: nobody said that it stays", engine.url)
        self.leave(engine)
