"""Whose call a request is: from the URL, else from the headers, else from the API key.

Knows HTTP. Knows no spans and no engines.
"""

from typing import Any

from starlette.requests import Request

from spangrad.tracer import conventions as names
from spangrad.tracer.gateway.agent_keys import SCOPE_ROLLOUT, KeyRollout

_NAMES = (
    (names.HEADER_STEP, names.STEP_NAME),
    (names.HEADER_PURPOSE, names.PURPOSE),
    (names.HEADER_STATE, names.STATE_KEY),
)


def origin_of(request: Request) -> dict[str, Any]:
    """Whose call it is, as attributes of its span. Raises ValueError."""
    headers = request.headers
    rollout_id = request.path_params.get("rollout_id") or headers.get(names.HEADER_ROLLOUT)
    if "rollout_id" in request.path_params and b"%2f" in request.scope.get("raw_path", b"").lower():
        # The path is decoded already: `a%2F1` reads as rollout a, attempt 1.
        raise ValueError(
            f"the URL's rollout has an encoded '/'; name it in the header {names.HEADER_ROLLOUT}"
        )
    if "attempt" in request.path_params:
        attempt = _attempt(request.path_params["attempt"], "the URL's attempt")
    else:
        attempt = _attempt(headers.get(names.HEADER_ATTEMPT, "0"), f"header {names.HEADER_ATTEMPT}")
    by_key = named_by_key(request)
    if by_key is not None and not rollout_id:
        rollout_id = by_key.rollout_id
        attempt = attempt if by_key.attempt is None else by_key.attempt
    origin: dict[str, Any] = {}
    if rollout_id:
        origin |= {names.ROLLOUT_ID: rollout_id, names.ATTEMPT: attempt}
    for header, attribute in _NAMES:
        if headers.get(header):
            origin[attribute] = headers[header]
    return origin


def named_by_key(request: Request) -> KeyRollout | None:
    """The rollout that the API key names."""
    found: KeyRollout | None = request.scope.get(SCOPE_ROLLOUT)
    return found


def _attempt(text: str, where: str) -> int:
    attempt = names.attempt_number(text)
    if attempt is None:
        raise ValueError(f"{where} is {text[:40]!r}; expected a number from 0 to {names.MAX_ATTEMPT}")
    return attempt
