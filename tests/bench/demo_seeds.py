"""`make bench-demo`: the demo with three seeds, fresh warm starts, and the curve of longer cloning.

Prints the README's results and writes `.spangrad/bench/demo_seeds.json` and, with the curve, the text-to-SQL
example's `cloning_curve.json`. Takes about 45 minutes on two cores. `python -m tests.bench.demo_seeds`:

    --seeds 0 1 2     which seeds; the curve is of the first one
    --no-cloning      take the curve from its file instead of measuring it again
    --write-readme    put the results between the markers of README.md, whether or not the claim holds
"""

import argparse
import json
import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

OUT = Path(".spangrad/bench")
COMMAND = "make bench-demo"
CURVE_FILE = Path("examples/01_text_to_sql/cloning_curve.json")
README = Path("README.md")
WIDTH = 120
"""Longest line of the README's text."""


def run_seed(seed: int) -> dict[str, Any]:
    """One whole demo in a process of its own; returns its JSON line."""
    command = [sys.executable, "-m", "spangrad", "demo", "--seed", str(seed), "--fresh", "--json"]
    print(f"$ spangrad demo --seed {seed} --fresh --json", flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    for line in done.stdout.splitlines()[:-1]:
        print("   ", line, flush=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {"seed": seed, **found}


def cloning_curve(seed: int) -> dict[str, Any]:
    """Success after cloning for longer, without reinforcement."""
    command = [sys.executable, "-m", "spangrad.trainer.policies.cloning_curve", "--seed", str(seed), "--json"]
    print(f"$ python -m spangrad.trainer.policies.cloning_curve --seed {seed} --json", flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    curve: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**curve, "command": COMMAND}


def percent(found: dict[str, Any]) -> str:
    """`86.7% [80.1%, 91.4%]`."""
    low, high = found["ci"]
    return f"{found['success']:.1%} [{low:.1%}, {high:.1%}]"


def table(results: Sequence[dict[str, Any]]) -> str:
    """A row for each seed."""
    lines = [
        "| seed | greedy before | greedy after | sampled before | sampled after | updates | minutes |"
        " logprob gap, nats |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for found in results:
        cells = [percent(found[key]) for key in ("before", "after", "before_sampled", "after_sampled")]
        lines.append(
            f"| {found['seed']} | {' | '.join(cells)} | {found['updates']} | {found['minutes']} |"
            f" {found['logprob_gap_mean']:.1e} |"
        )
    return "\n".join(lines)


def curve_table(curve: dict[str, Any]) -> str:
    """A row for each length of cloning."""
    lines = ["| cloning steps | greedy | sampled |", "|---|---|---|"]
    for point in curve["points"]:
        lines.append(
            f"| {point['clone/step']:.0f} | {point['eval/success_greedy']:.1%} |"
            f" {point['eval/success_sampled']:.1%} |"
        )
    return "\n".join(lines)


def results_text(
    results: Sequence[dict[str, Any]], curve: dict[str, Any], *, minutes: float, cores: int
) -> str:
    """What stands between the markers of the README."""
    tasks = {found[key]["n"] for found in results for key in ("before", "after")}
    seeds = f"{_word(len(results))} seeds, each with its own" if len(results) > 1 else "one seed, its own"
    sizes = "/".join(map(str, sorted(tasks)))
    parts = [
        _wrap(
            f"Measured by `{COMMAND}` on {_word(cores)} cores ({minutes:.0f} minutes; {seeds} expert,"
            f" start and draw of tasks; success on {sizes} held-out tasks with Wilson's 95% intervals;"
            " minutes are of the whole demo, cloning included):"
        ),
        table(results),
    ]
    best = max(point[f"eval/success_{mode}"] for point in curve["points"] for mode in ("greedy", "sampled"))
    parts += [
        _wrap(
            f"Cloning alone, for longer (same command, seed {curve['seed']}, {curve['date']};"
            f" learning rate: {curve['schedule']}), answers at most {best:.1%}:"
        ),
        curve_table(curve),
    ]
    return "\n\n".join(parts)


def write_readme(readme: Path, text: str) -> None:
    """Replace what stands between the markers; the markers stay.

    Raises:
        ValueError: The markers are not there, or more than once.
    """
    old = readme.read_text()
    pattern = r"(<!-- results: begin[^\n]*-->\n).*?(<!-- results: end -->)"
    new, count = re.subn(pattern, lambda found: f"{found[1]}{text}\n{found[2]}", old, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"{str(readme)!r} has {count} pairs of `<!-- results: ... -->` markers, expected 1")
    readme.write_text(new)


def _word(number: int) -> str:
    words = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
    return words[number] if number < len(words) else str(number)


def _wrap(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def holds(found: dict[str, Any]) -> bool:
    """At most 60% before, at least 85% after, intervals apart, 100 tasks or more, within 10 minutes."""
    before, after = found["before"], found["after"]
    return bool(
        before["success"] <= 0.60
        and after["success"] >= 0.85
        and before["ci"][1] < after["ci"][0]
        and min(before["n"], after["n"]) >= 100
        and found["minutes"] <= 10
    )


def main() -> int:
    """Run all seeds; exit code 1 if one misses the claim."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--no-cloning", action="store_true")
    parser.add_argument("--write-readme", action="store_true")
    options = parser.parse_args()
    started = time.monotonic()
    results = [run_seed(seed) for seed in options.seeds]
    curve = json.loads(CURVE_FILE.read_text()) if options.no_cloning else cloning_curve(options.seeds[0])
    minutes = (time.monotonic() - started) / 60
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "demo_seeds.json").write_text(json.dumps({"results": results, "cloning_curve": curve}, indent=2))
    if not options.no_cloning:
        CURVE_FILE.write_text(json.dumps(curve, indent=2) + "\n")
    text = results_text(results, curve, minutes=minutes, cores=os.cpu_count() or 1)
    print("\n" + text)
    if options.write_readme:
        write_readme(README, text)
    misses = [found["seed"] for found in results if not holds(found)]
    print(f"\n{minutes:.0f} minutes; " + (f"missed by seeds {misses}" if misses else "holds for every seed"))
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
