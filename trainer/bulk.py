"""The same work on many parts of a history, by several processes at once: Ray Data.

    parts (bytes) --> map, an actor for each worker, which opens what it reads once --> results (bytes)

Knows Ray Data. Does not know what the work is: the caller packs and unpacks.

* Results come in the order of the parts, however fast each was.
* Ray Data hands out parts as results are taken: memory holds those under way, not the history.
* A worker that dies is replaced and its part done again, so the work must change nothing.
* An error of spangrad's is raised here as it was there, and ends the work.
"""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ray
import ray.data
from ray.data import ActorPoolStrategy, DataContext

from spangrad.errors import ClusterError, SpangradError
from spangrad.store.wire import error_from_wire

Work = Callable[[bytes], bytes]


def done_in_parallel(make: Callable[[], Work], parts: Sequence[bytes], *, workers: int) -> Iterator[bytes]:
    """What `make()`, called once in each of so many processes, makes of every part.

    Raises:
        SpangradError: Of whatever kind the work raised. ClusterError: Ray failed, or the work did otherwise.
    """
    from spangrad.trainer.cluster import LOGS, start_ray  # torch, which no worker needs

    if not parts:
        return
    # Ray tells of every actor with arguments that a restart may lose them; these stay here.
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    start_ray(workers)
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True
    pool = ActorPoolStrategy(size=min(workers, len(parts)))
    given = ray.data.from_items([{"part": part} for part in parts], override_num_blocks=len(parts))
    worker: Any = _Worker
    done = given.map(worker, fn_constructor_args=(make,), compute=pool, num_cpus=1)
    try:
        for row in done.iter_rows():
            if row["error"]:
                raise error_from_wire(row["error"], row["text"])
            yield row["done"]
    except ray.exceptions.RayError as error:
        said = " ".join(str(error).split())
        raise ClusterError(f"Ray: {type(error).__name__}: {said[-500:]} (its logs: {LOGS})") from error


class _Worker:
    """One process's share."""

    def __init__(self, make: Callable[[], Work]) -> None:
        self._work = make()

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"done": self._work(row["part"]), "error": "", "text": ""}
        except SpangradError as error:
            return {"done": b"", "error": type(error).__name__, "text": str(error)}
