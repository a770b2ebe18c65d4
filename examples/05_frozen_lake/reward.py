"""Score a walk: 1.0 if its moves cross the lake, else 0.0."""

from collections.abc import Mapping
from typing import Any

from lake import Lake


def reward(task: Mapping[str, Any], output: Mapping[str, Any]) -> float:
    """Make the moves again, on the task's lake; what the agent says of its success counts for nothing.

    Args:
        task: One of `tasks.tasks`.
        output: What `agent.run` returned.
    """
    moves = output.get("moves")
    if not isinstance(moves, list) or not all(isinstance(move, str) for move in moves):
        return 0.0
    return float(Lake(task["lake"]).is_crossed(moves))
