"""What a gateway needs to know; checked before anything starts.

Knows no HTTP and no OpenTelemetry.
"""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from spangrad.errors import ConfigError


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """Settings of one gateway: one address for agents, one engine, one store."""

    engine_url: str
    """vLLM's address, `http://host:port`; a trailing `/` or `/v1` is cut off."""
    store: str
    """Where spans go: a hub's URL or the path of a file store."""
    store_key: str | None = field(default=None, repr=False)
    """Key for the hub; None if the hub asks for none or the store is a file."""
    host: str = "127.0.0.1"
    """Address to listen on; anything but loopback needs `agent_key`."""
    port: int = 8100
    """Port to listen on; 0 picks a free one."""
    agent_key: str | None = field(default=None, repr=False)
    """Key that agents must send as `Authorization: Bearer KEY`; None: everybody on this machine may call."""
    engine_key: str | None = field(default=None, repr=False)
    """Key sent to the engine. Without it and without `agent_key` the agent's own key is passed on."""
    models: Mapping[str, str] = field(default_factory=dict)
    """Model name that agents ask for -> name that the engine serves; `*` stands for every other name."""
    policy: Literal["trained", "frozen"] = "trained"
    """Whether the model behind this gateway is the one being trained; written on every span."""
    request_timeout_s: float = 600.0
    """Longest silence of the engine, in seconds: until a reply, or between two chunks of a stream."""
    logprobs_mode: Literal["processed", "raw"] = "processed"
    """The engine's `--logprobs-mode`, without `_logprobs`; the engine doesn't tell, so it is stated here."""
    initial_version: int | None = 0
    """Policy version of an engine whose weights were never replaced; None: unknown."""
    version_ttl_s: float = 0.25
    """How old, in seconds, the known policy version may be when a call starts, before it is asked again."""
    version_timeout_s: float = 5.0
    """Longest wait for the engine's policy version, in seconds; then it is unknown."""
    flush_timeout_s: float = 20.0
    """Longest wait of `POST /spangrad/flush` for the spans of ended calls to be in the store, in seconds."""
    spool_dir: Path | None = None
    """Folder where spans wait while the hub is down; None: the exporter's default."""
    raw_log: Path | None = None
    """File that gets one JSON line a call with the engine's raw reply; None: no such log."""

    def __post_init__(self) -> None:
        """Check every value and normalise `engine_url`. Raises ConfigError."""
        object.__setattr__(self, "engine_url", _base_url(self.engine_url))
        if not self.store:
            raise ConfigError("gateway.store is empty; give a hub's URL or the path of a file store")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"gateway.port is {self.port}; expected 0 to 65535")
        if self.agent_key is None and not is_loopback(self.host):
            raise ConfigError(
                f"gateway.host is {self.host!r}, which other machines can reach; "
                "set gateway.agent_key or listen on 127.0.0.1"
            )
        if self.agent_key == "":
            raise ConfigError("gateway.agent_key is empty; leave it out or give a key")
        for name in ("request_timeout_s", "version_timeout_s", "flush_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"gateway.{name} is {getattr(self, name)!r}; expected seconds above 0")
        if not self.version_ttl_s >= 0:
            raise ConfigError(f"gateway.version_ttl_s is {self.version_ttl_s!r}; expected seconds, 0 or more")
        if self.policy not in ("trained", "frozen"):
            raise ConfigError(f"gateway.policy is {self.policy!r}; expected 'trained' or 'frozen'")
        if self.logprobs_mode not in ("processed", "raw"):
            raise ConfigError(
                f"gateway.logprobs_mode is {self.logprobs_mode!r}; expected 'processed' or 'raw'"
            )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _base_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"gateway.engine_url is {url!r}; expected http://host:port of a vLLM server")
    return url.rstrip("/").removesuffix("/v1")
