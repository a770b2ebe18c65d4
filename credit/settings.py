"""What holds for the settings of every config: numbers are finite, names are known ones.

Knows dataclasses and the types of their fields. Does not know what a setting means: ranges are its config's.
"""

import math
import typing
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from functools import cache
from typing import Any

from spangrad.errors import ConfigError
from spangrad.store.names import nearest


def check_values(config: Any, section: str = "", *, unbounded: Collection[str] = ()) -> None:
    """Refuse numbers that are not finite, and names that the type of their field does not have.

    Args:
        config: A dataclass; of tuples and tables everything inside is looked at.
        section: What goes before the names of settings, with its dot.
        unbounded: Settings that may be infinite, which then have no bound.

    Raises:
        ConfigError: Says the value and what was expected, of names the nearest one.
    """
    names = _names(config.__class__)
    for setting in fields(config):
        value = getattr(config, setting.name)
        for one in _inside(value):
            if (known := names[setting.name]) and one not in known:
                raise ConfigError(f"{section}{setting.name} is {one!r}, expected {one_of(one, known)}")
            if isinstance(one, float) and not math.isfinite(one) and setting.name not in unbounded:
                expected = "a finite number" if one is value else "finite numbers"
                raise ConfigError(f"{section}{setting.name} is {value!r}, expected {expected}")


def one_of(name: object, known: Iterable[str]) -> str:
    """What was expected in place of a name: one of those that are known, the nearest last."""
    known = list(known)
    return f"one of {', '.join(known)}{nearest(str(name), known)}"


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, tuple) else (value,)


@cache
def _names(kind: type) -> Mapping[str, tuple[str, ...]]:
    """Setting -> the names that it can have; empty: it has other values."""
    return {name: _literals(hint) for name, hint in typing.get_type_hints(kind).items()}


def _literals(hint: Any) -> tuple[str, ...]:
    if typing.get_origin(hint) is typing.Literal:
        return typing.get_args(hint)
    return tuple(name for part in typing.get_args(hint) for name in _literals(part))
