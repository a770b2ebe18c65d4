"""Keys and tokens in what is about to leave: found by the tracer's built-in rules.

Knows texts; changes none. A row with a secret is left out whole: with the secret cut out of it, it would
train the policy to write the gap.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from spangrad.tracer.redaction import remembering, secrets

_MARK: Final = re.compile(r"\[redacted: ([a-z ]+)\]")
_LONGEST_VALUE: Final = 10_000
"""Longer values are looked at for themselves, not as what a name stands for."""


class Scanner:
    """Looks for secrets; a text that comes again, as in every call of an agent, is looked at once."""

    def __init__(self) -> None:
        """Nothing is found yet."""
        rule = remembering(secrets)
        assert rule is not None
        self._rule = rule
        self.found: Counter[str] = Counter()
        """Kind of secret -> rows that hold one."""

    def has_secret(self, row: Any) -> bool:
        """Whether a row, or anything of dicts, lists and texts, holds a secret; counts its kinds."""
        kinds: set[str] = set()
        for text in _texts(row):
            clean = self._rule(text)
            if clean != text:
                kinds.update(Counter(_MARK.findall(clean)) - Counter(_MARK.findall(text)) or {"secret": 1})
        self.found.update(kinds)
        return bool(kinds)


def _texts(value: Any) -> Iterator[str]:
    """Every text in a value; a short one under a name with its name: `"password": "..."`."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if isinstance(item, str) and len(item) < _LONGEST_VALUE:
                yield f'"{key}": "{item}"'
            else:
                yield from _texts(item)
    elif isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        for item in value:
            yield from _texts(item)
