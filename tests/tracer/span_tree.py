"""The tree of recorded spans, as nested names."""

from collections.abc import Iterable
from typing import Any

from tests.tracer.recording import Recorded


def tree(spans: Iterable[Recorded]) -> list[Any]:
    """Roots as `name` or `(name, [children])`, siblings in order of name; calls are `chat`."""
    found = list(spans)
    ids = {span.span_id for span in found}
    return _level(found, [span for span in found if span.parent_id not in ids])


def _level(spans: list[Recorded], of: list[Recorded]) -> list[Any]:
    level = []
    for span in of:
        below = _level(spans, [child for child in spans if child.parent_id == span.span_id])
        name = "chat" if span.is_call else span.name
        level.append((name, below) if below else name)
    return sorted(level, key=lambda item: (item if isinstance(item, str) else item[0], str(item)))


def named(spans: Iterable[Recorded], name: str) -> Recorded:
    """The one span of that name."""
    (found,) = [span for span in spans if span.name == name]
    return found
