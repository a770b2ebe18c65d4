"""What the engines are to serve: the newest published weights, kept as a file until the next ones are.

* A file is named after its version and is complete or absent. When the next version is served, it is deleted.
  An adapter is a folder in its place, which is kept as long as an engine has it.
* Whoever notices that an engine serves something else publishes the file to it again; that needs no learner.
* One publish at a time; if no engine is left, they are waited for.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from spangrad.errors import PublishError
from spangrad.trainer.rollouts.gateway_client import wait_for_engine, what_is_down
from spangrad.trainer.serving.fleet import Fleet, FleetReport, Probe
from spangrad.trainer.serving.serving_config import ServingConfig
from spangrad.trainer.serving.transfers import transfer_of

logger = logging.getLogger(__name__)


class ServedPolicy:
    """The weights of one run, as its engines serve them. Safe to use from several threads."""

    def __init__(self, serving: ServingConfig, key: str | None, folder: Path) -> None:
        """Nothing is published yet.

        Args:
            serving: Names the engines and the gateway.
            key: Bearer key for the gateway.
            folder: Where the files are kept; the engines' machines can read it.
        """
        self.fleet = Fleet(
            serving.engines,
            gateway_url=serving.gateway_url,
            gateway_key=key,
            transfer=transfer_of(serving.transfer, serving.served_name),
            mode=serving.pause_mode,
            timeout_s=serving.publish_timeout_s,
        )
        self._serving = serving
        self._key = key
        self._folder = folder
        self._publishing = threading.Lock()
        self.version: int | None = None
        """Policy version that was published last; None: none was."""
        self._path = folder
        """Its file, or its adapter's folder."""

    @property
    def engine_urls(self) -> tuple[str, ...]:
        """Addresses of the engines."""
        return self.fleet.engine_urls

    def use(self, engine_urls: Sequence[str]) -> None:
        """Publish to these engines from now on."""
        with self._publishing:
            self.fleet.engine_urls = tuple(engine_urls)

    def publish(
        self, version: int, export: Callable[[str], object], probe: Probe | None = None
    ) -> FleetReport:
        """Serve new weights.

        Args:
            version: Policy version.
            export: `export(path)` writes them there; an adapter is a folder below, which it returns.
            probe: What the engines must compute then.

        Raises:
            PublishError: Says what went wrong and what the engines serve now.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / f"v{version:05d}.safetensors"
        is_adapter = self._serving.transfer == "lora"
        written = export(str(self._folder if is_adapter else file))
        path = Path(str(written)) if is_adapter else file
        with self._publishing:
            report = self.fleet.publish(path, version, probe=probe)
            self.version, self._path = version, path
        for older in self._folder.glob("v*.safetensors"):
            if older != file:
                older.unlink()
        return report

    def ensure(self) -> None:
        """Publish the last version again to engines that serve anything else, as after a restart.

        Raises:
            EngineError: The engines stayed away. PublishError: None takes the weights.
        """
        with self._publishing:
            if self.version is None:
                return
            try:
                others = self.fleet.others(self.version)
            except PublishError:
                self._wait()
                others = self.fleet.others(self.version)
            if others:
                logger.warning("not served by %s: publishing %d again", ", ".join(others), self.version)
                self.fleet.publish(self._path, self.version, only=others)

    def was_away(self) -> bool:
        """Whether engine or gateway is what a failed publish failed for; waits until they are back.

        Raises:
            EngineError: They stayed away.
        """
        if what_is_down(self._serving.gateway_url, self._key) is None:
            return False
        self._wait()
        return True

    def _wait(self) -> None:
        wait_for_engine(self._serving.gateway_url, self._serving.engine_wait_s, self._key)
