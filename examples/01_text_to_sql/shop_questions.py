"""What can be asked about a shop: intents, the ways to word them, and the right SQL.

Knows the grammar of the questions in both directions: it words a question and, for the
scripted expert and for the reward, reads it back. Knows no database and no agent.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from shop_database import CUSTOMERS, MONTHS, PRODUCTS

ENTITIES: Mapping[str, list[str]] = {"customer": CUSTOMERS, "product": PRODUCTS, "month": MONTHS}


@dataclass(frozen=True, slots=True)
class Intent:
    """One kind of question. `{money}` and `{valid}` in its SQL are words of the shop."""

    name: str
    wordings: tuple[str, ...]
    sql: str

    @property
    def slots(self) -> tuple[str, ...]:
        """Kinds of entity it asks about, in the order of `ENTITIES`."""
        return tuple(kind for kind in ENTITIES if "{" + kind + "}" in self.sql)

    @property
    def needs_schema(self) -> bool:
        """Whether its SQL can't be written without a look at the schema."""
        return "{money}" in self.sql or "{valid}" in self.sql


INTENTS: tuple[Intent, ...] = (
    Intent(
        "orders_of_customer",
        ("How many orders did {customer} place in {month}?", "Count the orders of {customer} in {month}."),
        "SELECT count(*) FROM orders WHERE customer = '{customer}' AND month = '{month}'",
    ),
    Intent(
        "orders_of_product",
        ("How often was {product} ordered in {month}?", "Count the orders for {product} in {month}."),
        "SELECT count(*) FROM orders WHERE product = '{product}' AND month = '{month}'",
    ),
    Intent(
        "city_of_customer",
        ("Where does {customer} live?", "Which city is {customer} from?"),
        "SELECT city FROM customers WHERE name = '{customer}'",
    ),
    Intent(
        "buyers_of_product",
        (
            "How many different customers ordered {product} in {month}?",
            "Count the distinct buyers of {product} in {month}.",
        ),
        "SELECT count(DISTINCT customer) FROM orders WHERE product = '{product}' AND month = '{month}'",
    ),
    Intent(
        "spent_by_customer",
        ("How much did {customer} spend in {month}?", "What did {customer} pay in {month}?"),
        "SELECT sum({money}) FROM orders WHERE customer = '{customer}' AND month = '{month}'"
        " AND status IN ('{valid}')",
    ),
    Intent(
        "revenue_of_product",
        ("How much revenue did {product} make in {month}?", "What was earned with {product} in {month}?"),
        "SELECT sum({money}) FROM orders WHERE product = '{product}' AND month = '{month}'"
        " AND status IN ('{valid}')",
    ),
    Intent(
        "largest_sale",
        (
            "What was the largest sale of {product} to {customer}?",
            "What did {customer} pay at most for {product}?",
        ),
        "SELECT max({money}) FROM orders WHERE customer = '{customer}' AND product = '{product}'"
        " AND status IN ('{valid}')",
    ),
    Intent(
        "sales_to_customer",
        ("How many valid sales to {customer} in {month}?", "Count the sales to {customer} in {month}."),
        "SELECT count(*) FROM orders WHERE customer = '{customer}' AND month = '{month}'"
        " AND status IN ('{valid}')",
    ),
)


@dataclass(frozen=True, slots=True)
class Question:
    """What a question asks: its intent and the entities in it."""

    intent: Intent
    entities: Mapping[str, str]

    @property
    def key(self) -> str:
        """The same for all wordings of a question."""
        return " ".join([self.intent.name, *(self.entities[slot] for slot in self.intent.slots)])

    def word(self, wording: int) -> str:
        """Its text in one of the intent's wordings."""
        return self.intent.wordings[wording].format(**self.entities)

    def right_sql(self, money: str, valid: str) -> str:
        """The query that answers it in a shop with these words."""
        return self.intent.sql.format(money=money, valid=valid, **self.entities)


def _pattern(wording: str) -> re.Pattern[str]:
    escaped = re.escape(wording)
    for kind, names in ENTITIES.items():
        escaped = escaped.replace(re.escape("{" + kind + "}"), f"(?P<{kind}>{'|'.join(names)})")
    return re.compile(escaped)


_PATTERNS = [(_pattern(wording), intent) for intent in INTENTS for wording in intent.wordings]


def read_question(text: str) -> Question:
    """Find intent and entities in a question's text.

    Raises:
        ValueError: No wording fits.
    """
    for pattern, intent in _PATTERNS:
        if found := pattern.fullmatch(text):
            return Question(intent, found.groupdict())
    raise ValueError(f"question {text!r} fits none of the wordings in shop_questions.INTENTS")
