"""Whether a reply came out of a cache, as gateways tell in headers. Knows header names, nothing else."""

from collections.abc import Iterable

_MARKS = {
    "x-litellm-cache-key": "",
    "x-litellm-cache-hit": "true",
    "x-cache": "hit",
    "x-cache-status": "hit",
    "cf-cache-status": "hit",
    "cf-aig-cache-status": "hit",
    "helicone-cache": "hit",
    "x-portkey-cache-status": "hit",
}
"""Header of a reply that a cache served -> how its value begins, in lower case.

Several caches in a row tell one after the other: `MISS, HIT`.
"""


HEADERS = frozenset(name.encode() for name in _MARKS)
"""As they are on the wire, in lower case."""


def is_served_by_cache(headers: Iterable[tuple[str, str]]) -> bool:
    """Whether a response's headers say that nothing was sampled for it."""
    for name, value in headers:
        begin = _MARKS.get(name.lower())
        if begin is None or not value:
            continue
        if any(told.strip().startswith(begin) for told in value.lower().split(",")):
            return True
    return False
