"""The engines behind one gateway: which of them takes a call, and how they are.

    lease(model, rollout) -> the engines that serve the model
        -> the one that has the rollout's prefix in its cache, else the least loaded one

Invariants: a call is offered to another engine, or once more, only after a connection that could not be
made or a 503 while weights are replaced, so it is never sampled twice; an engine that drains, has old
weights or is out gets no new call, and loses none that it has; choosing costs no more the more calls or
rollouts there are, and waits only for an engine whose weights are being replaced, if no other is healthy.
Engines that are out are asked when no other is left: one may be back.

Knows HTTP to engines. Knows no spans and nothing of what is in a call.
"""

import logging
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import httpx

from spangrad.tracer.gateway.adapters import Adapter, AdapterWatch, NoAdapters
from spangrad.tracer.gateway.config import EngineConfig, GatewayConfig, HostedModel
from spangrad.tracer.gateway.engine import Engine
from spangrad.tracer.gateway.engine_settings import NoSettings, SettingsWatch
from spangrad.tracer.gateway.hosted import SCHEME, HostedTransport
from spangrad.tracer.gateway.upstream import EngineClient
from spangrad.tracer.gateway.versions import NoVersions, VersionWatch
from spangrad.tracer.gateway.visitors import Visitors

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
CONNECT_ERRORS = (httpx.ConnectError, httpx.ConnectTimeout)
"""After these the engine has seen nothing of a request."""
MAX_STICKY = 16_384
"""Rollouts whose engine is remembered, for each set of engines; the one seen longest ago makes way."""


class _Group:
    """The engines that serve the same models, and the rollouts that stick to them."""

    def __init__(self, engines: Sequence[Engine], visitors: Visitors | None = None) -> None:
        self._own = tuple(engines)
        self._visitors = visitors
        self._sticky: OrderedDict[int, Engine] = OrderedDict()

    @property
    def engines(self) -> tuple[Engine, ...]:
        return self._own if self._visitors is None else (*self._own, *self._visitors.engines)

    @property
    def remembered(self) -> int:
        return len(self._sticky)

    async def choose(self, rollout_id: str | None, tried: Iterable[Engine]) -> Engine | None:
        while True:
            left = [engine for engine in self.engines if not engine.is_closed and engine not in tried]
            candidates = [engine for engine in left if engine.is_open]
            swapped = next((engine for engine in left if engine.swap.is_on), None)
            if candidates or swapped is None:
                return self._choose(rollout_id, candidates or left)
            await swapped.swap.over()

    def _choose(self, rollout_id: str | None, candidates: Sequence[Engine]) -> Engine | None:
        if not candidates:
            return None
        if rollout_id is None:
            return _least_loaded(candidates)
        # An id may be as long as a header: two with one hash merely share an engine.
        key = hash(rollout_id)
        engine = self._sticky.get(key)
        if engine not in candidates:
            engine = _least_loaded(candidates)
            self._sticky[key] = engine
            if len(self._sticky) > MAX_STICKY:
                self._sticky.popitem(last=False)
        self._sticky.move_to_end(key)
        return engine


def _least_loaded(engines: Sequence[Engine]) -> Engine:
    """The one with the fewest calls in flight; of several, the one that was chosen longest ago."""
    return min(engines, key=lambda engine: (engine.in_flight, engine.last_chosen))


class Lease:
    """A call's claim on an engine; `with` gives it back."""

    __slots__ = (
        *("_group", "_pool", "_rollout_id", "_served", "_tried"),
        *("adapter", "engine", "error", "model", "refusal"),
    )

    def __init__(
        self,
        pool: "EnginePool",
        group: _Group | None,
        *,
        model: str | None,
        served: str | None,
        rollout_id: str | None,
    ) -> None:
        """Nothing is claimed before `next`; `served` is how engines call the client's `model`."""
        self._pool = pool
        self._group = group
        self._rollout_id = rollout_id
        self._tried: list[Engine] = []
        self.model = model
        self._served = served
        self.engine: Engine | None = None
        """The engine that has the call."""
        self.adapter: Adapter | None = None
        """What stands for the model there."""
        self.error: httpx.HTTPError | None = None
        """Why the last engine could not be connected to."""
        self.refusal: str | None = None
        """Why none of the engines may have the call."""

    @property
    def engines(self) -> tuple[Engine, ...]:
        """The engines that serve the model."""
        return () if self._group is None else self._group.engines

    def leave_out(self, engines: Iterable[Engine]) -> None:
        """Offer the call to none of these."""
        self._tried.extend(engines)

    def refuse(self, why: str) -> None:
        """Say so if `next` has no engine left."""
        self.refusal = why

    def __enter__(self) -> Self:
        """Begin."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the engine back."""
        self._give_back()

    async def next(self) -> Engine | None:
        """Claim an engine that was not tried yet; None if there is none."""
        self._give_back()
        engine = None if self._group is None else await self._group.choose(self._rollout_id, self._tried)
        if engine is not None:
            self._tried.append(engine)
            self._pool.count_call(engine)
        self.engine = engine
        return engine

    async def find_adapter(self) -> Adapter | None:
        """What stands for the model at the claimed engine, claimed with it; None: the model itself."""
        assert self.engine is not None
        adapters = self.engine.adapters
        self.adapter = await adapters.of(self._served)
        if self.adapter is not None:
            adapters.in_flight[self.adapter.name] += 1
        return self.adapter

    def is_refused_for_swap(self) -> bool:
        """The claimed engine did not take the call: whether it may be asked again, after its swap."""
        assert self.engine is not None
        if self.engine.swap.is_on:
            self._tried.remove(self.engine)
            return True
        return False

    def no_connection(self, error: httpx.HTTPError) -> None:
        """The claimed engine can't be connected to: it is out at once, or waited for if it has a reason."""
        assert self.engine is not None
        if self.is_refused_for_swap():
            return
        self.error = error
        self.engine.out(f"no connection ({type(error).__name__})")

    def failure(self) -> tuple[int, str, str]:
        """Status, type and message of the error when `next` has no engine left."""
        if self._group is None:
            served = ", ".join(self._pool.model_names) or "none"
            return 404, "model_not_found", f"no engine serves the model {self.model!r}; served are: {served}"
        engines = self._group.engines
        if self.refusal is not None:
            return 503, "policy_not_served", self.refusal
        if self.error is None:
            states = ", ".join(f"{engine.url} ({engine.state})" for engine in engines)
            return 503, "no_engine", f"no engine takes calls: {states}; undrain one or try again later"
        if len(engines) == 1:
            name = type(self.error).__name__
            advice = "start it or correct the gateway's engine_url"
            return 502, "engine_error", f"no engine answers at {engines[0].url} ({name}); {advice}"
        states = ", ".join(f"{engine.url} ({engine.state})" for engine in engines)
        return 502, "engine_error", f"no engine answers: {states}; start one or correct the gateway's engines"

    def _give_back(self) -> None:
        engine, self.engine = self.engine, None
        adapter, self.adapter = self.adapter, None
        if engine is not None:
            if adapter is not None:
                engine.adapters.in_flight[adapter.name] -= 1
            engine.in_flight -= 1
            if engine.in_flight == 0:
                engine.idle.set()


class EnginePool:
    """All engines of a gateway."""

    def __init__(self, config: GatewayConfig) -> None:
        """Open no connection yet."""
        self._chosen = 0
        self._client = EngineClient(
            timeout=httpx.Timeout(config.request_timeout_s, connect=CONNECT_TIMEOUT_S, pool=None)
        )
        self._config = config
        self._own = tuple(self._engine(entry) for entry in config.all_engines)
        self._visitors = Visitors(interval_s=config.health_interval_s, timeout_s=config.health_timeout_s)
        self.hosted = tuple(
            _hosted_engine(name, model, config.request_timeout_s)
            for name, model in config.hosted_models.items()
        )
        self._hosted_names = frozenset(config.hosted)
        self.models: Mapping[str, str] = {**{name: name for name in self.model_names}, **config.models}
        """The config's `models`, whose `*` leaves out the models that an engine names."""
        self._groups: dict[str, _Group] = {
            model: _Group([engine for engine in self.all if model in engine.models])
            for model in self.model_names
        }
        self._nameless = _Group([engine for engine in self._own if not engine.models], self._visitors)

    def _engine(self, entry: EngineConfig) -> Engine:
        config = self._config
        key = entry.key if entry.key is not None else config.engine_key
        client, url, timeout_s = self._client, entry.url, config.version_timeout_s
        return Engine(
            *(url, key, tuple(entry.models), entry.policy or config.policy, client),
            VersionWatch(client, url, initial_version=config.initial_version, timeout_s=timeout_s),
            SettingsWatch(client, url, patience_s=timeout_s),
            AdapterWatch(client, url, key=key, timeout_s=timeout_s),
        )

    @property
    def engines(self) -> tuple[Engine, ...]:
        """Those of the config, then those that joined."""
        return (*self._own, *self._visitors.engines)

    @property
    def _rest(self) -> _Group | None:
        """What serves the models that no engine names."""
        return self._nameless if self._nameless.engines else None

    async def join(self, url: str, for_s: float) -> Engine:
        """Let one more engine have calls for so long, or for longer; one of the config stays anyway.

        Raises:
            ConfigError: It is no address of an engine.
        """
        entry = EngineConfig(url)
        engine = self.find(entry.url) or self._engine(entry)
        if engine not in self._own:
            await self._visitors.join(engine, for_s)
        return engine

    def leave(self, engine: Engine) -> bool:
        """Let an engine that joined have no more calls; False if it is one of the config."""
        return self._visitors.leave(engine)

    @property
    def all(self) -> tuple[Engine, ...]:
        """Engines and hosted models."""
        return (*self.engines, *self.hosted)

    @property
    def model_names(self) -> list[str]:
        """Models that engines name, in order, then the hosted ones."""
        return list(dict.fromkeys(model for engine in self.all for model in engine.models))

    def lease(self, model: Any, rollout_id: str | None) -> Lease:
        """A claim for one call.

        Args:
            model: What the client asks for as a model; anything but a string counts as none.
            rollout_id: Whose call it is; None: nobody's, so any engine is as good.
        """
        name = model if isinstance(model, str) else None
        served = self._served(name)
        return Lease(self, self._group_of(name), model=name, served=served, rollout_id=rollout_id)

    def is_trained(self, body: Any) -> bool:
        """Whether a request's JSON asks for the policy that is trained."""
        name = body.get("model") if isinstance(body, dict) else None
        group = self._group_of(name if isinstance(name, str) else None)
        return group is not None and any(engine.policy == "trained" for engine in group.engines)

    def _group_of(self, name: str | None) -> _Group | None:
        served = self._served(name)
        group = self._rest if served is None else self._groups.get(served, self._rest)
        if group is None and served is None and len(self._groups) == 1:
            (group,) = self._groups.values()
        return group

    def is_hosted(self, body: Any) -> bool:
        """Whether a request's JSON asks for a hosted model."""
        name = body.get("model") if isinstance(body, dict) else None
        return self._served(name if isinstance(name, str) else None) in self._hosted_names

    def _served(self, name: str | None) -> str | None:
        return self.models.get("*") if name is None else self.models.get(name, self.models.get("*", name))

    def remembered_rollouts(self) -> int:
        """How many rollouts stick to an engine."""
        groups = [*self._groups.values(), *([] if self._rest is None else [self._rest])]
        return sum(group.remembered for group in groups)

    def count_call(self, engine: Engine) -> None:
        """Note that `engine` has one call more."""
        self._chosen += 1
        engine.last_chosen = self._chosen
        engine.calls += 1
        engine.in_flight += 1
        engine.idle.clear()

    def find(self, url: str) -> Engine | None:
        """The engine at an address."""
        return next((engine for engine in self.all if engine.url == url), None)

    def healthy_first(self) -> list[Engine]:
        """Engines in the order in which to try them for what any can answer."""
        return sorted(self.engines or self.hosted, key=lambda engine: (not engine.is_open, engine.is_closed))

    def forget_versions(self) -> None:
        """Trust no policy version that was asked before now."""
        for engine in self.engines:
            engine.forget_version()

    async def close(self) -> None:
        """Close all connections."""
        self._visitors.close()
        for client in (self._client, *(engine.client for engine in self.hosted)):
            await client.aclose()


def _hosted_engine(name: str, model: HostedModel, timeout_s: float) -> Engine:
    transport = HostedTransport(name, model, timeout_s=timeout_s)
    client = EngineClient(transport=transport, timeout=None)
    url = SCHEME + model.model
    watches = (NoVersions(), NoSettings(), NoAdapters())
    return Engine(url, None, (name,), "frozen", client, *watches, transport.provider)
