"""Answers that are sent while they are made.

Knows pieces of bytes; not what is in them. Invariants: an error before the first piece has a status of its
own; after an error behind it the connection breaks, so that a part is never taken for the whole; pieces are
closed when nobody takes them any more.
"""

import logging
from collections.abc import Callable, Generator
from itertools import chain

import anyio
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse
from starlette.types import Send

from spangrad.errors import SpangradError

logger = logging.getLogger(__name__)

Pieces = Generator[bytes, None, None]


async def stream(begin: Callable[[], Pieces], content_type: str, *, limit_s: float | None = None) -> Response:
    """A response of these pieces; who has not taken them within `limit_s` is left."""
    pieces = begin()
    first = await run_in_threadpool(next, pieces)
    return _Stream(first, pieces, content_type, limit_s)


class _Stream(StreamingResponse):
    def __init__(self, first: bytes, rest: Pieces, content_type: str, limit_s: float | None) -> None:
        super().__init__(chain([first], rest), media_type=content_type)
        self._rest = rest
        self._limit_s = limit_s

    async def stream_response(self, send: Send) -> None:
        try:
            with anyio.fail_after(self._limit_s):
                await super().stream_response(send)
        except TimeoutError:
            logger.warning("an answer that was not read within %s s was cut off", self._limit_s)
        except SpangradError as error:
            logger.warning("an answer was cut off: %s", error)
        finally:
            self._rest.close()
