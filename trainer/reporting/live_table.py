"""A run's updates as a table in the terminal, while they happen.

Knows metric names and widths. Does not know the loop. On a terminal the table grows in place; elsewhere
(a log file, CI) every update is one plain line. A metric that is not known is shown as `-`, never as 0.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

Metrics = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class _Column:
    head: str
    """At most two lines."""
    plain: str
    """Name in a plain line."""
    show: Callable[[Metrics], str]


def _value(key: str, spec: str) -> Callable[[Metrics], str]:
    def show(metrics: Metrics) -> str:
        value = metrics.get(key)
        return "-" if value is None else format(value, spec)

    return show


def _pair(first: str, second: str, spec: str) -> Callable[[Metrics], str]:
    def show(metrics: Metrics) -> str:
        shown = [_value(key, spec)(metrics) for key in (first, second)]
        return "-" if shown == ["-", "-"] else "/".join(shown)

    return show


_PHASES: Final = ("wait", "credit", "update", "publish", "eval")


def _seconds(metrics: Metrics) -> str:
    times = [metrics.get(f"time/{phase}_s") for phase in _PHASES]
    if all(time is None for time in times):
        return "-"
    return "/".join(
        "-" if time is None else f"{time:.0f}" if time >= 9.95 else f"{time:.1f}" for time in times
    )


def _seconds_in_all(metrics: Metrics) -> str:
    times = [metrics[key] for key in (f"time/{phase}_s" for phase in _PHASES) if key in metrics]
    return f"{sum(times):.1f}" if times else "-"


_LOSS: Final = _Column("\nloss", "loss", _value("loss/total", ".3f"))
_COLUMNS: Final = (
    _Column("train\nreward", "train reward", _value("reward/mean", ".3f")),
    _Column(
        "held-out\ngrdy/smpl",
        "held-out greedy/sampled",
        _pair("eval/success_greedy", "eval/success_sampled", ".2f"),
    ),
    _Column("group\nspread", "spread in groups", _value("reward/spread", ".2f")),
    _LOSS,
    _Column("\nentropy", "entropy", _value("policy/entropy", ".3f")),
    _Column("grad\nnorm", "grad norm", _value("grad/norm", ".2f")),
    _Column("KL to\nstart", "KL to start", _value("policy/kl_to_start", ".3f")),
    _Column("gap\nnats", "engine-to-learner gap", _value("gap/mean", ".1e")),
    _Column("stale-\nness", "staleness", _value("data/staleness_mean", ".1f")),
    _Column(
        "tokens\ntrain/drop",
        "tokens trained/dropped",
        _pair("data/trained_tokens", "data/dropped_tokens", ".0f"),
    ),
    _Column("seconds: wait/\ncredit/upd/publ/eval", f"seconds {'/'.join(_PHASES)}", _seconds),
)
_NARROW_COLUMNS: Final = (
    *(column for column in _COLUMNS[:-1] if column is not _LOSS),
    _Column("\nsecs", "seconds", _seconds_in_all),
)
_FULL_WIDTH: Final = 110


class LiveTable:
    """Shows updates as they come; a context manager.

        with LiveTable() as table:
            table.status("update 3: 12 of 32 rollouts")
            table.add(3, metrics)

    Args:
        console: Where to print; standard output without.
        rows_shown: On a terminal only the last rows stay visible while the run goes on; all at its end.
    """

    def __init__(self, console: Console | None = None, *, rows_shown: int = 20) -> None:
        """Nothing is printed before the first row or status."""
        self._console = Console() if console is None else console
        self._rows_shown = rows_shown
        self._columns = _COLUMNS if self._console.width >= _FULL_WIDTH else _NARROW_COLUMNS
        self._rows: list[tuple[str, ...]] = []
        self._status = ""
        self._live: Live | None = None

    def __enter__(self) -> "LiveTable":
        """Take over the bottom of the terminal."""
        if self._console.is_terminal:
            self._live = Live(self._screen(), console=self._console, refresh_per_second=4, transient=False)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the whole table behind."""
        if self._live is not None:
            self._status = ""
            self._live.update(self._table(self._rows) if self._rows else Text(""), refresh=True)
            self._live.stop()
            self._live = None

    def add(self, update: int, metrics: Metrics) -> None:
        """Add the row of one update."""
        self._rows.append((str(update), *(column.show(metrics) for column in self._columns)))
        if self._live is not None:
            self._live.update(self._screen(), refresh=True)
        else:
            values = (f"{column.plain} {column.show(metrics)}" for column in _COLUMNS)
            self._line(f"update {update}: {', '.join(values)}")

    def status(self, text: str) -> None:
        """Say what is going on; one changing line under the table, shown on terminals only."""
        self._status = text
        if self._live is not None:
            self._live.update(self._screen())

    def note(self, text: str) -> None:
        """Print a line that stays, above the table."""
        self._line(text)

    def _line(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)

    def _screen(self) -> RenderableType:
        shown = self._rows[-self._rows_shown :]
        parts: list[RenderableType] = [self._table(shown)] if shown else []
        if self._status:
            parts.append(Text(self._status, style="dim"))
        return Group(*parts)

    def _table(self, rows: list[tuple[str, ...]]) -> Table:
        table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold", pad_edge=False)
        for head in ("up-\ndate", *(column.head for column in self._columns)):
            table.add_column(head, justify="right", vertical="bottom", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        return table
