"""Rows of one query against the rows of the right one."""

import math
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from numbers import Real
from typing import Any

from spangrad.errors import CreditError

_NO_ROWS = (str, bytes, Mapping)
"""What can be gone through and is no row, nor several."""


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

    Raises:
        CreditError: `expected` is no rows (None, text, dictionaries, whose names would be compared instead of
            their values), or the digits are out of range.
    """
    if not 1 <= significant_digits <= 15:
        raise CreditError(f"significant_digits is {significant_digits!r}; expected 1 to 15")
    right = _keys(expected, significant_digits)
    if right is None:
        raise CreditError(f"the right rows are {expected!r:.200}; expected rows, a sequence of values each")
    left = _keys(found, significant_digits)
    if left is None:
        return 0.0
    if not ordered:
        left.sort()
        right.sort()
    return float(left == right)


def _keys(rows: object, digits: int) -> list[str] | None:
    """A text for each row, the same for rows that count as equal. None: they are no rows."""
    if not isinstance(rows, Iterable) or isinstance(rows, _NO_ROWS):
        return None
    kept = list(rows)
    if not all(isinstance(row, Iterable) and not isinstance(row, _NO_ROWS) for row in kept):
        return None
    try:
        return [repr([_value(value, digits) for value in row]) for row in kept]
    except (RecursionError, ValueError):  # nested as deep as a query likes, an integer of 10,000 digits
        return None


def _value(value: Any, digits: int) -> tuple[int, Any]:
    if value is None:
        return (0, "")
    if isinstance(value, bool):
        return (1, value)
    if isinstance(value, Real | Decimal):
        try:
            number = float(value)
        except (OverflowError, ValueError):  # 10 ** 400, and the signalling NaN of decimals
            return (4, str(value))
        if math.isnan(number):
            return (2, "nan")
        return (2, float(f"{number:.{digits - 1}e}") + 0.0)  # + 0.0: -0.0 is 0.0
    if isinstance(value, list | tuple):
        return (3, tuple(_value(one, digits) for one in value))
    return (4, str(value))
