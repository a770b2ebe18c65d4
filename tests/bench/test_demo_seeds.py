import re
from pathlib import Path
from typing import Any

import pytest

from tests.bench.demo_seeds import README, results_text, write_readme


def measured(success: float) -> dict[str, Any]:
    return {"success": success, "ci": [success - 0.05, success + 0.05], "n": 128}


RESULTS = [
    {
        "seed": seed,
        "before": measured(0.367),
        "after": measured(0.94),
        "before_sampled": measured(0.5),
        "after_sampled": measured(0.8),
        "updates": 14,
        "minutes": 8.55,
        "logprob_gap_mean": 3.5e-07,
    }
    for seed in (0, 1, 2)
]
CURVE = {
    "seed": 0,
    "date": "2026-11-29",
    "schedule": "cosine over the length of each point",
    "points": [
        {"clone/step": 300.0, "eval/success_greedy": 0.34375, "eval/success_sampled": 0.2578125},
        {"clone/step": 600.0, "eval/success_greedy": 0.4921875, "eval/success_sampled": 0.375},
    ],
}
TEXT = """\
Measured by `make bench-demo` on two cores (39 minutes; three seeds, each with its own expert, start and draw of tasks;
success on 128 held-out tasks with Wilson's 95% intervals; minutes are of the whole demo, cloning included):

| seed | greedy before | greedy after | sampled before | sampled after | updates | minutes | logprob gap, nats |
|---|---|---|---|---|---|---|---|
| 0 | 36.7% [31.7%, 41.7%] | 94.0% [89.0%, 99.0%] | 50.0% [45.0%, 55.0%] | 80.0% [75.0%, 85.0%] | 14 | 8.55 | 3.5e-07 |
| 1 | 36.7% [31.7%, 41.7%] | 94.0% [89.0%, 99.0%] | 50.0% [45.0%, 55.0%] | 80.0% [75.0%, 85.0%] | 14 | 8.55 | 3.5e-07 |
| 2 | 36.7% [31.7%, 41.7%] | 94.0% [89.0%, 99.0%] | 50.0% [45.0%, 55.0%] | 80.0% [75.0%, 85.0%] | 14 | 8.55 | 3.5e-07 |

Cloning alone, for longer (same command, seed 0, 2026-11-29; learning rate: cosine over the length of each point),
answers at most 49.2%:

| cloning steps | greedy | sampled |
|---|---|---|
| 300 | 34.4% | 25.8% |
| 600 | 49.2% | 37.5% |"""  # noqa: E501 - the README's own lines


def test_results_are_written_as_the_readme_has_them():
    assert results_text(RESULTS, CURVE, minutes=39.2, cores=2) == TEXT
    shape = re.sub(r"\d+(\.\d+)?(e-\d+)?", "N", TEXT)
    heads = [line for line in shape.splitlines() if line.startswith("| ") and "N" not in line]
    assert all(head in README.read_text() for head in heads)


def test_readme_keeps_its_markers_and_everything_around_them(tmp_path):
    copy = tmp_path / "README.md"
    copy.write_text(README.read_text())
    write_readme(copy, TEXT)
    write_readme(copy, TEXT)  # again
    old, new = README.read_text(), copy.read_text()
    begin, end = old.index("<!-- results: begin"), old.index("<!-- results: end -->")
    marker = old[begin : old.index("\n", begin) + 1]
    assert new == old[:begin] + marker + TEXT + "\n" + old[end:]


def test_readme_without_markers_is_refused(tmp_path: Path):
    copy = tmp_path / "README.md"
    copy.write_text("nothing")
    with pytest.raises(ValueError, match="0 pairs"):
        write_readme(copy, TEXT)
    assert copy.read_text() == "nothing"
