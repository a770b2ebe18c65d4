"""A small policy and learners of it, for tests that want nothing special of either."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.trainer.small_policy import make_policy

from spangrad.trainer.learning.learner import Learner
from spangrad.trainer.learning.learner_config import LearnerConfig


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("models") / "policy")


@pytest.fixture
def make_learner(policy: Path) -> Callable[..., Learner]:
    def make(**settings: Any) -> Learner:
        return Learner(LearnerConfig(**{"model_path": str(policy), "lr": 1e-3, "threads": 1, **settings}))

    return make


@pytest.fixture(scope="module")
def engine_url() -> Iterator[str]:
    """An engine that serves version 0, as far as the loop asks before it learns."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"weight_version": "0"}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        serving.join()
