"""What is odd in stored traces: times, parents, sizes, calls that nobody reads.

Pure functions of the spans of whole traces. Knows spans; knows no files and no tables. Invariants: nothing
is changed or left out for it, only counted; the work is linear in the number of spans and attributes.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from spangrad.store.faults import Faults, Outcome
from spangrad.store.records import Span

SKEW_S: Final = 5
"""A child that begins so much before its parent, or after its end, has another clock."""
LARGE: Final = 2**20
"""Characters or bytes of an attribute's value from which on it is counted as oversized."""
LATEST_NS: Final = 2**63
"""The year 2262: beyond it, whatever wrote the time did not write nanoseconds."""
NEGATIVE: Final = "negative durations"
ABSURD: Final = "times beyond the year 2262"
SKEW: Final = f"spans more than {SKEW_S} s outside their parent (clock skew)"
ORPHANS: Final = "orphans, whose parent is not in the store"
OWN_PARENTS: Final = "spans that are their own parent"
CYCLES: Final = "spans in a circle of parents"
OVERSIZED: Final = f"attributes of more than {LARGE >> 20} MiB"
UNKNOWN_DIALECT: Final = "model calls in an unknown dialect"
_SKEW_NS: Final = SKEW_S * 10**9
_KEYS_SHOWN: Final = 8
_LONGEST_KEY: Final = 80
_NO_PARENT: Final = "0" * 16


def count_faults(spans: Sequence[Span], unread: Sequence[Span], faults: Faults) -> None:
    """Count what is odd in the spans of whole traces.

    Args:
        spans: All that the store has of some traces.
        unread: Those of them that are calls in a dialect that nobody reads.
        faults: Where to count it.
    """
    by_id = {(span.trace_id, span.span_id): span for span in spans}
    for span in spans:
        _count_times(span, faults)
        _count_sizes(span, faults)
        parent_id = parent_of(span)
        if parent_id == span.span_id:
            _add(faults, OWN_PARENTS, span)
        elif parent_id is not None:
            parent = by_id.get((span.trace_id, parent_id))
            if parent is None:
                _add(faults, ORPHANS, span, f"its parent is {parent_id}")
            else:
                _count_skew(span, parent, faults)
    for span in unread:
        told = f"of scope {span.scope!r}, with the attributes {first_names(span)}"
        _add(faults, UNKNOWN_DIALECT, span, told)
    for span in _in_circles(by_id):
        _add(faults, CYCLES, span)


def first_names(span: Span) -> str:
    """Names of a span's first attributes."""
    return ", ".join(name[:_LONGEST_KEY] for name in list(span.attributes)[:_KEYS_SHOWN])


def parent_of(span: Span) -> str | None:
    """A span's parent; None of a root, also where zeros say so."""
    return None if span.parent_span_id == _NO_PARENT else span.parent_span_id


def _add(faults: Faults, kind: str, span: Span, what: str = "") -> None:
    known = kind in faults  # an example is made once
    example = "" if known else f"span {span.span_id} {span.name!r} of trace {span.trace_id} {what}".rstrip()
    faults.add(kind, Outcome.KEPT, example)


def _count_times(span: Span, faults: Faults) -> None:
    if span.start_ns >= LATEST_NS or span.end_ns >= LATEST_NS:
        _add(faults, ABSURD, span)
    elif span.end_ns and span.end_ns < span.start_ns:
        _add(faults, NEGATIVE, span, f"of {(span.end_ns - span.start_ns) / 1e9:.6g} s")


def _count_sizes(span: Span, faults: Faults) -> None:
    for name, value in span.attributes.items():
        if isinstance(value, str | bytes) and len(value) > LARGE:
            _add(faults, OVERSIZED, span, f"{name!r} has {len(value)}")


def _count_skew(span: Span, parent: Span, faults: Faults) -> None:
    before = parent.start_ns - span.start_ns
    behind = span.start_ns - parent.end_ns if parent.end_ns >= parent.start_ns else 0
    if span.start_ns and parent.start_ns and max(before, behind) > _SKEW_NS:
        how = f"begins {before / 1e9:.3g} s before" if before > 0 else f"begins {behind / 1e9:.3g} s after"
        _add(faults, SKEW, span, f"{how} its parent {parent.span_id}{'' if before > 0 else ' has ended'}")


def _in_circles(by_id: Mapping[tuple[str, str], Span]) -> list[Span]:
    """Spans that are their own ancestor, but not their own parent."""
    found: list[Span] = []
    done: set[tuple[str, str]] = set()
    for start in by_id:
        path: dict[tuple[str, str], None] = {}
        at: tuple[str, str] | None = start
        while at is not None and at in by_id and at not in done and at not in path:
            path[at] = None
            parent_id = parent_of(by_id[at])
            at = None if parent_id in (None, at[1]) else (at[0], str(parent_id))
        if at in path:
            way = list(path)
            found += [by_id[key] for key in way[way.index(at) :]]
        done.update(path)
    return found
