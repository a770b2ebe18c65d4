"""Traces in a store -> its calls and rollouts, found anew whenever more of them is there.

Knows that accounts of one call may come one by one, in traces of their own, and conversations turn by
turn. Knows no files; whoever takes traces in says which are new.

Invariants:
* what is stored follows from the traces that are there, not from the order in which they came, as long as
  fewer than MOST calls may be of one rollout with each other; beyond, what was joined stays joined;
* calls whose recorder names a rollout are left alone, and nothing is joined to them;
* a rule that was off when a trace was taken in does not join it later.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import Any, Final

from spangrad.adapters.calls import calls_from_spans, record_calls
from spangrad.adapters.dialects import NO_DIALECT, recognise
from spangrad.adapters.model_call import ModelCall
from spangrad.adapters.sessions import GUESSED, CallKeys, Rule, keys_of, sessions
from spangrad.store.base import Store
from spangrad.store.records import LogRecord, Span, UnreadTrace

MOST: Final = 20_000
_TRACE_ID: Final = re.compile("[0-9a-f]{32}")


def settle_calls(
    store: Store,
    trace_ids: Sequence[str],
    rules: Sequence[Rule] | None = None,
    unread: Sequence[UnreadTrace] = (),
    waiting: Mapping[str, int | None] = MappingProxyType({}),
) -> tuple[list[Span], list[LogRecord], list[Span]]:
    """Read the calls of traces, with the accounts that the store has of them already, and record them.

    Returns the spans and log records that were read, and those of the spans that are calls in an unknown
    dialect.

    Args:
        store: Where the spans are.
        trace_ids: Traces of which something is new.
        rules: Rules that may join them; None: as before, or all.
        unread: What the store said of those of them that were not read since they changed.
        waiting: Traces that were read before and are not marked so yet: when they had changed.
    """
    named = sorted({rollout_id for one in unread for rollout_id in one.rollout_ids})
    spans = list(store.spans(named, trace_ids=trace_ids))
    records = list(store.logs(named or None, trace_ids=trace_ids))
    calls = calls_from_spans(spans, records)
    rules_of = _rules_before(store, trace_ids) if rules is None else {}
    rules = GUESSED if rules is None else rules
    traces = {t: waiting.get(t) for t in (*trace_ids, *(span.trace_id for span in spans))}
    traces |= {one.trace_id: one.changed_ns for one in unread}
    rows = {row["call_id"]: row for row in _keys(calls, rules, rules_of)}
    asked = list(rows.values())
    while asked:
        related = [
            row
            for row in store.related_accounts(asked)
            if not traces.keys() >= {row["trace_id"], *(row["trace_ids"] or ())}
        ]
        further = {t: row["rules"] for row in related for t in (row["trace_id"], *(row["trace_ids"] or ()))}
        further = {trace_id: kept for trace_id, kept in further.items() if trace_id not in traces}
        if not further:
            break
        again = _linked(rows.values(), {row["given_id"] for row in related}) | further.keys()
        rules_of |= further
        traces |= {trace_id: waiting.get(trace_id) for trace_id in further}
        spans += store.spans(trace_ids=list(further))
        records += store.logs(trace_ids=list(further))
        anew = calls_from_spans(
            [span for span in spans if span.trace_id in again],
            [record for record in records if record.trace_id in again],
        )
        calls = [call for call in calls if again.isdisjoint(call.trace_ids)] + anew
        asked = list(_keys(anew, rules, rules_of))
        rows = {i: row for i, row in rows.items() if again.isdisjoint(row["trace_ids"])}
        rows |= {row["call_id"]: row for row in asked}
    strays = [span for span in spans if recognise(span) == NO_DIALECT]
    record_calls(store, [call for call in calls if call.trace_id in traces], traces, strays)
    if rows:
        store.put_call_keys(list(rows.values()))
    return spans, records, strays


def settle_sessions(store: Store, trace_ids: Sequence[str]) -> None:
    """Give every trace that names no rollout one, together with all that the store has of it by now.

    Replies that another trace of the rollout has, too, are graded once more.
    """
    keys = [CallKeys(**row) for row in store.related_call_keys(trace_ids, MOST)]
    if not keys:
        return
    before = _joined_before(store, keys) if len(keys) > MOST else []
    found = sessions(keys, before)
    store.set_sessions(
        [
            {
                trace_id: None if reason is None else str(reason)
                for trace_id, reason in session.reasons.items()
            }
            for session in found
        ]
    )
    if repeated := _repeated(keys):
        record_calls(store, calls_from_spans(store.spans(trace_ids=repeated), store.logs(trace_ids=repeated)))


def _rules_before(store: Store, trace_ids: Sequence[str]) -> dict[str, Sequence[str] | None]:
    sql = (
        "SELECT DISTINCT trace_id, rules FROM call_keys "
        "WHERE rules IS NOT NULL AND trace_id IN (SELECT unnest(?::VARCHAR[]))"
    )
    return {row["trace_id"]: row["rules"] for row in store.query(sql, [list(trace_ids)])}


def _keys(
    calls: Iterable[ModelCall], rules: Sequence[Rule], rules_of: dict[str, Sequence[str] | None]
) -> Iterable[dict[str, Any]]:
    for call in calls:
        if _names_no_rollout(call):
            row = asdict(keys_of(call, rules))
            yield row | {"rules": rules_of[call.trace_id]} if call.trace_id in rules_of else row


def _names_no_rollout(call: ModelCall) -> bool:
    """A rollout that was found here is named by a trace; a recorder's own name is no such id."""
    return call.rollout_id is None or _TRACE_ID.fullmatch(call.rollout_id) is not None


def _linked(rows: Iterable[dict[str, Any]], call_ids: set[str]) -> set[str]:
    """The traces of these calls, and of all that have a trace, a request or a response id of theirs."""
    rest = list(rows)
    found: set[str] = set(call_ids)
    traces: set[str] = set()
    while linked := [row for row in rest if not found.isdisjoint(_links(row))]:
        rest = [row for row in rest if found.isdisjoint(_links(row))]
        traces.update(trace_id for row in linked for trace_id in row["trace_ids"])
        found.update(link for row in linked for link in _links(row))
    return traces


def _links(row: dict[str, Any]) -> list[str]:
    told = (row["call_id"], row["request_key"], row["response_id"], *row["trace_ids"])
    return [link for link in told if link is not None]


def _joined_before(store: Store, keys: Sequence[CallKeys]) -> list[list[str]]:
    known = list({key.trace_id for key in keys})
    sql = "SELECT trace_id, rollout_id FROM sessions WHERE trace_id IN (SELECT unnest(?))"
    groups: dict[str, list[str]] = {}
    for start in range(0, len(known), 5000):
        for row in store.query(sql, [known[start : start + 5000]]):
            groups.setdefault(row["rollout_id"], []).append(row["trace_id"])
    return list(groups.values())


def _repeated(keys: Sequence[CallKeys]) -> list[str]:
    """Traces that have a response of another one, word for word, with those that tell of the same calls."""
    told: dict[tuple[str, tuple[str, ...]], set[str]] = {}
    for key in keys:
        if key.response_id is not None and key.reply_keys:
            told.setdefault((key.response_id, tuple(key.reply_keys)), set()).add(key.trace_id)
    repeated = {trace_id for traces in told.values() if len(traces) > 1 for trace_id in traces}
    others = (key.trace_ids or () for key in keys if key.trace_id in repeated)
    return sorted(repeated.union(*others))
