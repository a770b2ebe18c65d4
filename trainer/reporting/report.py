"""A training run as one HTML file that needs no network, and as a table in the terminal.

Knows the run's numbers, what monitors saw, and a few rollouts as text. Does not know stores, learners or
engines.

* Nothing that comes from a trace, a config or a task is trusted: it is escaped, and the page's
  content policy runs no script but the two that this module put in.
* A number that is not known is left out; it is never drawn as 0.
* The file appears whole or not at all.
"""

import base64
import hashlib
import html
import json
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spangrad.errors import MissingExtraError
from spangrad.store.records import RunEvent
from spangrad.trainer.processes import own_command
from spangrad.trainer.reporting.charts import (
    Chart,
    Metrics,
    health_charts,
    learning_curves,
    success_bars,
    update_numbers,
)
from spangrad.trainer.reporting.live_table import LiveTable
from spangrad.trainer.reporting.report_page import CHART_SCRIPT, PAGE

__all__ = ["EvalResult", "Example", "LiveTable", "RunReport", "SuccessRate", "write_report"]


@dataclass(frozen=True, slots=True)
class SuccessRate:
    """Share of tasks that were solved, with its 95% interval."""

    success: float
    ci: tuple[float, float]
    n: int


@dataclass(frozen=True, slots=True)
class EvalResult:
    """Success of one policy on the held-out tasks."""

    greedy: SuccessRate
    """The likeliest token at every position."""
    sampled: SuccessRate | None = None
    """Drawn as in training."""


@dataclass(frozen=True, slots=True)
class Example:
    """One rollout as text."""

    title: str
    text: str
    """Shown as it is, escaped."""
    reward: float | None = None
    """None: it has no reward."""


@dataclass(frozen=True, slots=True)
class RunReport:
    """Everything that the report shows."""

    title: str
    before: EvalResult
    after: EvalResult
    updates: Sequence[Metrics]
    """Metrics of each update in order, `area/name` keys; `update/index` places it on the x axis."""
    cloning_curve: Sequence[Metrics] = ()
    """Cloning for longer instead of reinforcement: `clone/step` and `eval/success_greedy`, `..._sampled`."""
    cloning_source: str = ""
    """How, when and with what seed the curve was measured: it is not of this run."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The resolved config; nested tables are shown with dotted keys."""
    store: str = ""
    """Path or URL of the store that holds the traces."""
    examples: Sequence[Example] = ()
    events: Sequence[RunEvent] = ()
    """What monitors saw, in order."""
    notes: Sequence[str] = ()
    """Sentences for the top of the page: time, seed, what was unusual."""


def write_report(path: str | os.PathLike[str], report: RunReport) -> Path:
    """Write the report as one self-contained HTML file and return where it is.

    Raises:
        MissingExtraError: plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingExtraError(
            "a report needs plotly, which is not installed; install it with `pip install 'spangrad[train]'`"
        ) from error
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        partial.write_text(render(report, str(get_plotlyjs())), encoding="utf-8")
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return target


def render(report: RunReport, plotly_js: str) -> str:
    """The page as text; `plotly_js` is plotly's own script, put in as it is."""
    charts = [
        _success_chart(report),
        learning_curves(
            report.updates,
            report.cloning_curve,
            report.cloning_source,
            before=_held_out(report.before),
            after=_held_out(report.after),
        ),
    ]
    small = health_charts(report.updates)
    figures = [chart.figure for chart in (*charts, *small)]
    script = CHART_SCRIPT.replace("FIGURES", _script_json(figures))
    parts = {
        "TITLE": html.escape(report.title),
        "POLICY": " ".join(f"'{_script_hash(text)}'" for text in (plotly_js, script)),
        "NOTES": "".join(f"<p>{html.escape(note)}</p>" for note in report.notes),
        "HEADLINE": _headline(report),
        "MAIN_CHARTS": "".join(_chart(chart, number) for number, chart in enumerate(charts)),
        "SMALL_CHARTS": "".join(
            _chart(chart, number) for number, chart in enumerate(small, start=len(charts))
        ),
        "UPDATES": _updates_table(report.updates),
        "EVENTS": _events(report.events),
        "EXAMPLES": "".join(_example(example) for example in report.examples),
        "CONFIG": _table(("setting", "value"), _flat(report.config)),
        "STORE": _store(report.store),
        "PLOTLY_SCRIPT": f"<script>{plotly_js}</script>",
        "CHART_SCRIPT": f"<script>{script}</script>",
    }
    pieces: list[str] = []
    for piece in PAGE.split("%%"):  # odd pieces are names; what is put in is never searched again
        pieces.append(parts[piece] if len(pieces) % 2 else piece)
    return "".join(pieces)


def _success_chart(report: RunReport) -> Chart:
    bars = []
    for when, result in (("before", report.before), ("after", report.after)):
        for mode, rate in (("greedy", result.greedy), ("sampled", result.sampled)):
            if rate is not None:
                bars.append((mode, when, rate.success, *rate.ci))
    return success_bars(bars)


def _held_out(result: EvalResult) -> Metrics:
    rates = {"eval/success_greedy": result.greedy, "eval/success_sampled": result.sampled}
    return {key: rate.success for key, rate in rates.items() if rate is not None}


def _headline(report: RunReport) -> str:
    rows = []
    for mode in ("greedy", "sampled"):
        before, after = getattr(report.before, mode), getattr(report.after, mode)
        if before is not None and after is not None:
            rows.append(
                (mode, _rate(before), _rate(after), f"{100 * (after.success - before.success):+.1f} points")
            )
    return _table(("held-out success", "before", "after", "change"), rows)


def _rate(rate: SuccessRate) -> str:
    low, high = rate.ci
    return f"{rate.success:.1%} ({low:.1%} to {high:.1%}, {rate.n} tasks)"


def _chart(chart: Chart, number: int) -> str:
    kind = "chart wide" if chart.is_wide else "chart"
    return (
        f'<figure class="{kind}"><h3>{html.escape(chart.title)}</h3><div id="chart-{number}"></div>'
        f"<figcaption>{html.escape(chart.caption)}</figcaption></figure>"
    )


def _updates_table(updates: Sequence[Metrics]) -> str:
    keys = sorted({key for metrics in updates for key in metrics} - {"update/index"})
    numbers = update_numbers(updates)
    rows = [
        (f"{number:g}", *(_number(metrics.get(key)) for key in keys))
        for number, metrics in zip(numbers, updates, strict=True)
    ]
    return _table(("update", *keys), rows)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _example(example: Example) -> str:
    reward = "no reward" if example.reward is None else f"reward {example.reward:g}"
    return (
        f'<section class="example"><h3>{html.escape(example.title)} <span class="reward">{reward}</span></h3>'
        f"<pre>{html.escape(example.text)}</pre></section>"
    )


def _events(events: Sequence[RunEvent]) -> str:
    if not events:
        return "<p>No monitor saw anything.</p>"
    rows = [
        (str(one.update_index), one.monitor, _number(one.value), _number(one.threshold), one.action, one.text)
        for one in events
    ]
    return _table(("update", "monitor", "value", "threshold", "action", "what it saw"), rows)


def _store(store: str) -> str:
    if not store:
        return ""
    command = html.escape(f"{own_command(from_anywhere=True)} rollouts --store {shlex.quote(store)}")
    return f"<p>The traces are in <code>{html.escape(store)}</code>. To list them: <code>{command}</code></p>"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table></div>'


def _flat(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows = []
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            rows += _flat(value, f"{name}.")
        else:
            rows.append((name, str(value)))
    return rows


def _script_json(value: Any) -> str:
    """JSON that can stand inside a <script>: no `<`, so no `</script>` and no `<!--`."""
    text = json.dumps(value, allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _script_hash(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"
