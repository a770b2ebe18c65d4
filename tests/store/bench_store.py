"""Speed of the store on this machine: `python -m tests.store.bench_store`.

Spans are model calls of 12 turns with ids, logprobs and messages, stored through the
file and through a hub; prints spans/s and ms per claim.
"""

import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from spangrad.store.base import Store
from spangrad.store.client import HubClient
from spangrad.store.file_store import FileStore
from spangrad.store.records import Rollout
from tests.store.building import conversation, new_trace, request
from tests.store.hub_process import HubProcess


def timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def claim_ms(store: Store, claims: int = 100) -> float:
    store.enqueue([Rollout(f"bench-{i}", task={"n": i}, split="bench") for i in range(claims)])
    return 1000 / claims * timed(lambda: [store.claim(worker="w", split="bench") for _ in range(claims)])


def requests(rollouts: int, batch: int) -> list[bytes]:
    spans = [span for i in range(rollouts) for span in conversation(new_trace(), f"r-{batch}-{i}", 12)]
    return [request(spans[i : i + batch]) for i in range(0, len(spans), batch)]


def main() -> None:
    rows: list[tuple[str, str]] = []
    with tempfile.TemporaryDirectory() as folder:
        with FileStore(Path(folder) / "file.duckdb") as store:
            for rollouts, batch in ((10, 1), (100, 100), (200, 1000)):
                bodies = requests(rollouts, batch)
                seconds = timed(lambda bodies=bodies: [store.put_otlp(body) for body in bodies])  # type: ignore[misc]
                rows.append((f"file, {batch} spans a batch", f"{rollouts * 12 / seconds:,.0f} spans/s"))
            stats = store.stats()
            rows.append(("file, size", f"{stats['size_bytes'] / stats['spans']:,.0f} bytes/span"))
            rows.append(("file, claim", f"{claim_ms(store):.1f} ms"))
            rows.append(
                ("file, read one rollout", f"{1000 * timed(lambda: list(store.spans(['r-1-0']))):.1f} ms")
            )
            rows.append(
                ("file, read all", f"{stats['spans'] / timed(lambda: list(store.spans())):,.0f} spans/s")
            )
        with HubProcess(Path(folder) / "hub.duckdb") as hub, HubClient(hub.url) as client:
            for rollouts, batch in ((20, 1), (100, 100)):
                bodies = requests(rollouts, batch)
                with ThreadPoolExecutor(8) as pool:
                    seconds = timed(lambda bodies=bodies, pool=pool: list(pool.map(client.put_otlp, bodies)))  # type: ignore[misc]
                rows.append(
                    (f"hub, 8 senders, {batch} spans a batch", f"{rollouts * 12 / seconds:,.0f} spans/s")
                )
            rows.append(("hub, claim", f"{claim_ms(client):.1f} ms"))
    for name, value in rows:
        print(f"{name:40} {value:>20}")


if __name__ == "__main__":
    main()
