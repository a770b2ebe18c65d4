"""JSON text of whatever an application has at hand, bounded in size.

Knows plain Python values, dataclasses, pydantic models and LangChain messages by their fields. Invariants:
* No code of the application runs: no `__repr__`, no property, no iteration of its own. What is none of the
  known kinds is named by its class.
* The text is valid JSON that UTF-8 can hold, whatever was cut.
* Never raises.
"""

import datetime
import enum
import json
import math
import numbers
import pathlib
import uuid
from dataclasses import is_dataclass
from decimal import Decimal
from typing import Any

from spangrad.tracer.span_size import cut

MAX_CHARS = 65_536
_MAX_DEPTH = 24
_CUT = "...[cut]"
_ARRAYS: tuple[Any, ...] = (list, tuple, set, frozenset)
_BY_TEXT = (datetime.date, datetime.time, datetime.timedelta, uuid.UUID, pathlib.PurePath, Decimal, complex)


def json_text(value: Any, limit: int = MAX_CHARS) -> tuple[str, bool]:
    """The value as JSON of about `limit` characters at most, and whether something was cut."""
    budget = _Budget(limit)
    try:
        plain = _plain(value, budget, 0)
        text = json.dumps(plain, ensure_ascii=False)
        try:
            text.encode()
        except UnicodeEncodeError:  # lone surrogates stay escaped
            text = json.dumps(plain)
    except Exception:  # whatever the application's objects do, the tool goes on
        return json.dumps(_named(value)), True
    return text, budget.is_cut


class _Budget:
    __slots__ = ("is_cut", "left")

    def __init__(self, limit: int) -> None:
        self.left = limit
        self.is_cut = False


def _plain(value: Any, budget: _Budget, depth: int) -> Any:
    """The value in JSON's types. Every part of it is paid for, so the work is bounded too."""
    budget.left -= 4
    if value is None or value is True or value is False:
        return value
    kind = type(value)  # not `isinstance`, which asks a lazy object for its `__class__`, and so makes it
    if issubclass(kind, enum.Enum):
        value = value.value
        kind = type(value)
    if issubclass(kind, str):
        return _text(value, budget)
    if issubclass(kind, int):
        return int(value) if -(2**63) <= value < 2**63 else _text(f"{value:#x}"[:1000], budget)
    if issubclass(kind, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if depth > _MAX_DEPTH:
        budget.is_cut = True
        return _CUT
    if issubclass(kind, dict):
        return _object(dict.items(value), budget, depth)
    for known in _ARRAYS:
        if issubclass(kind, known):
            return _array(known.__iter__(value), budget, depth)
    if issubclass(kind, bytes | bytearray | memoryview):
        return f"<{len(value)} bytes>"
    if issubclass(kind, _BY_TEXT):
        return _text(str(value), budget)
    if issubclass(kind, numbers.Integral):  # numpy's
        return int(value)
    if issubclass(kind, BaseException):
        return {kind.__qualname__: _array(value.args, budget, depth)}
    if (fields := _fields(value)) is not None:
        return _object(fields.items(), budget, depth)
    return _named(value)


def _text(value: str, budget: _Budget) -> str:
    value = str.__str__(value)
    if len(value) > budget.left:
        budget.is_cut = True
        value = cut(value, max(0, budget.left)) + _CUT
    budget.left -= len(value)
    return value


def _object(items: Any, budget: _Budget, depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, item in items:
        if budget.left <= 0:
            budget.is_cut = True
            break
        name = _text(key if isinstance(key, str) else str(_plain(key, budget, depth + 1)), budget)
        found[name] = _plain(item, budget, depth + 1)
    return found


def _array(items: Any, budget: _Budget, depth: int) -> list[Any]:
    found = []
    for item in items:
        if budget.left <= 0:
            budget.is_cut = True
            break
        found.append(_plain(item, budget, depth + 1))
    return found


def _fields(value: Any) -> dict[str, Any] | None:
    """Fields of a dataclass or a pydantic model, as they are stored."""
    kind = type(value)
    if is_dataclass(kind):
        names = kind.__dataclass_fields__
        return {name: object.__getattribute__(value, name) for name in names}
    if hasattr(kind, "__pydantic_fields__"):
        return {name: item for name, item in vars(value).items() if item is not None}
    return None


def _named(value: Any) -> str:
    kind = type(value)
    return f"<{kind.__module__}.{kind.__qualname__}>"
