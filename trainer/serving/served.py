"""What the engine is to serve: the newest published weights, kept as a file until the next ones are.

* A file is named after its version and is complete or absent. When the next version is served, it is deleted.
* Whoever notices that the engine serves something else publishes the file again; that needs no learner.
* One publish at a time; an engine that goes away meanwhile is waited for.
"""

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from spangrad.errors import PublishError
from spangrad.trainer.config import ServingConfig
from spangrad.trainer.rollouts.gateway_client import wait_for_engine, what_is_down
from spangrad.trainer.serving.publish import publish, served_version

logger = logging.getLogger(__name__)


class ServedPolicy:
    """The weights of one run, as its engine serves them. Safe to use from several threads."""

    def __init__(self, serving: ServingConfig, key: str | None, folder: Path) -> None:
        """Nothing is published yet.

        Args:
            serving: Names the engine and the gateway.
            key: Bearer key for the gateway.
            folder: Where the files are kept; the engine's machine can read it.
        """
        self._serving = serving
        self._key = key
        self._folder = folder
        self._publishing = threading.Lock()
        self.version: int | None = None
        """Policy version that was published last; None: none was."""

    def publish(self, version: int, export: Callable[[str], object]) -> None:
        """Serve new weights; `export(path)` writes them.

        Raises:
            PublishError: Says what went wrong and what the engine serves now.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._file(version)
        export(str(file))
        with self._publishing:
            self._serve(version)
            self.version = version
        for older in self._folder.glob("v*.safetensors"):
            if older != file:
                older.unlink()

    def ensure(self) -> None:
        """Publish the last version again if the engine serves anything else, as after it was restarted.

        Raises:
            EngineError: The engine stayed away. PublishError: It does not take the weights.
        """
        with self._publishing:
            if self.version is None:
                return
            try:
                served = served_version(self._serving.engine_url)
            except PublishError:
                self._wait()
                served = served_version(self._serving.engine_url)
            if served != self.version:
                logger.warning("the engine serves version %s; publishing %d again", served, self.version)
                self._serve(self.version)

    def was_away(self) -> bool:
        """Whether engine or gateway is what a failed publish failed for; waits until they are back.

        Raises:
            EngineError: They stayed away.
        """
        if what_is_down(self._serving.gateway_url, self._key) is None:
            return False
        self._wait()
        return True

    def _serve(self, version: int) -> None:
        publish(
            self._serving.engine_url,
            self._file(version),
            version,
            gateway_url=self._serving.gateway_url,
            gateway_key=self._key,
        )

    def _file(self, version: int) -> Path:
        return self._folder / f"v{version:05d}.safetensors"

    def _wait(self) -> None:
        wait_for_engine(self._serving.gateway_url, self._serving.engine_wait_s, self._key)
