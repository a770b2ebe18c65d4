"""Arguments that the operator gives a verifier, refused where they can only be a mistake."""

from collections.abc import Collection, Mapping
from typing import Any

from spangrad.errors import CreditError


def strings(given: Any, what: str) -> list[str]:
    """A list, tuple or set of strings, as a list.

    A string alone is none: its characters would be taken for the names.

    Raises:
        CreditError: It is anything else; `what` says what it stands for.
    """
    is_listed = isinstance(given, Collection) and not isinstance(given, str | bytes | Mapping)
    if not is_listed or not all(isinstance(one, str) for one in given):
        raise CreditError(f"{what} are {given!r:.200}; expected a list of strings")
    return list(given)
