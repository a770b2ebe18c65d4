"""A case: one client, one mode, one wire session, and by hand what must be known of its calls.

The functions of `clients/` are declared with `case`. What they return (or raise) is what the agent gets.
"""

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

DRY = (101, 102, 103, 104, 151645)
"""What a policy samples for `Dry in Oslo.` in the sessions."""
WET = (121, 122, 123, 124, 151645)
THOUGHT = (151667, 201, 202, 151668, 101, 102, 151645)
ONE_TOOL = (151657, 300, 301, 302, 303, 151658, 151645)
TWO_TOOLS = (151657, 300, 301, 302, 151658, 151657, 320, 321, 322, 151658, 151645)


@dataclass(frozen=True)
class Want:
    """One expected call: what no regenerated file may change."""

    grade: str
    sampled: Sequence[Sequence[int]] = ()
    """Token ids of each choice, all of them with logprobs; empty: there are none."""
    finish: Sequence[str | None] = ("stop",)
    is_complete: bool = True
    """Not a stream that was left early."""
    error: str | None = None
    """Part of the call's error; None: it has none; empty: that depends on the client's version."""
    spans: int = 1
    """Accounts that were merged into it."""


def ids(*sampled: Sequence[int], finish: str = "stop") -> Want:
    """Engine's ids and logprobs, but no policy version."""
    return Want("ids", sampled, [finish] * len(sampled))


def exact(*sampled: Sequence[int], finish: str = "stop") -> Want:
    """Everything, versions included: what the tracer and the gateway know together."""
    return Want("exact", sampled, [finish] * len(sampled), spans=2)


def text(finish: str = "stop", count: int = 1) -> Want:
    """Text only."""
    return Want("text", (), [finish] * count)


def failed(error: str, spans: int = 1) -> Want:
    """No reply at all."""
    return Want("unusable", (), (), error=error, spans=spans)


def partial(*sampled: int, error: str | None = None) -> Want:
    """A stream that did not come to its end."""
    return Want("unusable", [sampled] if sampled else (), (None,), is_complete=False, error=error)


@dataclass(frozen=True)
class Case:
    """One declared case."""

    client: str
    mode: str
    session: str
    wants: Sequence[Want]
    function: Callable[[str], Any]
    """Gets the server's base URL, `http://.../v1`."""
    is_parallel: bool = False
    """Its calls may start in any order."""
    through_gateway: bool = False
    broken: str | None = None
    """A known fault of ours, for which the case must fail."""

    @property
    def name(self) -> str:
        """Of its file and its test."""
        parts = [self.client, "gateway" if self.through_gateway else "", self.mode]
        return re.sub(r"[^a-z0-9]+", "-", " ".join(parts).lower()).strip("-")


CASES: list[Case] = []
AT_END: list[Callable[[], Awaitable[None]]] = []


def at_end(function: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
    """Declare what is to be awaited after the last case."""
    AT_END.append(function)
    return function


def case(
    client: str, mode: str, session: str, *wants: Want, **more: Any
) -> Callable[[Callable[[str], Any]], Callable[[str], Any]]:
    """Declare a function as a case; it can be declared several times."""

    def declare(function: Callable[[str], Any]) -> Callable[[str], Any]:
        CASES.append(Case(client, mode, session, wants, function, **more))
        return function

    return declare
