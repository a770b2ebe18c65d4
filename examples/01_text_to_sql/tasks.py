"""Tasks for training and for the held-out evaluation.

`tasks(split, n, seed)` gives n tasks. No question of `eval`, in whatever wording, is ever
asked in `train`, and no shop of `eval` is a shop of `train`: what is measured is a habit
that carries over, not a memory. The right SQL is in no task; `reward.py` derives it.
"""

import hashlib
import random
from collections.abc import Iterator
from itertools import product
from typing import Any, Literal

from shop_database import MONEY_COLUMNS, VALID_CODES, all_databases, run_sql
from shop_questions import ENTITIES, INTENTS, Question

Split = Literal["train", "eval"]


def _is_held_out(key: str) -> bool:
    return hashlib.sha256(key.encode()).digest()[0] % 4 == 0


def databases(split: Split) -> list[str]:
    """Shops of a split: every word is known from training, its pairing with the other is not."""
    held_out = {
        f"{money}/{VALID_CODES[(column + 1) % len(VALID_CODES)]}"
        for column, money in enumerate(MONEY_COLUMNS)
    }
    return [name for name in all_databases() if (name in held_out) == (split == "eval")]


def questions(split: Split) -> dict[str, list[Question]]:
    """All questions of a split, by intent."""
    found: dict[str, list[Question]] = {}
    for intent in INTENTS:
        for names in product(*(ENTITIES[slot] for slot in intent.slots)):
            question = Question(intent, dict(zip(intent.slots, names, strict=True)))
            if _is_held_out(question.key) == (split == "eval"):
                found.setdefault(intent.name, []).append(question)
    return found


def tasks(split: Split, n: int, seed: int = 0) -> list[dict[str, Any]]:
    """Draw n tasks; the same arguments give the same tasks."""
    rng = random.Random(f"{split} {seed}")
    drawn = _draw(split, rng)
    return [
        {
            "task_id": f"{split}-{seed}-{index}",
            "question": question.word(rng.randrange(len(question.intent.wordings))),
            "database": database,
        }
        for index, (question, database) in zip(range(n), drawn, strict=False)
    ]


def _draw(split: Split, rng: random.Random) -> Iterator[tuple[Question, str]]:
    by_intent, shops = questions(split), databases(split)
    weights = [intent.weight for intent in INTENTS]
    while True:
        intent = rng.choices(INTENTS, weights)[0]
        question, database = rng.choice(by_intent[intent.name]), rng.choice(shops)
        if _is_telling(question, database):
            yield question, database


def _is_telling(question: Question, database: str) -> bool:
    """Whether the usual mistakes give another result than the right query does."""
    right = question.right_sql(*database.split("/"))
    result = run_sql(database, right)
    if result in ([], [(None,)], [(0,)]):
        return False
    mistakes = {right.split(" AND status")[0], right.replace("DISTINCT ", "")} - {right}
    return all(run_sql(database, mistake) != result for mistake in mistakes)
