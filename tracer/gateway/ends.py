"""An agent says that its session is over, where no tracer would: it becomes a span behind those of its calls.

Knows HTTP and span attributes. Knows no store: whether a session has ended is for readers to find.

Invariants:
* an end is recorded behind the calls of the session that had been answered, and its time is after theirs;
* it is answered when it is in the journal (with `redact`: on its way to the store), and waits for no store;
* saying it twice is as good as once;
* a key that names a rollout ends no other one.
"""

import time
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from spangrad.tracer import conventions as names
from spangrad.tracer.gateway.call import Services
from spangrad.tracer.gateway.http_parts import error_response
from spangrad.tracer.gateway.routes import END
from spangrad.tracer.gateway.whose import named_by_key, origin_of

_UNNAMED: Final = (
    f"the request names no rollout, so there is nothing to end; post to /rollout/ID{END}, or name it in the "
    f"header {names.HEADER_ROLLOUT} or in the key, as the calls did"
)


class Ends:
    """Handler of the route that ends a session."""

    def __init__(self, services: Services) -> None:
        """Serve one gateway."""
        self._services = services

    async def end(self, request: Request) -> Response:
        """Record that the rollout that the request names is over."""
        try:
            origin = origin_of(request)
        except ValueError as error:
            return error_response(400, "invalid_header", str(error))
        if names.ROLLOUT_ID not in origin:
            return error_response(404, "no_rollout", _UNNAMED)
        if (problem := _of_another(request, origin)) is not None:
            return error_response(403, "forbidden", problem)
        recorder = self._services.recorder
        if not await recorder.caught_up(self._services.config.flush_timeout_s):
            return _not_recorded("calls that were answered before are not recorded yet")
        now_ns = time.time_ns()
        span = recorder.start("end", headers=request.headers, start_ns=now_ns)
        told = {**origin, names.SPAN_ROLE: names.ROLE_END}
        if not recorder.end(span, told, end_ns=now_ns, error=None):
            return _not_recorded("too many spans wait for the store")
        return JSONResponse({"rollout_id": origin[names.ROLLOUT_ID], "attempt": origin[names.ATTEMPT]})


def _of_another(request: Request, origin: dict[str, Any]) -> str | None:
    """Why the request may not end what it names, or None."""
    by_key = named_by_key(request)
    if by_key is None:
        return None
    rollout_id, attempt = origin[names.ROLLOUT_ID], origin[names.ATTEMPT]
    if by_key.rollout_id == rollout_id and by_key.attempt in (None, attempt):
        return None
    own = by_key.rollout_id if by_key.attempt is None else f"{by_key.rollout_id}, attempt {by_key.attempt}"
    return f"the key is that of rollout {own}; it can't end rollout {rollout_id}, attempt {attempt}"


def _not_recorded(problem: str) -> Response:
    return error_response(503, "not_recorded", f"the session is not ended: {problem}; ask again")
