"""What was measured beside what it should be at most (or at least), as a table."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Figure:
    """One number."""

    name: str
    value: float | None
    """None: not measured, for the reason in `note`."""
    unit: str
    at_most: float | None = None
    at_least: float | None = None
    note: str = ""
    """What it was measured against, with its own value."""

    def cells(self) -> list[str]:
        """One line of the table."""
        bounds = [f"<= {self.at_most:g}"] if self.at_most is not None else []
        bounds += [f">= {self.at_least:g}"] if self.at_least is not None else []
        value = "-" if self.value is None else f"{self.value:,.2f}"
        return [self.name, value, self.unit, " ".join(bounds), self._verdict(), self.note]

    def _verdict(self) -> str:
        if self.value is None or (self.at_most is None and self.at_least is None):
            return ""
        good = (self.at_most is None or self.value <= self.at_most) and (
            self.at_least is None or self.value >= self.at_least
        )
        return "yes" if good else "NO"


def show_figures(figures: Sequence[Figure]) -> None:
    """Print all as a Markdown table."""
    table = Table(box=box.MARKDOWN)
    for title in ("", "measured", "unit", "limit", "kept", "beside"):
        table.add_column(title, justify="right" if title == "measured" else "left", no_wrap=True)
    for figure in figures:
        table.add_row(*figure.cells())
    Console(width=200).print(table)
