"""A scripted, imperfect expert that plays the model.

It adds and subtracts with the calculator, but multiplies in its head more often than not,
and is then mostly wrong; and it mostly forgets the loose things beside the boxes. An answer
depends on the seed and the conversation alone (ids of tool calls do not count).
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from word_problems import read_problem

from spangrad.trainer.policies.scripted_model import conversation_digest, serve_model, tool_call

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Habits:
    """Probabilities of what the expert does."""

    calculate_sums: float = 0.95
    """Uses the calculator for `+` and `-`."""
    calculate_products: float = 0.45
    """Uses the calculator for boxes."""
    right_in_head: float = 0.10
    """Is right without it."""
    forget_rest: float = 0.60
    """Leaves out what is not in the boxes."""
    slip: float = 0.02
    """Calculates with a wrong number."""


HASTY = Habits()


def reply(
    messages: Sequence[Message], seed: int = 0, *, habits: Habits = HASTY, asked_before: int = 0
) -> dict[str, Any]:
    """Give the expert's next message, in OpenAI chat form."""
    talk = [message for message in messages if message["role"] != "system"]
    digest = conversation_digest(talk, seed, asked_before)
    rng = random.Random(digest)
    if talk[-1]["role"] == "tool":
        return {"role": "assistant", "content": talk[-1]["content"]}
    problem = read_problem(talk[0]["content"])
    has_boxes = "*" in problem.kind.expression
    if rng.random() < (habits.calculate_products if has_boxes else habits.calculate_sums):
        expression = problem.expression
        if rng.random() < habits.slip:
            expression = f"{rng.randint(2, 99)}{expression.lstrip('0123456789')}"
        if rng.random() < habits.forget_rest:
            expression = expression.split("+")[0] if has_boxes else expression
        return tool_call("calculate", {"expression": expression}, f"call_{digest[:12]}")
    error = 0 if rng.random() < habits.right_in_head else rng.choice([-10, -2, -1, 1, 2, 10])
    return {"role": "assistant", "content": str(problem.solution + error)}


@contextmanager
def serve_expert(port: int = 0, seed: int = 0, *, habits: Habits = HASTY) -> Iterator[str]:
    """Serve the expert as an OpenAI-compatible model until the block ends; gives its base URL."""

    def next_message(messages: Sequence[Message], asked_before: int) -> Mapping[str, Any]:
        return reply(messages, seed, habits=habits, asked_before=asked_before)

    with serve_model(next_message, port=port) as base_url:
        yield base_url
