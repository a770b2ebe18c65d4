"""The expected ModelCalls of each case: read, written, compared.

`expected/NAME.json` is for the newest clients. Where the oldest ones send other requests there is a
`NAME.oldest.json` beside it. Nothing writes them but `python -m tests.tracer.conformance.update`.
"""

import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.tracer.conformance.case import Case

FOLDER = Path(__file__).parent / "expected"
OLDEST_PINS = Path(__file__).parent / "versions" / "oldest.txt"


def are_clients_oldest() -> bool:
    """Whether this environment is the one of `versions/oldest.txt`."""
    return f"openai=={version('openai')}" in OLDEST_PINS.read_text().split()


def path_of(case: Case, *, oldest: bool) -> Path:
    """The file that holds for the environment; there need be none."""
    newest = FOLDER / f"{case.name}.json"
    old = newest.with_suffix(".oldest.json")
    return old if oldest and old.exists() else newest


def read(case: Case) -> Any:
    """The expected calls of a case in this environment."""
    return json.loads(path_of(case, oldest=are_clients_oldest()).read_text())


def write(case: Case, calls: list[dict[str, Any]]) -> Path:
    """Make `calls` the expected ones in this environment."""
    path = FOLDER / f"{case.name}.json"
    if are_clients_oldest():
        old = path.with_suffix(".oldest.json")
        if path.exists() and json.loads(path.read_text()) == calls:
            old.unlink(missing_ok=True)
            return path
        path = old
    path.write_text(_as_text(calls))
    return path


def _as_text(calls: list[dict[str, Any]]) -> str:
    """Indented JSON with lists of numbers on one line."""
    text = json.dumps(calls, indent=1, ensure_ascii=False, sort_keys=True)
    return (
        re.sub(r"\[\s+([-\d.,\s]+?)\s+\]", lambda found: "[" + " ".join(found[1].split()) + "]", text) + "\n"
    )
