"""Tasks for training and for the held-out evaluation.

A problem's numbers decide its split: no evaluation problem is ever trained on, in any wording.
"""

import hashlib
import random
from typing import Any, Literal

from word_problems import KINDS, NAMES, THINGS

Split = Literal["train", "eval"]


def _is_held_out(key: str) -> bool:
    return hashlib.sha256(key.encode()).digest()[0] % 4 == 0


def tasks(split: Split, n: int, seed: int = 0) -> list[dict[str, Any]]:
    """Draw n tasks; the same arguments give the same tasks."""
    rng = random.Random(f"{split} {seed}")
    found: list[dict[str, Any]] = []
    while len(found) < n:
        kind = rng.choice(KINDS)
        numbers = {"a": rng.randint(12, 99), "b": rng.randint(2, 11), "c": rng.randint(2, 11)}
        key = " ".join([kind.name, *(str(numbers[name]) for name in kind.numbers)])
        if _is_held_out(key) == (split == "eval"):
            wording = rng.choice(kind.wordings)
            question = wording.format(name=rng.choice(NAMES), thing=rng.choice(THINGS), **numbers)
            found.append({"task_id": f"{split}-{seed}-{len(found)}", "question": question})
    return found
