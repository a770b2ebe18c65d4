"""Run the model: `python -m tests.bench.cluster [--measure] [--write]`."""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Final

from tests.bench.cluster import page
from tests.bench.cluster.costs import measured
from tests.bench.cluster.model import Cluster, Costs, Model
from tests.bench.marked import filled

FOLDER: Final = Path(__file__).parent
COSTS: Final = FOLDER / "costs.json"
AGENTS: Final = (64, 250, 1000, 2000, 4000)
SCENARIOS: Final = {
    "slow turns (5 s, 200 tokens)": Cluster(1),
    "quick turns (0.5 s, 50 tokens)": Cluster(1, environment_s=0.5, call_tokens=50, token_s=0.01),
}
"""What the agents do."""
UPDATES: Final = 2


def main() -> None:
    """Print the table; with `--write` into the README, with the picture beside it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", action="store_true", help="measure the costs anew, a few minutes")
    parser.add_argument("--write", action="store_true", help="write README.md, saturation.svg and costs.json")
    options = parser.parse_args()
    costs = measured() if options.measure else Costs(**json.loads(COSTS.read_text()))
    results = {
        name: [
            (cluster, Model(cluster, costs).run(UPDATES))
            for cluster in (dataclasses.replace(work, agents=agents) for agents in AGENTS)
        ]
        for name, work in SCENARIOS.items()
    }
    print(page.costs_told(costs))
    print(page.table(results))
    if options.write:
        COSTS.write_text(json.dumps(dataclasses.asdict(costs), indent=2) + "\n")
        readme = FOLDER / "README.md"
        parts = {"costs": page.costs_told(costs), "results": page.table(results)}
        readme.write_text(filled(readme.read_text(), parts))
        (FOLDER / "saturation.svg").write_text(page.svg(results))


if __name__ == "__main__":
    main()
