"""What a rollout worker asks of the gateway (is the engine there, are all spans in the store) and tells it.

Knows the gateway's own routes. Knows no queue.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx

from spangrad.errors import EngineError, RolloutError
from spangrad.store.records import Rollout

FLUSH_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class GatewayState:
    """What tells whether a gateway loses spans: equal before and after a call, the call is in the store."""

    instance: str
    """Another one has another: what the one before had in memory is gone."""
    dropped: int
    """Spans that this instance could not record, or that the hub refused for good."""


def flush(gateway_url: str, key: str | None) -> tuple[bool, GatewayState]:
    """Have the gateway hand over the spans of all ended calls.

    Returns:
        Whether nothing waits for the hub any more, and the gateway's state: spans that were
        dropped do not wait.

    Raises:
        httpx.HTTPError: No gateway answers.
        RolloutError: It refuses.
    """
    reply = httpx.post(f"{gateway_url}/spangrad/flush", headers=_headers(key), timeout=FLUSH_TIMEOUT_S)
    if reply.status_code not in (httpx.codes.OK, httpx.codes.SERVICE_UNAVAILABLE):
        answer = f"{reply.status_code} {reply.text[:500]}"
        raise RolloutError(f"the gateway at {gateway_url} does not hand over its spans: {answer}")
    said = reply.json()
    state = GatewayState(str(said["instance"]), int(said["spans"]["dropped"]))
    return reply.status_code == httpx.codes.OK, state


def give_turns(gateway_url: str, key: str | None, rollouts: Sequence[Rollout], reply: str | None) -> None:
    """Tell the gateway how many turns these attempts have, and what to answer beyond them (None: an error).

    Raises:
        httpx.HTTPError: No gateway answers.
        RolloutError: It refuses.
    """
    given = [
        {"rollout_id": one.rollout_id, "attempt": one.attempt, "turns": one.turn_budget}
        for one in rollouts
        if one.turn_budget is not None
    ]
    if not given:
        return
    body = {"rollouts": given, "reply": reply}
    url = f"{gateway_url}/spangrad/budgets"
    answer = httpx.post(url, json=body, headers=_headers(key), timeout=FLUSH_TIMEOUT_S)
    if answer.status_code != httpx.codes.OK:
        raise RolloutError(
            f"the gateway at {gateway_url} gives rollouts no turns: {answer.status_code} {answer.text[:500]}"
        )


def what_is_down(gateway_url: str, key: str | None = None) -> str | None:
    """The gateway or the engine behind it, whichever does not answer, with what starts it; None: both do.

    With an operator's key the gateway asks the engine now.
    """
    try:
        reply = httpx.get(f"{gateway_url}/spangrad/health", headers=_headers(key), timeout=10.0)
        is_reachable = reply.json()["engine"]["reachable"] is True
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return f"the gateway at {gateway_url} (`spangrad gateway`)"
    if reply.status_code == httpx.codes.OK and is_reachable:
        return None
    return f"the engine behind the gateway at {gateway_url} (`spangrad serve`)"


def wait_for_engine(gateway_url: str, timeout_s: float, key: str | None = None) -> None:
    """Wait until gateway and engine answer; EngineError after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while (down := what_is_down(gateway_url, key)) is not None:
        if time.monotonic() > deadline:
            raise EngineError(
                f"{down} has not answered for {timeout_s:.0f} s;"
                " start it again, then the same command continues"
            )
        time.sleep(0.5)


def _headers(key: str | None) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}
