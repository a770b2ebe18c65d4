"""Ways of new weights into one running engine; a run chooses one with `serving.transfer`.

Knows who does what for each way. Does not know where the weights come from, the gateway, or other
engines: see `fleet.py`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from spangrad.trainer.serving.adapter_transfer import AdapterTransfer
from spangrad.trainer.serving.publish import disown, has_known_weights, publish, served_version
from spangrad.trainer.serving.serving_config import PauseMode, TransferName


class Transfer(Protocol):
    """One way; every method is about one engine, but the last."""

    pauses: bool
    """Whether the engine samples nothing meanwhile, so that its calls should go elsewhere or wait."""

    def publish(
        self, engine_url: str, path: Path, version: int, *, mode: PauseMode, timeout_s: float
    ) -> None:
        """Serve what is at `path` as `version`. Raises PublishError, which says what is served now."""
        ...

    def served_version(self, engine_url: str) -> int | None:
        """What calls get now; None: unknown, or nothing was published. Raises UnansweredError."""
        ...

    def model(self, engine_url: str) -> str | None:
        """The name by which the engine is asked for the published policy; None: its only model."""
        ...

    def has_known_weights(self, engine_url: str) -> bool:
        """Whether it answers and what it serves is all of one version."""
        ...

    def disown(self, engine_url: str) -> None:
        """Have no call labelled with the version that was just published: something else is served."""
        ...

    def tidy(self, engine_url: str, in_flight: Mapping[str, int]) -> None:
        """Let go of older versions; `in_flight`: calls that the gateway has there, by adapter."""
        ...

    def clean(self, path: Path, engine_urls: Sequence[str]) -> None:
        """Remove older files beside `path` that none of these engines needs any more."""
        ...


def transfer_of(name: TransferName, model: str) -> "Transfer":
    """The way that a config names, for the policy that agents call `model`."""
    return AdapterTransfer(model) if name == "lora" else FileTransfer()


class FileTransfer:
    """The engine's workers read all weights from a file that they and the learner can reach."""

    pauses = True

    def publish(
        self, engine_url: str, path: Path, version: int, *, mode: PauseMode, timeout_s: float
    ) -> None:
        """Pause, load, set the version, reset the prefix cache, resume."""
        publish(engine_url, path, version, mode=mode, timeout_s=timeout_s)

    def served_version(self, engine_url: str) -> int | None:
        """What the engine says of its weights."""
        return served_version(engine_url)

    def model(self, engine_url: str) -> str | None:
        """Its only model."""
        return None

    def has_known_weights(self, engine_url: str) -> bool:
        """What the engine says of its weights."""
        return has_known_weights(engine_url)

    def disown(self, engine_url: str) -> None:
        """Its version is unknown from then on."""
        disown(engine_url)

    def tidy(self, engine_url: str, in_flight: Mapping[str, int]) -> None:
        """The engine has no older weights."""

    def clean(self, path: Path, engine_urls: Sequence[str]) -> None:
        """Whoever wrote the files keeps or overwrites them."""
