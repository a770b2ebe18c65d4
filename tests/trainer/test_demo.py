import json
from pathlib import Path

from spangrad.trainer.config import EvalConfig
from spangrad.trainer.demo import DemoOptions, measured_by, prepare

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_every_seed_is_measured_on_held_out_tasks_of_its_own(tmp_path):
    seeds = []
    for seed in (0, 1, 2):
        prepared = prepare(
            DemoOptions(example=str(EXAMPLES / "01_text_to_sql"), folder=str(tmp_path), seed=seed)
        )
        assert prepared.config.run.seed == seed
        seeds.append(prepared.config.eval.seed)
    assert seeds == [EvalConfig().seed + seed for seed in (0, 1, 2)]


def test_report_says_where_the_cloning_curve_comes_from():
    curve = {
        "seed": 0,
        "schedule": "cosine",
        "date": "2026-11-29",
        "command": "make bench-demo",
        "points": [],
    }
    assert measured_by(curve) == "`make bench-demo`, date 2026-11-29, seed 0, schedule cosine"
    assert measured_by({"points": []}) == ""


def test_the_committed_cloning_curve_says_how_it_was_measured():
    curve = json.loads((EXAMPLES / "01_text_to_sql" / "cloning_curve.json").read_text())
    assert set(curve) == {"command", "date", "seed", "schedule", "points"}
