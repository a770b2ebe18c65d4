"""Whether values that came as JSON have the types that a function or a record declares.

Knows type hints; knows no HTTP and no table. Invariants: a value that passes is one that a
caller in this process could have given; records, statuses and authors are left to `wire.py`.
"""

import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from enum import Enum
from functools import cache
from inspect import Parameter, signature
from typing import Any, Union, get_args, get_origin, get_type_hints

from spangrad.errors import StoreError

_WORDS = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    bytes: "bytes",
    type(None): "null",
}


def check_arguments(name: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Raise StoreError if `function(**arguments)` would get too many, too few or ill-typed arguments."""
    parameters = _parameters(function)
    if unknown := sorted(arguments.keys() - parameters.keys()):
        raise StoreError(f"{name} has no argument {unknown[0]!r}; it takes {sorted(parameters)}")
    for argument, (hint, is_required) in parameters.items():
        if argument in arguments:
            check_value(f"{name}: argument {argument!r}", arguments[argument], hint)
        elif is_required:
            raise StoreError(f"{name} needs the argument {argument!r}, {describe(hint)}; send it")


def check_fields(kind: type, data: Mapping[str, Any]) -> None:
    """Raise StoreError if a field of this record has a value of another type."""
    for name, hint in _hints(kind).items():
        if name in data:
            check_value(f"field {name!r} of a {kind.__name__}", data[name], hint)


def check_value(label: str, value: Any, hint: Any) -> None:
    """Raise StoreError if the value does not fit the hint."""
    if not fits(value, hint):
        raise StoreError(f"{label} is {value!r:.80}; {describe(hint)} was expected")


def fits(value: Any, hint: Any) -> bool:
    """Whether a value from JSON can stand for a value of this type."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(fits(value, one) for one in inner)
    if origin is tuple:
        is_list = isinstance(value, list | tuple) and len(value) == len(inner)
        return is_list and all(map(fits, value, inner))
    if origin is Sequence:
        return isinstance(value, list | tuple) and all(fits(item, inner[0]) for item in value)
    if origin is Mapping:
        return isinstance(value, Mapping) and all(fits(item, inner[1]) for item in value.values())
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63
    if hint is float:
        return isinstance(value, int | float)
    return hint is Any or _is_read_elsewhere(hint) or isinstance(value, hint)


def describe(hint: Any) -> str:
    """A type in words: "a list of text or null"."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(map(describe, inner))
    if origin is tuple:
        return f"[{', '.join(map(describe, inner))}]"
    if origin is Sequence:
        return "a list" if inner[0] is Any else f"a list of {describe(inner[0])}"
    if origin is Mapping:
        return "an object" if inner[1] is Any else f"an object of {describe(inner[1])}"
    return _WORDS.get(hint) or (f"a {hint.__name__}" if isinstance(hint, type) else "a value")


def _is_read_elsewhere(hint: type) -> bool:
    return is_dataclass(hint) or issubclass(hint, Enum)


@cache
def _parameters(function: Callable[..., Any]) -> dict[str, tuple[Any, bool]]:
    hints = get_type_hints(function)
    return {
        name: (hints[name], parameter.default is Parameter.empty)
        for name, parameter in signature(function).parameters.items()
        if name != "self"
    }


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)
