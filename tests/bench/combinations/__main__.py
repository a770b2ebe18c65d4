"""`make bench-combinations`: an example trained with several estimators and losses, three seeds each.

Prints the table, and writes it with the picture `combinations.svg` into the example's README. An hour and a
half on two cores; a run that is done is not run again, so it may be stopped at any time, and started again.
`python -m tests.bench.combinations`:

    --example FOLDER  another example than the frozen lake
    --only NAME...    these combinations alone
    --seeds 0 1 2     these seeds
    --set KEY=VALUE   another setting of all of them, for instance a shorter training
    --no-runs         the table and the picture of what is there
    --write           put both into the example's folder
"""

import argparse
import sys
import time
from pathlib import Path

from tests.bench.combinations.page import by_kind, lengths, svg, table
from tests.bench.combinations.runs import COMBINATIONS, is_done, read_runs, run
from tests.bench.marked import filled

EXAMPLE = "examples/05_frozen_lake"
OUT = Path(".spangrad/bench/combinations")


def main() -> int:
    """Run what is missing; exit code 1 if credit by step is not ahead on the longest of several lengths."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--example", default=EXAMPLE)
    parser.add_argument("--only", nargs="+", choices=list(COMBINATIONS), default=list(COMBINATIONS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="changes")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of finished runs")
    parser.add_argument("--keep", action="store_true", help="keep stores and reports")
    parser.add_argument("--no-runs", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    out = options.out / Path(options.example).name
    out.mkdir(parents=True, exist_ok=True)
    todo = [(seed, name) for seed in options.seeds for name in options.only if not is_done(out, name, seed)]
    for seed, name in [] if options.no_runs else todo:
        started = time.monotonic()
        run(options.example, name, seed, out, changes=options.changes, keep=options.keep)
        print(f"{name}, seed {seed}: {(time.monotonic() - started) / 60:.1f} minutes", flush=True)
    runs = read_runs(out)
    if not runs:
        print(f"no finished run in {out}", file=sys.stderr)
        return 1
    print(table(runs))
    if options.write:
        readme = Path(options.example) / "README.md"
        readme.write_text(filled(readme.read_text(), {"combinations": table(runs)}))
        (Path(options.example) / "combinations.svg").write_text(svg(runs))
    if len(lengths(runs)) == 1:
        return 0
    kinds = by_kind(runs)
    print(
        "longest tasks, same losses, mean of greedy and sampled:",
        {kind: round(v, 3) for kind, v in kinds.items()},
    )
    return 0 if kinds.get("step", 0.0) > kinds.get("episode", 0.0) else 1


if __name__ == "__main__":
    sys.exit(main())
