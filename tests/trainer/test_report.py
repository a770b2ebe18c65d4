import html
import json
import re
from pathlib import Path
from typing import Any

from spangrad.store.records import RunEvent
from spangrad.trainer.reporting.report import (
    EvalResult,
    Example,
    RunReport,
    SuccessRate,
    render,
    write_report,
)

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


def result(greedy: float, sampled: float | None = None) -> EvalResult:
    rates = [
        None if rate is None else SuccessRate(rate, (rate - 0.05, rate + 0.05), 128)
        for rate in (greedy, sampled)
    ]
    assert rates[0] is not None
    return EvalResult(rates[0], rates[1])


def report(**changes: object) -> RunReport:
    fields = {
        "title": "run 7",
        "before": result(0.5, 0.4),
        "after": result(0.9, 0.8),
        "updates": [
            {"reward/mean": 0.5, "policy/entropy": 0.7, "time/wait_s": 4.0},
            {"reward/mean": 0.6, "eval/success_greedy": 0.75, "grad/norm": float("nan")},
        ],
    }
    return RunReport(**(fields | changes))  # type: ignore[arg-type]


def figures(page: str) -> list[dict[str, Any]]:
    found = re.search(r"const figures = (.*);\n", page)
    assert found is not None
    loaded: list[dict[str, Any]] = json.loads(found[1])
    return loaded


def scripts(page: str) -> list[str]:
    return re.findall(r"<script.*?>(.*?)</script>", page, flags=re.DOTALL)


def test_nothing_of_a_trace_is_trusted_html() -> None:
    evil = report(
        title=EVIL,
        notes=[EVIL],
        store=EVIL,
        config={EVIL: {EVIL: EVIL}},
        examples=[Example(title=EVIL, text=f"tool: {EVIL}", reward=1.0)],
        events=[RunEvent("r", 0, EVIL, 0.5, 0.1, EVIL, EVIL)],
        updates=[{EVIL: 1.0, "reward/mean": 1.0}],
        cloning_curve=[{EVIL: 1.0, "eval/success_greedy": 0.5}],
    )
    page = render(evil, "plotly();")
    assert len(scripts(page)) == 2
    assert "<img" not in page
    assert html.escape(f"tool: {EVIL}") in page


def test_only_the_pages_own_scripts_may_run_and_nothing_is_loaded() -> None:
    page = render(report(), "plotly();")
    policy = re.search(r'Content-Security-Policy" content="(.*?)"', page, flags=re.DOTALL)
    assert policy is not None
    assert "default-src 'none'" in policy[1]
    allowed = policy[1].partition("script-src")[2]
    assert "unsafe" not in allowed
    assert allowed.count("'sha256-") == 2
    assert not re.findall(r"(?:src|href)\s*=\s*[\"']?(?:https?:)?//", page)


def test_text_of_a_trace_that_looks_like_a_placeholder_stays_text() -> None:
    page = render(report(examples=[Example("%%CONFIG%%", "%%PLOTLY_SCRIPT%%")]), "plotly();")
    assert "%%CONFIG%%" in page
    assert "<pre>%%PLOTLY_SCRIPT%%</pre>" in page


def test_unknown_numbers_are_left_out_and_never_drawn_as_zero() -> None:
    page = render(report(), "plotly();")
    assert "Gradient norm" not in page  # its only value is NaN
    assert "KL to start" not in page
    lines = {trace["name"]: trace["y"] for figure in figures(page) for trace in figure["data"]}
    assert lines["train reward"] == [0.5, 0.6]
    assert lines["held out, greedy"] == [0.5, 0.9]
    assert lines["entropy"] == [0.7]


def test_what_monitors_saw_is_a_table_or_a_sentence() -> None:
    assert "No monitor saw anything." in render(report(), "")
    page = render(report(events=[RunEvent("r", 3, "gap", 0.25, 0.1, "warn", "a wide gap")]), "")
    row = "<td>3</td><td>gap</td><td>0.25</td><td>0.1</td><td>warn</td><td>a wide gap</td>"
    assert row in page


def test_bars_show_success_and_intervals() -> None:
    before, after = figures(render(report(), ""))[0]["data"]
    assert before["x"] == ["greedy", "sampled"]
    assert before["y"] == [0.5, 0.4]
    assert after["y"] == [0.9, 0.8]
    assert [round(width, 9) for width in after["error_y"]["array"]] == [0.05, 0.05]


def test_cloning_curve_stands_beside_on_the_same_scale() -> None:
    curve = [
        {"clone/step": 100.0, "eval/success_greedy": 0.5},
        {"clone/step": 200.0, "eval/success_greedy": 0.55},
    ]
    learning = figures(render(report(cloning_curve=curve), ""))[1]
    beside = [trace for trace in learning["data"] if trace.get("xaxis") == "x2"]
    assert [(trace["x"], trace["y"]) for trace in beside] == [([100.0, 200.0], [0.5, 0.55])]
    layout = learning["layout"]
    assert (layout["yaxis2"]["matches"], layout["yaxis2"]["anchor"]) == ("y", "x2")
    assert layout["xaxis2"]["anchor"] == beside[0]["yaxis"] == "y2"


def test_every_line_has_a_name_of_its_own_in_the_legend() -> None:
    points = [{"clone/step": 100.0, "eval/success_greedy": 0.5, "eval/success_sampled": 0.4}]
    learning = figures(render(report(cloning_curve=points), ""))[1]
    names = [trace["name"] for trace in learning["data"] if trace.get("showlegend", True)]
    assert len(names) == len(set(names)) == len(learning["data"]) == 5
    assert learning["layout"]["showlegend"]


def test_held_out_success_is_drawn_from_before_the_first_update_to_after_the_last() -> None:
    updates = [{"reward/mean": 0.5}, {"eval/success_greedy": 0.75}, {"eval/success_greedy": 0.85}]
    learning = figures(render(report(updates=updates), ""))[1]
    lines = {trace["name"]: (trace["x"], trace["y"]) for trace in learning["data"]}
    assert lines["held out, greedy"] == ([0.0, 2.0, 3.0], [0.5, 0.75, 0.9])
    assert lines["held out, sampled"] == ([0.0, 3.0], [0.4, 0.8])


def test_caption_says_that_the_cloning_curve_is_not_of_this_run() -> None:
    curve = [{"clone/step": 100.0, "eval/success_greedy": 0.5}]
    page = render(report(cloning_curve=curve, cloning_source="`make <x>`, date 2026-11-29, seed 0"), "")
    assert "not measured in this run, but separately (`make &lt;x&gt;`, date 2026-11-29, seed 0)." in page
    assert "not measured in this run" not in render(report(), "")


def test_a_run_without_sampled_evaluation_or_updates_still_has_a_report() -> None:
    page = render(report(before=result(0.5), after=result(0.9), updates=[]), "")
    assert "50.0% (45.0% to 55.0%, 128 tasks)" in page
    assert "+40.0 points" in page


def test_file_is_whole_and_self_contained(tmp_path: Path) -> None:
    written = write_report(tmp_path / "new" / "report.html", report(config={"learner": {"lr": 1e-4}}))
    page = written.read_text()
    assert "learner.lr" in page
    assert "Plotly.react" in page
    assert "plotly.js v" in page
    assert [path.name for path in written.parent.iterdir()] == ["report.html"]
