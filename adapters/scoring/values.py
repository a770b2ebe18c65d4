"""Which values are rewards. A reward is a finite number; one that is missing is not 0."""

import math
from collections.abc import Mapping
from typing import Any


def as_number(value: Any) -> float:
    """A reward as a float; True is 1 and False is 0.

    Raises:
        ValueError: It is no finite number.
    """
    try:
        if not isinstance(value, str | bytes) and math.isfinite(number := float(value)):
            return number
    except (TypeError, ValueError, OverflowError):
        pass
    raise ValueError(f"{value!r:.80} is no finite number")


def as_rewards(returned: Any, name: str) -> dict[str, float] | None:
    """What a verifier returned, by name of the reward; None if it has no opinion.

    Args:
        returned: A number, which gets `name`; a dict name -> number or None; or None.
        name: Of a reward that comes without one.

    Raises:
        ValueError: It is none of these.
    """
    if returned is None:
        return None
    if not isinstance(returned, Mapping):
        return {name: as_number(returned)}
    given = {key: as_number(value) for key, value in returned.items() if value is not None}
    for key in given:
        if not is_text(key) or not key:
            raise ValueError(f"{key!r:.80} is no name of a reward")
    return given or None


def is_text(value: Any) -> bool:
    """Whether it is text that a store can hold: no half of a surrogate pair."""
    try:
        return isinstance(value, str) and bool(value.encode() or True)
    except UnicodeEncodeError:
        return False
