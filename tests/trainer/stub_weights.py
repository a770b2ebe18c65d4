"""An engine and its gateway, as far as weights go: what was published, and which version is served."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.trainer.json_server import json_server


class StubWeights:
    """Takes weights as vLLM does; the files that it was given are in `loaded`."""

    def __init__(self) -> None:
        self.url = ""
        self.version = "default"
        self.loaded: list[str] = []
        """Names of the files of weights that were read, in order."""
        self.is_refusing = False
        """Whether it has an answer to nothing."""

    def restart(self) -> None:
        """Serve what it served before anything was published."""
        self.version = "default"

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        match path.split("?")[0]:
            case "/weight_info":
                return {"weight_version": self.version}
            case "/update_weights":
                file = Path(body["update_info"]["path"])
                assert file.is_file()
                self.loaded.append(file.name)
            case "/finish_weight_update":
                self.version = body["weight_version"]
            case "/reset_prefix_cache":
                return {"success": True}
            case "/spangrad/health":
                return {"engine": {"reachable": not self.is_refusing}}
        return {}


@contextmanager
def stub_weights() -> Iterator[StubWeights]:
    """One that answers on a port of its own."""
    stub = StubWeights()

    def answer(path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        is_engine = not path.startswith("/spangrad")
        return 503 if stub.is_refusing and is_engine else 200, stub.answer(path, body)

    with json_server(answer) as stub.url:
        yield stub
