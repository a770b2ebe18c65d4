"""An agent that is a server: `agent.url`, to which the task of every rollout is posted.

    POST  {"task", "rollout_id", "attempt", "base_url", "api_key", "model"}
          x-spangrad-rollout, x-spangrad-attempt, traceparent, and `agent.headers`
    200   any JSON: the output

Calls that the server makes with `base_url` belong to the rollout. Knows HTTP. Knows no protocol, queue or
rewards.

* No connection, a connection that breaks, and the statuses in `UNAVAILABLE` say nothing of the rollout: it is
  run again (`AgentUnavailableError`). Every other status, no JSON, and an answer larger than
  `MAX_OUTPUT_BYTES` are the agent's failures.
* Redirects are not followed: they would take the key along.
"""

import asyncio
import json
import socket
import time
from collections.abc import Mapping
from typing import Any, ClassVar, Final

import httpx

import spangrad
from spangrad.errors import AgentFailedError, AgentUnavailableError, RolloutError
from spangrad.trainer.rollouts.agent_start import MAX_OUTPUT_BYTES, AgentStart

CONNECT_S: Final = 10.0
UNAVAILABLE: Final = frozenset(
    {
        httpx.codes.TOO_MANY_REQUESTS,
        httpx.codes.BAD_GATEWAY,
        httpx.codes.SERVICE_UNAVAILABLE,
        httpx.codes.GATEWAY_TIMEOUT,
    }
)
"""What a server says that is busy, or what stands before one that is away."""
RETRY_AFTER_S: Final = 1.0
MOST_RETRY_AFTER_S: Final = 30.0


class EndpointAgent:
    """Posts tasks; one coroutine a rollout. Cancelling it ends the request."""

    is_async: ClassVar = True
    can_stop: ClassVar = True

    def __init__(self, start: AgentStart) -> None:
        """Nothing is asked yet."""
        self._start = start
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=CONNECT_S), limits=httpx.Limits(max_connections=None)
        )

    async def run(self, rollout: Mapping[str, Any]) -> Any:
        """Post one rollout's task.

        Raises:
            AgentFailedError: The server failed it.
            AgentUnavailableError: The server is away or busy.
        """
        start = self._start
        body = {
            **{name: rollout[name] for name in ("task", "rollout_id", "attempt")},
            "base_url": f"{start.policy_url(rollout)}/v1",
            "api_key": start.key or "none",
            "model": start.model,
        }
        headers = {**spangrad.rollout_headers(), **start.headers}
        try:
            async with self._client.stream("POST", start.url, json=body, headers=headers) as reply:
                content = await _content(reply)
        except httpx.TransportError as error:
            raise AgentUnavailableError(f"{start.url}: {type(error).__name__}: {error}") from error
        if reply.status_code in UNAVAILABLE:
            await asyncio.sleep(_retry_after_s(reply))
            raise AgentUnavailableError(_said(reply, content))
        if not reply.is_success:
            raise AgentFailedError(_said(reply, content))
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            raise AgentFailedError(f"the answer is no JSON: {error}: {_shown(content)}") from error

    def stop(self, key: tuple[str, int]) -> None:
        """Cancelling a rollout's coroutine has ended its request."""

    def close(self) -> None:
        """The process ends, and its connections with it."""


def wait_for_agent(url: str, timeout_s: float) -> None:
    """Wait until something takes connections there; RolloutError after `timeout_s`."""
    address = httpx.URL(url)
    port = address.port or (443 if address.scheme == "https" else 80)
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((address.host, port), CONNECT_S).close()
        except OSError as error:
            if time.monotonic() > deadline:
                raise RolloutError(
                    f"the agent at {url} could not be reached for {timeout_s:.0f} s ({error}); start it, then"
                    " the same command continues"
                ) from error
            time.sleep(0.5)
        else:
            return


async def _content(reply: httpx.Response) -> bytes:
    content = bytearray()
    async for chunk in reply.aiter_bytes():
        content += chunk
        if len(content) > MAX_OUTPUT_BYTES:
            raise AgentFailedError(f"the answer is larger than {MAX_OUTPUT_BYTES} bytes")
    return bytes(content)


def _retry_after_s(reply: httpx.Response) -> float:
    try:
        asked = float(reply.headers.get("retry-after", RETRY_AFTER_S))
    except ValueError:  # a date
        asked = RETRY_AFTER_S
    return min(max(asked, 0.0), MOST_RETRY_AFTER_S) if asked == asked else RETRY_AFTER_S


def _said(reply: httpx.Response, content: bytes) -> str:
    return f"{reply.status_code} {reply.reason_phrase}: {_shown(content)}".strip(": ")


def _shown(content: bytes) -> str:
    return content[:500].decode(errors="replace")
