"""A comparison of estimators as tables, and as one HTML file that needs no network.

Knows what `credit.compare` found. Nothing that comes from a trace is trusted: all of it is escaped, and the
page runs no script.
"""

import html
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from spangrad.commands.output import cell
from spangrad.errors import ConfigError
from spangrad.trainer.reporting.report_page import STYLE

if TYPE_CHECKING:
    from spangrad.credit.compare import ComparedStep, Comparison

MOST_STEPS: Final = 2000
"""Steps on a page; `--json` has all."""
COLUMNS: Final[Mapping[str, str]] = {
    "estimator": "",
    "informative": "groups that get any credit, of all",
    "predicted": "groups whose returns would differ if all tasks were equally hard, 1 - p^G - (1-p)^G; not"
    " known unless returns take at most two values",
    "covered": "share of steps whose state another step of the group began in",
    "nonzero": "share of steps with credit",
    "effective_steps": "how many steps of equal credit would weigh the same: (sum |A|)^2 / sum A^2",
    "mean_abs": "mean |A|: a scale, which a learning rate makes up for",
    "noise": "standard error of an advantage from who else is in its group, of its size (jackknife)",
}
"""Columns of the table of estimators, with what they mean."""


def estimator_rows(found: "Comparison") -> list[dict[str, Any]]:
    """A row for each estimator that took the batch."""
    groups = max(len(found.groups), 1)
    return [
        {
            "estimator": one.name,
            "informative": f"{one.informative_groups / groups:.0%} ({one.informative_groups}/{groups})",
            "predicted": _percent(one.diagnostics.expected_informative_share),
            "covered": _percent(one.diagnostics.anchor_coverage),
            "nonzero": _percent(one.nonzero_share),
            "effective_steps": one.effective_steps,
            "mean_abs": one.abs_mean,
            "noise": one.noise,
        }
        for one in found.estimators
        if one.diagnostics is not None
    ]


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{share:.0%}"


def wasted_rows(found: "Comparison") -> list[dict[str, Any]]:
    """A row for each group and reason to give it nothing, and which estimators that holds for."""
    everybody = set(found.rank_correlation)
    rows: list[dict[str, Any]] = []
    for group in found.groups:
        for why in dict.fromkeys(group.wasted.values()):
            on = [name for name, reason in group.wasted.items() if reason == why]
            rows.append(
                {
                    "group": group.group,
                    "rollouts": group.rollouts,
                    "returns": returns_told(group.returns),
                    "why": why,
                    "on": "all" if set(on) == everybody else ", ".join(on),
                }
            )
    return rows


def returns_told(returns: Sequence[float]) -> str:
    """`1 3x, 0 5x`: the returns of a group."""
    counts = Counter(returns)
    return ", ".join(f"{value:g} {counts[value]}x" for value in sorted(counts, reverse=True)) or "-"


def check_place(path: Path) -> None:
    """Refuse, before any work, a place where no page can be written.

    Raises:
        ConfigError: It is a folder, or in one that can't be written to.
    """
    if os.path.isdir(path):
        raise ConfigError(f"--html {str(path)!r} is a folder; name a file, {str(path / 'credit.html')!r} say")
    nearest = next(parent for parent in path.absolute().parents if os.path.lexists(parent))
    if not os.path.isdir(nearest) or not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(
            f"--html {str(path)!r} can't be written: {str(nearest)!r} is no folder that takes files"
        )


def write_page(path: Path, found: "Comparison", store: str) -> None:
    """Write the page, whole or not at all.

    Raises:
        ConfigError: The file can't be written.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(page(found, store), encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise ConfigError(f"--html {str(path)!r} can't be written: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def page(found: "Comparison", store: str) -> str:
    """The page as text."""
    names = list(found.rank_correlation)
    rollouts = sum(group.rollouts for group in found.groups)
    lead = f"{rollouts} rollouts in {len(found.groups)} groups, {len(found.steps)} scored steps, of {store}"
    meanings = [(name.replace("_", " "), text) for name, text in COLUMNS.items() if text]
    wasted = wasted_rows(found)
    refused = [(one.name, one.refused) for one in found.estimators if one.refused is not None]
    parts = [
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n{_POLICY}',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>Credit compared</title>\n<style>{STYLE}{_OWN_STYLE}</style>\n</head>\n<body>\n<main>",
        f'<h1>Credit compared</h1>\n<div class="lead"><p>{html.escape(lead)}</p></div>',
        "<h2>Estimators</h2>",
        _plain_table(COLUMNS, [list(row.values()) for row in estimator_rows(found)]),
        _plain_table(("column", "meaning"), meanings, is_text=True),
        *(["<h2>Refused</h2>", _plain_table(("estimator", "why"), refused, is_text=True)] if refused else []),
        "<h2>Rank correlation of advantages</h2>",
        _correlations(found, names),
        f"<h2>Wasted groups: {len({row['group'] for row in wasted})} of {len(found.groups)}</h2>",
        _plain_table(("group", "rollouts", "returns", "why", "on"), [list(row.values()) for row in wasted]),
        "<h2>Advantages side by side</h2>",
        *_side_by_side(found, names),
        "<h2>Settings</h2>",
        _plain_table(
            ("estimator", "settings"),
            [
                (one.name, ", ".join(f"{name} = {value}" for name, value in one.settings.items()))
                for one in found.estimators
            ],
            is_text=True,
        ),
        "</main>\n</body>\n</html>\n",
    ]
    return "\n".join(parts)


def _correlations(found: "Comparison", names: Sequence[str]) -> str:
    rows = []
    for one in names:
        cells = [f"<th>{html.escape(one)}</th>"]
        for other in names:
            value = found.rank_correlation[one][other]
            share = 0.0 if value is None else abs(value)
            color = "var(--up)" if value is None or value >= 0 else "var(--down)"
            tint = f"background:color-mix(in srgb, {color} {55 * share:.0f}%, transparent)"
            cells.append(f'<td class="number" style="{tint}">{"-" if value is None else f"{value:.2f}"}</td>')
        rows.append("".join(cells))
    return _table(["", *names], rows)


def _side_by_side(found: "Comparison", names: Sequence[str]) -> list[str]:
    """Groups by their largest disagreement; in each its rollouts and steps in order."""
    largest = {
        name: max((abs(step.advantages[name] or 0.0) for step in found.steps), default=0.0) or 1.0
        for name in names
    }
    order = list(dict.fromkeys(step.group for _, step in found.disagreements()))
    place = {group: number for number, group in enumerate(order)}
    steps = sorted(
        found.steps, key=lambda step: place.get(step.group, len(place))
    )  # stable: rollouts stay in order
    about = (
        "Bars are of each estimator's largest advantage; groups whose ranks are farthest apart come first."
    )
    parts = [f"<p>{about}</p>"]
    shown = steps[:MOST_STEPS]
    for number, (group, members) in enumerate(groupby(shown, key=lambda step: step.group)):
        own = list(members)
        told = f"{group}: {len({step.rollout_id for step in own})} rollouts, {len(own)} steps"
        rows = [_step_row(step, names, largest) for step in own]
        parts.append(
            f"<details{' open' if number < 3 else ''}><summary>{html.escape(told)}</summary>"
            f"{_table(['rollout', 'step', 'return', *names], rows)}</details>"
        )
    if len(shown) < len(steps):
        parts.append(f"<p>{len(shown)} of {len(steps)} steps; --json has all.</p>")
    return parts


def _step_row(step: "ComparedStep", names: Sequence[str], largest: Mapping[str, float]) -> str:
    cells = [
        f"<td>{html.escape(cell(step.rollout_id))}</td>",
        f'<td class="number">{step.step_index}</td><td class="number">{step.return_:.4g}</td>',
    ]
    for name in names:
        value = step.advantages[name]
        if value is None:
            cells.append('<td class="number">left out</td>')
            continue
        reach = 50 * max(-1.0, min(1.0, value / largest[name]))
        start, end, color = (50, 50 + reach, "--up") if reach >= 0 else (50 + reach, 50, "--down")
        tint = (
            f"background:linear-gradient(90deg, transparent {start:.1f}%, var({color}) {start:.1f}%,"
            f" var({color}) {end:.1f}%, transparent {end:.1f}%)"
        )
        cells.append(f'<td class="number bar" style="{tint}">{value:+.3g}</td>')
    return "".join(cells)


def _plain_table(head: Iterable[str], rows: Iterable[Sequence[Any]], *, is_text: bool = False) -> str:
    kind = ' class="text"' if is_text else ""
    return _table(
        [name.replace("_", " ") for name in head],
        ["".join(f"<td{kind}>{html.escape(cell(value))}</td>" for value in row) for row in rows],
    )


def _table(head: Iterable[str], rows: Iterable[str]) -> str:
    heads = "".join(f"<th>{html.escape(cell(name))}</th>" for name in head)
    body = "\n".join(f"<tr>{row}</tr>" for row in rows)
    return (
        f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>\n{body}\n</tbody></table></div>'
    )


_POLICY: Final = (
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; base-uri 'none';"
    " form-action 'none'; style-src 'unsafe-inline'\">"
)
_OWN_STYLE: Final = """
:root { --up: #7fb2f0; --down: #f2a07b; }
@media (prefers-color-scheme: dark) { :root { --up: #2f62a3; --down: #99492a; } }
td.number { text-align: right; } td.text { white-space: normal; overflow-wrap: anywhere; }
td.bar { min-width: 110px; } details th { text-align: right; white-space: normal; overflow-wrap: anywhere; }
details th:first-child { text-align: left; }
details table { font-size: 12px; } details td, details th { padding: 3px 10px; }
"""
