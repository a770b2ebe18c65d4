"""A hub in a process of its own under load: prebuilt OTLP requests from several writers."""

import http.client
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from tests.store.hub_process import HubProcess

TYPE = {"content-type": "application/x-protobuf"}


def send(url: str, queues: Sequence[Sequence[bytes]]) -> float:
    """Post each queue in order over a connection of its own; seconds until all were acknowledged."""
    failures: list[str] = []

    def post(requests: Sequence[bytes]) -> None:
        connection = http.client.HTTPConnection(urlsplit(url).netloc)
        for body in requests:
            connection.request("POST", "/v1/traces", body, TYPE)
            answer = connection.getresponse()
            said = answer.read()
            if answer.status != 200 or said:  # a partial success says something
                failures.append(f"{answer.status}: {said!r:.200}")
        connection.close()

    threads = [threading.Thread(target=post, args=(queue,)) for queue in queues]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - started
    if failures:
        raise SystemExit(f"the hub did not take {len(failures)} requests: {failures[0]}")
    return seconds


def dealt(requests: Sequence[bytes], writers: int) -> list[list[bytes]]:
    """Requests over so many writers."""
    return [list(requests[i::writers]) for i in range(writers)]


def size_bytes(path: Path) -> int:
    """Bytes on disk of a store, its log included."""
    return sum(file.stat().st_size for file in (path, path.with_name(path.name + ".wal")) if file.exists())


def hub(folder: str, name: str) -> tuple[HubProcess, Path]:
    """A hub on a new file."""
    path = Path(folder, f"{name}.duckdb")
    return HubProcess(path), path
