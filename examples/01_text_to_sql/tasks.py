"""Tasks for training and for the held-out evaluation.

`tasks(split, n, seed)` gives n tasks. No question of `eval`, in whatever wording, is ever
asked in `train`, and no shop of `eval` is a shop of `train`: what is measured is a habit
that carries over, not a memory. The right SQL is in no task; `reward.py` derives it.

A question is asked only about a shop where the right query's rows are other ones than what the
usual mistakes give, and than what it gives in the shop's twin: no constant is ever right.
"""

import hashlib
import random
from collections import deque
from collections.abc import Iterator
from itertools import islice, product
from typing import Any, Literal

from shop_database import MONEY_COLUMNS, VALID_CODES, all_databases, run_sql
from shop_questions import ENTITIES, INTENTS, Question

Split = Literal["train", "eval"]
Drawn = tuple[Question, int, str]
"""A question, the number of a wording, and a shop."""

DISTINCT = 100
"""So many training tasks in a row are about different pairs of question and shop."""


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
    """Draw n tasks; the same arguments give the same tasks, fewer of them the first ones.

    `train` draws any question alike, again and again, but no pair of question and shop twice among
    `DISTINCT` tasks. `eval` draws without replacement: every held-out question once, intents
    evenly mixed, before any is asked a second time, in its other wording and about another shop. No
    question is asked more than twice, no prompt more than once.

    Raises:
        ValueError: There are fewer held-out tasks than n.
    """
    rng = random.Random(f"{split} {seed}")
    drawn = list(islice(_draw(rng) if split == "train" else _draw_each(rng), n))
    if len(drawn) < n:
        raise ValueError(
            f"{n} tasks of split {split!r} were asked for, there are {len(drawn)}; ask for fewer"
        )
    return [
        {"task_id": f"{split}-{seed}-{index}", "question": question.word(wording), "database": database}
        for index, (question, wording, database) in enumerate(drawn)
    ]


def _draw(rng: random.Random) -> Iterator[Drawn]:
    """Training tasks without end."""
    every = [question for found in questions("train").values() for question in found]
    shops = databases("train")
    recent: deque[tuple[str, str]] = deque(maxlen=DISTINCT - 1)
    while True:
        question = rng.choice(every)
        rng.shuffle(shops)
        for database in shops:
            if (question.key, database) not in recent and _is_telling(question, database):
                recent.append((question.key, database))
                yield question, rng.randrange(len(question.intent.wordings)), database
                break


def _draw_each(rng: random.Random) -> Iterator[Drawn]:
    """Held-out tasks: every question in one of its wordings, then every one in the next wording."""
    places: list[tuple[float, Question, list[int], list[str]]] = []
    for found in questions("eval").values():
        rng.shuffle(found)
        for place, question in enumerate(found):
            wordings, shops = list(range(len(question.intent.wordings))), databases("eval")
            rng.shuffle(wordings)
            rng.shuffle(shops)
            # An intent of 2 questions has them at 1/4 and 3/4 of the round, one of 10 at 1/20, 3/20, ...
            places.append(((place + 0.5) / len(found), question, wordings, shops))
    places.sort(key=lambda each: each[0])
    for round_ in range(max(len(intent.wordings) for intent in INTENTS)):
        for _, question, wordings, shops in places:
            database = next((shop for shop in shops if _is_telling(question, shop)), None)
            if round_ < len(wordings) and database is not None:
                shops.remove(database)
                yield question, wordings[round_], database


def _is_telling(question: Question, database: str) -> bool:
    """Whether the usual mistakes, and the twin, give another result than the right query does."""
    right = question.right_sql(*database.split("/"))
    result = run_sql(database, right)
    if result in ([], [(None,)], [(0,)]):
        return False
    mistakes = {right.split(" AND status")[0], right.replace("DISTINCT ", "")} - {right}
    if any(run_sql(database, mistake) == result for mistake in mistakes):
        return False
    return run_sql(database, right, twin=True) != result
