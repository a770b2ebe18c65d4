"""Writes `expected/*.json` from what is recorded now: `python -m tests.tracer.conformance.update [NAME ...]`.

Read the diff before you commit it. Run it with the oldest clients too (`scripts/conformance.sh update`).
"""

import sys
import tempfile
from pathlib import Path

from tests.tracer.conformance import expected_files
from tests.tracer.conformance.cases import ALL
from tests.tracer.conformance.running import as_json, in_order, player_in


def main(names: list[str]) -> None:
    """Run the named cases, or all, and write what they record."""
    chosen = [case for case in ALL if not case.broken and (not names or case.name in names)]
    if not names:
        known = {case.name for case in chosen}
        for path in expected_files.FOLDER.glob("*.json"):
            if path.name.split(".")[0] not in known:
                path.unlink()
    expected_files.FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, player_in(Path(folder)) as player:
        for case in chosen:
            calls = in_order(case, player.record(case)[1])
            print(expected_files.write(case, [as_json(call) for call in calls]).name)


if __name__ == "__main__":
    main(sys.argv[1:])
