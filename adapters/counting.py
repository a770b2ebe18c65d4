"""What the traces of an ingest tell, counted in the store: calls by dialect, grade, reason; joinings by rule.

Knows the tables `calls`, `call_keys` and `sessions`; memory does not grow with the number of calls.
Invariant: a call counts once, in whichever traces and batches its accounts came.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, TypeVar

from spangrad.adapters.model_call import Purpose
from spangrad.adapters.sessions import KeptApart, Rule
from spangrad.store.base import Store

AT_ONCE: Final = 1000
_KINDS: Final = (
    "list_sort(list_distinct(list_transform(c.grade_reasons, lambda x: split_part(x, ': ', 1)))) AS kinds"
)
_NAMED: Final = f"""
SELECT dialect, grade, purpose, kinds, count(*) AS calls FROM (
  SELECT c.dialect, c.grade, c.purpose, {_KINDS} FROM calls c WHERE c.trace_id IN (SELECT unnest($traces)))
GROUP BY ALL
"""
_TOLD: Final = f"""
SELECT DISTINCT c.call_id, c.trace_id, c.dialect, c.grade, c.purpose, {_KINDS}, 1 AS calls FROM calls c JOIN (
  SELECT call_id, unnest(trace_ids) AS told_in FROM call_keys WHERE len(trace_ids) > 1) k USING (call_id)
WHERE k.told_in IN (SELECT unnest($traces)) AND c.trace_id NOT IN (SELECT unnest($traces))
"""
"""Calls that these traces tell of, and others name."""
_REASONS: Final = """
SELECT reason, count(*) AS traces FROM sessions
WHERE reason IS NOT NULL AND trace_id IN (SELECT unnest($traces)) GROUP BY reason
"""


@dataclass(slots=True)
class Counts:
    """What traces tell."""

    calls: int = 0
    """Model calls, embeddings not included."""
    embeddings: int = 0
    by_dialect: Counter[str] = field(default_factory=Counter)
    by_grade: Counter[str] = field(default_factory=Counter)
    by_reason: Counter[str] = field(default_factory=Counter)
    joined_by: dict[str, int] = field(default_factory=dict)
    kept_apart: dict[str, int] = field(default_factory=dict)


Told = TypeVar("Told", bound=Counts)


def count_told(store: Store, trace_ids: Collection[str], found: Told) -> Told:
    """Add to `found` what these traces tell, as the store has it by now."""
    reasons: Counter[str] = Counter()
    others: set[str] = set()
    for chunk in chunks(trace_ids, AT_ONCE):
        for row in store.query(_NAMED, {"traces": chunk}):
            _add(found, row)
        for row in store.query(_TOLD, {"traces": chunk}):
            if row["trace_id"] not in trace_ids and row["call_id"] not in others:
                others.add(row["call_id"])
                _add(found, row)
        reasons.update({row["reason"]: row["traces"] for row in store.query(_REASONS, {"traces": chunk})})
    found.by_reason = Counter(dict(found.by_reason.most_common()))
    found.joined_by = {rule: reasons[rule] for rule in map(str, Rule) if rule in reasons}
    found.kept_apart = {why: reasons[why] for why in map(str, KeptApart) if why in reasons}
    return found


def chunks(items: Iterable[str], size: int) -> Iterator[Sequence[str]]:
    """The items, so many at a time."""
    rest = iter(items)
    while chunk := list(islice(rest, size)):
        yield chunk


def _add(found: Counts, row: Mapping[str, Any]) -> None:
    if row["purpose"] == Purpose.EMBEDDING:
        found.embeddings += row["calls"]
        return
    found.calls += row["calls"]
    found.by_dialect[row["dialect"]] += row["calls"]
    found.by_grade[row["grade"]] += row["calls"]
    for kind in row["kinds"]:
        found.by_reason[kind] += row["calls"]
