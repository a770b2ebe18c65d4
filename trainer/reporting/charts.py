"""The report's charts as plain plotly figures: dicts of `data` and `layout`.

Knows metric names and what to draw. Does not know HTML, plotly's Python package or where
the numbers come from. A metric that no update has draws nothing: its chart is left out.
Colors of text and grid are the page's, set when it is shown (light or dark).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

Metrics = Mapping[str, float]

BLUE: Final = "#3d7fd9"
ORANGE: Final = "#e07b28"
GREEN: Final = "#2f9e6e"
RED: Final = "#cf4f57"
VIOLET: Final = "#8a63d2"
GREY: Final = "#8a8f98"


@dataclass(frozen=True, slots=True)
class Chart:
    """One figure with the sentence that explains it."""

    title: str
    caption: str
    figure: Mapping[str, Any]
    is_wide: bool = False


@dataclass(frozen=True, slots=True)
class _Line:
    key: str
    label: str
    color: str


_HEALTH: Final[tuple[tuple[str, str, tuple[_Line, ...]], ...]] = (
    (
        "Entropy",
        "nats per sampled token; a fall to 0 means that the policy stopped exploring",
        (_Line("policy/entropy", "entropy", BLUE),),
    ),
    (
        "Gradient norm",
        "before clipping",
        (_Line("grad/norm", "norm", BLUE),),
    ),
    (
        "KL to start",
        "nats per sampled token, from the policy that the run started with",
        (_Line("policy/kl_to_start", "KL", BLUE),),
    ),
    (
        "Engine-to-learner gap",
        "nats; how far the engine's sampled logprobs are from the learner's for the same weights",
        (_Line("gap/mean", "mean", BLUE), _Line("gap/max", "max", ORANGE)),
    ),
    (
        "Staleness",
        "updates between the policy that sampled a token and the one that trained on it, mean",
        (_Line("data/staleness_mean", "mean", BLUE),),
    ),
    (
        "Reward spread",
        "standard deviation of the reward inside a group of rollouts of one task, mean over groups",
        (_Line("reward/spread", "spread", BLUE),),
    ),
    (
        "Informative groups",
        "share of groups whose members got different rewards; the others train nothing",
        (_Line("credit/groups_informative_share", "share", BLUE),),
    ),
)

_HELD_OUT: Final = (
    _Line("eval/success_greedy", "held out, greedy", BLUE),
    _Line("eval/success_sampled", "held out, sampled", GREEN),
)
_CLONED: Final = (
    _Line("eval/success_greedy", "cloned, greedy", BLUE),
    _Line("eval/success_sampled", "cloned, sampled", GREEN),
)
_TOKENS: Final = (
    _Line("data/trained_tokens", "trained", GREEN),
    _Line("data/dropped_tokens", "dropped", RED),
)
_SECONDS: Final = (
    _Line("time/wait_s", "waiting for rollouts", BLUE),
    _Line("time/credit_s", "credit", VIOLET),
    _Line("time/update_s", "update", ORANGE),
    _Line("time/publish_s", "publish", GREEN),
    _Line("time/eval_s", "evaluation", GREY),
)


def success_bars(bars: Sequence[tuple[str, str, float, float, float]]) -> Chart:
    """Success before and after as bars with intervals.

    Args:
        bars: (mode, "before" or "after", success, low, high), shares from 0 to 1.
    """
    data = []
    for when, color in (("before", GREY), ("after", BLUE)):
        mine = [bar for bar in bars if bar[1] == when]
        data.append(
            {
                "type": "bar",
                "name": when,
                "x": [mode for mode, *_ in mine],
                "y": [success for _, _, success, _, _ in mine],
                "text": [f"{success:.0%}" for _, _, success, _, _ in mine],
                "textposition": "inside",
                "textangle": 0,
                "insidetextanchor": "start",
                "textfont": {"color": "#ffffff", "size": 13},
                "marker": {"color": color},
                "error_y": {
                    "type": "data",
                    "symmetric": False,
                    "array": [high - success for _, _, success, _, high in mine],
                    "arrayminus": [success - low for _, _, success, low, _ in mine],
                    "thickness": 1.5,
                    "width": 6,
                },
                "hovertemplate": "%{x}, " + when + ": %{y:.1%}<extra></extra>",
            }
        )
    layout = {"barmode": "group", "bargap": 0.35, "yaxis": _share_axis(), "showlegend": True}
    return Chart(
        title="Success on held-out tasks",
        caption="Share of tasks solved, with 95% intervals. Greedy takes the likeliest token; sampled draws "
        "as in training.",
        figure={"data": data, "layout": layout},
    )


def learning_curves(
    updates: Sequence[Metrics],
    cloning: Sequence[Metrics],
    cloning_source: str = "",
    *,
    before: Metrics | None = None,
    after: Metrics | None = None,
) -> Chart:
    """Held-out success and train reward per update, and longer cloning beside it on the same scale.

    Args:
        updates: Metrics of each update of the run.
        before: Held-out success of the policy that the run started with: update 0.
        after: Held-out success after the last update; stands for what was measured there in between.
        cloning: The curve of longer cloning; empty leaves it out.
        cloning_source: What measured that curve, for the caption.
    """
    numbers = update_numbers(updates)
    held_out = dict(zip(numbers, updates, strict=True))
    if before is not None:
        held_out = {0.0: before} | held_out
    if after is not None and numbers:
        held_out[numbers[-1]] = {**held_out[numbers[-1]], **after}
    x = list(held_out)
    learned = [
        *(trace for line in _HELD_OUT for trace in _lines(list(held_out.values()), line, x=x)),
        *_lines(updates, _Line("reward/mean", "train reward", GREY)),
    ]
    layout: dict[str, Any] = {
        "yaxis": _share_axis() | {"title": {"text": "success, reward", "standoff": 4}},
        "xaxis": {"title": {"text": "update"}},
        "showlegend": True,
    }
    caption = (
        "Mean train reward of each update, and success on tasks that are never trained on, from before the"
        " first update (0) to after the last."
    )
    if cloning:
        x = [point.get("clone/step", float(index)) for index, point in enumerate(cloning)]
        for line in _CLONED:
            learned += [_beside(trace) for trace in _lines(cloning, line, x=x)]
        layout["xaxis"] = {"title": {"text": "update: reinforcement", "standoff": 6}, "domain": [0, 0.57]}
        layout["xaxis2"] = {
            "title": {"text": "step: cloning for longer", "standoff": 6},
            "domain": [0.65, 1],
            "anchor": "y2",
        }
        layout["yaxis2"] = _share_axis() | {"anchor": "x2", "matches": "y"}
        source = f" ({cloning_source})" if cloning_source else ""
        caption += (
            " Right, for comparison: cloning for longer instead of reinforcement."
            f" That curve was not measured in this run, but separately{source}."
        )
    return Chart("Learning", caption, {"data": learned, "layout": layout}, is_wide=True)


def health_charts(updates: Sequence[Metrics]) -> list[Chart]:
    """Small charts of what tells a healthy run from a sick one, those that have numbers."""
    charts = []
    for title, caption, lines in _HEALTH:
        data = [trace for line in lines for trace in _lines(updates, line)]
        if data:
            axis: dict[str, Any] = {"rangemode": "tozero", "exponentformat": "power"}
            layout = {"showlegend": len(lines) > 1, "yaxis": axis}
            charts.append(Chart(title, caption, {"data": data, "layout": layout}))
    for title, caption, lines in (
        ("Tokens", "sampled tokens per update: trained, and dropped with a reason", _TOKENS),
        ("Time", "seconds per phase of an update", _SECONDS),
    ):
        data = [_bar(trace) for line in lines for trace in _lines(updates, line)]
        if data:
            layout = {"showlegend": True, "barmode": "stack"}
            charts.append(Chart(title, caption, {"data": data, "layout": layout}))
    return charts


def update_numbers(updates: Sequence[Metrics]) -> list[float]:
    """Position of each update on the x axis: `update/index` where it is known, else 1, 2, ..."""
    return [metrics.get("update/index", float(number)) for number, metrics in enumerate(updates, start=1)]


def _lines(rows: Sequence[Metrics], line: _Line, x: Sequence[float] | None = None) -> list[dict[str, Any]]:
    numbers = update_numbers(rows) if x is None else x
    points = [
        (number, row[line.key])
        for number, row in zip(numbers, rows, strict=True)
        if _is_finite(row, line.key)
    ]
    if not points:
        return []
    return [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": line.label,
            "x": [number for number, _ in points],
            "y": [value for _, value in points],
            "line": {"color": line.color, "width": 2},
            "marker": {"color": line.color, "size": 6 if len(points) < 40 else 3},
        }
    ]


def _beside(trace: Mapping[str, Any]) -> dict[str, Any]:
    """A line of the right panel, dotted."""
    return {**trace, "xaxis": "x2", "yaxis": "y2", "line": {**trace["line"], "dash": "dot"}}


def _is_finite(row: Metrics, key: str) -> bool:
    value = row.get(key)
    return value is not None and abs(value) < float("inf")


def _bar(trace: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "bar",
        "name": trace["name"],
        "x": trace["x"],
        "y": trace["y"],
        "marker": {"color": trace["line"]["color"]},
    }


def _share_axis() -> dict[str, Any]:
    return {"range": [0, 1.02], "tickformat": ".0%"}
