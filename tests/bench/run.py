"""`make bench`: what spangrad costs, held against the same work without it.

`python -m tests.bench.run store learner` runs some. Absolute times are of this machine at this moment.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

from tests.bench import capture_benches as capture
from tests.bench.ahead_benches import bench_ahead
from tests.bench.benches import BENCHES
from tests.bench.estimator_benches import bench_estimators
from tests.bench.figures import Figure, show_figures
from tests.bench.large_store import bench_large
from tests.bench.learner import bench_dense
from tests.bench.packing import bench_packing
from tests.bench.pairs import Pair, show
from tests.bench.publishing import bench_publish
from tests.bench.queue_benches import bench_queue
from tests.bench.store_benches import bench_floor, bench_growth, bench_ingest
from tests.bench.tree_benches import bench_trees


def main() -> None:
    """Run the named benchmarks, by default all that are quick, and print tables of pairs and of figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    known = [*BENCHES, *FIGURES]
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(known))
    parser.add_argument("--peers", nargs="*", default=[], metavar="PYTHON", help="with other tracers")
    parser.add_argument("--agl-server", metavar="PATH", help="`agl-server` of agentlightning 1.0.2")
    parser.add_argument("--agl-03", metavar="PYTHON", help="with agentlightning 0.3.0")
    parser.add_argument("--agl-verl", metavar="PYTHON", help="with agentlightning 1.0.2, verl and torch")
    parser.add_argument("--large", metavar="PATH", help="a store for `large`, made if it is not there")
    parser.add_argument("--calls", type=int, default=20_000, help="of `memory`; its limits are of 100000")
    options = parser.parse_args()
    names: list[str] = options.names or [name for name in known if name not in SLOW]
    measured: dict[str, Callable[[], list[Figure]]] = {
        "calls": partial(capture.bench_calls, options.peers),
        "gateway": partial(capture.bench_gateway, options.agl_server),
        "memory": partial(capture.bench_memory, calls=options.calls),
        "imports": capture.bench_imports,
        "ingest": partial(bench_ingest, options.agl_03),
        "growth": bench_growth,
        "floor": bench_floor,
        "queue": bench_queue,
        "ahead": bench_ahead,
        "dense": bench_dense,
        "estimators": bench_estimators,
        "trees": partial(bench_trees, options.agl_03, options.agl_verl),
        "packing": bench_packing,
        "publish": bench_publish,
        "large": partial(bench_large, options.large),
    }
    if unknown := sorted(set(names) - set(known)):
        parser.error(
            f"there is no benchmark {unknown[0]!r}; expected one of {', '.join([*BENCHES, *FIGURES])}"
        )
    started = time.monotonic()
    pairs: list[Pair] = []
    figures: list[Figure] = []
    for name in names:
        print(f"{name} ...", flush=True)
        if name in BENCHES:
            pairs += BENCHES[name]()
        else:
            figures += measured[name]()
    if pairs:
        show(pairs)
    if figures:
        show_figures(figures)
    print(f"{time.monotonic() - started:.0f} s; ratios are of time per item: 1 is free, 2 is twice as slow")


FIGURES = (
    "calls",
    "gateway",
    "memory",
    "imports",
    "ingest",
    "growth",
    "floor",
    "queue",
    "ahead",
    "dense",
    "estimators",
    "trees",
    "packing",
    "publish",
    "large",
)
SLOW = ("ahead", "large")
"""Only when named."""


if __name__ == "__main__":
    main()
