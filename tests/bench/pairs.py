"""Paired timing: two blocks of work take turns, so that a slow moment of the machine hits both."""

import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table

Block = Callable[[], Sequence[float]]
"""Does some work and returns seconds per item, one number for each thing that it measured."""


@dataclass(frozen=True)
class Pair:
    """Seconds per item of the same work done in two ways, block by block."""

    name: str
    against: str
    unit: str
    """`ms` or `µs` per item, or `x/s` for a rate of x."""
    measured: Sequence[float]
    baseline: Sequence[float]

    def cells(self) -> list[str]:
        """One line of the table."""
        ratios = [a / b for a, b in zip(self.measured, self.baseline, strict=True)]
        ours, base = self._best_and_median(self.measured), self._best_and_median(self.baseline)
        both = (min(self.measured) / min(self.baseline), statistics.median(ratios))
        return [self.name, self.unit, *ours, self.against, *base, *(f"{ratio:.2f}" for ratio in both)]

    def _best_and_median(self, values: Sequence[float]) -> list[str]:
        chosen = (min(values), statistics.median(values))
        if self.unit.endswith("/s"):
            return [f"{1 / seconds:,.0f}" for seconds in chosen]
        return [f"{seconds * {'ms': 1e3, 'µs': 1e6}[self.unit]:,.2f}" for seconds in chosen]


def paired(
    names: Sequence[str], measured: tuple[str, Block], baseline: tuple[str, Block], blocks: int
) -> list[Pair]:
    """Run both kinds of block in turn, each first every other time, after one of each that does not count.

    `measured` comes with its unit, `baseline` with its name; there is a name for each number of a block.
    """
    found: tuple[list[Sequence[float]], list[Sequence[float]]] = ([], [])
    for turn in range(-1, blocks):
        for which in (0, 1) if turn % 2 else (1, 0):
            gc.collect()
            numbers = (measured, baseline)[which][1]()
            if turn >= 0:
                found[which].append(numbers)
    columns = (zip(*numbers, strict=True) for numbers in found)
    return [Pair(name, baseline[0], measured[0], *both) for name, *both in zip(names, *columns, strict=True)]


def show(pairs: Sequence[Pair]) -> None:
    """Print all pairs as a Markdown table."""
    table = Table(box=box.MARKDOWN)
    for title in ("", "unit", "best", "median", "against", "best", "median", "ratio, best", "ratio, median"):
        table.add_column(title, justify="left" if title in ("", "unit", "against") else "right", no_wrap=True)
    for pair in pairs:
        table.add_row(*pair.cells())
    Console(width=200).print(table)
