"""Score an answer: 1.0 if it is the right number, else 0.0."""

from collections.abc import Mapping
from typing import Any

from word_problems import read_problem


def reward(task: Mapping[str, Any], output: Mapping[str, Any]) -> float:
    """Compare the answer with the solution.

    Args:
        task: One of `tasks.tasks`.
        output: What `agent.run` returned.
    """
    return float(output.get("answer") == str(read_problem(task["question"]).solution))
