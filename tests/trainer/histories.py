"""Histories of made-up runs, for tests of monitors."""

from collections.abc import Mapping, Sequence

from spangrad.trainer.monitoring.history import History
from spangrad.trainer.monitoring.monitor_config import MonitorConfig
from spangrad.trainer.monitoring.monitors import MONITORS


def history(series: Mapping[str, Sequence[float | None]], last: int | None = None) -> History:
    """Numbers of updates 0, 1, 2, ...; None: an update has no such number."""
    length = max(len(numbers) for numbers in series.values())
    values = {
        name: {u: number for u, number in enumerate(numbers) if number is not None}
        for name, numbers in series.items()
    }
    return History(length - 1 if last is None else last, values)


def onsets(name: str, series: Mapping[str, Sequence[float | None]], config: MonitorConfig) -> list[int]:
    """Updates at which a monitor finds what it did not find one update before."""
    length = max(len(numbers) for numbers in series.values())
    find = MONITORS[name].find
    seen = [find(history(series, last), config) is not None for last in range(length)]
    return [u for u in range(length) if seen[u] and not (u and seen[u - 1])]
