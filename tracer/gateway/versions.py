"""Which policy version the engine serves, and when that was seen.

vLLM's chat route doesn't say which weights sampled a token; `GET /weight_info` says
which are loaded now. Versions only grow, so equal versions seen before a call and
after it prove that the whole call was sampled by that version, however old the
first observation is. Different ones leave the boundary unknown: no token is older
than the first, and none is newer than the second.

Invariants: an observation never counts for a moment after its request was started;
at most one request is under way; asking never raises; an engine that does not answer
delays the calls of one timeout, not those after it.

Knows nothing of spans.
"""

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import httpx

UNTOUCHED = (None, "default")
"""What vLLM reports until somebody sets a version."""


@dataclass(frozen=True, slots=True)
class Observation:
    """The engine's policy version as it was at some moment after `asked_at`."""

    asked_at: float
    """`time.monotonic()` when the request was started."""
    version: int | None
    """None: unknown, for the reason in `problem`."""
    problem: str | None = None


class VersionWatch:
    """Asks the engine for its policy version, as seldom as callers allow."""

    def __init__(
        self, client: httpx.AsyncClient, engine_url: str, *, initial_version: int | None, timeout_s: float
    ) -> None:
        """Ask `engine_url` through `client`; the engine's untouched version counts as `initial_version`."""
        self._client = client
        self._url = f"{engine_url}/weight_info"
        self._initial_version = initial_version
        self._timeout_s = timeout_s
        self._latest: Observation | None = None
        self._forgotten_at = float("-inf")
        self._asking: asyncio.Task[None] | None = None
        self._silence: str | None = None
        """Why nobody waits for an answer: the last one did not come in time."""

    @property
    def latest(self) -> Observation | None:
        """The newest observation, however old."""
        return self._latest

    def forget(self) -> None:
        """Trust nothing that was asked before now."""
        self._latest = None
        self._forgotten_at = time.monotonic()

    async def observe(self, not_before: float) -> Observation:
        """An observation asked at or after `not_before`; callers that can share a request do.

        Unknown at once while the engine is silent: it is asked again, but nobody waits for that.
        """
        while True:
            latest = self._latest
            if latest is not None and latest.asked_at >= max(not_before, self._forgotten_at):
                return latest
            if self._asking is None:
                self._asking = asyncio.create_task(self._ask())
            if self._silence is not None:
                return Observation(not_before, None, self._silence)
            await asyncio.shield(self._asking)

    async def _ask(self) -> None:
        asked_at = time.monotonic()
        silence: str | None = None
        try:
            response = await self._client.get(self._url, timeout=self._timeout_s)
            response.raise_for_status()
            version, problem = self._read(response.json())
        except httpx.HTTPStatusError as error:
            version, problem = None, f"GET /weight_info answered {error.response.status_code}"
        except httpx.TimeoutException:
            silence = f"GET /weight_info was not answered within {self._timeout_s:g} s"
            version, problem = None, silence
        except httpx.HTTPError as error:
            version, problem = None, f"GET /weight_info failed: {type(error).__name__}"
        except ValueError:
            version, problem = None, "GET /weight_info answered no JSON"
        finally:
            self._asking = None
        self._silence = silence
        self._latest = Observation(asked_at, version, problem)

    def _read(self, answer: Any) -> tuple[int | None, str | None]:
        if not isinstance(answer, dict) or "weight_version" not in answer:
            return None, "GET /weight_info names no weight_version"
        value = answer["weight_version"]
        if value in UNTOUCHED:
            if self._initial_version is None:
                return None, f"the engine's weight version is {value!r}"
            return self._initial_version, None
        text = str(value)
        if isinstance(value, bool) or not (text.isascii() and text.isdigit()):
            return None, f"the engine's weight version {value!r} is no integer"
        return int(text), None


class NoVersions:
    """Stands for the watch of a model whose weights nobody here changes."""

    latest: Observation | None = None

    def forget(self) -> None:
        """Nothing is known."""

    async def observe(self, not_before: float) -> Observation:
        """Unknown, and no loss."""
        return Observation(not_before, None)


@dataclass(frozen=True, slots=True)
class SampledBy:
    """The versions that can have sampled a call's tokens."""

    oldest: int | None = None
    """None: unknown, for the reason in `problem`, if anybody is to be told."""
    newest: int | None = None
    """As `oldest`, unless the engine got other weights during the call."""
    problem: str | None = None


def version_of_call(before: Observation, after: Observation) -> SampledBy:
    """What sampled the tokens between two observations of an engine whose versions only grow."""
    if before.version is None or after.version is None:
        return SampledBy(problem=(before if before.version is None else after).problem)
    if before.version > after.version:
        return SampledBy(problem=f"fell from {before.version} to {after.version} during the call")
    return SampledBy(before.version, after.version)
