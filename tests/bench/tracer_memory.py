"""Memory of a process whose hub is down, as a program: makes calls, prints its RSS after each fifth of them.

python -m tests.bench.tracer_memory --calls 100000
"""

import argparse
import json
import logging
import os
import tempfile

import spangrad
from spangrad.tracer.hub_exporter import HubExporter
from spangrad.tracer.runtime import active
from tests.bench.call_cost import Pool, client, reply, requests

BOUND_BYTES = 16 * 2**20
"""Of the spool; the default would not be full after 100,000 calls."""


def main() -> None:
    """Make calls of an agent's size in small rollouts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=5000)
    calls: int = parser.parse_args().calls
    logging.disable(logging.WARNING)
    chat = client(Pool(reply(96, 1200)))
    arguments = requests()["agent"]
    marks: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        spangrad.init(store="http://127.0.0.1:1", spool_dir=folder)  # nothing listens there
        runtime = active()
        assert runtime is not None
        exporter = runtime.worker.exporter
        assert isinstance(exporter, HubExporter)
        exporter.spool.max_bytes = BOUND_BYTES
        for _ in range(5):
            for _ in range(calls // 50):
                with spangrad.rollout():
                    for _ in range(10):
                        chat.chat.completions.create(**arguments)
                if runtime.worker.waiting > 200:  # faster than any agent: what waits is no leak
                    runtime.worker.flush(60)
            runtime.worker.flush(60)
            with open("/proc/self/statm") as file:
                marks.append(int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20)
        found = {
            "rss_mb": marks,
            "spool_mb": exporter.spool.size_bytes() / 2**20,
            "bound_mb": BOUND_BYTES / 2**20,
            "lost": exporter.lost_spans,
            "lost_in_queue": runtime.worker.dropped,
        }
        spangrad.shutdown(1)
        print(json.dumps(found))


if __name__ == "__main__":
    main()
