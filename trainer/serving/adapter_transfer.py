"""New low-rank adapters into a running engine, each under a name that is never used again.

    load MODEL-vVERSION-DIGEST -> gateway: calls for MODEL get it -> unload older ones without calls

Nothing is paused: running calls end with the adapter that they began with, and no block of the prefix
cache can be an older adapter's, because blocks are kept by adapter name.

Invariants:
* a name stands for one file of weights: its end is the file's digest, which is compared before it is loaded;
* the adapter that was loaded last is the one that calls get; publishing a version again makes it the last;
* an adapter with calls in flight, as far as the gateway knows, stays loaded, and its files stay.

Knows vLLM's adapter endpoints. Does not know how adapters are trained.
"""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from spangrad.errors import PolicyError, PublishError
from spangrad.tracer.gateway.adapters import Adapter, adapter_of
from spangrad.trainer.serving.checksums import check_weights, weights_digest
from spangrad.trainer.serving.control import Control
from spangrad.trainer.serving.serving_config import PauseMode

WEIGHTS = "adapter_model.safetensors"
"""In an adapter's folder, beside `adapter_config.json`."""
_TIMEOUT_S = 10.0


def adapter_name(model: str, version: int, weights: Path) -> str:
    """The name under which a file of adapter weights, which has checksums, is served."""
    digest = weights_digest(weights)
    assert digest is not None, weights
    return f"{model}-v{version}-{digest[:8]}"


class AdapterTransfer:
    """The engine loads an adapter's folder, named as the adapter is, beside the weights that it serves."""

    pauses = False

    def __init__(self, model: str) -> None:
        """Publish adapters of the model that agents know by this name."""
        self._model = model

    def publish(
        self, engine_url: str, path: Path, version: int, *, mode: PauseMode, timeout_s: float
    ) -> None:
        """Load it, unless it is the last already; `mode` is of no concern, for nothing is paused."""
        name = path.name
        with Control(engine_url, timeout_s=timeout_s) as engine:
            loaded = self._loaded(engine)
            served = f"version {loaded[-1].version}" if loaded else "its model without adapters"
            try:
                _check(path, Adapter(name, self._model, version))
                if loaded and loaded[-1].name == name:
                    return
                if any(adapter.name == name for adapter in loaded):
                    engine.post("/v1/unload_lora_adapter", {"lora_name": name})
                engine.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path.absolute())})
            except (PolicyError, PublishError) as error:
                raise PublishError(
                    f"version {version} was not published: {error}; the engine serves {served}"
                ) from error

    def served_version(self, engine_url: str) -> int | None:
        """The version of the adapter that was loaded last."""
        with Control(engine_url, timeout_s=_TIMEOUT_S) as engine:
            loaded = self._loaded(engine)
        return loaded[-1].version if loaded else None

    def model(self, engine_url: str) -> str | None:
        """The adapter that was loaded last."""
        with Control(engine_url, timeout_s=_TIMEOUT_S) as engine:
            loaded = self._loaded(engine)
        return loaded[-1].name if loaded else None

    def has_known_weights(self, engine_url: str) -> bool:
        """Whether it answers: a load that failed changes nothing."""
        try:
            self.served_version(engine_url)
        except PublishError:
            return False
        return True

    def disown(self, engine_url: str) -> None:
        """Unload the last: calls get the one before."""
        with Control(engine_url, timeout_s=_TIMEOUT_S) as engine:
            if loaded := self._loaded(engine):
                engine.post("/v1/unload_lora_adapter", {"lora_name": loaded[-1].name})

    def tidy(self, engine_url: str, in_flight: Mapping[str, int]) -> None:
        """Unload all but the last, and but those with calls."""
        with Control(engine_url, timeout_s=_TIMEOUT_S) as engine:
            for adapter in self._loaded(engine)[:-1]:
                if not in_flight.get(adapter.name):
                    engine.post("/v1/unload_lora_adapter", {"lora_name": adapter.name})

    def clean(self, path: Path, engine_urls: Sequence[str]) -> None:
        """Remove folders of adapters that no engine has; an engine that does not answer may have any."""
        needed = {path.name}
        for url in engine_urls:
            with Control(url, timeout_s=_TIMEOUT_S) as engine:
                needed |= {adapter.name for adapter in self._loaded(engine)}
        for folder in path.parent.iterdir():
            if folder.name not in needed and adapter_of(folder.name) is not None:
                shutil.rmtree(folder)

    def _loaded(self, engine: Control) -> list[Adapter]:
        """The adapters of the model, the one that was loaded last at the end."""
        entries = engine.get("/v1/models").get("data", [])
        adapters = [adapter_of(str(entry["id"])) for entry in entries if entry.get("parent") is not None]
        return [adapter for adapter in adapters if adapter is not None and adapter.model == self._model]


def _check(path: Path, expected: Adapter) -> None:
    if adapter_of(path.name) != expected:
        raise PolicyError(
            f"adapter folder {str(path)!r} is not named {expected.model}-v{expected.version}-DIGEST;"
            " export it with `Learner.export_adapter`"
        )
    digest = weights_digest(path / WEIGHTS)
    if digest is None or digest[:8] != path.name.rpartition("-")[2]:
        raise PolicyError(f"adapter folder {str(path)!r} lacks {WEIGHTS!r} with the digest of its name")
    check_weights(path / WEIGHTS, digest)
