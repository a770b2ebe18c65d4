"""One engine behind a gateway, and how it is.

Knows HTTP to it. Knows no other engines, and no calls but how many it has.
"""

import asyncio
import logging
import time
from dataclasses import dataclass, field

import httpx

from spangrad.tracer.gateway.adapters import AdapterWatch, NoAdapters
from spangrad.tracer.gateway.engine_settings import NoSettings, SettingsWatch
from spangrad.tracer.gateway.swaps import Swap
from spangrad.tracer.gateway.upstream import EngineClient
from spangrad.tracer.gateway.versions import NoVersions, VersionWatch

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Engine:
    """One engine, and how it is."""

    url: str
    """Its address, and its name on spans."""
    key: str | None = field(repr=False)
    """Sent as `Authorization: Bearer KEY`."""
    models: tuple[str, ...]
    """Models that it serves; empty: every one that no other engine names."""
    policy: str
    """`trained` or `frozen`."""
    client: EngineClient
    versions: VersionWatch | NoVersions
    settings: SettingsWatch | NoSettings
    adapters: AdapterWatch | NoAdapters
    provider: str = "vllm"
    problem: str | None = None
    """Why it is out; None while it is healthy."""
    is_draining: bool = False
    stale: str | None = None
    """Why its weights are not the ones that the others serve; it gets no calls until they are."""
    in_flight: int = 0
    """Calls that it works on now."""
    calls: int = 0
    last_chosen: int = 0
    """Running number of its latest call among all calls of the gateway."""
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set whenever no call is in flight."""
    swap: Swap = field(init=False)
    """Whether its weights are being replaced."""

    def __post_init__(self) -> None:
        """Begin idle."""
        self.idle.set()
        self.swap = Swap(self.url)

    @property
    def is_closed(self) -> bool:
        """Whether it gets no calls, whatever becomes of the others."""
        return self.is_draining or self.stale is not None

    @property
    def is_open(self) -> bool:
        """Whether it should get calls."""
        return self.problem is None and not self.is_closed and not self.swap.is_on

    @property
    def state(self) -> str:
        """What to say of it when no engine can take a call."""
        return self.problem or self.stale or ("draining" if self.is_draining else "healthy")

    def out(self, problem: str) -> None:
        """Give it no calls until it is back."""
        if self.problem is None:
            logger.warning("engine %s is out: %s", self.url, problem)
        self.problem = problem
        self.settings.forget()
        self.adapters.forget()

    def back(self) -> None:
        """Give it calls again."""
        if self.problem is not None:
            logger.info("engine %s is back", self.url)
        self.problem = None

    def forget_version(self) -> None:
        """Trust nothing that was asked before now of the policy that it serves."""
        self.versions.forget()
        self.adapters.forget()

    async def check(self, timeout_s: float) -> bool:
        """Ask how it is, note the answer, and return whether it is healthy."""
        headers = {} if self.key is None else {"authorization": f"Bearer {self.key}"}
        try:
            answer = await self.client.get(f"{self.url}/health", headers=headers, timeout=timeout_s)
        except httpx.HTTPError as error:
            self.out(f"GET /health failed: {type(error).__name__}")
        else:
            if answer.is_success:
                self.back()
            else:
                self.out(f"GET /health answered {answer.status_code}")
        return self.problem is None

    async def watch(self, interval_s: float, timeout_s: float) -> None:
        """Check it again and again; ends when it is cancelled."""
        while True:
            await asyncio.sleep(interval_s)
            try:
                await self.check(timeout_s)
            except Exception:  # boundary: it must go on whatever happened
                logger.exception("engine %s could not be checked", self.url)


async def drained(engine: Engine, timeout_s: float) -> bool:
    """Wait until an engine works on nothing; False if it still does after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while engine.in_flight:
        try:
            await asyncio.wait_for(engine.idle.wait(), deadline - time.monotonic())
        except TimeoutError:
            return False
    return True
