import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from spangrad.trainer.policies.scripted_model import serve_model
from tests.command_line import listed
from tests.examples.loading import EXAMPLES, from_example, module_of

EXAMPLE = "02_calculator"
run = from_example(EXAMPLE, "agent:run")
tasks = from_example(EXAMPLE, "tasks:tasks")
reward = from_example(EXAMPLE, "reward:reward")
serve_expert = from_example(EXAMPLE, "expert:serve_expert")
word_problems = module_of(EXAMPLE, "word_problems")


def test_agent_solves_about_half_of_the_problems_through_the_expert(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    todo = tasks("train", 300, 1)
    with serve_expert(0, 1) as base_url, ThreadPoolExecutor(8) as pool:
        monkeypatch.setenv("OPENAI_BASE_URL", base_url)
        outputs = list(pool.map(run, todo))
    scores = [reward(task, output) for task, output in zip(todo, outputs, strict=True)]
    assert 0.55 <= sum(scores) / len(scores) <= 0.75
    assert {output["calls"] for output in outputs} == {1, 2}


@pytest.mark.parametrize(
    "arguments", ["no JSON", "[]", '{"expression": "1/0"}', '{"expression": "1*1"}', "{}"]
)
def test_agent_that_is_told_nonsense_ends_without_a_right_answer(monkeypatch, arguments):
    call = {"id": "c", "type": "function", "function": {"name": "calculate", "arguments": arguments}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    task = tasks("train", 1)[0]
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    with serve_model(lambda messages, asked_before: message) as base_url:
        monkeypatch.setenv("OPENAI_BASE_URL", base_url)
        output = run(task)
    assert output == {"answer": "", "calls": 4}
    assert reward(task, output) == 0.0


def test_calculator_knows_integers_and_three_operators_only():
    assert word_problems.calculate("12*7+3") == 87
    assert word_problems.calculate("-(2-5)") == 3
    for expression in ("", "1/2", "2**9", "a", "__import__('os')", "1.5", "True", "1+" * 30, "9" * 50):
        with pytest.raises(ValueError):
            word_problems.calculate(expression)


def test_splits_are_disjoint_and_every_problem_is_read_back():
    found = {
        split: {word_problems.read_problem(task["question"]).expression for task in tasks(split, 500)}
        for split in ("train", "eval")
    }
    assert found["train"] and found["eval"] and not found["train"] & found["eval"]
    assert tasks("train", 30, 2) == tasks("train", 60, 2)[:30]


def test_held_out_problems_are_drawn_without_replacement_and_kinds_in_turn():
    drawn = [word_problems.read_problem(task["question"]) for task in tasks("eval", 1000, 3)]
    assert len({problem.expression for problem in drawn}) == 1000
    kinds = Counter(problem.kind.name for problem in drawn[:128])
    assert set(kinds.values()) == {32}
    assert tasks("eval", 64, 3) == tasks("eval", 128, 3)[:64] != tasks("eval", 64, 4)
    with pytest.raises(ValueError, match=r"10000 tasks .* there are 2\d\d\d; ask for fewer"):
        tasks("eval", 10_000)


def test_training_problems_of_an_update_are_distinct():
    drawn = [word_problems.read_problem(task["question"]).expression for task in tasks("train", 600, 9)]
    for start in range(0, 600, 10):
        assert len(set(drawn[start : start + 100])) == len(drawn[start : start + 100])


@pytest.mark.slow
def test_the_first_stage_of_the_recipe_clones_what_start_has_recorded(tmp_path):
    def python(*arguments: str | Path) -> str:
        command = [sys.executable, *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"COLUMNS": "100"})
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "40 rollouts of the expert in" in python(
        EXAMPLES / EXAMPLE / "start.py", "--rollouts", "40", "--folder", tmp_path
    )
    changes = {
        **{"hub.url": tmp_path / "store.duckdb", "hub.keys": "none", "serving.model": tmp_path / "start"},
        **{"run.folder": tmp_path / "runs", "learner.threads": 1, "clone.run.updates": 3},
    }
    options = [part for name, value in changes.items() for part in ("--set", f"{name}={value}")]
    recipe = EXAMPLES / EXAMPLE / "recipe.toml"
    said = python("-m", "spangrad", "train", recipe, "--stage", "clone", *options)
    assert said.endswith(
        "run calculator-recipe.clone: 3 updates, policy version 3 (run.updates: 3 updates)\n"
    )
    rows = listed("policies", "--store", str(tmp_path / "store.duckdb"), "--json")
    assert [row["model"] for row in rows] == [
        *[None] * 3,
        str(tmp_path / "runs" / "calculator-recipe.clone" / "model"),
    ]
