"""Publish to every engine of a policy, one after another, so that others serve meanwhile.

    for each engine: gateway, leave it alone -> transfer, prove -> gateway, it is back

A version is published when every engine that gets calls serves it, and at least one does. An
engine that could not take it gets no calls until a publish to it succeeds. If none could, the
version is not published: those that still have their old weights serve on, the others get no calls.

Invariants:
* at most one engine is changed at a time, and while it is, the gateway sends its calls elsewhere or
  lets them wait;
* an engine that computes other logprobs than the learner never keeps the version's label;
* publishing again puts right what was left of a publish that failed or died.

Knows the gateway's own routes. Does not know where the weights come from.
"""

import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spangrad.errors import PublishError, UnansweredError
from spangrad.trainer.serving.control import Control
from spangrad.trainer.serving.publish import Proof, prove, served_logprobs
from spangrad.trainer.serving.serving_config import PauseMode
from spangrad.trainer.serving.transfers import FileTransfer, Transfer

logger = logging.getLogger(__name__)

GATEWAY_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Probe:
    """Rows of tokens that show which weights an engine serves."""

    token_ids: Sequence[Sequence[int]]
    """Whole rows, prompt included."""
    learner: Sequence[NDArray[np.float32]]
    """The learner's logprobs of every token but the first of each row, at temperature 1, nats."""
    tolerance_nats: float
    learner_before: Sequence[NDArray[np.float32]] | None = None
    """The same before the update; the engines must then have moved as far. None: not asked."""


@dataclass(frozen=True, slots=True)
class FleetReport:
    """What a publish to all engines did."""

    version: int
    seconds: float
    proofs: Mapping[str, Proof]
    """How close the logprobs of each engine are, by address; none without a probe."""
    failed: Mapping[str, str]
    """Engines that did not take the version and get no calls, with the reason."""

    def metrics(self) -> dict[str, float]:
        """Numbers for an update's metrics: of several engines, those of the worst."""
        found = {"serving/engines_out": float(len(self.failed))}
        proofs = list(self.proofs.values())
        if proofs:
            found["gap/published_mean"] = max(proof.mean_gap for proof in proofs)
            found["gap/published_max"] = max(proof.max_gap for proof in proofs)
        moved = [proof.moved for proof in proofs if proof.moved is not None and proof.expected is not None]
        return found | ({"gap/published_moved": min(moved)} if moved else {})


class Fleet:
    """The engines that serve one policy, and the gateway in front of them."""

    def __init__(
        self,
        engine_urls: Sequence[str],
        *,
        gateway_url: str | None = None,
        gateway_key: str | None = None,
        transfer: Transfer | None = None,
        mode: PauseMode = "keep",
        timeout_s: float = 120.0,
    ) -> None:
        """Connect to nothing yet.

        Args:
            engine_urls: Addresses of vLLM servers, without `/v1`, as the gateway has them; one or more.
            gateway_url: Gateway to tell what happens; None: nobody is told.
            gateway_key: Operator's key for the gateway, if it needs one.
            transfer: How weights get into an engine; None: by a file.
            mode: What becomes of running requests, see `publish`.
            timeout_s: Longest wait for one answer of an engine.
        """
        self.engine_urls = tuple(engine_urls)
        self._gateway_url = gateway_url
        self._gateway_key = gateway_key
        self._transfer: Transfer = transfer or FileTransfer()
        self._mode: PauseMode = mode
        self._timeout_s = timeout_s

    def others(self, version: int) -> list[str]:
        """Engines that answer and serve another version.

        Raises:
            PublishError: No engine answers.
        """
        served = served_versions(self.engine_urls, self._transfer)
        return [url for url, found in served.items() if found != version]

    def publish(
        self,
        weights_path: str | Path,
        version: int,
        *,
        probe: Probe | None = None,
        only: Sequence[str] | None = None,
    ) -> FleetReport:
        """Serve new weights as `version`, and prove it where a probe is given.

        Args:
            weights_path: What the transfer takes: a file, or an adapter's folder. Every engine's machine must
                be able to read it.
            version: Policy version, 0 or more.
            probe: What every engine must compute then.
            only: Engines to publish to, where the others serve the version already; None: all.

        Raises:
            PublishError: No engine serves the version; says what each serves.
        """
        started = time.monotonic()
        targets = list(self.engine_urls if only is None else only)
        proofs: dict[str, Proof] = {}
        failed: dict[str, str] = {}
        taken: list[str] = []
        try:
            for url in targets:
                if self._transfer.pauses:
                    self._announce(url, version)
                try:
                    proof = self._publish_to(url, Path(weights_path), version, probe)
                except PublishError as error:
                    failed[url] = str(error)  # the gateway is told at the end, when it is clear who serves
                    continue
                except BaseException:
                    self._tell("swapped", url)
                    raise
                taken.append(url)
                told = self._tell("swapped", url)
                with contextlib.suppress(PublishError):  # what is too old stays for the next time
                    self._transfer.tidy(url, told.get("adapters", {}))
                if proof is not None:
                    proofs[url] = proof
        finally:
            is_served = bool(taken) or any(
                self._serves(url, version) for url in self.engine_urls if url not in targets
            )
            self._settle(failed, is_served=is_served)
        if not is_served:
            raise PublishError(_told(version, failed))
        for url, reason in failed.items():
            logger.warning("the engine at %s gets no calls until a publish to it succeeds: %s", url, reason)
        with contextlib.suppress(PublishError):
            self._transfer.clean(Path(weights_path), self.engine_urls)
        return FleetReport(version, time.monotonic() - started, proofs, failed)

    def _publish_to(self, url: str, path: Path, version: int, probe: Probe | None) -> Proof | None:
        before = None
        if probe is not None and probe.learner_before is not None:
            before = served_logprobs(
                url, probe.token_ids, model=self._transfer.model(url), timeout_s=self._timeout_s
            )
        self._transfer.publish(url, path, version, mode=self._mode, timeout_s=self._timeout_s)
        if probe is None:
            return None
        try:
            return prove(
                url,
                probe.token_ids,
                probe.learner,
                model=self._transfer.model(url),
                tolerance_nats=probe.tolerance_nats,
                before=before,
                learner_before=probe.learner_before,
                timeout_s=self._timeout_s,
            )
        except PublishError:
            with contextlib.suppress(PublishError):
                self._transfer.disown(url)
            raise

    def _serves(self, url: str, version: int) -> bool:
        with contextlib.suppress(PublishError):
            return self._transfer.served_version(url) == version
        return False

    def _settle(self, failed: Mapping[str, str], *, is_served: bool) -> None:
        """Tell the gateway which of the engines that took nothing get calls."""
        kept = [] if is_served else [url for url in failed if self._transfer.has_known_weights(url)]
        for url, reason in failed.items():
            # Without any other engine it goes on: what it serves is labelled, if only as unknown.
            is_out = url not in kept and (is_served or bool(kept))
            self._tell("swapped", url, **({"stale": reason} if is_out else {}))

    def _announce(self, url: str, version: int) -> None:
        try:
            self._tell("swap", url)
        except PublishError as error:
            raise PublishError(f"version {version} was not published to {url}: {error}") from error

    def _tell(self, action: str, url: str, **more: Any) -> dict[str, Any]:
        """Tell the gateway, and return what it says of the engine; nothing if there is no gateway."""
        if self._gateway_url is None:
            return {}
        gateway = Control(
            self._gateway_url, timeout_s=GATEWAY_TIMEOUT_S, key=self._gateway_key, who="gateway"
        )
        try:
            with gateway:
                told = gateway.post(f"/spangrad/engines/{action}", {"engine": url, **more})
        except UnansweredError as error:  # then it sends no calls either
            logger.warning("publishing goes on without the gateway: %s", error)
            return {}
        return dict(told.get("engine", {}))


def served_versions(engine_urls: Sequence[str], transfer: Transfer) -> dict[str, int | None]:
    """The version that each engine serves, by address, of those that tell; None: unknown, or none yet.

    Raises:
        PublishError: No engine tells.
    """
    found: dict[str, int | None] = {}
    silent: list[PublishError] = []
    for url in engine_urls:
        try:
            found[url] = transfer.served_version(url)
        except PublishError as error:
            silent.append(error)
    if not found:
        raise silent[0]
    return found


def _told(version: int, failed: Mapping[str, str]) -> str:
    if len(failed) == 1:
        (reason,) = failed.values()
        return reason
    reasons = "; ".join(f"{url}: {reason}" for url, reason in failed.items())
    return f"version {version} was published to none of {len(failed)} engines: {reasons}"
