"""Tasks for training and for the held-out evaluation.

A problem's numbers decide its split: no evaluation problem is ever trained on, in any wording.
"""

import hashlib
import random
from collections import deque
from collections.abc import Iterator
from itertools import islice, product
from typing import Any, Literal

from word_problems import KINDS, NAMES, THINGS, Kind

Split = Literal["train", "eval"]
RANGES = {"a": range(12, 100), "b": range(2, 12), "c": range(2, 12)}
DISTINCT = 100
"""So many training tasks in a row have different expressions."""


def _is_held_out(kind: Kind, numbers: dict[str, int]) -> bool:
    key = " ".join([kind.name, *(str(numbers[name]) for name in kind.numbers)])
    return hashlib.sha256(key.encode()).digest()[0] % 4 == 0


def tasks(split: Split, n: int, seed: int = 0) -> list[dict[str, Any]]:
    """Draw n tasks; the same arguments give the same tasks, fewer of them the first ones.

    `train` draws kinds and numbers again and again, but no expression twice among `DISTINCT`
    tasks. `eval` draws without replacement: kinds in turn, no expression more than once.

    Raises:
        ValueError: There are fewer held-out tasks than n.
    """
    rng, words = random.Random(f"{split} {seed}"), random.Random(f"{split} {seed} words")
    drawn = list(islice(_draw(rng) if split == "train" else _draw_each(rng), n))
    if len(drawn) < n:
        raise ValueError(
            f"{n} tasks of split {split!r} were asked for, there are {len(drawn)}; ask for fewer"
        )
    return [
        {
            "task_id": f"{split}-{seed}-{index}",
            "question": words.choice(kind.wordings).format(
                name=words.choice(NAMES), thing=words.choice(THINGS), **numbers
            ),
        }
        for index, (kind, numbers) in enumerate(drawn)
    ]


def _draw(rng: random.Random) -> Iterator[tuple[Kind, dict[str, int]]]:
    """Training problems without end."""
    recent: deque[str] = deque(maxlen=DISTINCT - 1)
    while True:
        kind = rng.choice(KINDS)
        numbers = {name: rng.choice(RANGES[name]) for name in kind.numbers}
        expression = kind.expression.format(**numbers)
        if expression not in recent and not _is_held_out(kind, numbers):
            recent.append(expression)
            yield kind, numbers


def _draw_each(rng: random.Random) -> Iterator[tuple[Kind, dict[str, int]]]:
    """Every held-out problem once, a kind after the other; a kind that is used up is left out."""
    left: list[tuple[Kind, list[dict[str, int]]]] = []
    for kind in KINDS:
        every = product(*(RANGES[name] for name in kind.numbers))
        each = [dict(zip(kind.numbers, values, strict=True)) for values in every]
        found = [numbers for numbers in each if _is_held_out(kind, numbers)]
        rng.shuffle(found)
        left.append((kind, found))
    while left := [(kind, found) for kind, found in left if found]:
        for kind, found in left:
            yield kind, found.pop()
