"""Keeps the leases of a worker's rollouts, and learns which of them are somebody else's by now.

Knows the queue. Does not know what becomes of a rollout that was lost.
"""

import logging
import threading
from collections.abc import Callable

from spangrad.store.base import Store

logger = logging.getLogger(__name__)

Held = Callable[[], list[tuple[str, int]]]
"""The attempts that a worker has, by id and number; called in another thread."""


class Heartbeat:
    """A thread that beats three times a lease, for as long as the block lasts."""

    def __init__(self, store: Store, worker: str, lease_s: float, held: Held) -> None:
        """It beats from the block's begin on."""
        self._store = store
        self._worker = worker
        self._lease_s = lease_s
        self._held = held
        self._lost = set[tuple[str, int]]()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="heartbeat")

    def __enter__(self) -> "Heartbeat":
        """Begin."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End."""
        self._end.set()
        self._thread.join()

    def take_lost(self) -> list[tuple[str, int]]:
        """What was found to be no longer this worker's, once."""
        lost = list(self._lost)
        self._lost.difference_update(lost)
        return lost

    def _run(self) -> None:
        while not self._end.wait(self._lease_s / 3):
            held = self._held()
            if not held:
                continue
            try:
                lost = self._store.heartbeat(held, worker=self._worker, lease_s=self._lease_s)
                self._lost.update(key for key in held if key[0] in lost)
            except Exception as error:  # a missed beat only risks the lease
                logger.warning("%s: heartbeat failed: %s", self._worker, error)
