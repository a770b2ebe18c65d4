"""`make exact`: every estimator against the exact policy gradient of small problems.

Prints the page; `--write` puts its tables into credit/EXACT.md, and the picture credit/exact.svg beside it.
Takes one to five minutes.
"""

import argparse
import sys
import time
from pathlib import Path

from tests.bench.exact.mdps import MDPS
from tests.bench.exact.measure import measure
from tests.bench.exact.page import svg, tables
from tests.bench.marked import filled

FOLDER = Path(__file__).resolve().parents[3] / "credit"


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=6000, help="groups of each problem")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="into credit/EXACT.md and credit/exact.svg")
    options = parser.parse_args()
    problems = [make() for make in MDPS]
    results = {}
    for mdp in problems:
        started = time.monotonic()
        results[mdp.name] = measure(mdp, options.groups, options.seed)
        print(f"{mdp.name}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    text = filled((FOLDER / "EXACT.md").read_text(), tables(problems, results, groups=options.groups))
    print(text)
    if options.write:
        (FOLDER / "EXACT.md").write_text(text)
        (FOLDER / "exact.svg").write_text(svg(problems, results))


if __name__ == "__main__":
    main()
