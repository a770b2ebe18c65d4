"""`make bench`: what spangrad costs, held against the same work without it. Under a minute.

`python -m tests.bench.run store learner` runs some. Absolute times are of this machine at this moment.
"""

import argparse
import time

from tests.bench.benches import BENCHES
from tests.bench.pairs import Pair, show


def main() -> None:
    """Run the named benchmarks, by default all, and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(BENCHES), metavar="NAME", help=", ".join(BENCHES))
    names: list[str] = parser.parse_args().names
    if unknown := sorted(set(names) - set(BENCHES)):
        parser.error(f"there is no benchmark {unknown[0]!r}; expected one of {', '.join(BENCHES)}")
    started = time.monotonic()
    pairs: list[Pair] = []
    for name in names:
        print(f"{name} ...", flush=True)
        pairs += BENCHES[name]()
    show(pairs)
    print(f"{time.monotonic() - started:.0f} s; ratios are of time per item: 1 is free, 2 is twice as slow")


if __name__ == "__main__":
    main()
