"""A hub in a process of its own, for tests that stop it or talk to it over HTTP."""

import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

_PROGRAM = """
import sys
from spangrad.store.keys import Keys
from spangrad.store.serve import serve
path, port, keys = sys.argv[1:]
keys = Keys.load(keys) if keys else None
serve(path, port=int(port), keys=keys, on_ready=lambda url: print(url, flush=True))
"""


class HubProcess:
    def __init__(self, path: Path, *, port: int = 0, keys: Path | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(path), str(port), str(keys or "")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.url = self._read_url()

    def _read_url(self) -> str:
        assert self.process.stdout and self.process.stderr
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            readable, _, _ = select.select([self.process.stdout], [], [], 1)
            if readable:
                line = self.process.stdout.readline().strip()
                if line:
                    return line
                break
        self.process.kill()
        raise AssertionError(f"the hub did not start: {self.process.stderr.read()}")

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def kill(self) -> None:
        self.process.kill()
        self._wait()

    def terminate(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self._wait()

    def _wait(self) -> int:
        code = self.process.wait(60)
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe:
                pipe.close()
        return code

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.kill()
        else:
            self._wait()
