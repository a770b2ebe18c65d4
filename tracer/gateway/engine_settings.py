"""How an engine samples where a request does not say, asked of the engine itself.

vLLM tells it at `GET /server_info`, where it tells its weights (`VLLM_SERVER_DEV_MODE=1`): whether
logprobs are of the distribution that was sampled, and whether a model folder's own temperature, top_p and
the like stand in for what a request leaves out. Without it only the gateway's config says so.

Invariants: an engine is asked until it answers, and then once a life; nobody's reply waits for it, and no
span longer than a version's; asking never raises.

Knows vLLM's configuration. Knows no spans and no calls.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import httpx

logger = logging.getLogger(__name__)

TIMEOUT_S = 30.0
"""vLLM collects a report on its machine with the first answer: seconds."""
_HAS_NONE = (401, 403, 404, 405)
"""Statuses of a server that will not tell: not vLLM's, or not in development mode."""
SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
"""Parameters for which vLLM takes defaults from a model's folder."""
_NEUTRAL = "vllm"


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What an engine says of itself."""

    is_known: bool = False
    logprobs_mode: str | None = None
    """vLLM's `--logprobs-mode`: `processed_logprobs`, `raw_logprobs`, or one with logits; None: not told."""
    defaults: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Sampling parameters that stand in for what a request leaves out."""
    unknown_defaults: str | None = None
    """Why there may be others."""


class SettingsWatch:
    """Asks an engine how it samples, once until it is forgotten."""

    def __init__(self, client: httpx.AsyncClient, engine_url: str, *, patience_s: float) -> None:
        """Ask later; callers wait until `patience_s` after it was asked."""
        self._client = client
        self._url = f"{engine_url}/server_info"
        self._patience_s = patience_s
        self._asking: asyncio.Task[EngineSettings] | None = None
        self._asked_at = 0.0

    def forget(self) -> None:
        """Another engine may answer at this address from now on."""
        self._asking = None

    async def known(self) -> EngineSettings:
        """What the engine says, or nothing yet; callers share one request."""
        if self._asking is None:
            self._asked_at = time.monotonic()
            self._asking = asyncio.create_task(self._ask())
        asking = self._asking
        if not asking.done():
            left_s = self._patience_s - (time.monotonic() - self._asked_at)
            await asyncio.wait({asking}, timeout=max(0.0, left_s))
        return asking.result() if asking.done() else EngineSettings()

    async def _ask(self) -> EngineSettings:
        try:
            answer = await self._client.get(self._url, params={"config_format": "json"}, timeout=TIMEOUT_S)
            if not answer.is_success and answer.status_code not in _HAS_NONE:
                answer.raise_for_status()
            settings = _read(answer.json()) if answer.is_success else EngineSettings()
        except httpx.HTTPError as error:
            logger.debug("%s does not answer: %s: %s", self._url, type(error).__name__, error)
            self._asking = None  # another call asks again
            return EngineSettings()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            logger.debug("%s does not say how it samples: %s: %s", self._url, type(error).__name__, error)
            return EngineSettings()
        if settings.unknown_defaults is not None:
            logger.warning("%s: %s", self._url.removesuffix("/server_info"), settings.unknown_defaults)
        return settings


def _read(answer: Any) -> EngineSettings:
    """What a `/server_info` says. Raises KeyError and the like if it is none."""
    model = answer["vllm_config"]["model_config"]
    source, mode = model["generation_config"], model["logprobs_mode"]
    override = model.get("override_generation_config") or {}
    unknown = None
    if source != _NEUTRAL:
        unknown = (
            f"the engine was started with --generation-config {source}: what a request leaves out comes from "
            "the model's folder; start it with `--generation-config vllm`"
        )
    return EngineSettings(
        is_known=True,
        logprobs_mode=str(mode),
        defaults={name: override[name] for name in SAMPLING if override.get(name) is not None},
        unknown_defaults=unknown,
    )


class NoSettings:
    """Stands for the watch of a model whose calls have no logprobs."""

    def forget(self) -> None:
        """Nothing is known."""

    async def known(self) -> EngineSettings:
        """Nothing, and no loss."""
        return EngineSettings()
