"""Rows of one query against the rows of the right one."""

import math
from collections.abc import Iterable, Sequence
from decimal import Decimal
from numbers import Real
from typing import Any

_Key = tuple[tuple[int, Any], ...]


def same_rows(
    found: Iterable[Sequence[Any]],
    expected: Iterable[Sequence[Any]],
    *,
    ordered: bool = False,
    significant_digits: int = 9,
) -> float:
    """1.0 if both are the same rows, as often as they occur, else 0.0. Names of columns do not matter.

    Numbers are equal if they agree in the significant digits, whatever their type (2 is 2.0 and `Decimal(2)`;
    True is not 1); NaN equals NaN; NULL equals NULL only.

    Args:
        found: Rows that the agent's query gave; a sequence of values each.
        expected: Rows of the right query.
        ordered: Rows must be in the same order, too.
        significant_digits: Of numbers, 1 to 15.
    """
    left = [_key(row, significant_digits) for row in found]
    right = [_key(row, significant_digits) for row in expected]
    if not ordered:
        left.sort(key=repr)
        right.sort(key=repr)
    return float(left == right)


def _key(row: Sequence[Any], digits: int) -> _Key:
    return tuple(_value(value, digits) for value in row)


def _value(value: Any, digits: int) -> tuple[int, Any]:
    if value is None:
        return (0, "")
    if isinstance(value, bool):
        return (1, value)
    if isinstance(value, Real | Decimal):
        number = float(value)
        if math.isnan(number):
            return (2, "nan")
        return (2, float(f"{number:.{digits - 1}e}") + 0.0)  # + 0.0: -0.0 is 0.0
    if isinstance(value, list | tuple):
        return (3, tuple(_value(one, digits) for one in value))
    return (4, str(value))
