"""A scripted, imperfect expert that plays the model.

It knows where to go and seldom looks where it steps: mostly it takes the longer of the two ways that lead
to the goal, hole or not, and now and then it wanders off. A move depends on the seed and
on what the walker sees, and on how often it was asked the same.
"""

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lake import MOVES

from spangrad.trainer.policies.scripted_model import conversation_digest, serve_model

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Habits:
    """Probabilities of what the expert does."""

    wander: float = 0.30
    """Goes anywhere."""
    look: float = 0.40
    """Else: looks, and takes the first way that has no hole; otherwise the longer way, hole or not."""


HASTY = Habits()


def reply(
    messages: Sequence[Message], seed: int = 0, *, habits: Habits = HASTY, asked_before: int = 0
) -> dict[str, Any]:
    """Give the expert's next message, in OpenAI chat form."""
    rng = random.Random(conversation_digest(messages, seed, asked_before))
    _, goal, around = messages[-1]["content"].split(";")
    kinds = dict(re.findall(r"(\w+) (\w+)", around))
    ways = re.findall(r"\d+ (\w+)", goal)
    if rng.random() < habits.wander:
        move = rng.choice(list(MOVES))
    elif rng.random() < habits.look:
        move = next((way for way in ways if kinds[way] != "hole"), ways[0])
    else:
        move = ways[0]
    return {"role": "assistant", "content": move}


@contextmanager
def serve_expert(port: int = 0, seed: int = 0, *, habits: Habits = HASTY) -> Iterator[str]:
    """Serve the expert as an OpenAI-compatible model until the block ends; gives its base URL."""

    def next_message(messages: Sequence[Message], asked_before: int) -> Mapping[str, Any]:
        return reply(messages, seed, habits=habits, asked_before=asked_before)

    with serve_model(next_message, port=port) as base_url:
        yield base_url
