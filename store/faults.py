"""What of sent traces was not kept as it came: counts by kind, each with an example.

Knows words and numbers; knows no OTLP and no tables. Invariant: an example is text of bounded length,
so that what counts a million faults stays small.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

LONGEST_EXAMPLE: Final = 300
"""Characters."""
FAULTS_HEADER: Final = "x-spangrad-faults"
"""Where a hub tells faults; examples are shorter there, as servers bound the size of headers."""
_LONGEST_IN_HEADER: Final = 80


class Outcome(StrEnum):
    """What became of the thing that a fault is of."""

    LEFT_OUT = "left out"
    MENDED = "mended"
    """It is stored, and what OTLP has no form for is in it as text."""
    KEPT = "kept"
    """It is stored as it came."""


@dataclass(slots=True)
class Fault:
    """One kind of fault."""

    outcome: Outcome
    count: int
    example: str
    """The first one; empty where there is nothing to show."""


class Faults(dict[str, Fault]):
    """Faults by kind, in order of their first appearance."""

    def add(self, kind: str, outcome: Outcome, example: str = "", count: int = 1) -> None:
        """Count faults of a kind."""
        known = self.get(kind)
        if known is None:
            short = example if len(example) <= LONGEST_EXAMPLE else f"{example[: LONGEST_EXAMPLE - 3]}..."
            self[kind] = Fault(outcome, count, short)
        else:
            known.count += count

    def merge(self, other: "Faults", place: str = "") -> None:
        """Count all of another one; `place` says where its examples are."""
        for kind, fault in other.items():
            self.add(kind, fault.outcome, f"{place}{fault.example}", fault.count)

    def count(self, outcome: Outcome) -> int:
        """How many things ended so."""
        return sum(fault.count for fault in self.values() if fault.outcome is outcome)

    def told(self) -> str:
        """All of it in one line: `2 bad ids, left out: span '00'; ...`."""
        return "; ".join(
            f"{fault.count} {kind}, {fault.outcome}{f': {fault.example}' if fault.example else ''}"
            for kind, fault in self.items()
        )


def faults_to_text(faults: Faults) -> str:
    """Faults as ASCII JSON, for a header."""
    return json.dumps(
        {
            kind: [str(one.outcome), one.count, one.example[:_LONGEST_IN_HEADER]]
            for kind, one in faults.items()
        }
    )


def faults_from_text(text: str) -> Faults:
    """Undo `faults_to_text`. Raises ValueError if it is no such text."""
    found = Faults()
    data: Mapping[str, Any] = json.loads(text)
    for kind, (outcome, count, example) in data.items():
        found.add(kind, Outcome(outcome), example, count)
    return found
