"""Word problems: kinds, wordings, and the expression that solves each.

Words a problem and, for the scripted expert and the reward, reads it back.
"""

import ast
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass

THINGS = ["apples", "pears", "coins", "cards", "books", "shells"]
NAMES = ["ann", "ben", "cora", "dan", "eva", "finn", "gus", "hana"]
MAX_EXPRESSION = 40
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of problem; `a`, `b`, `c` are its numbers."""

    name: str
    wordings: tuple[str, ...]
    expression: str

    @property
    def numbers(self) -> tuple[str, ...]:
        """Names of its numbers."""
        return tuple(name for name in "abc" if "{" + name + "}" in self.expression)


KINDS: tuple[Kind, ...] = (
    Kind(
        "more",
        ("{name} has {a} {thing} and gets {b} more. How many now?", "{a} {thing} and {b} more: how many?"),
        "{a}+{b}",
    ),
    Kind(
        "less",
        ("{name} has {a} {thing} and loses {b}. How many now?", "{a} {thing} without {b}: how many?"),
        "{a}-{b}",
    ),
    Kind(
        "boxes",
        (
            "{name} has {a} boxes of {b} {thing}. How many {thing}?",
            "{a} boxes with {b} {thing} each: how many?",
        ),
        "{a}*{b}",
    ),
    Kind(
        "boxes_and_more",
        (
            "{name} has {a} boxes of {b} {thing} and {c} more. How many {thing}?",
            "{a} boxes with {b} {thing} each and {c} more: how many?",
        ),
        "{a}*{b}+{c}",
    ),
)


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem that was read: its kind and its numbers."""

    kind: Kind
    numbers: Mapping[str, int]

    @property
    def expression(self) -> str:
        """What solves it, e.g. `12*7+3`."""
        return self.kind.expression.format(**self.numbers)

    @property
    def solution(self) -> int:
        """The right number."""
        return calculate(self.expression)


def _pattern(wording: str) -> re.Pattern[str]:
    escaped = re.escape(wording)
    for slot, pattern in (("name", "|".join(NAMES)), ("a", r"\d+"), ("b", r"\d+"), ("c", r"\d+")):
        escaped = escaped.replace(re.escape("{" + slot + "}"), f"(?P<{slot}>{pattern})")
    return re.compile(escaped.replace(re.escape("{thing}"), f"(?:{'|'.join(THINGS)})"))


_PATTERNS = [(_pattern(wording), kind) for kind in KINDS for wording in kind.wordings]


def read_problem(text: str) -> Problem:
    """Find kind and numbers in a problem's text.

    Raises:
        ValueError: No wording fits.
    """
    for pattern, kind in _PATTERNS:
        if found := pattern.fullmatch(text):
            return Problem(kind, {name: int(found[name]) for name in kind.numbers})
    raise ValueError(f"problem {text!r} fits none of the wordings in word_problems.KINDS")


def calculate(expression: str) -> int:
    """Value of an expression of integers, `+`, `-`, `*` and parentheses.

    Raises:
        ValueError: It is something else, or longer than `MAX_EXPRESSION`.
    """
    if len(expression) > MAX_EXPRESSION:
        raise ValueError(f"longer than {MAX_EXPRESSION} characters")
    try:
        return _value(ast.parse(expression, mode="eval").body)
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError("not an expression") from error


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return int(_OPERATORS[type(node.op)](_value(node.left), _value(node.right)))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    raise ValueError("only integers and + - * are allowed")
