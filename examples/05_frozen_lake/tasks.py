"""Lakes for training and for the held-out evaluation.

A lake's map decides its split: no lake of the evaluation is ever trained on.
"""

import hashlib
import random
from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any, Literal

from lake import Lake, draw_lake

Split = Literal["train", "eval"]
SIZES = (4, 5, 6)
"""Cells along a side; the shortest ways have 6, 8 and 10 moves, and 18, 24 and 30 are allowed."""


def _is_held_out(lake: Lake) -> bool:
    return hashlib.sha256(lake.text.encode()).digest()[0] % 4 == 0


def tasks(split: Split, n: int, seed: int = 0) -> list[dict[str, Any]]:
    """Draw n tasks, sizes in turn; the same arguments give the same tasks, fewer of them the first ones.

    No lake is drawn twice. `shortest`, the moves of the shortest way, is there for whoever looks at
    results by length; the agent reads `lake` alone.
    """
    return [
        {"task_id": f"{split}-{seed}-{index}", "lake": lake.text, "shortest": lake.shortest}
        for index, lake in enumerate(islice(_draw(split, random.Random(f"{split} {seed}")), n))
    ]


def _draw(split: Split, rng: random.Random) -> Iterator[Lake]:
    drawn = set[Lake]()
    for size in cycle(SIZES):
        lake = draw_lake(size, rng)
        while lake in drawn or _is_held_out(lake) != (split == "eval"):
            lake = draw_lake(size, rng)
        drawn.add(lake)
        yield lake
