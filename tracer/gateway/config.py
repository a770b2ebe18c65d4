"""What a gateway needs to know; checked before anything starts.

Knows no HTTP and makes no spans.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal
from urllib.parse import urlsplit

from spangrad.errors import ConfigError
from spangrad.tracer.access import MIN_KEY_CHARS, is_loopback
from spangrad.tracer.redaction import Rule, rule_of

_ABOVE_0 = (
    "request_timeout_s",
    "version_timeout_s",
    "flush_timeout_s",
    "drain_timeout_s",
    "swap_timeout_s",
    "health_interval_s",
    "health_timeout_s",
    "shutdown_s",
)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One vLLM server behind a gateway."""

    url: str
    """Its address, `http://host:port`; a trailing `/` or `/v1` is cut off."""
    key: str | None = field(default=None, repr=False)
    """Key sent to it; None: the gateway's `engine_key`."""
    models: Sequence[str] = ()
    """Names of the models that it serves; none: every model that no other engine names."""
    policy: Literal["trained", "frozen"] | None = None
    """Whether its model is the one being trained; None: as the gateway's `policy` says."""

    def __post_init__(self) -> None:
        """Check every value and normalise the address. Raises ConfigError."""
        object.__setattr__(self, "url", _checked_url(self.url, "gateway.engines"))
        if isinstance(self.models, str) or "" in self.models:
            raise ConfigError(f"engine {self.url}: models is {self.models!r}; expected a list of names")
        object.__setattr__(self, "models", tuple(self.models))
        if self.policy not in (None, "trained", "frozen"):
            raise ConfigError(f"engine {self.url}: policy is {self.policy!r}; expected 'trained' or 'frozen'")


@dataclass(frozen=True, slots=True)
class HostedModel:
    """One model that LiteLLM reaches."""

    model: str
    """LiteLLM's name of it: `PROVIDER/MODEL`."""
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Further arguments of every call, such as `api_base`, `api_key` or `drop_params`."""

    @classmethod
    def of(cls, name: str, entry: "HostedModel | str | Mapping[str, Any]") -> "HostedModel":
        """Read one entry of `GatewayConfig.hosted`. Raises ConfigError."""
        if isinstance(entry, HostedModel):
            return entry
        settings = {"model": entry} if isinstance(entry, str) else dict(entry)
        model = settings.pop("model", None)
        if not name or not isinstance(model, str) or not model:
            raise ConfigError(
                f"gateway.hosted: {name!r} names no model; expected PROVIDER/MODEL as its `model`"
            )
        return cls(model, MappingProxyType(settings))


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """Settings of one gateway: one address for agents, its engines, one store."""

    engine_url: str | None = None
    """vLLM's address if there is only one; the same as the first of `engines`."""
    store: str = ""
    """Where spans go: a hub's URL or the path of a file store. Needed."""
    engines: Sequence[EngineConfig | str] = ()
    """Engines, or their addresses; `engine_url` may be left out then."""
    store_key: str | None = field(default=None, repr=False)
    """Key for the hub; None if the hub asks for none or the store is a file."""
    host: str = "127.0.0.1"
    """Address to listen on; anything but loopback needs `agent_key`."""
    port: int = 8100
    """Port to listen on; 0 picks a free one."""
    agent_key: str | None = field(default=None, repr=False)
    """Key that agents must send as `Authorization: Bearer KEY` or `x-api-key: KEY`, without a `~`.

    None: everybody on this machine may call.
    """
    operator_keys: Sequence[str] = field(default=(), repr=False)
    """Keys with which callers on other machines may flush, refresh and drain; those on this one need none."""
    engine_key: str | None = field(default=None, repr=False)
    """Key sent to the engine. Without it and without `agent_key` the agent's own key is passed on."""
    models: Mapping[str, str] = field(default_factory=dict)
    """Model name that agents ask for -> name that the engine serves; `*` stands for every other name."""
    hosted: Mapping[str, "HostedModel | str | Mapping[str, Any]"] = field(default_factory=dict, repr=False)
    """Model name that agents ask for -> LiteLLM's `PROVIDER/MODEL`, or a table with it as `model` and
    LiteLLM's settings (`api_base`, ...); recorded as frozen. Keys come from LiteLLM's environment variables.
    """
    policy: Literal["trained", "frozen"] = "trained"
    """Whether the model behind this gateway is the one being trained; written on every span."""
    serve: Literal["any", "latest", "promoted"] = "any"
    """Which version a call gets that names none in `x-spangrad-policy`: any engine's, the highest that an
    engine serves, or the promoted one."""
    canary: float | None = None
    """Share of the rollouts that get the latest version where `serve` is `promoted`; above 0, below 1."""
    run: str | None = None
    """Training run whose promoted version is meant; the hub in `store` is asked for it."""
    promoted_version: int | None = None
    """The promoted version, where there is no hub to be asked; 0 or more."""
    request_timeout_s: float = 600.0
    """Longest silence of the engine, in seconds: until a reply, or between two chunks of a stream."""
    logprobs_mode: Literal["processed", "raw"] = "processed"
    """The engine's `--logprobs-mode`, without `_logprobs`, for an engine that doesn't tell it itself."""
    fidelity: Literal["as-asked", "tokens-in"] = "as-asked"
    """`tokens-in`: follow-up chat calls of a rollout are sent with its own token ids, which can change what
    the policy sees; needs `POST /tokenize` of the engine."""
    initial_version: int | None = 0
    """Policy version of an engine whose weights were never replaced; None: unknown."""
    version_ttl_s: float = 0.25
    """How old, in seconds, the known policy version may be when a call starts, before it is asked again."""
    version_timeout_s: float = 5.0
    """Longest wait for the engine's policy version, in seconds; then it is unknown."""
    flush_timeout_s: float = 20.0
    """Longest wait of `POST /spangrad/flush` for the spans of ended calls to be in the store, and of
    `POST /v1/end` for them to be recorded, in seconds."""
    drain_timeout_s: float = 600.0
    """Longest wait of `POST /spangrad/engines/drain` for an engine's running calls, in seconds."""
    swap_timeout_s: float = 120.0
    """Longest time, in seconds, that calls wait for an engine whose weights are being replaced, and that it
    is left alone; below the clients' own patience, 600 for OpenAI's."""
    health_interval_s: float = 2.0
    """Time between two health checks of an engine, in seconds."""
    health_timeout_s: float = 5.0
    """An engine that does not answer a health check for so long, in seconds, gets no calls."""
    shutdown_s: int = 10
    """Calls that are still running get so long, in seconds, to end when the gateway is stopped; then they
    are cut and recorded as far as they came.
    """
    spool_dir: Path | None = None
    """Folder where spans wait while the hub is down; None: the exporter's default."""
    redact: bool | str | Rule | None = None
    """What is taken out of texts before they leave the process, as for `spangrad.init(redact=...)`. With it
    there is no journal: it would hold them in clear.
    """
    raw_log: Path | None = None
    """File that gets one JSON line a call with the engine's raw reply; None: no such log."""

    def __post_init__(self) -> None:
        """Check every value and normalise the engines. Raises ConfigError."""
        self._check_engines()
        if not self.store:
            raise ConfigError("gateway.store is empty; give a hub's URL or the path of a file store")
        if rule_of(self.redact) is not None and self.raw_log is not None:
            raise ConfigError("gateway.raw_log holds replies as they are; leave it out, or leave out redact")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"gateway.port is {self.port}; expected 0 to 65535")
        if self.agent_key is None and not is_loopback(self.host):
            raise ConfigError(
                f"gateway.host is {self.host!r}, which other machines can reach; "
                "set gateway.agent_key or listen on 127.0.0.1"
            )
        if self.agent_key == "":
            raise ConfigError("gateway.agent_key is empty; leave it out or give a key")
        if isinstance(self.operator_keys, str) or any(len(k) < MIN_KEY_CHARS for k in self.operator_keys):
            raise ConfigError(
                f"gateway.operator_keys: expected a list of keys of {MIN_KEY_CHARS} characters or more"
            )
        if self.agent_key is not None and self.agent_key in self.operator_keys:
            raise ConfigError(
                "gateway.operator_keys has the agents' key, within the policy's reach; leave it out"
            )
        if self.agent_key is not None and "~" in self.agent_key:
            raise ConfigError(
                "gateway.agent_key has a '~', behind which agents name a rollout; use another key"
            )
        self._check_choice()
        for name in _ABOVE_0:
            if not getattr(self, name) > 0:
                raise ConfigError(f"gateway.{name} is {getattr(self, name)!r}; expected seconds above 0")
        if not self.version_ttl_s >= 0:
            raise ConfigError(f"gateway.version_ttl_s is {self.version_ttl_s!r}; expected seconds, 0 or more")
        if self.policy not in ("trained", "frozen"):
            raise ConfigError(f"gateway.policy is {self.policy!r}; expected 'trained' or 'frozen'")
        if self.fidelity not in ("as-asked", "tokens-in"):
            raise ConfigError(f"gateway.fidelity is {self.fidelity!r}; expected 'as-asked' or 'tokens-in'")
        if self.logprobs_mode not in ("processed", "raw"):
            raise ConfigError(
                f"gateway.logprobs_mode is {self.logprobs_mode!r}; expected 'processed' or 'raw'"
            )

    @property
    def all_engines(self) -> tuple[EngineConfig, ...]:
        """Every engine, `engine_url` first."""
        first = [] if self.engine_url is None else [EngineConfig(self.engine_url)]
        rest = [EngineConfig(entry) if isinstance(entry, str) else entry for entry in self.engines]
        return (*first, *rest)

    @property
    def hosted_models(self) -> dict[str, HostedModel]:
        """Every hosted model under the name that agents ask for."""
        return {name: HostedModel.of(name, entry) for name, entry in self.hosted.items()}

    def _check_choice(self) -> None:
        if self.serve not in ("any", "latest", "promoted"):
            raise ConfigError(f"gateway.serve is {self.serve!r}; expected 'any', 'latest' or 'promoted'")
        if self.run is not None and self.promoted_version is not None:
            raise ConfigError(
                f"gateway.run is {self.run!r} and gateway.promoted_version {self.promoted_version!r}; give"
                " one of them"
            )
        if self.run is not None and not self.store.startswith(("http://", "https://")):
            raise ConfigError(
                f"gateway.run is {self.run!r}, but gateway.store is the file {self.store!r}, not a hub that"
                " says which version is promoted; give promoted_version"
            )
        if self.promoted_version is not None and not self.promoted_version >= 0:
            raise ConfigError(f"gateway.promoted_version is {self.promoted_version!r}; expected 0 or more")
        if self.serve == "promoted" and self.run is None and self.promoted_version is None:
            raise ConfigError("gateway.serve is 'promoted'; name the training run as gateway.run")
        if self.canary is not None and not (self.serve == "promoted" and 0 < self.canary < 1):
            raise ConfigError(
                f"gateway.canary is {self.canary!r} and gateway.serve {self.serve!r}; expected a share above"
                " 0, below 1, and 'promoted'"
            )

    def _check_engines(self) -> None:
        if self.engine_url is not None:
            object.__setattr__(self, "engine_url", _checked_url(self.engine_url, "gateway.engine_url"))
        if isinstance(self.engines, str):
            raise ConfigError(f"gateway.engines is {self.engines!r}; expected a list of addresses")
        urls = [engine.url for engine in self.all_engines]
        if not urls and not self.hosted:
            raise ConfigError("gateway has no engine; give engine_url, engines or hosted")
        named = {model for engine in self.all_engines for model in engine.models}
        for name in self.hosted_models:
            if name in named:
                raise ConfigError(f"gateway.hosted: {name!r} is also an engine's model; name it once")
        if (twice := next((url for url in urls if urls.count(url) > 1), None)) is not None:
            raise ConfigError(f"gateway names the engine {twice!r} twice; name each once")


def base_url(url: str) -> str:
    """An engine's address without what clients put behind it."""
    return url.rstrip("/").removesuffix("/v1")


def _checked_url(url: str, where: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"{where} is {url!r}; expected http://host:port of a vLLM server")
    if "@" in parts.netloc:
        raise ConfigError(
            f"{where} has a name or a password before {parts.hostname!r}, which spans and logs would show; "
            "give a key as engine_key"
        )
    return base_url(url)
