"""An engine and its gateway, as far as weights go: what was published, and which version is served."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


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

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.do_POST()

        def do_POST(self) -> None:
            length = int(self.headers.get("content-length") or 0)
            given = json.loads(self.rfile.read(length) or b"null") or {}
            is_engine = not self.path.startswith("/spangrad")
            body = json.dumps(stub.answer(self.path, given)).encode()
            self.send_response(503 if stub.is_refusing and is_engine else 200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        stub.url = f"http://127.0.0.1:{server.server_port}"
        yield stub
        server.shutdown()
        serving.join()
