"""A scripted, imperfect expert that plays the model.

It knows SQL and the two tables, and it has the habits of somebody in a hurry: mostly it
does not look at the schema first, guesses the words that it doesn't know, and gives up when
a guess fails; it often leaves out a filter, and mostly a DISTINCT. Everything right is
among the things it does, but on every hard question some wrong choice is the more frequent
one. `README.md` says why.

Invariants: an answer depends on the seed and the conversation alone (ids of tool calls do
not count); the expert reads only what a model would read. It knows no database.
"""

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from shop_database import CUSTOMERS, MONEY_COLUMNS, MONTHS, PRODUCTS, VALID_CODES
from shop_questions import Question, read_question

from spangrad.trainer.policies.scripted_model import conversation_digest, serve_model, tool_call

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Habits:
    """Probabilities of what the expert does."""

    look_first: float = 0.40
    """Looks at the schema before a query that needs it."""
    look_needlessly: float = 0.05
    """Looks at the schema before a query that doesn't."""
    look_after_error: float = 0.35
    """Looks at the schema after a query failed, instead of handing in the broken query."""
    favourite_guess: float = 0.60
    """Guesses `price` and `paid`, instead of any other word."""
    forget_filter: float = 0.45
    """Leaves out `status IN (...)` where money is asked for by product."""
    forget_filter_elsewhere: float = 0.03
    """Leaves out `status IN (...)` in the other questions that need it."""
    forget_distinct: float = 0.60
    """Counts orders instead of customers."""
    slip: float = 0.02
    """Mistakes a name for another one."""


HASTY = Habits()


def reply(
    messages: Sequence[Message], seed: int = 0, *, habits: Habits = HASTY, asked_before: int = 0
) -> dict[str, Any]:
    """Give the expert's next message, in OpenAI chat form."""
    talk = [message for message in messages if message["role"] != "system"]
    digest = conversation_digest(talk, seed, asked_before)
    rng = random.Random(digest)
    question = read_question(talk[0]["content"])
    seen = next(
        (m["content"] for m in talk if m["role"] == "tool" and m["content"].startswith("orders(")), None
    )
    last_call = _last_call(talk)
    if last_call is None:
        chance = habits.look_first if question.intent.needs_schema else habits.look_needlessly
        if rng.random() < chance:
            return _call("schema", {"table": _table(question)}, digest)
    elif "sql" in last_call:
        failed = "Error" in talk[-1]["content"]
        if failed and seen is None and rng.random() < habits.look_after_error:
            return _call("schema", {"table": _table(question)}, digest)
        return {"role": "assistant", "content": last_call["sql"]}
    return _call("query", {"sql": _write_sql(question, seen, habits, rng)}, digest)


@contextmanager
def serve_expert(port: int = 0, seed: int = 0, *, habits: Habits = HASTY) -> Iterator[str]:
    """Serve the expert as an OpenAI-compatible model until the block ends; gives its base URL."""

    def next_message(messages: Sequence[Message], asked_before: int) -> Mapping[str, Any]:
        return reply(messages, seed, habits=habits, asked_before=asked_before)

    with serve_model(next_message, port=port) as base_url:
        yield base_url


def _last_call(talk: Sequence[Message]) -> dict[str, str] | None:
    calls = [call for message in talk for call in message.get("tool_calls") or []]
    return json.loads(calls[-1]["function"]["arguments"]) if calls else None


def _table(question: Question) -> str:
    return "customers" if "FROM customers" in question.intent.sql else "orders"


def _call(name: str, arguments: Mapping[str, str], digest: str) -> dict[str, Any]:
    return tool_call(name, arguments, f"call_{digest[:12]}")


def _write_sql(question: Question, seen: str | None, habits: Habits, rng: random.Random) -> str:
    if seen is not None and (words := re.search(r"sum\((\w+)\).* IN \('(\w+)'\)", seen)):
        money, valid = words.groups()
    else:
        money = MONEY_COLUMNS[0] if rng.random() < habits.favourite_guess else rng.choice(MONEY_COLUMNS)
        valid = VALID_CODES[0] if rng.random() < habits.favourite_guess else rng.choice(VALID_CODES)
    entities = dict(question.entities)
    for slot, names in (("customer", CUSTOMERS), ("product", PRODUCTS), ("month", MONTHS)):
        if slot in entities and rng.random() < habits.slip:
            entities[slot] = rng.choice(names)
    sql = Question(question.intent, entities).right_sql(money, valid)
    by_product = "{money}" in question.intent.sql and "product" in question.intent.slots
    forget_filter = habits.forget_filter if by_product else habits.forget_filter_elsewhere
    if rng.random() < forget_filter and "{money}" in question.intent.sql:
        sql = sql.split(" AND status")[0]
    if rng.random() < habits.forget_distinct:
        sql = sql.replace("DISTINCT ", "")
    return sql
