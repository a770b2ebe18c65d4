"""Low-rank adapters that an engine has: which one stands for the model that an agent asks for.

A trainer that publishes adapters loads each as MODEL-vVERSION-DIGEST, a name that is never used for other
weights, so that no block of a prefix cache can be an older adapter's. The one that was loaded last is the
model's newest. Its name says the policy version of a whole call, from the first token to the last.

Invariants: an engine is asked again after every publish and after it was out, and otherwise once; asking
never raises; an engine that does not answer delays the calls of one timeout, not those after it.

Knows vLLM's `/v1/models`. Knows no calls and no spans.
"""

import asyncio
import re
from collections import Counter
from dataclasses import dataclass

import httpx

_NAME = re.compile(r"(?P<model>.+)-v(?P<version>[0-9]{1,9})-[0-9a-f]{8}")


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter that an engine has."""

    name: str
    """What the engine knows it by."""
    model: str
    """The model that it was made for."""
    version: int
    """Policy version."""


def adapter_of(name: str) -> Adapter | None:
    """What an adapter's name says; None if it is none of a trainer's."""
    found = _NAME.fullmatch(name)
    return None if found is None else Adapter(name, found["model"], int(found["version"]))


class AdapterWatch:
    """The adapters of one engine, and how many calls each has."""

    def __init__(
        self, client: httpx.AsyncClient, engine_url: str, *, key: str | None, timeout_s: float
    ) -> None:
        """Ask later, through `client` and with the engine's key, if it wants one."""
        self._client = client
        self._url = f"{engine_url}/v1/models"
        self._headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._timeout_s = timeout_s
        self._known: tuple[Adapter, ...] | None = None
        self._round = 0
        """How often what was known has been forgotten."""
        self._asking: asyncio.Task[None] | None = None
        self._is_silent = False
        """The last question was not answered: nobody waits for the answer to the next."""
        self.in_flight: Counter[str] = Counter()
        """Calls by adapter."""

    def forget(self) -> None:
        """It may have others from now on."""
        self._known = None
        self._asking = None
        self._is_silent = False
        self._round += 1

    async def of(self, model: str | None) -> Adapter | None:
        """The adapter that a call for `model` gets; None: the model itself.

        Args:
            model: The name that the engine serves, or an adapter's own; None: the only one that there is.
        """
        while self._known is None:
            if self._asking is None:
                self._asking = asyncio.create_task(self._ask(self._round))
            if self._is_silent:
                return None
            await asyncio.shield(self._asking)
        for adapter in reversed(self._known):
            if adapter.name == model:
                return adapter
        return next((one for one in reversed(self._known) if model is None or one.model == model), None)

    async def _ask(self, round: int) -> None:
        known: tuple[Adapter, ...] | None
        try:
            answer = await self._client.get(self._url, headers=self._headers, timeout=self._timeout_s)
            entries = answer.json()["data"] if answer.is_success else []
            told = [adapter_of(entry["id"]) for entry in entries if entry.get("parent") is not None]
            known = tuple(adapter for adapter in told if adapter is not None)
        except httpx.HTTPError:
            known = None
        except (ValueError, KeyError, TypeError, AttributeError):
            known = ()  # it speaks of no adapters
        if round == self._round:
            self._known, self._asking, self._is_silent = known, None, known is None


class NoAdapters:
    """Stands for the watch of a model that nobody here publishes to."""

    def __init__(self) -> None:
        """Count nothing."""
        self.in_flight: Counter[str] = Counter()

    def forget(self) -> None:
        """Nothing is known."""

    async def of(self, model: str | None) -> Adapter | None:
        """The model itself."""
        return None
