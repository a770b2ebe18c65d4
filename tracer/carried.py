"""The context variables of ours that follow an agent's work to other threads and processes.

Only ours are carried, never the application's context. Knows context variables and how to write their values
down; it does not know where work goes (`following.py`). A variable's default is None, and None means that
there is nothing to carry.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Variable:
    variable: ContextVar[Any]
    read: Callable[[], Any]
    pack: Callable[[Any], str | None]
    unpack: Callable[[str], Any]


_variables: dict[str, _Variable] = {}


def carry(
    name: str,
    variable: ContextVar[T | None],
    *,
    pack: Callable[[T], str | None] = lambda value: None,
    unpack: Callable[[str], T | None] = lambda text: None,
    read: Callable[[], T | None] | None = None,
) -> None:
    """Let `variable` follow.

    Args:
        name: Under which the value travels to other processes.
        variable: With None as its default.
        pack: Writes a value down for another process. None keeps it in this one, as the default does.
        unpack: Undoes `pack`.
        read: What counts as its value; default: `variable.get`.
    """
    _variables[name] = _Variable(variable, read or variable.get, pack, unpack)


class Carried:
    """Values of our variables, to be set elsewhere."""

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, Any]) -> None:
        """`values` by the names that `carry` gave."""
        self._values = values

    def set(self) -> list[tuple[ContextVar[Any], Token[Any]]]:
        """Set the variables of this context, those without a value to None. `unset` undoes it."""
        return [
            (known.variable, known.variable.set(self._values.get(name))) for name, known in _variables.items()
        ]

    def pack(self) -> dict[str, str]:
        """The values written down."""
        packed = {name: _variables[name].pack(value) for name, value in self._values.items()}
        return {name: text for name, text in packed.items() if text is not None}


def unset(tokens: list[tuple[ContextVar[Any], Token[Any]]]) -> None:
    """Undo `Carried.set`; in another context, where a generator may end, there is nothing to undo."""
    for variable, token in tokens:
        with suppress(ValueError):
            variable.reset(token)


def capture() -> Carried | None:
    """What is to be carried from here; None if there is nothing."""
    values = None
    for name, known in _variables.items():
        value = known.read()
        if value is not None:
            values = {} if values is None else values
            values[name] = value
    return None if values is None else Carried(values)


def unpack(packed: Mapping[str, str]) -> Carried:
    """Undo `Carried.pack`; names that this process does not know are left out."""
    return Carried(
        {name: _variables[name].unpack(text) for name, text in packed.items() if name in _variables}
    )


@contextmanager
def set_aside() -> Iterator[None]:
    """Nothing is carried from within: for what outlives the work that happens to start it."""
    tokens = Carried({}).set()
    try:
        yield
    finally:
        unset(tokens)
