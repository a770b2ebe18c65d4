"""Packed: the numbers of a packed attribute as a sequence, without a copy of them.

Each prompt of a rollout has all the ids that the calls before have added, so a list of them for each call
costs far more than all else that is read of a span. Knows bytes; does not know what the numbers are.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

N = TypeVar("N", int, float)

_INTS: Final = "<i4"
_FLOATS: Final = "<f4"
_FEW: Final = 2_048
"""Up to so many numbers, their sign bytes are looked at sooner than NumPy has begun."""


class Packed(Sequence[N]):
    """Numbers of four bytes each, little-endian. Equal to any sequence of the same numbers."""

    __slots__ = ("_kind", "packed")

    def __init__(self, packed: bytes, kind: str) -> None:
        """Read `packed` as numbers of a NumPy type.

        Raises TypeError if it is no bytes, ValueError if the length is no multiple of 4.
        """
        if not isinstance(packed, bytes):
            raise TypeError(f"{type(packed).__name__} is no packed numbers; expected bytes")
        if len(packed) % 4:
            raise ValueError(f"{len(packed)} bytes are no numbers of 4 bytes each")
        self.packed = packed
        """The bytes as they came."""
        self._kind = kind

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """As a NumPy array: without a copy, unless one is asked for or the type is another."""
        array = np.frombuffer(self.packed, self._kind)
        if dtype is not None:
            array = array.astype(dtype, copy=False)
        return array.copy() if copy else array

    def __len__(self) -> int:
        """How many numbers."""
        return len(self.packed) // 4

    @overload
    def __getitem__(self, index: int) -> N: ...

    @overload
    def __getitem__(self, index: slice) -> list[N]: ...

    def __getitem__(self, index: int | slice) -> N | list[N]:
        """One number, or a list of several."""
        found: N | list[N] = np.frombuffer(self.packed, self._kind)[index].tolist()
        return found

    def __iter__(self) -> Iterator[N]:
        """The numbers as Python's."""
        return iter(self.tolist())

    def __eq__(self, other: object) -> bool:
        """Whether they are the same numbers in the same order."""
        if isinstance(other, Packed):
            return self._kind == other._kind and self.packed == other.packed
        if isinstance(other, list | tuple):
            return len(self) == len(other) and self.tolist() == list(other)
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        """As the list that it stands for."""
        return repr(self.tolist())

    def __reduce__(self) -> tuple[type["Packed[N]"], tuple[bytes, str]]:
        """For other processes: the bytes."""
        return Packed, (self.packed, self._kind)

    def tolist(self) -> list[N]:
        """A list of them."""
        found: list[N] = np.frombuffer(self.packed, self._kind).tolist()
        return found


def packed_ints(packed: bytes) -> Packed[int]:
    """Token ids or versions. Raises ValueError if the length is no multiple of 4."""
    return Packed(packed, _INTS)


def packed_floats(packed: bytes) -> Packed[float]:
    """Logprobs, exactly as float32. Raises ValueError if the length is no multiple of 4."""
    return Packed(packed, _FLOATS)


def any_negative(values: Sequence[int]) -> bool:
    """Whether one of them is below 0; of packed ones without a look at each."""
    if not isinstance(values, Packed) or values._kind != _INTS:
        return len(values) > 0 and min(values) < 0
    if len(values.packed) <= 4 * _FEW:
        return not values.packed[3::4].isascii()  # the highest bit is the sign
    return bool(np.minimum.reduce(np.frombuffer(values.packed, _INTS)) < 0)


def as_ids(values: Sequence[int]) -> bytes:
    """The packed bytes of ids, without a copy if they are packed already."""
    if isinstance(values, Packed) and values._kind == _INTS:
        return values.packed
    return np.asarray(values, _INTS).tobytes()
