"""Table and picture of finished runs: mean over seeds, and their range."""

import html
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from tests.bench.combinations.runs import COMBINATIONS, Combination, in_order

Runs = Sequence[Mapping[str, Any]]
Curve = dict[int, list[float]]
"""Update -> success of each seed."""

WINDOW = 4
"""So many updates of training rollouts make one point: an update has few."""
_WAYS = {"greedy": "greedy", "sampled": "sampled", "train": "sampled, while training"}
_COLORS = ("#555555", "#c62828", "#ef8f00", "#3d7fd9", "#00838f", "#8e24aa", "#2e7d32", "#795548")


def curve(runs: Runs, name: str, how: str, length: str | None) -> Curve:
    """Success of one combination over updates; `length` None: of all tasks.

    A run that ended early keeps its last values; one that stopped has no sampled ones after its start.
    """
    lacks_end = {
        run["seed"] for run in runs if run["name"] == name and run.get("has_stopped") and how == "sampled"
    }
    curves = [(run["name"], run["seed"], _curve_of(run, how, length)) for run in runs]
    found: Curve = defaultdict(list)
    for update in sorted({update for _, _, each in curves for update in each}):
        for whose, seed, each in curves:
            is_told = whose == name and (update in each or seed not in lacks_end)
            if is_told and (earlier := [other for other in each if other <= update]):
                found[update].append(each[max(earlier)])
    return dict(found)


def _curve_of(run: Mapping[str, Any], how: str, length: str | None) -> dict[int, float]:
    counts: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    for point in run["points"]:
        if point["how"] == how:
            update = point["update"]
            place = counts[update // WINDOW * WINDOW + WINDOW // 2 if how == "train" else update]
            for key, (wins, rollouts) in point["by"].items():
                if length in (None, key):
                    place[0] += wins
                    place[1] += rollouts
    return {update: wins / rollouts for update, (wins, rollouts) in counts.items() if rollouts}


def lengths(runs: Runs) -> list[str]:
    """Of tasks, the shortest first."""
    return in_order({key for run in runs for point in run["points"] for key in point["by"]})


def table(runs: Runs) -> str:
    """A row for each combination: held-out success at the end, of the longest tasks and of all."""
    measures: list[tuple[str, str, str | None]] = [(heading, how, None) for how, heading in _WAYS.items()]
    if len(known := lengths(runs)) > 1:
        longest = [(f"longest ({known[-1]}), {heading}", how, known[-1]) for how, heading in _WAYS.items()]
        measures = [*longest, *((f"all, {how}", how, None) for how in ("greedy", "sampled"))]
    heads = [*(heading for heading, _, _ in measures), "seeds"]
    lines = [f"| credit | loss | by step | {' | '.join(heads)} |", "|---" * (3 + len(heads)) + "|"]
    for name, combination in COMBINATIONS.items():
        if not (seeds := [run["seed"] for run in runs if run["name"] == name]):
            continue
        cells = [
            (_all if how == "train" else _last)(curve(runs, name, how, length)) for _, how, length in measures
        ]
        stopped = sum(run["name"] == name and run.get("has_stopped", False) for run in runs)
        cells.append(f"{len(seeds)}, {stopped} of them stopped" if stopped else str(len(seeds)))
        is_by_step = "yes" if combination.has_steps else "no"
        head = f"| `{combination.credit}` | `{combination.objective}` | {is_by_step} |"
        lines.append(f"{head} {' | '.join(cells)} |")
    start = [
        "" if how == "train" else _first(curve(runs, runs[0]["name"], how, length))
        for _, how, length in measures
    ]
    return "\n".join([*lines, f"| before | | | {' | '.join(start)} | |"])


def by_kind(runs: Runs) -> dict[str, float]:
    """Mean success on the longest tasks at the end, greedy and sampled: with and without steps told apart.

    Of losses that were run with both, so that credit is all that differs.
    """
    longest = lengths(runs)[-1]
    present = [each for name, each in COMBINATIONS.items() if any(run["name"] == name for run in runs)]
    kinds = {(each.objective, each.has_steps) for each in present}
    found: dict[str, list[float]] = defaultdict(list)
    for name, combination in COMBINATIONS.items():
        if (combination.objective, not combination.has_steps) not in kinds:
            continue
        for how in ("greedy", "sampled"):
            if points := curve(runs, name, how, longest):
                found["step" if combination.has_steps else "episode"] += points[max(points)]
    return {kind: sum(values) / len(values) for kind, values in found.items()}


_PANEL, _HIGH, _GAP, _LEFT, _TOP, _LEGEND = 270, 210, 22, 48, 96, 290


def svg(runs: Runs) -> str:
    """A panel for each length and way to measure: a line for each combination, a band for its seeds."""
    ways, known = (("greedy", "held-out, greedy"), ("train", "sampled, while training")), lengths(runs)
    panels = [[(how, each, f"shortest way {each}: {title}") for each in known] for how, title in ways]
    if len(known) == 1:
        panels = [[(how, known[0], title) for how, title in ways]]
    names = [name for name in COMBINATIONS if any(run["name"] == name for run in runs)]
    last = max(run["updates"] for run in runs)
    width = _LEFT + (_PANEL + _GAP) * len(panels[0])
    height = _TOP + (_HIGH + 64) * len(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}"'
        f' height="{height}" font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    beside = max(1, (width - _LEFT) // _LEGEND)
    for place, name in enumerate(names):
        x, y = _LEFT + place % beside * _LEGEND, 18 + place // beside * 18
        line = f'<line x1="{x}" y1="{y - 4}" x2="{x + 24}" y2="{y - 4}" {_stroke(name)}/>'
        parts += [line, _text(x + 30, y, _label(COMBINATIONS[name]))]
    for row, beside_it in enumerate(panels):
        for column, (how, length, title) in enumerate(beside_it):
            x, y = _LEFT + column * (_PANEL + _GAP), _TOP + row * (_HIGH + 64)
            parts.append(_text(x, y - 6, title))
            parts += _axes(x, y, last, is_first=column == 0)
            for name in names:
                parts += _line(x, y, last, name, curve(runs, name, how, length))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _axes(x: int, y: int, last: int, *, is_first: bool) -> list[str]:
    parts = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        level = y + _HIGH * (1 - share)
        parts.append(f'<line x1="{x}" y1="{level}" x2="{x + _PANEL}" y2="{level}" stroke="#dddddd"/>')
        if is_first:
            parts.append(_text(x - 6, level + 4, f"{share:.0%}", anchor="end"))
    for update in range(0, last + 1, max(1, last // 4)):
        parts.append(_text(x + _PANEL * update / last, y + _HIGH + 16, str(update), anchor="middle"))
    return [*parts, _text(x + _PANEL / 2, y + _HIGH + 30, "updates", anchor="middle")]


def _line(x: int, y: int, last: int, name: str, points: Curve) -> list[str]:
    def at(update: int, share: float) -> str:
        return f"{x + _PANEL * update / last:.1f},{y + _HIGH * (1 - share):.1f}"

    if not points:
        return []
    high = [at(update, max(values)) for update, values in points.items()]
    low = [at(update, min(values)) for update, values in points.items()]
    mean = [at(update, sum(values) / len(values)) for update, values in points.items()]
    fill = f'fill="{_color(name)}" fill-opacity="0.08"'
    return [
        f'<polygon points="{" ".join([*high, *reversed(low)])}" {fill}/>',
        f'<polyline points="{" ".join(mean)}" fill="none" {_stroke(name)}/>',
    ]


def _color(name: str) -> str:
    return _COLORS[list(COMBINATIONS).index(name) % len(_COLORS)]


def _stroke(name: str) -> str:
    dash = "" if COMBINATIONS[name].has_steps else ' stroke-dasharray="5 3"'
    return f'stroke="{_color(name)}" stroke-width="2"{dash}'


def _label(combination: Combination) -> str:
    return f"{combination.credit}, {combination.objective}"


def _text(x: float, y: float, text: str, *, anchor: str = "start") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _range(values: Sequence[float]) -> str:
    mean = sum(values) / len(values)
    return f"{mean:.0%}" if len(values) == 1 else f"{mean:.0%} ({min(values):.0%} to {max(values):.0%})"


def _last(points: Curve) -> str:
    return _range(points[max(points)]) if points else "-"


def _first(points: Curve) -> str:
    return _range(points[min(points)]) if points else "-"


def _all(points: Curve) -> str:
    """Mean over the whole training, for each seed: how fast it was learned."""
    seeds = min((len(values) for values in points.values()), default=0)
    means = [sum(values[seed] for values in points.values()) / len(points) for seed in range(seeds)]
    return _range(means) if means else "-"
