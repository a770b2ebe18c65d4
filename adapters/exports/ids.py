"""Ids of other systems -> ids of OTel.

Invariant: the same text gives the same id, in spans as in scores; hex of the right length stays what it is.
"""

import re
from hashlib import blake2b
from typing import Final

TRACE_BYTES: Final = 16
SPAN_BYTES: Final = 8


def trace_id(told: str) -> str:
    """A trace id of 32 hex digits."""
    return _hex(told, TRACE_BYTES)


def span_id(told: str) -> str:
    """A span id of 16 hex digits."""
    return _hex(told, SPAN_BYTES)


def _hex(told: str, size: int) -> str:
    plain = told.lower()
    if re.fullmatch(rf"[0-9a-f]{{{2 * size}}}", plain) and plain.strip("0"):
        return plain
    return blake2b(told.encode("utf-8", "surrogatepass"), digest_size=size).hexdigest()
