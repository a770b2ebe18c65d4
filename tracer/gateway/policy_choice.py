"""Which version of the policy a call gets, where engines serve different ones.

    call asks for "promoted" --> engines that serve the promoted version --> one of them
                                 none does: 503, and what each serves

A call says it in the header `x-spangrad-policy` (`any`, `latest`, `promoted`); the gateway's `serve`
says it for all others. With `canary`, a share of the rollouts gets `latest` where `promoted` is the
gateway's choice: by a hash of the rollout's id, so that a rollout has one answer for good, from every
gateway. Calls of no rollout are no canaries.

The promoted version is asked of the hub, so a gateway that starts anew knows it. Invariants: once it is
known, no call waits for the hub, but for the first one after a refresh; while the hub is away the last
answer stands; a call that asks for a version is never sent to an engine that was last seen to serve
another one.

Knows engines and the hub's question. Knows no spans and nothing of what is in a call.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Final, Literal

import httpx

from spangrad.tracer.conventions import HEADER_POLICY
from spangrad.tracer.gateway.config import GatewayConfig
from spangrad.tracer.gateway.engine import Engine
from spangrad.tracer.gateway.engines import Lease

logger = logging.getLogger(__name__)

Asked = Literal["any", "latest", "promoted", "canary"]
"""`canary`: the latest version, by the gateway's share."""

KNOWN_FOR_S: Final = 2.0
"""The hub is asked again so long after it was asked, when a call comes."""
HUB_TIMEOUT_S: Final = 5.0
_BY_HEADER: Final[Mapping[str, Asked]] = {"any": "any", "latest": "latest", "promoted": "promoted"}
_SQL: Final = "SELECT policy_version FROM policy_lineage WHERE run_id = ? AND status = 'promoted'"


class PolicyChoice:
    """Chooses among the engines that could take a call."""

    def __init__(self, config: GatewayConfig) -> None:
        """Ask nobody yet."""
        self._config = config
        self.promoted: int | None = config.promoted_version
        """The promoted version; None: not known, for the reason in `problem`."""
        self.problem: str | None = None
        self._asked_at = float("-inf")
        self._asking: asyncio.Task[None] | None = None
        self._is_forgotten = True
        key = config.store_key
        self._hub = httpx.AsyncClient(
            headers={} if key is None else {"authorization": f"Bearer {key}"},
            timeout=HUB_TIMEOUT_S,
            trust_env=False,
        )

    def asked(self, header: str | None, rollout_id: str | None) -> Asked:
        """What a call asks for. Raises ValueError for a header that says something else."""
        if header is not None:
            if (wanted := _BY_HEADER.get(header.strip().lower())) is not None:
                return wanted
            raise ValueError(f"header {HEADER_POLICY} is {header[:40]!r}; expected any, latest or promoted")
        share = self._config.canary
        if share is not None and rollout_id is not None and place_of(rollout_id) < share:
            return "canary"
        return self._config.serve

    async def narrow(self, lease: Lease, asked: Asked) -> None:
        """Leave those engines to a call that serve what it asks for."""
        trained = [engine for engine in lease.engines if engine.policy == "trained"]
        if asked == "any" or not trained:
            return
        served = await self._served(trained)
        if asked == "promoted":
            wanted = await self._promoted_now()
            what = self.problem if wanted is None else f"none serves the promoted version, {wanted}"
        else:
            wanted = max((version for version in served.values() if version is not None), default=None)
            what = "none says which version it serves"
        lease.leave_out(engine for engine in lease.engines if wanted is None or served.get(engine) != wanted)
        if wanted is None or wanted not in served.values():
            told = ", ".join(f"{engine.url} {_shown(engine, served[engine])}" for engine in trained)
            lease.refuse(
                f"no engine for the policy that was asked for: {what}; {told}. Publish the version to one"
                f" (`spangrad promote RUN VERSION --engine ADDRESS`), or ask for another in {HEADER_POLICY}"
            )

    def forget(self) -> None:
        """Something was published or decided: the next call waits for the hub's answer."""
        self._is_forgotten = True

    async def close(self) -> None:
        """Close the connection."""
        if self._asking is not None:
            self._asking.cancel()
        await self._hub.aclose()

    async def _served(self, engines: Sequence[Engine]) -> dict[Engine, int | None]:
        not_before = time.monotonic() - self._config.version_ttl_s
        up = [engine for engine in engines if engine.problem is None] or engines
        seen = await asyncio.gather(*(engine.versions.observe(not_before) for engine in up))
        versions: dict[Engine, int | None] = dict.fromkeys(engines)
        return versions | {engine: one.version for engine, one in zip(up, seen, strict=True)}

    async def _promoted_now(self) -> int | None:
        if self._config.run is None:
            if self.promoted is None:
                self.problem = "this gateway was not told of a run: --run"
            return self.promoted
        if self._is_forgotten or time.monotonic() - self._asked_at >= KNOWN_FOR_S:
            if self._asking is None:
                self._asking = asyncio.create_task(self._ask(self._config.run))
            if self._is_forgotten or self.promoted is None:
                await asyncio.shield(self._asking)
        return self.promoted

    async def _ask(self, run: str) -> None:
        self._is_forgotten = False
        self._asked_at = time.monotonic()
        try:
            question = {"sql": _SQL, "parameters": [run]}
            answer = await self._hub.post(f"{self._config.store.rstrip('/')}/api/query", json=question)
            answer.raise_for_status()
            rows = answer.json()["result"]
            self.promoted = int(rows[0]["policy_version"]) if rows else None
            self.problem = None if rows else f"no version of run {run!r} is promoted"
        except (httpx.HTTPError, ValueError, KeyError, TypeError, IndexError) as error:
            self.problem = f"the hub did not say which version of run {run!r} is promoted: {error!r}"
            logger.warning("%s", self.problem)
        finally:
            self._asking = None


def place_of(rollout_id: str) -> float:
    """Where a rollout stands between 0 and 1, for good: the first 53 bits of BLAKE2b of its id."""
    digest = hashlib.blake2b(rollout_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53


def _shown(engine: Engine, version: int | None) -> str:
    what = "serves an unknown version" if version is None else f"serves version {version}"
    return what if engine.is_open else f"{what} ({engine.state})"
